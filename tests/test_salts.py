"""The salts of secret noise: files that their user alone can read; and secret noise on clients' sums by them."""

import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.core import salts
from fedcommons.core.noise import Noise, Source
from fedcommons.core.salts import name_of
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.condensation import Networks
from fedcommons.runs import secret
from fedcommons.seeds import generator
from fedcommons.sharing import merf, ndpdc
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.ndpdc import NDPDC
from fedcommons.sharing.random_features import Features, Fourier


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's salts, which does not exist yet."""
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "salts"


def test_a_salt_is_a_file_that_only_its_user_reads(state: Path) -> None:
    mask = os.umask(0)
    try:
        made = [salts.new(), salts.new(), salts.of_artifact("key")]
    finally:
        os.umask(mask)
    assert len({*made}) == 3
    assert all(len(salt) == 32 for salt in made)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    files = sorted(state.iterdir())
    assert [path.name for path in files] == sorted(["artifact-key", *(f"run-{salts.name_of(s)}" for s in made[:2])])
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {path.read_bytes() for path in files} == {*made}
    before = [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files]  # what is there is read alone
    assert salts.of_run(salts.name_of(made[0]), Path("run")) == made[0]
    assert salts.of_artifact("key") == made[2]
    assert [(path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(state.iterdir())] == before


def test_processes_that_need_a_salt_at_the_same_time_get_the_same_one(state: Path, tmp_path: Path) -> None:
    """Twenty times four of them: the second one takes the first one's."""
    start, out = os.pipe(), tmp_path / "out"
    out.mkdir()
    children = []
    for number in range(4):
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
    assert len(found) == 4
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


def test_what_cannot_be_written_or_read_is_refused(
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
        os.environ["FEDCOMMONS_STATE"] = str(tmp_path / "open" / "mine")
        salts.of_artifact("key")
        (salts.folder() / "artifact-key").chmod(0)
        with pytest.raises(UserError, match="cannot be read"):
            salts.of_artifact("key")

    for name, mode in (("open", 0o777), ("closed", 0o555)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    for folder in (tmp_path, *(of for of in tmp_path.parents if of.name.startswith(("pytest-", "popen-")))):
        folder.chmod(0o755)
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


# Secret noise on sums: were it the same on two values, their difference would tell the data


OF_MERF = MERF(target_epsilon=1.0, features=40, per_class=2, steps=3)
OF_NDPDC = NDPDC(target_epsilon=1.0, iterations=3, per_class=2, batch=50, width=8)


def dealt(is_secret: bool = True) -> Dealt:
    draws = generator("images of secret sums")
    x = torch.randint(256, (60, 1, 8, 8), generator=draws, dtype=torch.uint8)
    y = torch.randint(10, (60,), generator=draws)
    return Dealt(Clients(Examples(x, y), np.split(np.arange(60), [20])), 10, False, 0, is_secret)


class Rounded(Fourier):
    """It rounds otherwise."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * (1 + 1e-6)


def first(stage: MERF | NDPDC, is_secret: bool = True, rounds_otherwise: bool = False) -> tuple[Tensor, float]:
    """Return the noise in a client's first message, and the sigma that it has."""
    given, messages = dealt(is_secret), []
    for each in (stage, replace(stage, target_epsilon=None, noise_multiplier=0.0)):
        if isinstance(each, MERF):
            phi = each.phi(given)
            messages.append(each.message(given, 0, Rounded(phi.w) if rounds_otherwise else phi))  # pyright: ignore
        else:
            plain = each.networks(given).at(0)
            by = 1 + 1e-6 * rounds_otherwise
            messages.append(each.sender(given, 0).message(lambda x, y, f=plain, by=by: f(x, y) * by, 0))
    return messages[0].values - messages[1].values, messages[0].sigma


# Another version of the package: with the same constants its messages have another sigma, other features or a number


class LouderMERF(MERF):
    def sigma_of_each(self, n_clients: int) -> float:
        return 1.003 * super().sigma_of_each(n_clients)


class LouderNDPDC(NDPDC):
    def sigma(self, n: int, classes: int) -> float:
        return 1.003 * super().sigma(n, classes)


class OtherRate(NDPDC):
    def rate(self, n: int, classes: int) -> float:
        return 0.999


class OtherFeatures(MERF):
    def phi(self, dealt: Dealt) -> Features:
        return Fourier(super().phi(dealt).w * 1.01)  # pyright: ignore[reportAttributeAccessIssue]


class OtherNetworks(NDPDC):
    def networks(self, dealt: Dealt) -> Networks:
        networks = super().networks(dealt)
        return replace(networks, seed=networks.seed + 1)


OF_SIGMA = replace(OF_NDPDC, target_epsilon=None, noise_multiplier=5.0)
VERSIONS = {
    "merf, sigma": (OF_MERF, LouderMERF(**vars(OF_MERF))),
    "merf, features": (OF_MERF, OtherFeatures(**vars(OF_MERF))),
    "merf, version": (OF_MERF, OF_MERF),
    "ndpdc, sigma": (OF_NDPDC, LouderNDPDC(**vars(OF_NDPDC))),
    "ndpdc, features": (OF_NDPDC, OtherNetworks(**vars(OF_NDPDC))),
    "ndpdc, rate": (OF_SIGMA, OtherRate(**vars(OF_SIGMA))),
    "ndpdc, version": (OF_NDPDC, OF_NDPDC),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_has_other_secret_noise_and_salts_and_resumes_no_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, other = VERSIONS[name]
    noise, sigma = first(stage)
    assert torch.equal(first(stage)[0], noise)
    # else the classes in which nothing differs would be those that a client does not hold
    assert (noise - first(stage, rounds_otherwise=True)[0]).std() > 1.2 * sigma
    names = [*map(name_of, stage.salts(dealt()))]
    (run := tmp_path / "run").mkdir()
    secret.begun(run, names)
    assert secret.kept(run, [*map(name_of, stage.salts(dealt()))])
    if "version" in name:
        for module in (merf, ndpdc):
            monkeypatch.setattr(module, "DRAWS", module.DRAWS + 1)
    elif "sigma" in name:  # seeded noise hides nothing, so it need not change, and results stay
        (plain, its_sigma), (others, others_sigma) = (first(each, is_secret=False) for each in (stage, other))
        assert others_sigma == pytest.approx(1.003 * its_sigma)
        assert torch.allclose(plain / its_sigma, others / others_sigma, rtol=0, atol=1e-4)
    others_noise, others_sigma = first(other)
    assert (noise / sigma - others_noise / others_sigma).std() > 1.2  # sqrt(2), and 0 if they were the same
    others_names = [*map(name_of, other.salts(dealt()))]
    assert not set(names) & set(others_names)
    with pytest.raises(UserError, match="would release twice"):
        secret.kept(run, others_names)


def test_noise_hides_one_value_once() -> None:
    for salt in (b"", bytes(32)):
        noise, one = Noise(Source(1, salt)), torch.ones(3)
        of = [noise.call("test").hiding(value).random(4).tolist() for value in (one, one)]
        assert of[0] != of[1]  # calls differ
        again = [Noise(Source(1, salt)).call("test").hiding(value).random(4).tolist() for value in (one, 2 * one)]
        assert again[0] == of[0]
        assert (again[1] == of[0]) == (salt == b"")
    draws = Noise(Source(1)).call("test")
    draws.hiding(one, 1)
    with pytest.raises(ValueError, match="has been drawn"):
        draws.hiding(one, 1)
