"""A block of a round's clients, which one worker trains one after another: input, training and result.

The configuration alone decides which clients form a block, so sums over clients have the same rounding errors for any
number of workers. The result is a pure function of (message, memory, data, seed), so a block may run on any worker and
may be repeated.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import hypot, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from fedcommons.core import state_leaks, vmap_clients
from fedcommons.core.algorithm import BUFFERS, Message, Reply
from fedcommons.core.block_sum import BlockSum, Total
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalResult
from fedcommons.core.returned import require_reply
from fedcommons.core.updates import NO_STEPS, Updates, without_errors
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError, is_exit, name_of
from fedcommons.federation.reply_releases import released, unnamed
from fedcommons.flat_tensors import Flat, Payload, copy, data, flat, like, nbytes, norm, scale, to_device
from fedcommons.privacy.noise import Noise
from fedcommons.privacy.release import Release
from fedcommons.runtime import gpu_memory
from fedcommons.seeding import keyed_besides_torch, seed_for, set_default_generator

NOT_FINITE = "has values that are not finite"
"""The last words of the message that rejects a reply with nan or infinity."""

CPU = torch.device("cpu")
"""The device of the server's tensors."""

GROUP_BYTES = 2**18  # the examples of more clients are not copied together; the number fits into a CPU's cache


@dataclass(frozen=True, kw_only=True)
class RoundTask:
    """The input that all blocks of a round share.

    algorithm: name of the method. common: the message to all clients. buffers: the averaged buffers of the module (such
    as BatchNorm's statistics). keep_buffers: whether buffers stay with the clients. buffers_singly: whether each client
    sends its buffers separately. max_norm: largest accepted L2 norm of an update; None: no limit. updates: steps of the
    engine on updates. singly: whether a block returns each client's sums instead of their sum.
    """

    algorithm: str
    round: int
    common: Payload
    seed: int
    buffers: Flat
    keep_buffers: bool
    buffers_singly: bool
    max_norm: float | None
    updates: Updates = NO_STEPS
    singly: bool = False

    @property
    def nbytes(self) -> int:
        return nbytes(self.common) + self.buffers.buffer.nbytes


class ClientTask(NamedTuple):
    """The input of one client in a round.

    individual: the client's individual message. memory: the client's stored memory. share: share of the local work
    that the client does, in (0, 1]; below 1 for a straggler.
    """

    client: int
    individual: Payload
    memory: Payload
    share: float


Form = tuple[tuple[str, Hashable, torch.dtype], ...]
"""Names, shapes and types of the tensors in a reply's ``sums``, which the server adds over clients."""


@dataclass
class BlockResult:
    """The replies of a block's clients: the float64 sums over clients, and each reply without the summed tensors.

    With ``RoundTask.singly``, ``sums`` is empty, and each reply has its ``sums``.

    Replies are added separately for each ``Form``, the names, shapes and types of a reply's tensors. Normally all
    replies have one form. If forms differ, the server accepts only the most frequent form of the round.
    """

    sums: dict[Form, Total] = field(default_factory=dict)
    replies: dict[int, tuple[Form, Reply]] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)  # client -> L2 norm of its whole reply
    rejected: dict[int, str] = field(default_factory=dict)  # client -> reason why its reply is rejected
    up_bytes: int = 0
    releases: list[Release] = field(default_factory=list)  # privacy ledger entries of all tensors that were sent
    outlived: set[str] = field(default_factory=set)  # with DP, objects that a client's training changed (state leaks)
    exposed: set[int] = field(default_factory=set)  # with DP, the clients with a training without a privacy guarantee


