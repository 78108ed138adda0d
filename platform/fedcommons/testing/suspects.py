"""Usual differences between two implementations of a method, by which the referee explains unequal models.

The referee runs the method of the special case again with one changed setting. If the models are then equal, the
setting is the difference.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pytorch_lightning import LightningModule
from torch import Tensor

from fedcommons.core.algorithm import Algorithm
from fedcommons.errors import ClientError
from fedcommons.flat_tensors import Flat, norm, sub
from fedcommons.testing.federations import Federation

ATTRIBUTES = {
    **{f"momentum {value}": ("momentum", value) for value in (0.9, 0.5)},
    "no zero_grad between steps": ("momentum", 1.0),
    **{f"weight decay {value}": ("weight_decay", value) for value in (0.01, 0.001, 0.0005, 0.0001)},
    "Adam instead of SGD": ("optimizer", "adam"),
}
"""Name of a difference -> attribute of the tests' module, and the attribute's value with this difference.

If gradients are never set to zero, each step uses the sum of all gradients so far, which is momentum 1.
"""

OTHER_WEIGHTING = {
    "uniform": ("samples", "weights by examples"),
    "samples": ("uniform", "equal weights of the clients"),
}
"""For each weighting of clients, the other weighting and its name."""


def changed_federations(federation: Federation) -> Iterator[tuple[str, Federation]]:
    """Yield the name of each usual difference and a copy of the federation that has this difference."""
    loop, weighting = federation.loop, federation.weighting
    for name, (attribute, value) in ATTRIBUTES.items():
        yield name, replace(federation, module=_changed(federation.module, attribute, lambda _, value=value: value))
    summed = _changed(federation.module, "training_step", _summed)
    yield "the sum instead of the mean of the examples' losses", replace(federation, module=summed)
    yield "the last incomplete batch is dropped", federation.training(replace(loop, drop_last=True), weighting)
    for epochs in (loop.epochs - 1, loop.epochs + 1):
        yield f"{epochs} instead of {loop.epochs} epochs", federation.training(replace(loop, epochs=epochs), weighting)
    other, name = OTHER_WEIGHTING[weighting]
    yield name, federation.training(loop, other)


def explanation(model: Flat, method: Algorithm, federation: Federation, participation: float, most: float) -> str:
    """Return the end of a message with the difference that turns the model of ``method`` into ``model``, if known.

    Args:
        model: the tested method's model after four rounds.
        method: the method that the tested method should equal.
        federation: the federation of the comparison.
        participation: share of the clients that take part in a round.
        most: maximum relative distance (Euclidean norm) of two models that count as equal.
    """
    if not norm(sub(model, federation.model)):
        return "its model does not change at all"
    names = []
    for name, changed in changed_federations(federation):
        names.append(name)
        with suppress(ClientError):  # the method refuses the setting, or its training diverges
            other = changed.run(method, changed.plan(4, participation))[-1][0].model
            if norm(sub(model, other)) <= most * norm(sub(other, federation.model)):
                return f"they are equal with this difference: {name}"
    return f"none of these differences alone makes them equal: {', '.join(names)}"


def _changed(
    build: Callable[[], LightningModule], attribute: str, change: Callable[[Any], Any]
) -> Callable[[], LightningModule]:
    """Return a function that builds the module and replaces an attribute by ``change`` of the attribute."""

    def module() -> LightningModule:
        result = build()
        setattr(result, attribute, change(getattr(result, attribute)))
        return result

    return module


def _summed(training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda batch, batch_idx: len(batch[0]) * training_step(batch, batch_idx)
