"""Checks of the values that a method returns to the engine; each check raises ``ValueError``."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.core.algorithm import Merged, Message, Reply, State
from fedcommons.errors import quote, require_type
from fedcommons.flat_tensors import EMPTY, Flat, Layout, Payload, data, require_payload
from fedcommons.privacy.release import Release


def require_state(state: State, layout: Layout | None, *, has_model: bool = True) -> None:
    """Check the server state that a method's ``start`` or ``merge`` returned.

    layout: names and shapes of the server model; None without a server model. has_model: whether the state must contain
    a server model.
    """
    require_payload("the state", state)
    for name, x in state.items():
        is_model = name == "model" or name.startswith("model/")
        if is_model and not (isinstance(x, Flat) and x.layout == layout and x.buffer.is_floating_point()):
            raise ValueError(f"the state's {name!r} must be a Flat with the names and shapes of the model's weights")
    if ("model" in state) != has_model:
        reason = "the server model" if has_model else "because the state before round 1 had no model"
        raise ValueError(f"the state must {'' if has_model else 'not '}have 'model', {reason}")


def split_merged(merged: Merged) -> tuple[State, dict[str, float]]:
    """Return the state and the numbers that a method's ``merge`` returned; the numbers get names ``server/NAME``."""
    if not isinstance(merged, tuple):
        return merged, {}
    if len(merged) != 2 or not isinstance(merged[1], Mapping):
        kinds = ", ".join(type(part).__name__ for part in merged)
        raise ValueError(f"it must return the state, or the pair (state, numbers by name), got ({kinds})")
    for name, value in merged[1].items():
        if not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", name, re.ASCII) and len(name) <= 100):
            allowed = "have at most 100 letters, digits, '_', '.', '-', and '/' between them"
            raise ValueError(f"the name of a number beside the state must {allowed}, got {quote(name)}")
        if not (_is_number(value) and abs(float(value)) <= 1e100):  # the limit of records; false for nan
            raise ValueError(f"the number {name} beside the state must be one finite number, got {quote(value)}")
    return merged[0], {f"server/{name}": float(value) for name, value in merged[1].items()}


def require_message(message: Message, checked: Payload | None = None) -> None:
    """Check the message that a method's ``down`` returned.

    checked: the ``common`` of an earlier message. If this message has the same object, the object is not checked again.
    """
    require_type(Message, message)
    if message.common is not checked:
        require_payload("Message.common", message.common)
    require_payload("Message.individual", message.individual)


def require_reply(reply: Reply) -> None:
    """Check the reply that a method's ``client`` returned. The engine calls this for each client in each round."""
    require_type(Reply, reply)
    require_payload("Reply.sums", reply.sums)
    for name, x in reply.sums.items():
        values = x.buffer if x.__class__ is Flat else data(x)  # pyright: ignore[reportAttributeAccessIssue]
        if values.requires_grad or values.layout is not torch.strided or values.dtype.is_complex:
            kind = f"{values.dtype}, {values.layout}, requires_grad={values.requires_grad}"
            raise ValueError(f"Reply.sums[{name!r}] must be a dense real tensor with requires_grad=False, got {kind}")
    require_payload("Reply.each", reply.each)
    for name in reply.sums.keys() & reply.each.keys() if reply.each else ():
        single, added = data(reply.each[name]) * reply.weight, data(reply.sums[name])
        if single.shape != added.shape or not torch.allclose(
            single.double(), added.double(), 1e-6, 0.0, equal_nan=True
        ):
            raise ValueError(f"{name!r} is in Reply.sums and Reply.each: the first must be the second times weight")
    if reply.memory is not None:
        require_payload("Reply.memory", reply.memory)
    if reply.weight.__class__ is not float and not _is_number(reply.weight):
        raise ValueError(f"it must return a number as Reply.weight, got {type(reply.weight).__name__}")
    require_type(Mapping, reply.metrics, "numbers by name as Reply.metrics")
    for name, value in reply.metrics.items():
        tensor: Any = value if value.__class__ is Tensor else None
        is_usual = value.__class__ is float or (tensor is not None and not tensor.ndim and not tensor.dtype.is_complex)
        if name.__class__ is not str or not (is_usual or _is_number(value)):
            kind = type(value).__name__
            raise ValueError(f"Reply.metrics must map names to numbers that fit in a float, got {kind} of {name!r}")
    require_type(Sequence, reply.releases, "a list of Release as Reply.releases")
    for event in reply.releases:
        require_type(Release, event, "a list of Release as Reply.releases")
        if event.what.__class__ is not tuple:
            require_type(list, event.what, "a tuple of names as Release.what")
        for name in event.what:
            if name.__class__ is not str:
                raise ValueError(f"Release.what must be a tuple of names, got {quote(event.what)}")


def require_personal(payload: Payload) -> None:
    """Check the personal model that a method's ``personal`` returned; ``module_with`` checks names and shapes later."""
    require_payload("the returned value", payload)
    model, buffers = payload.get("model"), payload.get("buffers", EMPTY)
    if not (isinstance(model, Flat) and model.buffer.is_floating_point() and isinstance(buffers, Flat)):
        raise ValueError("it must return 'model', a Flat of all weights; 'buffers', a Flat of all buffers, is optional")


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a real number that fits in a float, or a tensor or array with one such number."""
    if not (isinstance(value, Real) or (isinstance(value, Tensor | np.ndarray) and prod(value.shape) == 1)):
        return False
    try:
        float(value)  # pyright: ignore[reportArgumentType]
    except (OverflowError, RuntimeError, TypeError, ValueError):  # for example 10**400 or a complex number
        return False
    return True
