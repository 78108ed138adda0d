"""Arithmetic on named tensors that are views of one flat buffer.

A model, a control variate or a gradient is a ``Flat``: one vector (the buffer), and a ``Layout`` with the names and
shapes of the tensors in the vector. So adding clients' updates, loading a module and sending a model take one operation
each, for any number of layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a flat buffer, in their order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def parts(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Position in the buffer (a slice) and shape of each tensor, by name."""
        parts, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            parts[name] = slice(start, start + prod(shape)), shape
            start += prod(shape)
        return parts

    @property
    def size(self) -> int:
        """Number of elements of all tensors together."""
        return sum(prod(shape) for shape in self.shapes)

    def __reduce__(self) -> tuple:
        return Layout, (self.names, self.shapes)


class Flat(Mapping[str, Tensor]):
    """Mapping from names to tensors that are views of one flat buffer; pickling stores and copies the whole buffer."""

    __slots__ = ("buffer", "layout")

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self.layout = layout
        self.buffer = buffer  # (layout.size,)

    def __getitem__(self, name: str) -> Tensor:
        part, shape = self.layout.parts[name]
        return self.buffer[part].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def __reduce__(self) -> tuple:
        return _from_array, (self.layout, self.buffer.detach().cpu().numpy())


def _from_array(layout: Layout, array: np.ndarray) -> Flat:
    # torch.tensor copies the array. A write to a view of Ray's shared memory would change the array for all processes.
    return Flat(layout, torch.tensor(array))


Payload = Mapping[str, Flat | Tensor]
"""Type of messages, client memory and server state: a mapping from names to ``Flat`` or tensors."""


def layout_of(named: Iterable[tuple[str, Tensor]]) -> Layout:
    """Return the names and shapes of (name, tensor) pairs, in the order of ``named``."""
    items = [(name, tuple(t.shape)) for name, t in named]
    return Layout(tuple(n for n, _ in items), tuple(s for _, s in items))


def flatten(named: Mapping[str, Tensor]) -> Flat:
    """Return a ``Flat`` with copies of the named tensors in a new buffer."""
    return Flat(layout_of(named.items()), torch.cat([t.detach().reshape(-1) for t in named.values()]))


EMPTY = Flat(Layout((), ()), torch.empty(0, dtype=torch.float32, device="cpu"))
"""The ``Flat`` without tensors."""


def copy(x: Flat) -> Flat:
    """Return a copy of ``x`` with a new buffer."""
    return Flat(x.layout, x.buffer.clone())


def data(x: Flat | Tensor) -> Tensor:
    """Return the tensor with all values of ``x``: the buffer of a ``Flat``, or the tensor itself."""
    return x.buffer if isinstance(x, Flat) else x


def require_payload(what: str, payload: Any) -> None:
    """Check that ``payload`` is a ``Payload``. what: name of the payload in the error message.

    Raises:
        ValueError: ``payload`` is no mapping from names to ``Flat`` or tensors.
    """
    # Exact classes are tested first, because the check runs for each client and isinstance is slower.
    if payload.__class__ is dict and not payload:
        return
    if payload.__class__ is not dict and not isinstance(payload, Mapping):
        raise ValueError(f"{what} must map names to Flat or tensors, got {type(payload).__name__}")
    for name, x in payload.items():
        if name.__class__ is not str or (x.__class__ is not Flat and not isinstance(x, Flat | Tensor)):
            raise ValueError(f"{what} must map names to Flat or tensors, got {type(x).__name__} of {name!r}")


def flat(payload: Payload, name: str) -> Flat:
    """Return the ``Flat`` called ``name`` in a payload.

    Raises:
        KeyError: the payload has no entry ``name``.
        TypeError: the entry is a plain tensor.
    """
    x = payload[name]
    if not isinstance(x, Flat):
        raise TypeError(f"{name} is a plain tensor, not a named vector")
    return x


