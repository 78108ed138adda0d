"""Helpers that copy tensors as bytes, compare them bit for bit, and report differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Payload, data


def require(condition: object, sentence: str) -> None:
    """Raise an AssertionError with the message ``sentence`` if ``condition`` is false, also under `python -O`.

    Raises:
        AssertionError: ``condition`` is false.
    """
    if not condition:
        raise AssertionError(sentence)


def raw(payload: Payload, prefix: str = "") -> dict[str, bytes]:
    """Return a copy of each tensor's bytes; the keys are ``prefix`` + name."""
    return {prefix + name: data(x).reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in payload.items()}


def bits(standing: Standing) -> dict[str, bytes]:
    """Return a copy of the bytes of all tensors of a federation between two rounds.

    Keys: ``state/NAME`` (server state), ``memory/CLIENT/NAME`` (a client's memory), ``buffers`` (BatchNorm's averages).
    """
    copies = raw(standing.state, "state/") | raw({"buffers": standing.buffers})
    for client, memory in standing.memory.items():
        copies |= raw(memory, f"memory/{client}/")
    return copies


def differing(a: Mapping[Any, object], b: Mapping[Any, object]) -> list[Any]:
    """Return the sorted keys that only one mapping has, or whose values differ between the two mappings."""
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or a[key] != b[key])


def listed(names: Sequence[Any]) -> str:
    """Join the first six names with commas, for a message; an ellipsis stands for further names."""
    return ", ".join(map(str, names[:6])) + (", ..." if len(names) > 6 else "")
