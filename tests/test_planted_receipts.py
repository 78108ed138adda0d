"""Faults in generators and stages: ledger or audit finds receipts of others, and images that nobody speaks of."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.audits.one_run import Bounded, bound
from fedcommons.core.dp_sgd import NoisySum
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Receipt, TrainedGenerator, Weights
from fedcommons.seeds import wide_generator
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.stage import Assigned, Contributions, share

if TYPE_CHECKING:
    from conftest import Federation

    Digits = Callable[..., Federation]


@dataclass(frozen=True)
class Sums:
    """The sum of its images, each of norm C at most, under noise in every epoch: the Gaussian mechanism on all.

    lies: the receipt states this sigma instead. early: the receipt is that of the first epoch.
    """

    sigma: float = 4.0
    epochs: int = 1
    lies: float | None = None
    early: bool = False
    sampling: ClassVar[tuple[str, ...]] = ()

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> dict[int, TrainedGenerator]:
        x = examples.x.flatten(1).double()
        total = (x / x.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
        noise = [self.sigma * torch.from_numpy(wide_generator(seed, e).standard_normal(len(total)))
                 for e in range(max(epochs))]  # fmt: skip
        return {
            e: TrainedGenerator({"sum": total + torch.stack(noise[:e]).mean(0)}, Receipt(
                SAMPLED_GAUSSIAN, 1.0, self.lies or self.sigma, 1.0, 1 if self.early else e))
            for e in epochs
        }  # fmt: skip

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        raise NotImplementedError


def _bounded(part: Sums) -> Bounded:
    """Canary j is white in pixel j only; its score is what the trained sum has there."""
    m = 1024
    x = 255 * torch.eye(m, dtype=torch.uint8).view(m, 1, 32, 32)
    none = Examples(x[:0], torch.zeros(0, dtype=torch.int64))

    def at_its_pixel(generator: object, weights: Weights, images: Examples, n_classes: int, seed: int) -> np.ndarray:
        return (images.x.flatten(1).double() / 255 @ weights["sum"]).numpy()

    return bound(part, none, Examples(x, torch.zeros(m, dtype=torch.int64)), 1, 0, at_its_pixel, reference=False)


@pytest.mark.parametrize(
    "part",
    [Sums(sigma=1.0, lies=8.0), Sums(sigma=4.0, epochs=50, early=True)],
    ids=["receipt of another client", "receipt of another epoch"],
)
def test_the_audit_finds_receipts_of_others(part: Sums) -> None:
    found = _bounded(part)
    assert found.reported is not None
    assert found.audited.bound > found.reported
    honest = _bounded(replace(part, lies=None, early=False))
    assert honest.reported is not None
    assert 0 < honest.audited.bound < honest.reported


def test_the_ledger_counts_noise_over_the_longest_vector() -> None:
    """A vector three times as long as C, truly stated: sigma is a third."""
    total = NoisySum(torch.zeros(4), clip=0.5)
    total.add(torch.ones(4), norm=1.5)
    total.blur(6.0, wide_generator(0))
    assert (total.release.sigma, total.release.sensitivity) == (2.0, 1.5)
    assert total.release.covered
    total.add(torch.ones(4))
    assert not total.release.covered


def test_the_ledger_finds_images_that_a_stage_gives_without_a_word(digits: "Digits") -> None:
    @dataclass(frozen=True)
    class Silent:
        def make(self, dealt: Dealt, drawn: object) -> Contributions:
            return Contributions.of_own(dealt, [rows[:2] for rows in dealt.own.rows])

        def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, list[Release]]:
            return contributed, []

        def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
            return Assigned(dealt.own.rows, released.shuffled(len(dealt.own), dealt.seed))

    own = digits().data.own
    releases = share(Silent(), Dealt(own, 10, False, 0)).releases
    assert {r.client: (r.what, r.covered) for r in releases} == dict.fromkeys(
        range(len(own)), (("raw examples",), False)
    )
