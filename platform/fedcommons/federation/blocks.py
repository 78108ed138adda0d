"""A block of a round's clients, trained by one worker: what it is handed, what it does, what it gives back.

A pure function of (message, memory, data, seed), so a block may run anywhere, twice.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import isfinite

import torch

from fedcommons.algorithms.algorithm import Message, Reply
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError
from fedcommons.federation.reduction import BlockSum, Total
from fedcommons.federation.worker import Worker
from fedcommons.seeds import seed_for
from fedcommons.tensors import Flat, Payload, copy, data, nbytes, scale, to_device

BUFFERS = "buffers"
"""Name of the module's buffers in a reply's sums, or in a client's memory; the algorithms never see it."""


CPU = torch.device("cpu")
"""Where the server's numbers rest."""


@dataclass(frozen=True)
class RoundTask:
    """What all blocks of a round share."""

    algorithm: str
    round: int
    common: Payload
    seed: int
    buffers: Flat
    keep_buffers: bool

    @property
    def nbytes(self) -> int:
        return nbytes(self.common) + self.buffers.buffer.nbytes


@dataclass(frozen=True)
class Block:
    """Some of a round's clients, with what is theirs alone."""

    clients: list[int]
    own: list[Payload]
    memory: list[Payload]


Form = tuple[tuple[str, Hashable, torch.dtype], ...]
"""Names, shapes and types of a reply's sums; what travels singly may differ from client to client."""


@dataclass(frozen=True)
class BlockResult:
    """What a block's clients sent: float64 sums and replies without their sums, apart for each form of reply.

    Nearly always there is one form. Which one is right where there are several only the whole round can tell.
    """

    sums: dict[Form, Total]
    replies: dict[int, tuple[Form, Reply]]
    rejected: dict[int, str]  # client: why
    up_bytes: int


def train_block(worker: Worker, task: RoundTask, block: Block) -> BlockResult:
    """Train the block's clients one after another and add their sums in that order."""
    sums: dict[Form, BlockSum] = {}
    replies, rejected, up_bytes = {}, {}, 0
    device = worker.work.device
    common = to_device(task.common, device)
    for client, own, memory in zip(block.clients, block.own, block.memory, strict=True):
        rows = worker.data.clients[client]
        seed = seed_for(task.seed, "client", task.round, client)
        try:
            message = Message(common, to_device(own, device))
            reply = _client(worker, task, message, to_device(memory, device), rows, seed)
        except Exception as error:
            raise ClientError.of(error, client, task.round, task.algorithm, rows.x.shape) from error
        up_bytes += reply.nbytes
        if why := _not_finite(reply):
            rejected[client] = why
            continue
        form = _form(reply)
        sums.setdefault(form, BlockSum()).add(reply.sums)
        replies[client] = form, _at_rest(reply)
    return BlockResult({form: s.total for form, s in sums.items()}, replies, rejected, up_bytes)


def _client(worker: Worker, task: RoundTask, message: Message, memory: Payload, rows: ClientData, seed: int) -> Reply:
    """The algorithm's client, with the module's buffers handled around it: averaged, or kept by the client."""
    work = worker.work
    if not len(work.buffers):
        return worker.algorithm.client(work, message, memory, rows, seed)
    kept = memory.get(BUFFERS, task.buffers)
    assert isinstance(kept, Flat)
    work.load_buffers(kept if len(kept) else work.initial_buffers)
    memory = {name: x for name, x in memory.items() if name != BUFFERS}
    reply = worker.algorithm.client(work, message, memory, rows, seed)
    if task.keep_buffers:
        after = memory if reply.memory is None else reply.memory
        return replace(reply, memory={**after, BUFFERS: copy(work.buffers)})
    return replace(reply, sums={**reply.sums, BUFFERS: scale(copy(work.buffers), reply.weight)})


def _at_rest(reply: Reply) -> Reply:
    """The reply without its sums, on the CPU."""
    memory = None if reply.memory is None else to_device(reply.memory, CPU)
    metrics = {name: float(value) for name, value in reply.metrics.items()}
    return Reply({}, to_device(reply.each, CPU), reply.weight, memory, metrics)


def _form(reply: Reply) -> Form:
    return tuple(
        (name, x.layout if isinstance(x, Flat) else tuple(x.shape), data(x).dtype) for name, x in reply.sums.items()
    )


def _not_finite(reply: Reply) -> str | None:
    """Why this reply must not be averaged in, if so."""
    if not (isfinite(reply.weight) and reply.weight > 0):
        return f"its weight is {reply.weight}"
    for name, x in (*reply.sums.items(), *reply.each.items()):
        values = data(x)
        # one sum finds every nan and infinity; only an overflow of the sum itself needs the closer look
        if values.is_floating_point() and not isfinite(values.sum()) and not values.isfinite().all():
            return f"{name} has values that are not finite"
    return None
