"""The two runs (sides) of a sensitivity test, with equal noise, on data that differ in one example per client.

In this test the noise depends on the order of the calls and not on the data. A noisy sum of the first run replaces the
same sum of the second run, if both sums differ before noise by at most the sensitivity. So the test compares each sum
separately, and values that are computed only from noisy sums have equal bits in both runs.
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
"""Relative tolerance for rounding errors in sums of floating-point numbers."""


@dataclass(frozen=True)
class Sum:
    """A recorded ``NoisySum``: values before and after noise, and declared privacy. what: name of the noise stream."""

    what: str
    before: Tensor
    after: Tensor
    release: Release
    sd: float  # standard deviation of the noise

    def moved(self, other: "Sum") -> float:
        """Return the Euclidean distance of both sums before noise, or inf if values are not finite or shapes differ."""
        if self.before.shape != other.before.shape:
            return inf
        distance = float(torch.linalg.vector_norm(self.before.double() - other.before.double()))
        return distance if distance < inf else inf

    def keeps(self, other: "Sum", times: float) -> bool:
        """Return whether the sum is declared as protected, and ``other``, the sum of the second run, is close to it.

        Close sums have equal sensitivity and noise multiplier, and before noise a distance of at most ``times``
        sensitivities.
        """
        most = times * self.release.sensitivity * (1 + ROUNDING)
        return self.release.covered and self.is_like(other) and self.moved(other) <= most

    def is_like(self, other: "Sum") -> bool:
        """Return whether both sums have equal sensitivity and noise multiplier, up to rounding."""
        first, second = self.release, other.release
        bounds = isclose(first.sensitivity, second.sensitivity, rel_tol=ROUNDING)
        return bounds and isclose(first.sigma, second.sigma, rel_tol=ROUNDING)


@dataclass
class Side:
    """The random draws and noisy sums of one run (side) of the test, in order.

    seed: the seed of the noise. follows: the first run, if this is the second run; otherwise None. A noisy sum of
    the first run replaces the sum of this run if both are at most ``times`` sensitivities apart before noise. raised:
    number added to every standard normal number outside of noisy sums, to measure the effect of this noise.
    """

    seed: int
    follows: "Side | None" = None
    times: float = 0.0
    raised: float = 0.0
    draws: list[str] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    loose: int = 0  # number of normal numbers drawn outside of noisy sums
    calls: int = 0
    opened: set[str] = field(default_factory=set)  # names of the noise streams that were opened
    again: list[str] = field(default_factory=list)  # streams that were opened twice, so that their noise repeats
    in_sum: bool = False

    def follower(self, times: float, raised: float = 0.0) -> "Side":
        """Return a new side with the seed of this side, which it follows."""
        return Side(self.seed, follows=self, times=times, raised=raised)


class PlayedStream:
    """A ``Stream`` of random numbers in the test, which records each draw in its ``Side``."""

    def __init__(self, side: Side, what: str) -> None:
        self.side, self.what, self._draws = side, what, wide_generator(side.seed, what)

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """Return seeded numbers from N(0, 1); outside of a ``NoisySum``, ``Side.raised`` is added to each number."""
        self.side.draws.append(f"{self.what}: {size} normal numbers")
        normal = self._draws.standard_normal(size)
        if self.side.in_sum:
            return normal.astype(dtype)
        self.side.loose += prod(size) if isinstance(size, tuple) else size
        return (normal + self.side.raised).astype(dtype)

    def random(self, size: Size) -> np.ndarray:
        """Return seeded numbers from the uniform distribution on [0, 1), in float64."""
        self.side.draws.append(f"{self.what}: {size} uniform numbers")
        return self._draws.random(size)


@dataclass(frozen=True)
class PlayedDraws:
    """The test's replacement of a ``Draws`` object, which opens the noise streams of one call of ``Noise.call``."""

    side: Side
    what: str

    def seeds(self, n: int, step: int) -> list[int]:
        """Return an empty list (no seeds), as ``Draws.seeds`` does for seeded noise, which this test uses."""
        return []

    def stream(self, *key: int | str) -> Stream:
        """Return the noise stream with this key. ``side`` records a stream that is opened twice."""
        what = f"{self.what}, {' '.join(map(str, key))}" if key else self.what
        (self.side.again.append if what in self.side.opened else self.side.opened.add)(what)
        return PlayedStream(self.side, what)

    def stream_for(self, value: Tensor, *key: int | str) -> Stream:
        """Return the noise stream with this key; as for seeded noise in ``Draws``, it does not depend on ``value``."""
        return self.stream(*key)


@contextmanager
def playing(side: Side) -> Iterator[None]:
    """Patch ``Noise.call`` and ``NoisySum.blur`` so that ``side`` provides and records all noise in this context."""
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
