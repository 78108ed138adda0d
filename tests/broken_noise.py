"""Streams of secret noise that are broken, for audits that must find it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedcommons.core.noise import CipherStream

STEPS = 10
"""Steps of a client, by which ``break_noise`` tells clients apart."""

Change = Callable[[np.ndarray, int], np.ndarray]


class TakenBack:
    """Each step's noise minus that of the step before."""

    def __init__(self) -> None:
        self.last: np.ndarray | None = None

    def __call__(self, normal: np.ndarray, number: int) -> np.ndarray:
        new = normal if number % STEPS == 0 or self.last is None else normal - self.last
        self.last = normal
        return new


def fixed(normal: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(normal.shape)


STREAMS: dict[str, Change] = {
    "none": lambda normal, number: np.zeros_like(normal),
    "half": lambda normal, number: normal / 2,
    "the same in each step": lambda normal, number: fixed(normal, 0),
    "the same for each client": lambda normal, number: fixed(normal, number % STEPS),
    "taken back": TakenBack(),
}
"""What a broken stream returns in place of normal numbers, by the number of the call."""


def break_noise(patch: pytest.MonkeyPatch, name: str) -> None:
    """Replace the normal numbers of every stream of secret noise."""
    right, calls = CipherStream.standard_normal, []

    def standard_normal(self: CipherStream, size: Any, dtype: type = np.float64) -> np.ndarray:
        calls.append(size)
        return STREAMS[name](right(self, size, dtype), len(calls) - 1)

    patch.setattr(CipherStream, "standard_normal", standard_normal)
