"""The round loop: who joins, what travels, the fixed blocks, the sum, the merge.

Everything a worker does here is a pure function of (message, memory, data, seed), so a block may run anywhere, twice.
"""

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor

from fedcommons.accounting.communication import Traffic
from fedcommons.algorithms.algorithm import Algorithm, Facts, Message, Reply, State
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError
from fedcommons.federation.executor import Executor
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.participation import participants, stragglers
from fedcommons.federation.reduction import BlockSum, add_blocks, cut
from fedcommons.federation.worker import Worker
from fedcommons.seeds import seed_for
from fedcommons.tensors import EMPTY, Flat, Payload, copy, data, flat, nbytes, scale

log = logging.getLogger("fedcommons")

BUFFERS = "buffers"
"""Name of the module's buffers in a reply's sums, or in a client's memory; the algorithms never see it."""


@dataclass(frozen=True)
class Plan:
    """A federation's public facts and schedule."""

    facts: Facts
    participation: float
    blocks: int
    seed: int
    straggling: float = 0.0  # probability q that a drawn client's answer does not arrive
    keep_buffers: bool = False  # BatchNorm's statistics stay with the clients instead of being averaged


@dataclass(frozen=True)
class Standing:
    """Where a federation stands after ``round``: all that the next round depends on, and what a checkpoint holds.

    buffers: the module's floating buffers, averaged over clients; empty where it has none, before the first round and
    where clients keep theirs (in their memory, under the name ``BUFFERS``).
    """

    round: int
    state: State
    memory: ClientMemory = field(default_factory=ClientMemory)
    traffic: Traffic = field(default_factory=Traffic)  # totals since the start
    buffers: Flat = field(default_factory=lambda: EMPTY)

    @property
    def model(self) -> Flat:
        """The server model."""
        return flat(self.state, "model")


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

    sums: dict[Form, dict[str, Flat | Tensor]]
    replies: dict[int, tuple[Form, Reply]]
    rejected: dict[int, str]  # client: why
    up_bytes: int


def run(
    algorithm: Algorithm, executor: Executor, plan: Plan, start: Standing
) -> Iterator[tuple[Standing, dict[str, float]]]:
    """Play the rounds after ``start.round``, yielding where the federation stands after each and the round's facts.

    Raises:
        ClientError: a client failed (it names client, round and algorithm) or every reply of a round was rejected.
    """
    now = start
    for number in range(start.round + 1, plan.facts.rounds + 1):
        now, facts = _round(algorithm, executor, plan, now, number)
        yield now, facts


def answering(plan: Plan, number: int) -> tuple[list[int], list[int]]:
    """Who is drawn in the round of this number, and who of them answers."""
    joined = participants(plan.facts.n_clients, plan.participation, plan.seed, number)
    late = stragglers(joined, plan.straggling, plan.seed, number)
    return joined, [i for i in joined if i not in late]


def times_answered(plan: Plan, upto: int) -> list[int]:
    """In how many of the first ``upto`` rounds each client answers."""
    times = [0] * plan.facts.n_clients
    for number in range(1, upto + 1):
        for client in answering(plan, number)[1]:
            times[client] += 1
    return times


@dataclass(frozen=True)
class Call:
    """A round before anybody trains: who is drawn, what they download, and the jobs of those who answer."""

    joined: list[int]
    down_bytes: int
    task: RoundTask
    blocks: list[Block]


def call(algorithm: Algorithm, plan: Plan, now: Standing, number: int) -> Call:
    """Draw the clients of the round of this number, cut them into blocks and make their messages."""
    joined, present = answering(plan, number)
    messages = {i: algorithm.down(now.state, number, i) for i in joined}
    common = messages[joined[0]].common if joined else {}
    task = RoundTask(type(algorithm).__name__, number, common, plan.seed, now.buffers, plan.keep_buffers)
    blocks = [
        Block(ids, [messages[i].own for i in ids], [now.memory.get(i, {}) for i in ids])
        for ids in cut(present, plan.blocks)
    ]
    down_bytes = sum(m.nbytes for m in messages.values()) + len(messages) * now.buffers.buffer.nbytes
    return Call(joined, down_bytes, task, blocks)


