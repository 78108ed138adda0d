"""Helpers that copy tensors as bytes, compare them bit for bit, and report differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Payload, data


def require(condition: object, sentence: str) -> None:
    """Assert ``condition``; unlike ``assert``, `python -O` does not remove this check.

    Raises:
        AssertionError: ``condition`` does not hold.
    """
    if not condition:
        raise AssertionError(sentence)


def raw(payload: Payload, prefix: str = "") -> dict[str, bytes]:
    """Return a copy of all tensors as bytes, by ``PREFIXNAME``."""
    return {prefix + name: data(x).reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in payload.items()}


def bits(standing: Standing) -> dict[str, bytes]:
    """Return a copy of all tensors as bytes: ``state/NAME`` (the server's), ``memory/CLIENT/NAME`` and ``buffers``."""
    copies = raw(standing.state, "state/") | raw({"buffers": standing.buffers})
    for client, memory in standing.memory.items():
        copies |= raw(memory, f"memory/{client}/")
    return copies


def differing(a: Mapping[Any, object], b: Mapping[Any, object]) -> list[Any]:
    """Return the sorted keys that are missing in one mapping or have different values."""
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or a[key] != b[key])


def listed(names: Sequence[Any]) -> str:
    """Join the first six names for a sentence."""
    return ", ".join(map(str, names[:6])) + (", ..." if len(names) > 6 else "")
