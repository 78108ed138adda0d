"""A part of the model stays with each client, and the rest is averaged as in FedAvg.

x: the shared part, on the server;  h_i: client i's own part, in its memory, at first that of the untrained model;
(y_i, h_i'): both parts after local SGD started at (x, h_i);  w_i: the client's weight.

    h_i <- h_i';   x <- x + sum_i w_i (y_i - x) / sum_i w_i

Only the shared part travels. The server has no whole model, so none is evaluated; a client's own model is (x, h_i). The
state keeps the untrained model for clients that have not taken part yet.
"""

from collections.abc import Collection

from fedcommons.core.algorithm import Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, flat, put, scale, select, sub


def parted(model: Flat, own: Collection[str]) -> State:
    """The state before round 1; own: names of the parameters that stay with clients."""
    return {"shared": select(model, [name for name in model if name not in own]), "untrained": model}


def download(state: State) -> Message:
    """x alone."""
    return Message({"shared": state["shared"]})


def trained(work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
    """w_i (y_i - x), and h_i' as memory."""
    x, w = flat(message.common, "shared"), work.weight(data)
    start = put(work.initial, x)
    y, metrics, spent = work.local(put(start, flat(memory, "own")) if memory else start, data, seed)
    delta = scale(sub(select(y, x.layout.names), x), w)
    kept = {"own": select(y, [name for name in y if name not in x.layout.parts])}
    return Reply({"delta": delta}, weight=w, memory=kept, metrics=metrics, releases=[spent.of("delta")])


def merged(state: State, total: Payload, replies: Replies) -> State:
    """x of the next round."""
    return {**state, "shared": weighted_mean(flat(state, "shared"), total, replies)}


def own_model(state: State, memory: Payload, message: Message) -> Payload:
    """(x, h_i) as the client would have it in the next round."""
    model = put(flat(state, "untrained"), flat(message.common, "shared"))
    return {"model": put(model, flat(memory, "own")) if memory else model}
