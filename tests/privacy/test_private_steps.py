"""Private steps: a noisy sum is divided by a constant, and what else examples draw is of each example alone.

Divided by the secret size of the batch, the noise would depend on its members (arXiv:2605.15648). Here all examples
have the same clipped gradient, of norm C, and there is no noise: the result shows what a sum was divided by.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons import ClientData, Examples, LocalSGD, Work
from fedcommons.algorithms import feddm_matching
from fedcommons.algorithms.feddm import FedDM
from fedcommons.config.registry import make
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.dp_sgd import DPSGD, NoisySum
from fedcommons.privacy.noise import SEED_ALONE, Draws, Noise, Source, Stream
from fedcommons.seeding import wide_generator
from fedcommons.testing import digits
from lightning_modules import Classifier

N, EXPECTED, CLIP = 40, 5, 0.25


@dataclass(frozen=True)
class Counting(DPSGD):
    sizes: list[int] = field(default_factory=list, compare=False)

    def sample(self, n: int, batch_size: int, draws: Stream) -> Tensor:
        rows = super().sample(n, batch_size, draws)
        self.sizes.append(len(rows))
        return rows


Divided = list[tuple[int, float]]
"""Of each step: how many examples the batch has, and C over the norm of an example's share of the result."""


class Pull(LightningModule):
    """Every example x has the gradient (1 - x) (3, 4): one that is 1 is blanked out."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (1 - x.mean()) * (self.w @ torch.tensor([3.0, 4.0]))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def examples(blank: int) -> Tensor:
    """(N, 1) examples, of which the first ones are blanked out."""
    return (torch.arange(N) < blank).float().unsqueeze(1)


def divided(size: int, result: Tensor) -> tuple[int, float]:
    return size, size * CLIP / float(result.norm())


def local(dp: Counting, seed: int, batch_size: int = EXPECTED, blank: int = 0) -> Divided:
    results: list[Tensor] = []

    def watch(params: Mapping[str, nn.Parameter]) -> None:
        grad = params["w"].grad
        assert grad is not None
        results.append(grad.clone())

    work = Work(Pull(), torch.device("cpu"), LocalSGD(2, batch_size, dp=dp))
    work.noise = Noise(SEED_ALONE, seed)
    work.local(work.initial, ClientData(examples(blank), torch.arange(N)), seed, add_to_grad=watch)
    return [divided(n, result) for n, result in zip(dp.sizes, results, strict=True) if n]


def vectorised(dp: Counting, seed: int, batch_size: int = EXPECTED, blank: int = 0) -> Divided:
    module, results = Pull(), []
    for _ in dp_sgd_vmap.steps(
        module, module.configure_optimizers(), lambda named, x: torch.func.functional_call(module, named, x),
        [examples(blank)], lambda *_: [], dp, batch_size=batch_size, epochs=2, physical_batch=3,
        noise=Draws(SEED_ALONE, (seed,)),
    ):  # fmt: skip
        assert module.w.grad is not None
        results.append(module.w.grad.clone())
    return [divided(n, result) for n, result in zip(dp.sizes, results, strict=True) if n]


def feddm(dp: Counting, seed: int) -> Divided:
    """The images of one class, which all its real images pull the same way: each step moves them by lr = 1 times it."""
    module = Classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), lr=0.1)
    module.head = "network.2"
    work, results = Work(module, torch.device("cpu"), LocalSGD(1, EXPECTED, dp=dp)), []
    data = ClientData(torch.ones(N, 4), torch.zeros(N, dtype=torch.int64))
    how = FedDM(iterations=1, radius=0.0, match_batch=EXPECTED, image_lr=1.0, image_momentum=0.0, sigma=0.0, clip=1.0)
    for step in range(16):
        work.noise, before = Noise(SEED_ALONE, seed, step), -torch.ones(1, 4)
        after = feddm_matching.match(work, work.initial, data, {0: torch.arange(N)}, before.clone(), how, seed)[0]
        results += [divided(dp.sizes[-1], after - before)] if dp.sizes[-1] else []
    return results


@pytest.mark.parametrize("way", [local, vectorised, feddm])
def test_whatever_batch_is_drawn_the_divisor_is_its_expected_size(way: Callable[..., Divided]) -> None:
    for seed in (0, 1):
        steps = way(Counting(0.0, CLIP), seed)
        assert len({n for n, _ in steps}) >= 4
        assert [by for _, by in steps] == pytest.approx([EXPECTED] * len(steps), rel=1e-4)
    for blank in (0, 1) if way is not feddm else ():
        # one of 40 is blanked out, all are in each batch: 39/40 of the gradient is left, as if 40 x 40/39 divided it
        steps = way(Counting(0.0, CLIP), 0, N, blank)
        assert [by for _, by in steps] == pytest.approx([N * N / (N - blank)] * 2)


SIZE = 12
WITH, WITHOUT = list(range(SIZE)), list(range(1, SIZE))  # two batches; the first example, which is blanked, is in one
SEEDED, SALT, ANOTHER = b"", b"a" * 32, b"b" * 32

LOCAL: dict[str, tuple[dict[str, Any], bool]] = {
    "dropout": ({"dropout": 0.5}, False), "crops": ({}, True), "noise of the module's own": ({"noise": 0.5}, False),
}  # fmt: skip
"""What ``digits`` gets, and ``augment``."""

GENERATORS = ["private_ddpm", "private_cvae", "private_gan"]
SMALL = {"epochs": 1, "batch_size": 6, "lr": 1e-3, "channels": (8, 16), "noise_multiplier": 0.1, "draws": 2}


@contextmanager
def watched(batch: Sequence[int]) -> Iterator[list[Tensor]]:
    """Sums in units of C, before their noise, of steps that all have this batch."""
    sums, blur = list[Tensor](), NoisySum.blur

    def watch(total: NoisySum, *arguments: Any) -> None:
        sums.append(total.values / total.clip)
        blur(total, *arguments)

    with patch.object(NoisySum, "blur", watch), patch.object(DPSGD, "sample", lambda *_: torch.tensor(batch)):
        yield sums


def blanked() -> Examples:
    """Return digits, the first of which has no finite gradient and adds nothing to a sum."""
    store = digits((SIZE,)).data.clients.store
    x = store.x.float()
    x[0] = float("nan")
    return Examples(x, store.y)


def local_sums(what: str, batch: Sequence[int], salt: bytes) -> Tensor:
    fields, augment = LOCAL[what]
    federation = digits((SIZE,), **fields).training(LocalSGD(2, 6, dp=DPSGD(0.1, 1.0), augment=augment))
    work, data = federation.work(), blanked()
    work.noise = Noise(Source(5, salt))
    with watched(batch) as sums:
        work.local(work.initial, ClientData(data.x / 255, data.y), 7)
    return torch.stack(sums)


def generator_sums(name: str, batch: Sequence[int], salt: bytes) -> Tensor:
    with watched(batch) as sums:
        make("generator", name, SMALL).fit(blanked(), 10, 7, [1], flip=True, noise=Noise(Source(5, salt)))
    return torch.stack(sums)


EVERY = [*((local_sums, what) for what in LOCAL), *((generator_sums, name) for name in GENERATORS)]


@pytest.mark.parametrize(("sums", "what"), EVERY)
@pytest.mark.long
def test_who_is_in_a_batch_changes_no_other_term_where_noise_is_secret(sums: Any, what: str) -> None:
    """Else the sum moves by more than C. The salt decides the first draws; if noise is seeded, the place does."""
    salted, again, another = (sums(what, WITHOUT, salt) for salt in (SALT, SALT, ANOTHER))
    moved = (sums(what, WITH, SALT) - salted).norm(dim=1)
    assert len(moved) >= 2
    assert moved.max() < 1e-3
    assert (sums(what, WITH, SEEDED) - sums(what, WITHOUT, SEEDED)).norm(dim=1)[0] > 0.1
    assert torch.allclose(salted, again, atol=1e-5)
    assert (salted[0] - another[0]).norm() > 0.1


def test_seeds_are_those_of_examples_and_of_the_salt() -> None:
    def seeds(salt: bytes, n: int, step: int) -> list[int]:
        return Draws(Source(5, salt), ("tests",)).seeds(n, step)

    assert seeds(SEEDED, 3, 0) == []
    assert seeds(SALT, 3, 0) == seeds(SALT, 3, 0)
    all_of_them = [*seeds(SALT, 1000, 0), *seeds(SALT, 1000, 1), *seeds(ANOTHER, 1000, 0)]
    assert len({*all_of_them}) == 3000
    assert 0 <= min(all_of_them) < max(all_of_them) < 2**53
    assert len({seed % 2**32 for seed in all_of_them}) > 2990  # the bits that torch takes on a CPU


def test_noise_is_counted_relative_to_the_longest_vector() -> None:
    """A vector three times as long as C: sigma is a third. A vector of unknown norm: not covered."""
    total = NoisySum(torch.zeros(4), clip=0.5)
    total.add(torch.ones(4), norm=1.5)
    total.blur(6.0, wide_generator(0))
    assert (total.release.sigma, total.release.sensitivity) == (2.0, 1.5)
    assert total.release.covered
    total.add(torch.ones(4))
    assert not total.release.covered
