"""Temporary folders: only their user can enter them, they go with their process, and nothing else is removed."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedcommons.runtime import tempdirs

MAKES = """
import signal, sys
from fedcommons.runtime import tempdirs
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = tempdirs.make()
(folder / "deep" / "er").mkdir(parents=True)
(folder / "deep" / "er" / "secret").write_text("seed")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that all users may write, in the place of /tmp."""
    where = tmp_path / "tmp"
    where.mkdir()
    where.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(where))
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    return where


@pytest.fixture
def process(base: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that creates a folder with files and waits."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", MAKES], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        assert Path(child.stdout.readline().strip()).parent == base
        yield child
        child.kill()


def test_only_its_user_can_enter_it(base: Path) -> None:
    before = os.umask(0)
    try:
        with tempdirs.folder() as folder:
            status = folder.stat()
    finally:
        os.umask(before)
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.geteuid())
    assert not folder.exists()


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(None, 0), (signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_it_is_removed(number: signal.Signals | None, code: int, process: subprocess.Popen[str], base: Path) -> None:
    if number:
        process.send_signal(number)
    _, output = process.communicate("", timeout=300)
    assert process.returncode == code, output
    assert list(base.iterdir()) == []


@pytest.mark.long
def test_an_unused_folder_of_a_killed_process_goes_with_the_next(process: subprocess.Popen[str], base: Path) -> None:
    (folder,) = base.iterdir()

    def stays() -> bool:
        with tempdirs.folder():
            return folder.exists()

    assert stays()  # its process lives
    with open(folder / "log", "w", encoding="utf-8") as log:
        agent = subprocess.Popen(["sleep", "600"], stdout=log)  # as Ray's, which outlive their driver
    works = subprocess.Popen(["sleep", "600"], cwd=folder / "deep")
    process.kill()
    process.wait()
    for used_by in (agent, works):
        assert stays()
        used_by.kill()
        used_by.wait()
    assert not stays()
    assert list(base.iterdir()) == []


def left_over(base: Path) -> Path:
    """A folder that a killed process left."""
    folder = base / "fc-abcdefgh"
    folder.mkdir(mode=0o700)
    (folder / tempdirs.MARK).touch(mode=0o600)
    return folder


def linked_mark(base: Path) -> None:
    mark = left_over(base) / tempdirs.MARK
    mark.unlink()
    mark.symlink_to(base.parent / "victim" / "kept")


PLANTED: dict[str, Callable[[Path], object]] = {
    "no mark": lambda base: (left_over(base) / tempdirs.MARK).unlink(),
    "a linked mark": linked_mark,
    "open to others": lambda base: left_over(base).chmod(0o755),
    "of another user": lambda base: os.chown(left_over(base), 65534, 65534),
    "a mark of another user": lambda base: os.chown(left_over(base) / tempdirs.MARK, 65534, 65534),
    "a link": lambda base: (base / "fc-abcdefgh").symlink_to(base.parent / "victim"),
    "a pipe": lambda base: os.mkfifo(base / "fc-abcdefgh"),
}  # fmt: skip


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user that looks like ours."""
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o700)
    for name in ("kept", tempdirs.MARK):
        (folder / name).touch(mode=0o600)
    return folder


@pytest.mark.parametrize("how", PLANTED)
def test_what_is_not_ours_stays(how: str, base: Path, victim: Path) -> None:
    if "user" in how and os.getuid():
        pytest.skip("to change an owner takes root")
    PLANTED[how](base)
    with tempdirs.folder():
        pass
    assert (victim / "kept").exists()
    assert os.path.lexists(base / "fc-abcdefgh")


def test_links_within_are_not_followed(base: Path, victim: Path) -> None:
    folder = left_over(base)
    (folder / "deep").mkdir()
    for at in (folder / "link", folder / "deep" / "link"):
        at.symlink_to(victim)
    with tempdirs.folder() as temporary:
        (temporary / "link").symlink_to(victim)
        with tempdirs.tempdir(temporary), tempfile.NamedTemporaryFile() as file:
            assert Path(file.name).parent == temporary
            assert os.environ["TMPDIR"] == str(temporary)
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(base)
    assert list(base.iterdir()) == []
    assert (victim / "kept").exists()
