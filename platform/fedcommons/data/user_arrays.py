"""Arrays of any library as tensors, and what to do with what is no array of numbers, in words."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.errors import UserError, shown

_HOW = (
    ("toarray", "give x.toarray()"),  # scipy's sparse matrices
    ("dataset", "give its .dataset"),  # DataLoader
    ("to_numpy", "give (frame[names].to_numpy(), frame[name].to_numpy())"),  # pandas, polars
    ("keys", "give (np.asarray(d['x']), np.asarray(d['y']))"),  # Bunch, Hugging Face's
    ("__next__", "give list(rows)"),  # generators
)  # fmt: skip


def how(thing: Any) -> str:
    """How something, or what a tuple holds, is made an array, in words after ``; ``; empty if nobody knows."""
    things = thing if isinstance(thing, tuple) else (thing,)
    return next((f"; {words}" for attribute, words in _HOW for t in things if hasattr(t, attribute)), "")


def kind_of(thing: Any) -> str:
    """What something is, for a message: its type, of a tuple also the types in it."""
    kind = type(thing).__name__
    return f"{kind} of {len(thing)} ({', '.join(type(t).__name__ for t in thing[:4])})" if kind == "tuple" else kind


def is_array(thing: Any) -> bool:
    """Whether it is a tensor, or of a library whose arrays numpy takes."""
    return isinstance(thing, Tensor) or (hasattr(thing, "__array__") and hasattr(thing, "shape"))


def as_tensor(whose: str, what: str, given: Any) -> Tensor:
    """A dense tensor on the CPU with the numbers of ``given``; whose, what: for messages.

    It shares memory with ``given`` where it can be written to without harm: a mapped file or what Ray gave is copied.

    Raises:
        UserError: it holds no numbers, or hides some.
    """
    if isinstance(given, list) and given and all(isinstance(one, Tensor) for one in given):
        tensors = [one.detach().cpu() for one in given]  # numpy takes neither those with a gradient nor bfloat16
        given = torch.stack(tensors) if len({one.shape for one in tensors}) == 1 else given
    if isinstance(given, Tensor):
        is_dense = given.layout == torch.strided and not (given.is_nested or given.is_quantized or given.is_meta)
        if not is_dense or given.is_complex():
            raise UserError(
                f"{whose}: {what} must be a dense tensor of real numbers, such as x.to_dense(), got {given.layout} "
                f"{given.dtype}."
            )
        t = given.detach().cpu()
        return t.long() if t.dtype in (torch.uint16, torch.uint32, torch.uint64) else t
    array = as_array(whose, what, given)
    if array.dtype.kind == "u" and array.itemsize > 1:
        array = array.astype(np.int64)  # torch adds and compares no other unsigned numbers than uint8
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, native, ["C", "W"]))


def as_array(whose: str, what: str, given: Any) -> np.ndarray:
    """``given`` as numpy has it.

    Raises:
        UserError: it holds no numbers, or hides some.
    """
    mode = getattr(given, "mode", "L") if hasattr(given, "convert") else "L"
    if mode not in ("L", "RGB", "F"):  # of another, such as a palette's indices, the numbers are no brightnesses
        raise UserError(
            f"{whose}: {what} must be images of mode L or RGB, such as image.convert('RGB'), got {shown(mode)}."
        )
    if isinstance(given, np.ma.MaskedArray):
        raise UserError(
            f"{whose}: {what} must not be masked, as the numbers under a mask would be used; see np.ma.filled."
        )
    try:
        array = np.asarray(given)
    except ValueError as error:  # lists of several lengths
        raise UserError(f"{whose}: {what} must have one shape ({str(error).partition('.')[0]}).") from error
    if array.dtype.kind not in "biuf" or array.itemsize > 8:
        hint = "; np.unique(y, return_inverse=True)[1] numbers them" if what == "labels" else how(given)
        raise UserError(
            f"{whose}: {what} must be numbers of at most 64 bits, got {kind_of(given)} of {array.dtype.name}{hint}."
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise UserError(f"{whose}: {what} must be at most 2^63 - 1, got {array.max()}.")
    return array


def read_only(array: np.ndarray) -> np.ndarray:
    """A copy for somebody's code: numpy refuses to write to it, and what is written through torch does not reach us."""
    array = array.copy()
    array.setflags(write=False)
    return array
