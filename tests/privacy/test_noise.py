"""Noise: no two messages share any, secret noise is a cipher's, and its salts are files that their user alone reads."""

import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from math import cos, log, pi, sin, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from closed_forms import Problem
from scipy.stats import kstest
from torch import Tensor

from fedcommons import ClientDatasets, Clients, Examples, LocalSGD, Payload, UserError, flat, flatten
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.generators import requests
from fedcommons.generators.ddpm import DDPM
from fedcommons.privacy import salts
from fedcommons.privacy.dp_sgd import DPSGD, NoisySum
from fedcommons.privacy.noise import CipherStream, Noise, Source
from fedcommons.testing.spy import Spy

FULL = 1000
"""A batch size above every client's number of examples."""


def counted(y: Tensor, x: Tensor, seed: int = 0, sigma: float = 2.0) -> Tensor:
    """Return the noisy class shares of 200 examples of two classes, as the labels of 20,000 synthetic images."""
    store = Examples(x, y)
    client_data = ClientDatasets(Clients(store, [np.arange(200)]), 2, False, seed)
    recipe = requests.GeneratorRecipe("", DDPM(), 1.0, label_noise=sigma)
    (need,) = requests.requests_of_clients(0.99, client_data, recipe)
    return torch.bincount(need.labels, minlength=2) / len(need.labels)


def test_noisy_class_counts_have_the_stated_deviation_and_no_two_data_sets_share_it() -> None:
    x, y = torch.arange(200.0).view(200, 1), torch.arange(200) % 2
    shares = torch.stack([counted(y, x, seed) for seed in range(300)])
    noise = 200 * (shares[:, 1] - shares[:, 0])  # the difference of two counts, to first order
    assert abs(float(noise.mean())) < 4 * 2 * sqrt(2 / 300)
    assert float(noise.std()) == pytest.approx(2 * sqrt(2), rel=4 / sqrt(2 * 300))
    assert torch.equal(counted(y, x), counted(y, x))
    assert not torch.equal(counted(y, x), counted(y, x.flip(0)))  # of the same sizes and counts
    assert torch.equal(counted(y, x, sigma=0.0), torch.full((2,), 0.5))


def numbers(noise: Noise, *columns: Tensor, purpose: str = "any") -> tuple[float, ...]:
    return tuple(noise.call(purpose, *columns).stream("step", 3).random(4).tolist())


@pytest.mark.parametrize("salt", [b"", bytes(range(32))], ids=["seeded", "secret"])
def test_whatever_differs_has_draws_of_its_own_and_nothing_else(salt: bytes) -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.tensor([3, 4])
    model: Payload = {"model": flatten({"w": torch.ones(2)}), "t": torch.tensor(5)}
    memory: Payload = {"control": torch.zeros(2)}

    def first(
        facts: int = 1, salt: bytes = salt, round: int = 1, client: int = 2, purpose: str = "any",
        x: Tensor = x, y: Tensor = y, model: Payload = model, memory: Payload = memory,
    ) -> tuple[float, ...]:  # fmt: skip
        noise = Noise(Source(facts, salt), round, client, received=(model, memory))
        return numbers(noise, x, y, purpose=purpose)

    blanked, moved = x.clone(), {**model, "model": flatten({"w": torch.tensor([1.0, 1.0000001])})}
    blanked[1] = 0
    others = [
        first(facts=2), first(salt=bytes(31) + b"1"), first(round=2), first(client=1), first(purpose="other"),
        first(round=12, client=0), first(round=1, client=20), first(x=blanked), first(x=x.double()),
        first(x=x.view(3, 2)), first(x=x[:0]), first(y=y + 1), first(x=y, y=x), first(model=moved),
        first(model={**model, "t": torch.tensor(6)}), first(memory={}),
        first(memory={"control": torch.tensor([0.0, 1e-30])}),
    ]  # fmt: skip
    twice = Noise(Source(1, salt), 1, 2, received=(model, memory))
    assert numbers(twice, x, y) == first()
    calls = [numbers(twice, x, y) for _ in range(3)]
    draws, keys = twice.call("any", x, y), (("a", 1), ("a", 2), ("b", 1), ("a1", 1), ("a", 11))
    steps = [tuple(draws.stream(*key).random(4).tolist()) for key in keys]
    results = [first(), *others, *calls, *steps]
    assert len({number for each in results for number in each}) == 4 * len(results)
    assert first(x=x.t().contiguous().t(), memory=dict(memory)) == first()  # where they lie decides nothing


def test_a_clients_noise_is_of_its_round_and_of_what_it_received(least_squares: Problem) -> None:
    """Clients with the same data, and the same round with another model."""
    (a, *_), (b, *_) = least_squares().a, least_squares().b
    alike = replace(least_squares(), a=[0 * a, 0 * a], b=[b, b]).federation(0.1)  # all gradients are zero
    alike = alike.training(LocalSGD(1, FULL, dp=DPSGD(1.0, 1.0)))
    plan, sent = alike.plan(2), []
    start = alike.start(FedAvg(), plan)
    for state in (start.state, {"model": flatten({"w": torch.ones(3, dtype=torch.float64)})}):
        spy = Spy(FedAvg())
        alike.run(spy, plan, start=replace(start, state=state))
        sent += [flat(call.reply.sums, "delta").buffer for call in spy.calls]
    assert len(sent) == 8
    assert not any(torch.isclose(p, q, rtol=0, atol=1e-6).any() for p, q in combinations(sent, 2))


BLOCKS = (
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)
"""RFC 8439, appendix A.1, test vectors 1 and 2: ChaCha20's first two blocks for a key and a nonce of zeros."""
KEY = bytes(range(32))
MANY = 200_000


