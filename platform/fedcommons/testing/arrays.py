"""Models and messages as lists of numpy arrays, which clients and strategies of other frameworks exchange."""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.errors import quote
from fedcommons.flat_tensors import Flat, Payload, copy, data, flat

EXTRA, METRIC, ATTRIBUTE = "array/", "metric/", "attribute/"
"""Prefixes of names of tensors: arrays besides the model, a client's metrics, and attributes of a strategy."""


def arrays_of(x: Flat) -> list[np.ndarray]:
    """Return a copy of each weight tensor of ``x`` as a numpy array, in the order of ``x``."""
    return [part.detach().cpu().clone().numpy() for part in x.values()]


def flat_of(arrays: Sequence[Any], like: Flat) -> Flat:
    """Return a copy of the arrays as a flat vector with the names, shapes and type of ``like``.

    Raises:
        ValueError: the number or the shapes of the arrays differ from ``like``.
    """
    shapes, expected = [tuple(np.shape(array)) for array in arrays], [*like.layout.shapes]
    if shapes != expected:
        raise ValueError(f"the arrays have shapes {quote(shapes)}, but the model has shapes {quote(expected)}")
    result = copy(like)
    for array, part in zip(arrays, result.values(), strict=True):
        part.copy_(torch.as_tensor(np.asarray(array)))
    return result


def arrays_in(payload: Payload) -> dict[str, np.ndarray]:
    """Return the arrays of the model and the extra arrays of a message, a reply or a state, by name."""
    extra = {f"{EXTRA}{i}": payload[f"{EXTRA}{i}"] for i in range(len(named(EXTRA, payload)))}
    model = flat(payload, "model")
    model_arrays = dict(zip(model.layout.names, arrays_of(model), strict=True))
    return model_arrays | {name: data(x).cpu().clone().numpy() for name, x in extra.items()}


def payload_of(arrays: Sequence[Any], like: Flat) -> dict[str, Flat | Tensor]:
    """Return the first arrays as the model, whose names and shapes are those of ``like``, and the extra arrays."""
    extra = {f"{EXTRA}{i}": torch.tensor(np.asarray(array)) for i, array in enumerate(arrays[len(like) :])}
    return {"model": flat_of(arrays[: len(like)], like), **extra}


def named(prefix: str, payload: Payload) -> Payload:
    """Return the tensors whose names begin with ``prefix``, by the rest of the name."""
    return {name.removeprefix(prefix): x for name, x in payload.items() if name.startswith(prefix)}


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, Real | Tensor)}


def packed(settings: Mapping[str, Any]) -> Payload:
    """Return the settings as a payload with one tensor, the bytes of their JSON text; empty without settings."""
    return {"config": torch.tensor([*json.dumps(settings).encode()], dtype=torch.uint8)} if settings else {}


def unpacked(payload: Payload) -> dict[str, Any]:
    """Return the settings that ``packed`` put into a message."""
    return json.loads(bytes(data(payload["config"]).tolist())) if "config" in payload else {}
