"""The salts of secret noise: files that their user alone can read, written once."""

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcommons.core import salts
from fedcommons.errors import UserError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's salts, which does not exist yet."""
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "salts"


def test_a_salt_is_a_file_that_only_its_user_reads(state: Path) -> None:
    before = os.umask(0)
    try:
        made = [salts.new(), salts.new(), salts.of_artifact("key")]
    finally:
        os.umask(before)
    assert len({*made}) == 3
    assert all(len(salt) == 32 for salt in made)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    files = sorted(state.iterdir())
    assert [path.name for path in files] == sorted(["artifact-key", *(f"run-{salts.name_of(s)}" for s in made[:2])])
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {path.read_bytes() for path in files} == {*made}
    assert salts.of_run(salts.name_of(made[0]), Path("run")) == made[0]


def test_a_salt_that_is_there_is_read_and_nothing_is_written(state: Path) -> None:
    first = salts.of_artifact("key")
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in state.iterdir()]
    assert salts.of_artifact("key") == first
    assert [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in state.iterdir()] == before
    assert salts.of_artifact("another") != first


def test_processes_that_need_a_salt_at_the_same_time_get_the_same_one(state: Path, tmp_path: Path) -> None:
    """Twenty times eight of them: the second one takes the first one's."""
    start, out = os.pipe(), tmp_path / "out"
    out.mkdir()
    children = []
    for number in range(8):
        if not (child := os.fork()):
            try:
                os.close(start[1])
                os.read(start[0], 1)  # until all are there
                found = [salts.of_artifact(f"key {k}").hex() for k in range(20)]
                (out / str(number)).write_text("\n".join(found))
            finally:
                os._exit(0)
        children.append(child)
    os.close(start[0])
    os.close(start[1])
    for child in children:
        os.waitpid(child, 0)
    found = [path.read_text() for path in out.iterdir()]
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(list(state.iterdir())) == len(set(found[0].split())) == 20


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def another_users(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, 65534)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "read by others": lambda path: path.chmod(0o640),
    "a link": a_link,
    "a broken link": in_its_place(lambda path: path.symlink_to("nowhere")),
    "a folder": in_its_place(lambda path: path.mkdir(mode=0o700)),
    "a pipe": in_its_place(lambda path: os.mkfifo(path, 0o600)),
    "another user's": another_users,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_file_that_is_no_salt_is_refused(name: str, state: Path) -> None:
    salt = salts.new()
    salts.of_artifact("key")
    for path, ask in (
        (state / "artifact-key", lambda: salts.of_artifact("key")),
        (state / f"run-{salts.name_of(salt)}", lambda: salts.of_run(salts.name_of(salt), Path("runs/mine"))),
    ):
        DAMAGE[name](path)
        with pytest.raises(UserError, match=re.escape(str(path))):
            ask()


def test_what_its_user_may_not_read_is_refused(tmp_path: Path, as_nobody: Callable[..., None]) -> None:
    def ask() -> None:
        os.environ["FEDCOMMONS_STATE"] = str(tmp_path / "open" / "mine")
        salts.of_artifact("key")
        (salts.folder() / "artifact-key").chmod(0)
        with pytest.raises(UserError, match="cannot be read"):
            salts.of_artifact("key")

    (tmp_path / "open").mkdir()
    ours = [folder for folder in tmp_path.parents if folder.name.startswith(("pytest-", "popen-"))]
    for folder in (tmp_path, tmp_path / "open", *ours):
        folder.chmod(0o777 if folder.name == "open" else 0o755)
    as_nobody(ask)


def test_a_state_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_nobody: Callable[..., None]
) -> None:
    (tmp_path / "file").touch()
    sentence = "dp.noise secret keeps its salt in .*, which cannot be written .*FEDCOMMONS_STATE"
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=sentence):
        salts.new()

    def ask() -> None:
        os.environ["FEDCOMMONS_STATE"] = str(tmp_path / "closed")
        for make in (salts.new, lambda: salts.of_artifact("key")):
            with pytest.raises(UserError, match=sentence):
                make()

    (tmp_path / "closed").mkdir(mode=0o555)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    tmp_path.chmod(0o755)
    as_nobody(ask)


def test_the_state_directory_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert salts.folder() == tmp_path / "state" / "salts"
    monkeypatch.delenv("FEDCOMMONS_STATE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert salts.folder() == tmp_path / "xdg" / "fedcommons" / "salts"
    for ignored in ("relative/folder", ""):  # as the standard says
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert salts.folder() == tmp_path / "home" / ".local" / "state" / "fedcommons" / "salts"
    monkeypatch.setenv("FEDCOMMONS_STATE", "~/mine")
    assert salts.folder() == tmp_path / "home" / "mine" / "salts"
