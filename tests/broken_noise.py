"""Broken streams of secret noise, for audits that must detect them, and noise that no data changes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedcommons.core.noise import CipherStream, Draws, Noise

STREAMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": np.zeros_like,
    "half": lambda normal: normal / 2,
    "the same in each step": lambda normal: np.random.default_rng(0).standard_normal(normal.shape),
}
"""What each broken noise stream returns instead of Gaussian draws."""


def break_noise(patch: pytest.MonkeyPatch, name: str) -> None:
    """Replace the normal numbers of every stream of secret noise."""
    right = CipherStream.standard_normal

    def standard_normal(self: CipherStream, size: Any, dtype: type = np.float64) -> np.ndarray:
        return STREAMS[name](right(self, size, dtype))

    patch.setattr(CipherStream, "standard_normal", standard_normal)


class OfNoData(Noise):
    """The same noise for any data, so that trainings on two data sets differ by the data alone."""

    def call(self, purpose: str, *data: Tensor) -> Draws:
        return super().call(purpose)
