"""Partial model sharing: some parameters stay with each client, and the server averages the others as in FedAvg.

x: shared parameters, on the server;  h_i: client i's personal parameters, in its memory, untrained at first; (y_i,
h_i'): shared and personal parameters after local SGD started at (x, h_i);  w_i: client i's weight.

    h_i <- h_i';   x <- x + sum_i w_i (y_i - x) / sum_i w_i

Clients and server send the shared parameters only. The server has no whole model, so no server model is evaluated;
client i's personal model is (x, h_i). The state contains the untrained model for clients that have not taken part yet.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import nn

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import layers_of, matching_layers
from fedcommons.core.local_training import AddToGrad
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, flat, put, select


class HasLayers(Protocol):
    """A method whose constant ``layers`` selects the layers that the server does not average."""

    @property
    def layers(self) -> str | None: ...


def personal_layers(method: HasLayers, model: Flat, head: Sequence[str]) -> list[str]:
    """Return the names of the parameters that the constant ``layers`` selects; None selects ``head``, the model's head.

    Raises:
        UserError: a pattern matches no layer, or ``layers`` is None and the model has no head.
    """
    field = f"{type(method).__name__.lower()}.layers"
    if method.layers is not None:
        return matching_layers(model, method.layers, field)
    if not head:
        raise UserError(f"{field} must name layers, as the model has no head; the layers are {layers_of(model)}.")
    return list(head)


def effective_constants(self: HasLayers, model: Flat, facts: Facts, epochs: int) -> dict[str, str]:
    """Return the names of the layers that ``layers`` selects, separated by commas."""
    return {"layers": layers_of(personal_layers(self, model, facts.head))}


def freeze(names: Collection[str]) -> AddToGrad:
    """Return a function for ``work.local`` that removes the gradients of ``names``, so the optimizer skips them."""

    def remove(params: Mapping[str, nn.Parameter]) -> None:
        for name in names:
            params[name].grad = None

    return remove


def initial_state(model: Flat, personal_names: Collection[str]) -> State:
    """Return the state before round 1; personal_names: names of the parameters that stay with the clients."""
    return {"shared": select(model, [name for name in model if name not in personal_names]), "untrained": model}


def down(self: object, state: State, round: int, client: int) -> Message:
    return Message({"shared": state["shared"]})


def client(
    self: object, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int
) -> Reply:
    x = flat(message.common, "shared")
    start = put(work.initial, x)
    trained = work.local(put(start, flat(memory, "own")) if memory else start, data, seed)
    new_memory = {"own": select(trained.model, [name for name in trained.model if name not in x.layout.parts])}
    shared = trained._replace(model=select(trained.model, x.layout.names))
    return weighted_reply(x, shared, work.weight(data), memory=new_memory)


def merge(
    self: object, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
) -> State:
    return {**state, "shared": weighted_mean(flat(state, "shared"), total, replies)}


def personal(self: object, state: State, memory: Payload, message: Message) -> Payload:
    model = put(flat(state, "untrained"), flat(message.common, "shared"))
    return {"model": put(model, flat(memory, "own")) if memory else model}