def slowly(stream: bytes, n: int) -> list[float]:
    """Return n numbers by their definition, from 32 n bytes: number i uses words i, n + i, 2 n + i and 3 n + i."""
    words = [int.from_bytes(stream[8 * k : 8 * k + 8], "little") >> 11 for k in range(4 * n)]
    normals = []
    for i in range(n):
        total = 0.0
        for of_radius, of_angle in ((words[i], words[2 * n + i]), (words[n + i], words[3 * n + i])):
            radius, angle = sqrt(-2 * log((of_radius + 1) / 2**53)), 2 * pi * of_angle / 2**53
            total += radius * cos(angle) + radius * sin(angle)
        normals.append(total / 2)
    return normals


def test_the_stream_is_chacha20() -> None:
    stream = bytes.fromhex(BLOCKS)
    words = [int.from_bytes(stream[k : k + 8], "little") >> 11 for k in range(0, 128, 8)]
    assert CipherStream(bytes(32)).random(16).tolist() == [word / 2**53 for word in words]
    normal = CipherStream(bytes(32)).standard_normal((2, 2), dtype=np.float32)
    assert normal.dtype == np.float64  # or better than asked for
    assert normal.tolist() == [pytest.approx(row, abs=1e-13) for row in np.reshape(slowly(stream, 4), (2, 2)).tolist()]
    cipher = CipherStream(KEY)  # a stream is read on
    assert np.concatenate([cipher.random(3), cipher.random(5)]).tolist() == CipherStream(KEY).random(8).tolist()
    assert not set(cipher.standard_normal(8)) & set(cipher.standard_normal(8))


@pytest.mark.parametrize("kind", ["random", "standard_normal"])
def test_draws_have_their_law_and_are_independent(kind: str) -> None:
    """200,000 draws: the first four moments within 4 standard errors, and the Kolmogorov-Smirnov test at 1 %."""
    x, other = (getattr(CipherStream(key), kind)(MANY) for key in (KEY, bytes(32)))
    normal = kind == "standard_normal"
    moments = (0, 1, 0, 3, 15, 105) if normal else tuple(1 / (k + 1) for k in range(1, 9))
    eight = (0, 1, 0, 3, 0, 15, 0, 105) if normal else moments
    for k in range(1, 5):
        error = sqrt((eight[2 * k - 1] - eight[k - 1] ** 2) / MANY)
        assert abs(float(np.mean(x**k)) - eight[k - 1]) < 4 * error
    assert kstest(x, "norm" if normal else "uniform").pvalue > 0.01
    assert normal or (x.min() >= 0 and x.max() < 1)
    for shifted in (other, np.roll(x, 1), np.roll(x, 2), np.roll(x, MANY // 2)):
        assert abs(np.corrcoef(x, shifted)[0, 1]) < 4 / sqrt(MANY)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_sum_is_rounded_once_after_secret_noise(kind: torch.dtype) -> None:
    values = torch.linspace(-3, 3, 500, dtype=kind)
    total = NoisySum(values.clone(), clip=0.7)
    total.blur(1.3, CipherStream(KEY))
    noise = torch.from_numpy(CipherStream(KEY).standard_normal(500))
    wanted = (values.double() + noise * (1.3 * 0.7)).to(kind)
    assert torch.allclose(total.values, wanted, rtol=0, atol=0 if kind == torch.float32 else 1e-15)
    assert total.values.dtype == kind


def test_no_salt_is_shown() -> None:
    salt = b"a salt of thirty-two bytes......"
    source = Source(3, salt)
    for text in (repr(source), repr(Noise(source, 1).call("any")), f"{source}"):
        assert "a salt" not in text
        assert salt.hex() not in text


# The salts of secret noise


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's salts, which does not exist yet."""
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "salts"


def test_a_salt_is_a_file_that_only_its_user_reads(state: Path) -> None:
    mask = os.umask(0)
    try:
        fresh = [salts.new(), salts.new(), salts.of_artifact("key")]
    finally:
        os.umask(mask)
    assert len({*fresh}) == 3
    assert all(len(salt) == 32 for salt in fresh)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    files = sorted(state.iterdir())
    assert [path.name for path in files] == sorted(["artifact-key", *(f"run-{salts.name_of(s)}" for s in fresh[:2])])
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {path.read_bytes() for path in files} == {*fresh}
    assert salts.of_run(salts.name_of(fresh[0]), Path("run")) == fresh[0]
    assert salts.of_artifact("key") == fresh[2]


def test_workers_that_need_a_salt_at_the_same_time_get_the_same_one(state: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        values = [*pool.map(salts.of_artifact, [f"key {k // 4}" for k in range(80)])]
    assert [len(set(values[k : k + 4])) for k in range(0, 80, 4)] == [1] * 20
    assert len(set(values)) == len(list(state.iterdir())) == 20


def another_users(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, 65534)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]), "read by others": lambda path: path.chmod(0o640),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "another user's": another_users,
}  # fmt: skip


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


def test_a_salt_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written .*FEDCOMMONS_STATE"):
        salts.new()


def test_noise_hides_one_value_once() -> None:
    for salt in (b"", bytes(32)):
        noise, ones = Noise(Source(1, salt)), torch.ones(3)
        numbers = [noise.call("test").stream_for(value).random(4).tolist() for value in (ones, ones)]
        assert numbers[0] != numbers[1]  # calls differ
        again = [Noise(Source(1, salt)).call("test").stream_for(value).random(4).tolist() for value in (ones, 2 * ones)]
        assert again[0] == numbers[0]
        assert (again[1] == numbers[0]) == (salt == b"")
    draws = Noise(Source(1)).call("test")
    draws.stream_for(ones, 1)
    with pytest.raises(ValueError, match="has been drawn"):
        draws.stream_for(ones, 1)