def train_block(worker: Worker, task: RoundTask, block: Sequence[ClientTask]) -> BlockResult:
    """Train the block's clients one after another, and add the tensors of their replies in the same order."""
    work, algorithm, result = worker.work, worker.algorithm, BlockResult()
    sums: dict[Form, BlockSum] = defaultdict(BlockSum)
    before: state_leaks.State = {}
    private = work.loop.dp is not None or task.updates.private  # an epsilon needs that clients leave no data behind
    knows_number = capabilities_of(algorithm).knows_number
    common = to_device(task.common, work.device)
    if private and block:  # before any client's code runs, also that of clients that train simultaneously
        first = worker.data.clients[block[0].client]
        work.begin(task.round, first)
        state_leaks.put_back(work)
        before = state_leaks.state(work, algorithm, {"commons": first.commons})
    is_batched = work.loop.batched and capabilities_of(algorithm).trains_locally
    ready = _at_once(worker, task, block, common) if is_batched else {}
    for client_task, rows, seed in _feed(worker, task, block):
        client = client_task.client
        work.begin(task.round, rows)
        work.share, work.number = client_task.share, client_task.client if knows_number else None
        work.releases.clear()
        set_default_generator(seed, "client")  # a module may draw random numbers outside of local training
        try:
            message, memory = _receive(work, task, client_task, common)
            work.replacement = vmap_clients.return_result(ready[client]) if client in ready else None
            objects_before = state_leaks.engine_attributes(work) if private else {}
            with keyed_besides_torch(seed, "client") if private else nullcontext():
                reply = _client(worker, task, message, memory, rows, seed)
            if private:
                result.outlived |= state_leaks.replaced(objects_before, state_leaks.engine_attributes(work))
            require_reply(reply)
            up_bytes = reply.nbytes
            for step in task.updates.on_client:
                reply, up_bytes = step(reply, up_bytes, client_task.memory, seed)
            size = checked_norm(reply, task.max_norm)  # waits for the GPU, so GPU errors of this client are raised here
        except BaseException as error:  # user code may raise any exception
            if is_exit(error):
                raise
            where = f"client {client}, round {task.round}, {task.algorithm}"
            doing = [f"training data {tuple(rows.x.shape)}", *getattr(error, "__notes__", [])]
            failed = ClientError.from_exception(error, where, f"{name_of(algorithm)}.client", doing)
            failed.client, failed.round = client, task.round
            raise failed from error
        finally:
            work.share, work.replacement, work.number = 1.0, None, None  # server jobs must not use a client's values
        if private:
            state_leaks.put_back(work)
            after = state_leaks.state(work, algorithm, {"commons": rows.commons})
            result.outlived |= state_leaks.differing(before, after)
            before = after
        result.up_bytes += up_bytes
        events, is_whole = released(reply, client, rows, has_drawn=work.noise.calls > 0)
        result.releases += events
        if private:
            result.releases += unnamed(work.releases, reply.releases, client)
            if not (is_whole and all(training.covered for training in work.releases)):
                result.exposed.add(client)
        if isinstance(size, str):
            result.rejected[client] = size
            continue
        if task.buffers_singly and BUFFERS in reply.each:  # the engine also averages buffers in ``each``
            weighted_buffers = scale(flat(reply.each, BUFFERS), reply.weight)
            reply = replace(reply, sums={**reply.sums, BUFFERS: weighted_buffers})
        result.norms[client], form = size, _form(reply)
        if not task.singly:
            sums[form].add(reply.sums)
        result.replies[client] = form, _at_rest(reply, work, task.singly)
    result.sums = {form: s.total for form, s in sums.items()}
    return result


def _feed(worker: Worker, task: RoundTask, block: Sequence[ClientTask]) -> Iterator[tuple[ClientTask, ClientData, int]]:
    """Yield each client with its data and seed. The data of small clients are copied in groups, which is faster."""
    group, size = list[tuple[ClientTask, ClientData, int]](), 0
    for client_task in block:
        rows = worker.data.clients[client_task.client]
        group.append((client_task, rows, seed_for(task.seed, "client", task.round, client_task.client)))
        size += rows.x.nbytes
        if size > GROUP_BYTES:
            yield from group
            group, size = [], 0
    yield from group


def _receive(work: Work, task: RoundTask, client_task: ClientTask, common: Payload) -> tuple[Message, Payload]:
    """Prepare the noise of a client's round; return the client's message and memory on the worker's device."""
    stored = without_errors(client_task.memory) if task.updates.on_client else client_task.memory
    message, memory = Message(common, to_device(client_task.individual, work.device)), to_device(stored, work.device)
    work.noise = Noise(work.source, task.round, client_task.client, received=(common, message.individual, memory))
    if (
        work.loop.dp is not None or task.updates.private
    ):  # copies, because a client that writes to its message must not change other messages
        message = Message(_cloned(message.common), _cloned(message.individual))
    return message, memory