def scalar(payload: Payload, name: str) -> float:
    """Return the entry ``name`` of a payload, a tensor with one element, as a number.

    Raises:
        KeyError: the payload has no entry ``name``.
    """
    return float(data(payload[name]))


def zeros_like(x: Flat) -> Flat:
    """Return a ``Flat`` of zeros with the names and shapes of ``x``."""
    return Flat(x.layout, torch.zeros_like(x.buffer))


def select(x: Flat, names: Sequence[str]) -> Flat:
    """Return a copy of the tensors of ``x`` called ``names``, in the order of ``names``.

    Args:
        x: tensors by name.
        names: names of tensors of ``x``; a string is one name.

    Raises:
        KeyError: ``x`` has no tensor with one of the names.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    return Flat(layout_of((n, x[n]) for n in names), torch.cat([x[n].reshape(-1) for n in names] or [x.buffer[:0]]))


def put(whole: Flat, part: Flat) -> Flat:
    """Return a copy of ``whole`` in which the tensors named in ``part`` have the values of ``part``.

    Args:
        whole: all tensors; they are not changed.
        part: new values of some tensors of ``whole``, with the same names and shapes.

    Raises:
        ValueError: ``whole`` lacks a tensor of ``part``, or two tensors with the same name have different shapes.
    """
    result = copy(whole)
    for name, values in part.items():
        if name not in whole.layout.parts:
            raise ValueError(f"there is no tensor {name!r} that could be replaced")
        if values.shape != result[name].shape:
            raise ValueError(f"{name} has shape {tuple(result[name].shape)}, and not {tuple(values.shape)}")
        result[name].copy_(values)
    return result


def like(x: Flat | Tensor, values: Tensor) -> Flat | Tensor:
    """Return ``values`` in the form of ``x``: as a ``Flat`` with the layout of ``x``, or as a plain tensor."""
    return Flat(x.layout, values) if isinstance(x, Flat) else values


def sub(a: Flat, b: Flat) -> Flat:
    """Return a - b, for two ``Flat`` with equal names and shapes."""
    return Flat(a.layout, a.buffer - b.buffer)


def add(a: Flat, b: Flat, scale: float = 1.0) -> Flat:
    """Return a + scale * b in the number type of a, computed in ``torch.promote_types`` of both number types.

    Args:
        a: first summand, which determines the names and shapes of the result.
        b: second summand, with the names and shapes of a.
        scale: factor of b; default: 1.
    """
    wide = torch.promote_types(a.buffer.dtype, b.buffer.dtype)
    return Flat(a.layout, torch.add(a.buffer.to(wide), b.buffer, alpha=scale).to(a.buffer.dtype))


def scale(a: Flat, factor: float) -> Flat:
    """Return factor * a; if the factor is 1, return the object ``a`` itself and no copy."""
    return a if factor == 1 else Flat(a.layout, a.buffer * factor)


def sq_norm(a: Flat | Tensor) -> float:
    """Return the squared Euclidean norm ||a||^2, summed in float64."""
    x = data(a).double()
    return float(x.mul_(x).sum()) if x is not data(a) else float(x.square().sum())


def norm(a: Flat | Tensor) -> float:
    """Return the Euclidean norm ||a||; large values do not overflow: the result is finite if all values are finite."""
    x = data(a)
    result = float(torch.linalg.vector_norm(x))
    if isfinite(result) or not x.isfinite().all():
        return result
    largest = x.abs().max().double()
    return float(largest * torch.linalg.vector_norm(x / largest))


def nbytes(payload: Payload) -> int:
    """Return the number of bytes of all tensors in a message, without names and headers."""
    return sum(data(x).nbytes for x in payload.values())


def to_device(payload: Payload, device: torch.device) -> Payload:
    """Return the payload with all tensors on ``device``; the same object if all tensors are already there."""
    if not payload or all(data(x).device == device for x in payload.values()):
        return payload
    return {name: like(x, data(x).to(device)) for name, x in payload.items()}
