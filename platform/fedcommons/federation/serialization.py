"""Conversion of payloads (tensors by name, such as a model) to the tensors and JSON values of a file, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedcommons.flat_tensors import Flat, Layout, Payload, data


def pack(payloads: Mapping[str, Payload]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, named ``KEY/NAME``, and the JSON values that ``unpack`` needs; keys must not have a slash."""
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
    """Return the payloads by key, from the results of ``pack``.

    Raises:
        ValueError: ``facts`` does not have the form that ``pack`` returns, or does not match the tensors.
    """
    try:
        if facts["tensors"].keys() != tensors.keys():
            raise ValueError("it names other tensors than the file contains")
        layouts = [_layout(names, shapes) for names, shapes in facts["layouts"]]
        payloads: dict[str, dict[str, Flat | Tensor]] = {key: {} for key in facts["keys"]}
        for full, index in facts["tensors"].items():
            key, _, name = full.partition("/")
            payloads[key][name] = tensors[full] if index is None else _flat(layouts[index], tensors[full])
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # raised for JSON of another form
        raise ValueError(f"the facts do not describe the tensors of the file: {error!r}") from error
    return dict(payloads)


def _layout(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Layout:
    layout = Layout(tuple(names), tuple(tuple(shape) for shape in shapes))
    sides = [side for shape in layout.shapes for side in shape]
    if not all(isinstance(name, str) for name in names) or not all(type(side) is int and side >= 0 for side in sides):
        raise ValueError("a layout must have names, and shapes of whole numbers")
    if len(layout.parts) != len(names):  # ``parts`` itself checks the number of shapes
        raise ValueError("a layout has a name twice")
    return layout


def _flat(layout: Layout, buffer: Tensor) -> Flat:
    if buffer.shape != (layout.size,):
        raise ValueError(f"a layout has {layout.size} elements, but its tensor has the shape {tuple(buffer.shape)}")
    return Flat(layout, buffer)