def _round(
    algorithm: Algorithm, executor: Executor, plan: Plan, now: Standing, number: int
) -> tuple[Standing, dict[str, float]]:
    name = type(algorithm).__name__
    called = call(algorithm, plan, now, number)
    joined, blocks = called.joined, called.blocks
    results = executor.map(train_block, called.task, blocks) if blocks else []
    total, accepted, rejected = _accept(results)
    for client, why in rejected.items():
        log.warning("round %d, %s: the reply of client %d was rejected: %s", number, name, client, why)
    if blocks and not accepted:
        client, why = next(iter(rejected.items()))
        raise ClientError(f"round {number}, {name}: every reply was rejected; client {client}: {why}")
    # memory is the client's: the server does not see it
    replies = [replace(reply, memory=None) for reply in accepted.values()]
    state, buffers = now.state, now.buffers
    if BUFFERS in total:
        weights = sum(r.weight for r in replies)
        mean = scale(flat(total, BUFFERS), 1 / weights)
        kind = now.buffers.buffer.dtype if len(now.buffers) else torch.float32
        buffers = Flat(mean.layout, mean.buffer.to(kind))
        total = {n: x for n, x in total.items() if n != BUFFERS}
    if accepted or not joined:  # a round that nobody answers is skipped
        state = algorithm.merge(executor, now.state, total, replies, seed_for(plan.seed, "merge", number))
    memory = now.memory.updated(number, {i: r.memory for i, r in accepted.items() if r.memory is not None})
    traffic = Traffic(down=called.down_bytes, up=sum(r.up_bytes for r in results))
    after = Standing(number, state, memory, now.traffic + traffic, buffers)
    facts = {"clients": len(joined), "rejected": len(rejected)} | _means(accepted) | traffic.metrics()
    if plan.straggling:
        facts["stragglers"] = len(joined) - sum(len(block.clients) for block in blocks)
    return after, facts


def _accept(
    results: Sequence[BlockResult],
) -> tuple[dict[str, Flat | Tensor], dict[int, Reply], dict[int, str]]:
    """The sum over clients, their replies in client order, and who was rejected why.

    Of several forms of reply the one that most clients sent is right, the first client's where as many sent another.
    """
    replies = {client: pair for result in results for client, pair in sorted(result.replies.items())}
    rejected = {client: why for result in results for client, why in result.rejected.items()}
    counts = Counter(form for form, _ in replies.values())
    right = max(counts, key=lambda form: counts[form], default=())
    for client, (form, _) in replies.items():
        if form != right:
            rejected[client] = f"it sent {_describe(form)}, most clients {_describe(right)}"
    accepted = {client: reply for client, (form, reply) in replies.items() if form == right}
    return add_blocks(r.sums[right] for r in results if right in r.sums), accepted, rejected


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
            raise ClientError(
                f"client {client}, round {task.round}, {task.algorithm}: {type(error).__name__}: {error} "
                f"(training data {tuple(rows.x.shape)})"
            ) from error
        up_bytes += reply.nbytes
        if why := _not_finite(reply):
            rejected[client] = why
            continue
        form = _form(reply)
        sums.setdefault(form, BlockSum()).add(reply.sums)
        replies[client] = form, _at_rest(reply)
    cpu = torch.device("cpu")  # the server's numbers rest there
    return BlockResult({f: dict(to_device(s.total, cpu)) for f, s in sums.items()}, replies, rejected, up_bytes)


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
    cpu = torch.device("cpu")
    return replace(
        reply,
        sums={},
        each=to_device(reply.each, cpu),
        memory=None if reply.memory is None else to_device(reply.memory, cpu),
        metrics={name: float(value) for name, value in reply.metrics.items()},
    )


def to_device(payload: Payload, device: torch.device) -> Payload:
    """The payload on ``device``; itself where it is there."""
    return {
        name: Flat(x.layout, x.buffer.to(device)) if isinstance(x, Flat) else x.to(device)
        for name, x in payload.items()
    }


def _form(reply: Reply) -> Form:
    return tuple(
        (name, x.layout if isinstance(x, Flat) else tuple(x.shape), data(x).dtype) for name, x in reply.sums.items()
    )


def _describe(form: Form) -> str:
    return ", ".join(f"{name} ({dtype})" for name, _, dtype in form) or "nothing"


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


def _means(accepted: Mapping[int, Reply]) -> dict[str, float]:
    """Means over the clients that measured it, in client order."""
    names = sorted({name for reply in accepted.values() for name in reply.metrics})
    replies = [reply for _, reply in sorted(accepted.items())]
    values = {name: [float(r.metrics[name]) for r in replies if name in r.metrics] for name in names}
    return {f"train/{name}": sum(v) / len(v) for name, v in values.items()}
