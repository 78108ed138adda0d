"""Broken streams of secret noise, for audits that must detect these faults, and noise that ignores the data."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedcommons.privacy.noise import CipherStream, Draws, Noise

STEPS = 10
"""Number of steps of one client in an audit; each step draws noise once."""


def fixed(normal: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(normal.shape)


STREAMS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "none": lambda normal, number: np.zeros_like(normal),
    "half": lambda normal, number: normal / 2,
    "the same in each step": lambda normal, number: fixed(normal, 0),
    "the same for each client": lambda normal, number: fixed(normal, number % STEPS),
}
"""What each broken noise stream returns instead of a Gaussian draw, given the draw and its index."""


def break_noise(patch: pytest.MonkeyPatch, name: str) -> None:
    """Make every stream of secret noise return the broken stream ``name`` of ``STREAMS`` in this test."""
    right, numbers = CipherStream.standard_normal, count()

    def standard_normal(self: CipherStream, size: Any, dtype: type = np.float64) -> np.ndarray:
        return STREAMS[name](right(self, size, dtype), next(numbers))

    patch.setattr(CipherStream, "standard_normal", standard_normal)


class OfNoData(Noise):
    """Noise that does not depend on the data, so that trainings on two data sets differ only by the data."""

    def call(self, purpose: str, *data: Tensor) -> Draws:
        return super().call(purpose)
