"""The sensitivity test of sharing stages: five clients, of whom one has a neighbour."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedcommons.core.worker import fresh_torch
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.data.federated import Dealt
from fedcommons.generators.generator import Receipt
from fedcommons.generators.requests import Contribution, GeneratorRecipe, Need
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.seeding import generator, keyed_globals
from fedcommons.sharing.stage import Generating, Stage
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import digits
from fedcommons.testing.judging import Left, faults, renamed, told
from fedcommons.testing.neighbours import BLANKED, RELABELLED, REPLACED, ZEROED, Kind, apart
from fedcommons.testing.sides import Side, playing
from fedcommons.testing.spreads import SLACK, spread_of

SIZES = (30, 40, 35, 45, 50)
"""Examples of the clients."""

N_CLASSES = 10

COVERED = Receipt(SAMPLED_GAUSSIAN, q=0.5, sigma=2.0, sensitivity=1.0, steps=10)
"""Of the images that a stage is handed."""


@fresh_torch()
def check_stage(stage: Stage, *, seed: int = 0) -> None:
    """Play ``stage`` on five clients, of whom one has a neighbour: does what leaves it keep what its releases say?

    What leaves may move by 1/sigma standard deviations of its noise, which are found, to a quarter, by playing with
    other seeds. A stage that declares nothing, or that nothing protects what leaves, has nothing to keep.

    Raises:
        AssertionError: a sentence says what moved, by how much, and what was declared.
    """
    for label_noise in (0.0, 2.0) if isinstance(stage, Generating) else (0.0,):
        zeroed = StagePlay(stage, ZEROED, label_noise, seed)
        found = zeroed.faults()
        if found and not _raises_or_finds(StagePlay(stage, BLANKED, label_noise, seed)):
            found = []  # nan is a blank image for it, and a black one is not
        found = found or StagePlay(stage, REPLACED if zeroed.is_bare else RELABELLED, label_noise, seed).faults()
        require(not found, f"{type(stage).__name__}: {told(found)}")


def _raises_or_finds(play: "StagePlay") -> bool:
    try:
        return bool(play.faults())
    except (TypeError, ValueError, RuntimeError):
        return True  # it takes no floating images


@dataclass(frozen=True)
class _Nobody:
    """A generator that is never trained: its images are made up."""

    sampling: ClassVar[tuple[str, ...]] = ()
    epochs: int = 1


class StagePlay:
    """A stage on both sides; is_bare: whether something was declared as protected by nothing, after ``faults``."""

    def __init__(self, stage: Stage, kind: Kind, label_noise: float, seed: int) -> None:
        self.stage, self.kind, self.seed, self.is_bare = stage, kind, seed, False
        self.recipe = GeneratorRecipe("nobody", _Nobody(), 1.0, label_noise=label_noise)  # pyright: ignore[reportArgumentType]
        own = digits(SIZES).data.clients
        x = own.store.x.float() if kind is BLANKED else own.store.x
        self.both = apart(Clients(Examples(x, own.store.y), own.rows), [0], kind, seed)

    def faults(self) -> list[str]:
        """A sentence for each."""
        needs = [self._needs(side) for side in (0, 1)]
        drawn = [self._drawn(need) for need in needs[0](self.seed)]
        found = self._compared(lambda side, seed: _labels(needs[side](seed)))
        return found or self._compared(lambda side, seed: self._left(self._dealt(side, seed), drawn))

    def _dealt(self, side: int, seed: int) -> Dealt:
        return Dealt(self.both[side], N_CLASSES, False, seed)

    def _needs(self, side: int) -> Callable[[int], Sequence[Need]]:
        stage = self.stage
        if not isinstance(stage, Generating):
            return lambda seed: []
        return lambda seed: stage.needs(self._dealt(side, seed), self.recipe)

    def _drawn(self, need: Need) -> Contribution:
        """Images that nobody's data are in, with the labels that the stage asks for."""
        like, labels = need.examples.x, need.labels[torch.arange(need.n) % len(need.labels)]
        x = torch.randint(256, (need.n, *like.shape[1:]), generator=generator("made up", need.client)).to(like.dtype)
        return Contribution(Examples(x, labels), COVERED, len(need.examples), self.recipe.of_counts)

    def _compared(self, left_of: Callable[[int, int], Left]) -> list[str]:
        first = Side(self.seed)
        second = Side(self.seed, follows=first, times=self.kind.times)

        def played(number: int, side: Side) -> Left:
            with keyed_globals(side.seed, "stage"), playing(side):
                return left_of(number, side.seed)

        one, two = played(0, first), played(1, second)
        self.is_bare |= bool(one.free)
        spread = spread_of(lambda other: played(0, Side(self.seed + other)).tensors, one.tensors)
        return faults(one, two, (first, second), self.kind, spread, SLACK)

    def _left(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Left:
        """What leaves client 0, and what is declared of it."""
        made, events = self.stage.release(dealt, self.stage.make(dealt, drawn))
        assigned, n_real = self.stage.assign(dealt, made), len(dealt.own.store)
        parts = [made.rows, made.owners, *assigned.kept, *assigned.received, *assigned.pool]
        numbers = np.concatenate([[len(part), *part] for part in parts])
        weights = np.concatenate([np.zeros(0), *(assigned.weights or ())])
        others = [*assigned.kept[1:], *assigned.received[1:], made.rows]
        leave = np.isin(np.concatenate(others), dealt.own.rows[0])
        tensors = {
            "what was made": made.store.x[n_real:], "labels": made.store.y[n_real:],
            "who gets what": torch.from_numpy(numbers), "weights": torch.from_numpy(weights),
        }  # fmt: skip
        mine = [event for event in events if event.client == 0]
        releases = renamed(mine or [Release(0)], tensors)
        if leave.any() and all(event.covered for event in releases):
            raise AssertionError(
                f"{type(self.stage).__name__}: {leave.sum()} real examples of client 0 leave it, and all that is "
                "declared of it is covered, as if they were made with noise"
            )
        return Left(tensors, releases)


def _labels(needs: Sequence[Need]) -> Left:
    """How many images of each class are drawn for client 0, and what protects that."""
    if not needs:
        return Left({}, [])
    counts, numbers = torch.bincount(needs[0].labels, minlength=N_CLASSES), torch.tensor([need.n for need in needs])
    others = torch.cat([need.labels for need in needs[1:]])
    releases = [needs[0].recipe.of_counts.release(0, "labels")]
    return Left({"labels": counts, "numbers of images": numbers, "labels of others": others}, releases)
