"""What private steps draw besides noise and batches, where noise is secret: each example by itself, and by the salt."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fedcommons.config.parts import make
from fedcommons.core.dp_sgd import DPSGD, NoisySum
from fedcommons.core.local import LocalSGD
from fedcommons.core.noise import Draws, Noise, Source
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.testing import digits

N = 12
WITH, WITHOUT = list(range(N)), list(range(1, N))  # two batches; the first example, which is blanked, is in one
SEEDED, SALT, ANOTHER = b"", b"a" * 32, b"b" * 32

LOCAL: dict[str, tuple[dict[str, Any], bool]] = {
    "dropout": ({"dropout": 0.5}, False),
    "crops": ({}, True),
    "noise of the module's own": ({"noise": 0.5}, False),
}
"""What ``digits`` gets, and ``augment``."""

GENERATORS = ["private_ddpm", "private_cvae", "private_gan"]
SMALL = {"epochs": 1, "batch_size": 6, "lr": 1e-3, "channels": (8, 16), "noise_multiplier": 0.1, "draws": 2}


@contextmanager
def watched(batch: Sequence[int]) -> Iterator[list[Tensor]]:
    """Sums in units of C, before their noise, of steps that all have this batch."""
    sums, blur = list[Tensor](), NoisySum.blur

    def watch(total: NoisySum, *given: Any) -> None:
        sums.append(total.values / total.clip)
        blur(total, *given)

    with patch.object(NoisySum, "blur", watch), patch.object(DPSGD, "sample", lambda *_: torch.tensor(batch)):
        yield sums


def blanked() -> Examples:
    """Digits, the first of which has no finite gradient and adds nothing to a sum."""
    own = digits((N,)).data.clients.store
    x = own.x.float()
    x[0] = float("nan")
    return Examples(x, own.y)


def local_sums(what: str, batch: Sequence[int], salt: bytes) -> Tensor:
    """(steps, parameters) of a local training."""
    given, augment = LOCAL[what]
    work, data = digits((N,), **given).training(LocalSGD(2, 6, dp=DPSGD(0.1, 1.0), augment=augment)).work(), blanked()
    work.noise = Noise(Source(5, salt))
    with watched(batch) as sums:
        work.local(work.initial, ClientData(data.x / 255, data.y), 7)
    return torch.stack(sums)


def generator_sums(name: str, batch: Sequence[int], salt: bytes) -> Tensor:
    """(steps, parameters) of the training of a generator."""
    with watched(batch) as sums:
        make("generator", name, SMALL).fit(blanked(), 10, 7, [1], flip=True, noise=Noise(Source(5, salt)))
    return torch.stack(sums)


EVERY = [*((local_sums, what) for what in LOCAL), *((generator_sums, name) for name in GENERATORS)]


@pytest.mark.parametrize(("sums", "what"), EVERY)
def test_who_is_in_a_batch_changes_the_terms_of_nobody_else_where_noise_is_secret(sums: Any, what: str) -> None:
    """Else the sum moves by more than C, and sampling does not amplify. With seeded noise the place decides."""
    moved = [(sums(what, WITH, salt) - sums(what, WITHOUT, salt)).norm(dim=1) for salt in (SALT, SEEDED)]
    assert len(moved[0]) >= 2
    assert moved[0].max() < 1e-3
    assert moved[1][0] > 0.1


@pytest.mark.parametrize(("sums", "what"), EVERY)
def test_the_salt_decides_the_draws_where_noise_is_secret(sums: Any, what: str) -> None:
    """The first step's, as later ones depend on noise: nobody who knows the seed can draw them again."""
    salted, again, another = (sums(what, WITHOUT, salt) for salt in (SALT, SALT, ANOTHER))
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
