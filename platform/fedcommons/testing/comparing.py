"""Copies of numbers, to compare bit for bit, and the sentence for a difference."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Payload, data


def require(condition: object, sentence: str) -> None:
    """An assertion that `python -O` does not remove.

    Raises:
        AssertionError: ``condition`` does not hold.
    """
    if not condition:
        raise AssertionError(sentence)


def raw(payload: Payload, prefix: str = "") -> dict[str, bytes]:
    """A copy of all numbers, as ``PREFIXNAME``."""
    return {prefix + name: data(x).reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in payload.items()}


def bits(standing: Standing) -> dict[str, bytes]:
    """A copy of all numbers, as ``state/NAME`` (the server's), ``memory/CLIENT/NAME`` and ``buffers``."""
    found = raw(standing.state, "state/") | raw({"buffers": standing.buffers})
    for client, kept in standing.memory.items():
        found |= raw(kept, f"memory/{client}/")
    return found


def differing(a: Mapping[Any, object], b: Mapping[Any, object]) -> list[Any]:
    """Keys that are not in both with the same value."""
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or a[key] != b[key])


def listed(names: Sequence[Any]) -> str:
    """The first of them, for a sentence."""
    return ", ".join(map(str, names[:6])) + (", ..." if len(names) > 6 else "")
