"""Payloads as the tensors and plain facts of a file, and back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedcommons.tensors import Flat, Layout, Payload, data


def pack(payloads: Mapping[str, Payload]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by ``KEY/NAME`` and what says how to read them; keys hold no slash."""
    tensors: dict[str, Tensor] = {}
    layouts: list[Layout] = []
    names: dict[str, int | None] = {}
    for key, payload in payloads.items():
        for name, x in payload.items():
            full = f"{key}/{name}"
            tensors[full], names[full] = data(x), None
            if isinstance(x, Flat):
                if x.layout not in layouts:
                    layouts.append(x.layout)
                names[full] = layouts.index(x.layout)
    facts = [[list(x.names), [list(s) for s in x.shapes]] for x in layouts]
    return tensors, {"keys": list(payloads), "layouts": facts, "tensors": names}


def unpack(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Payload]:
    """What ``pack`` was given."""
    layouts = [Layout(tuple(names), tuple(tuple(s) for s in shapes)) for names, shapes in facts["layouts"]]
    payloads: dict[str, dict[str, Flat | Tensor]] = {key: {} for key in facts["keys"]}
    for full, index in facts["tensors"].items():
        key, _, name = full.partition("/")
        payloads[key][name] = tensors[full] if index is None else Flat(layouts[index], tensors[full])
    return dict(payloads)
