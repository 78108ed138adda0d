"""Conversion of arrays of any library to tensors; errors name a conversion for objects that are not numeric arrays."""

from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.errors import UserError, quote

_HOW = (
    ("toarray", "give x.toarray()"),  # attribute of scipy's sparse matrices
    ("dataset", "give its .dataset"),  # attribute of torch's DataLoader
    ("to_numpy", "give (frame[names].to_numpy(), frame[name].to_numpy())"),  # attribute of pandas' and polars' frames
    ("keys", "give (np.asarray(d['x']), np.asarray(d['y'])), or sets named train and test"),  # of dictionaries
    ("__next__", "give list(rows)"),  # attribute of Python's generators
)  # fmt: skip


def conversion_hint(thing: Any) -> str:
    """Return "; " and advice on how to convert an object, or a tuple's entries, to arrays; "" if none is known."""
    things = thing if isinstance(thing, tuple) else (thing,)
    return next((f"; {words}" for attribute, words in _HOW for t in things if hasattr(t, attribute)), "")


def kind_of(thing: Any) -> str:
    """Return the name of an object's type for a message; for a tuple also its length and the types of its entries."""
    kind = type(thing).__name__
    return f"{kind} of {len(thing)} ({', '.join(type(t).__name__ for t in thing[:4])})" if kind == "tuple" else kind


def is_array(thing: Any) -> bool:
    """Return whether an object is a tensor, or an array that numpy can convert."""
    return isinstance(thing, Tensor) or (hasattr(thing, "__array__") and hasattr(thing, "shape"))


def as_tensor(whose: str, what: str, value: Any) -> Tensor:
    """Convert ``value`` to a dense tensor on the CPU.

    The tensor shares memory with ``value`` if this memory is writable. A memory-mapped file or an array from Ray is
    copied. ``whose`` and ``what``: names of the component and of its value, for messages.

    Raises:
        UserError: ``value`` contains no real numbers, or masked or sparse numbers.
    """
    if isinstance(value, list) and value and all(isinstance(item, Tensor) for item in value):
        tensors = [item.detach().cpu() for item in value]  # numpy accepts neither tensors with gradients nor bfloat16
        value = torch.stack(tensors) if len({item.shape for item in tensors}) == 1 else value
    if isinstance(value, Tensor):
        is_dense = value.layout == torch.strided and not (value.is_nested or value.is_quantized or value.is_meta)
        if not is_dense or value.is_complex():
            raise UserError(
                f"{whose}: {what} must be a dense tensor of real numbers, such as x.to_dense(), got {value.layout} "
                f"{value.dtype}."
            )
        t = value.detach().cpu()
        return t.long() if t.dtype in (torch.uint16, torch.uint32, torch.uint64) else t
    array = as_array(whose, what, value)
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.int64)  # uint8 is the only unsigned type that torch can add and compare
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, native, ["C", "W"]))


def as_array(whose: str, what: str, value: Any) -> np.ndarray:
    """Convert ``value`` to a numpy array of numbers; ``whose`` and ``what`` are names for messages, see ``as_tensor``.

    Raises:
        UserError: ``value`` contains no numbers of at most 64 bits, or masked numbers.
    """
    mode = getattr(value, "mode", "L") if hasattr(value, "convert") else "L"
    if mode not in ("L", "RGB", "F"):  # PIL images of other modes hold other numbers, such as palette indices
        raise UserError(
            f"{whose}: {what} must be images of mode L or RGB, such as image.convert('RGB'), got {quote(mode)}."
        )
    if isinstance(value, np.ma.MaskedArray):
        raise UserError(
            f"{whose}: {what} must not be masked, as the numbers under a mask would be used; see np.ma.filled."
        )
    try:
        array = np.asarray(value)
    except ValueError as error:  # numpy refuses lists of unequal lengths
        raise UserError(f"{whose}: {what} must have one shape ({str(error).partition('.')[0]}).") from error
    if array.dtype.kind not in "biuf" or array.itemsize > 8:
        hint = "; np.unique(y, return_inverse=True)[1] numbers them" if what == "labels" else _text_column(value, array)
        hint = hint or conversion_hint(value)
        raise UserError(
            f"{whose}: {what} must be numbers of at most 64 bits, got {kind_of(value)} of {array.dtype.name}{hint}."
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise UserError(f"{whose}: {what} must be at most 2^63 - 1, but some are larger.")
    return array


def column_names(table: Any, n: int) -> list[str]:
    """Return the names of a frame's n columns for a message, in quotes; the numbers of the columns of another table."""
    names = list(getattr(table, "columns", ()))
    return [quote(name) for name in names] if len(names) == n else [f"{i}" for i in range(n)]


def _text_column(table: Any, array: np.ndarray) -> str:
    """Return the end of a message: the table's first column with a value that is no number; "" if there is none."""
    named = zip(column_names(table, array.shape[1]), array.T.tolist(), strict=True) if array.ndim == 2 else ()
    kinds = ((name, kind_of(value)) for name, column in named for value in column if not isinstance(value, Real))
    return next((f"; column {name} contains {kind}" for name, kind in kinds), "")  # no value, which may be private


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only copy for user code. It is a copy, because torch can write even to a read-only array."""
    array = array.copy()
    array.setflags(write=False)
    return array
