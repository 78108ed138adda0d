"""The two sides of a sensitivity test: runs with equal noise, on data that differ in one example.

Here the order of calls determines the noise, not the data. A side that follows another side gets that side's noisy
sums. So the test compares each sum separately, and values that depend only on noisy sums are equal on both sides, bit
for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isclose, prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedcommons.privacy.dp_sgd import NoisySum
from fedcommons.privacy.noise import Noise, Size, Stream
from fedcommons.privacy.release import Release
from fedcommons.seeding import wide_generator

ROUNDING = 1e-3
"""Relative tolerance for sums of floating point numbers."""


@dataclass(frozen=True)
class Sum:
    """A recorded ``NoisySum``: values before and after its noise, and its release. what: name of the noise."""

    what: str
    before: Tensor
    after: Tensor
    release: Release
    sd: float  # standard deviation of its noise

    def moved(self, other: "Sum") -> float:
        """Return ||before - other.before||, or inf if values are not finite or shapes differ."""
        if self.before.shape != other.before.shape:
            return inf
        distance = float(torch.linalg.vector_norm(self.before.double() - other.before.double()))
        return distance if distance < inf else inf

    def keeps(self, other: "Sum", times: float) -> bool:
        """Check that the sum is covered, and ``other`` is like it and at most ``times`` sensitivities away."""
        most = times * self.release.sensitivity * (1 + ROUNDING)
        return self.release.covered and self.is_like(other) and self.moved(other) <= most

    def is_like(self, other: "Sum") -> bool:
        """Check that both sums have equal clipping and noise, up to rounding of norms."""
        first, second = self.release, other.release
        bounds = isclose(first.sensitivity, second.sensitivity, rel_tol=ROUNDING)
        return bounds and isclose(first.sigma, second.sigma, rel_tol=ROUNDING)


@dataclass
class Side:
    """The draws and noisy sums of one side, in order.

    seed: of the noise. follows: a side whose noisy sums replace this side's sums that are at most ``times``
    sensitivities away. raised: number of standard deviations added to every normal number outside of sums; the
    resulting differences measure the noise in the sent tensors.
    """

    seed: int
    follows: "Side | None" = None
    times: float = 0.0
    raised: float = 0.0
    draws: list[str] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    loose: int = 0  # normal numbers outside of sums
    calls: int = 0
    opened: set[str] = field(default_factory=set)  # names of opened streams
    again: list[str] = field(default_factory=list)  # streams that were opened twice, and so repeat their noise
    in_sum: bool = False


class PlayedStream:
    """The noise stream of a side for one key; see ``Stream``."""

    def __init__(self, side: Side, what: str) -> None:
        self.side, self.what, self._draws = side, what, wide_generator(side.seed, what)

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """See ``Stream``."""
        self.side.draws.append(f"{self.what}: {size} normal numbers")
        normal = self._draws.standard_normal(size)
        if self.side.in_sum:
            return normal.astype(dtype)
        self.side.loose += prod(size) if isinstance(size, tuple) else size
        return (normal + self.side.raised).astype(dtype)

    def random(self, size: Size) -> np.ndarray:
        """See ``Stream``."""
        self.side.draws.append(f"{self.what}: {size} uniform numbers")
        return self._draws.random(size)


@dataclass(frozen=True)
class PlayedDraws:
    """The noise streams of one call; see ``Draws``."""

    side: Side
    what: str

    def seeds(self, n: int, step: int) -> list[int]:
        """See ``Draws``. The test uses seeded noise, so there are no secret seeds."""
        return []

    def stream(self, *key: int | str) -> Stream:
        """See ``Draws``."""
        what = f"{self.what}, {' '.join(map(str, key))}" if key else self.what
        (self.side.again.append if what in self.side.opened else self.side.opened.add)(what)
        return PlayedStream(self.side, what)

    def stream_for(self, value: Tensor, *key: int | str) -> Stream:
        """See ``Draws``."""
        return self.stream(*key)


@contextmanager
def playing(side: Side) -> Iterator[None]:
    """Patch ``Noise`` and ``NoisySum`` so that within the context this side provides and records all noise."""
    blur = NoisySum.blur

    def played_call(noise: Noise, purpose: str, *data: Tensor) -> Any:
        noise.calls += 1
        side.calls += 1
        side.draws.append(f"call {side.calls}, for {purpose}")
        return PlayedDraws(side, f"{purpose}, call {side.calls}")

    def played_blur(total: NoisySum, sigma: float, noise: Stream) -> None:
        before, number = total.values.detach().clone(), len(side.sums)
        side.in_sum = True
        blur(total, sigma, noise)
        side.in_sum = False
        what = noise.what if isinstance(noise, PlayedStream) else ""
        side.sums.append(Sum(what, before, total.values.detach().clone(), total.release, sigma * total.clip))
        for led in side.follows.sums[number : number + 1] if side.follows else []:
            if led.keeps(side.sums[-1], side.times):
                total.values.copy_(led.after)

    with patch.object(Noise, "call", played_call), patch.object(NoisySum, "blur", played_blur):
        yield
