"""Helpers that copy tensors as bytes, compare them bit for bit, and report differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Payload, data

Results = Sequence[tuple[Standing, dict[str, float]]]
"""The federation's state and the metrics after each round of a run."""


class NotJudged(AssertionError):
    """A check cannot decide whether a method is right; the message states the reason."""


def require(condition: object, sentence: str) -> None:
    """Raise an AssertionError with the message ``sentence`` if ``condition`` is false, also under `python -O`.

    Raises:
        AssertionError: ``condition`` is false.
    """
    if not condition:
        raise AssertionError(sentence)


def raw(payload: Payload) -> dict[str, bytes]:
    """Return a copy of each tensor's bytes by name."""
    return {name: data(x).reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in payload.items()}


def copies(payloads: Mapping[str, Payload]) -> dict[str, bytes]:
    """Return a copy of the bytes of each tensor of several payloads; the keys are the payload's key + the name."""
    return {prefix + name: value for prefix, payload in payloads.items() for name, value in raw(payload).items()}


def tensors_of(standing: Standing) -> dict[str, Payload]:
    """Return the tensors of a federation between two rounds: the server state, and each client's memory."""
    return {"state/": standing.state, **{f"memory/{client}/": memory for client, memory in standing.memory.items()}}


def bits(standing: Standing) -> dict[str, bytes]:
    """Return a copy of the bytes of all tensors of a federation between two rounds.

    Keys: ``state/NAME`` (server state), ``memory/CLIENT/NAME`` (a client's memory), ``buffers`` (BatchNorm's averages).
    """
    return copies({**tensors_of(standing), "": {"buffers": standing.buffers}})


def outcome(results: Results) -> dict[str, object]:
    """Return a copy of the last state's bytes, the byte counts of the run, and the metrics of each round, by name."""
    now, _ = results[-1]
    metrics = {f"the metrics of round {after.round}": of_round for after, of_round in results}
    return {**bits(now), "the byte counts": now.traffic, **metrics}


def differing(a: Mapping[Any, object], b: Mapping[Any, object]) -> list[Any]:
    """Return the sorted keys that only one mapping has, or whose values differ between the two mappings."""
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or a[key] != b[key])


def require_same(a: Mapping[Any, object], b: Mapping[Any, object], sentence: str, cause: str = "") -> None:
    """Check that two mappings are equal.

    Raises:
        AssertionError: they differ; the message is ``sentence``, the first keys that differ, and the ``cause``.
    """
    unequal = differing(a, b)
    require(not unequal, f"{sentence} {listed(unequal)}" + (f": {cause}" if cause else ""))


def listed(names: Sequence[Any]) -> str:
    """Join the first six names with commas, for a message; an ellipsis stands for further names."""
    return ", ".join(map(str, names[:6])) + (", ..." if len(names) > 6 else "")