def _at_once(worker: Worker, task: RoundTask, block: Sequence[ClientTask], common: Payload) -> dict[int, LocalResult]:
    """Train by ``torch.vmap`` all clients that can train simultaneously; return client -> result of local training."""
    work, requests, knows_number = worker.work, {}, capabilities_of(worker.algorithm).knows_number
    try:
        for client_task, rows, seed in _feed(worker, task, block):
            work.share, work.number = client_task.share, client_task.client if knows_number else None
            work.begin(task.round, rows)
            set_default_generator(seed, "client")
            message, memory = _receive(work, task, client_task, common)
            play = partial(worker.algorithm.client, work, message, memory, rows, task.round, seed)
            if request := vmap_clients.request_training(work, play):
                requests[client_task.client] = request
        trained: dict[int, LocalResult] = {}
        for part in vmap_clients.group_alike(requests):
            if len(part) > 1:
                results = vmap_clients.train(work, [requests[client] for client in part])
                trained |= zip(part, results, strict=True)
        gpu_memory.wait()  # without waiting, an error on the GPU would be attributed to the first client
        return trained
    except BaseException as error:  # user code may raise any exception
        if is_exit(error):
            raise
        where = f"clients {', '.join(str(t.client) for t in block)}, round {task.round}, {task.algorithm}"
        raise ClientError.from_exception(error, where, f"{name_of(worker.algorithm)}.client", ["batched"]) from error
    finally:
        work.share, work.replacement, work.number = 1.0, None, None


def _client(worker: Worker, task: RoundTask, message: Message, memory: Payload, rows: ClientData, seed: int) -> Reply:
    """Call the method's ``client``; load the module's buffers before the call, and add the new buffers to the reply."""
    work = worker.work
    if not len(work.buffers):
        if work.counters:
            work.load_buffers(work.buffers)
        return worker.algorithm.client(work, message, memory, rows, task.round, seed)
    loaded_buffers = memory.get(BUFFERS, task.buffers)
    assert isinstance(loaded_buffers, Flat)
    work.load_buffers(loaded_buffers if len(loaded_buffers) else work.initial_buffers)
    memory = {name: x for name, x in memory.items() if name != BUFFERS}
    reply = worker.algorithm.client(work, message, memory, rows, task.round, seed)
    if task.keep_buffers:
        after = memory if reply.memory is None else reply.memory
        return replace(reply, memory={**after, BUFFERS: copy(work.buffers)})
    buffers = copy(work.buffers)
    if task.buffers_singly:
        return replace(reply, each={**reply.each, BUFFERS: buffers})
    return replace(reply, sums={**reply.sums, BUFFERS: scale(buffers, reply.weight)})


def _cloned(payload: Payload) -> Payload:
    return {name: copy(x) if isinstance(x, Flat) else x.clone() for name, x in payload.items()}


def _bare(x: Flat | Tensor) -> Flat | Tensor:
    """Return the tensor detached and without user-defined attributes. A view of a larger tensor is copied."""
    values = data(x).detach()
    return like(x, values.clone() if values.untyped_storage().nbytes() > values.nbytes else values)


def _at_rest(reply: Reply, work: Work, singly: bool) -> Reply:
    """Return a copy of the reply on the CPU; the next client's training does not change the copy.

    singly: whether the copy has ``sums``.
    """
    each, memory = reply.each, reply.memory
    if each or memory:
        each, memory = work.copied(dict(each)), None if memory is None else work.copied(dict(memory))
    memory = None if memory is None else to_device(memory, CPU)
    metrics = {name: float(value) for name, value in reply.metrics.items()}
    each = {name: _bare(x) for name, x in to_device(each, CPU).items()}
    sums = {name: like(x, data(x).detach().to(CPU, copy=True)) for name, x in reply.sums.items()} if singly else {}
    return Reply(sums, each, weight=reply.weight, memory=memory, metrics=metrics)


def _form(reply: Reply) -> Form:
    return tuple(
        (name, x.layout if isinstance(x, Flat) else tuple(x.shape), data(x).dtype) for name, x in reply.sums.items()
    )


def checked_norm(reply: Reply, max_norm: float | None) -> float | str:
    """Return the L2 norm of the whole reply, with ``sums`` divided by the reply's weight, or the reason to reject it.

    max_norm: largest accepted norm of the update (``core/updates.py``); None: no limit.
    """
    weight = reply.weight
    if not (isfinite(weight) and weight > 0):
        return f"its weight is {weight}"
    update, rest = [], []
    for part, over in ((reply.sums, weight), (reply.each, 1.0)):
        for name, x in part.items():
            values = data(x)
            if not values.is_floating_point():
                continue
            if not isfinite(length := norm(values)):
                return f"{name} {NOT_FINITE}"
            of_update = part is reply.sums and name != BUFFERS and values.dim() > 0  # ``is_update``, without its call
            (update if of_update else rest).append(length / over)
    size = hypot(*update)
    if max_norm is not None and size > max_norm:
        return f"its update has norm {size:.4g}, above federation.max_norm {max_norm:g}"
    return hypot(size, *rest)
