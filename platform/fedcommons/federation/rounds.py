"""The round loop: who joins, what travels, the fixed blocks, the sum, the merge.

Everything a worker does here is a pure function of (message, memory, data, seed), so a block may run anywhere, twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor

from fedcommons.accounting.communication import Traffic
from fedcommons.algorithms.algorithm import Algorithm, Facts, Message, Reply, State
from fedcommons.errors import ClientError
from fedcommons.federation.executor import Executor
from fedcommons.federation.participation import participants
from fedcommons.federation.reduction import BlockSum, add_blocks, cut
from fedcommons.federation.worker import Worker
from fedcommons.seeds import seed_for
from fedcommons.tensors import Flat, Payload, data, nbytes


@dataclass(frozen=True)
class Plan:
    """A federation's public facts and schedule."""

    facts: Facts
    participation: float
    blocks: int
    seed: int


@dataclass(frozen=True)
class Standing:
    """Where a federation stands after ``round``: all that the next round depends on, and what a checkpoint holds."""

    round: int
    state: State
    memory: Mapping[int, Payload] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)  # totals since the start


@dataclass(frozen=True)
class RoundTask:
    """What all blocks of a round share."""

    algorithm: str
    round: int
    common: Payload
    seed: int

    @property
    def nbytes(self) -> int:
        return nbytes(self.common)


@dataclass(frozen=True)
class Block:
    """Some of a round's clients, with what is theirs alone."""

    clients: list[int]
    own: list[Payload]
    memory: list[Payload]


@dataclass(frozen=True)
class BlockResult:
    """The block's float64 sums, and the replies without their sums, None where one was rejected."""

    total: dict[str, Flat | Tensor]
    replies: list[Reply | None]
    rejections: list[str]
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


def _round(
    algorithm: Algorithm, executor: Executor, plan: Plan, now: Standing, number: int
) -> tuple[Standing, dict[str, float]]:
    joined = participants(plan.facts.n_clients, plan.participation, plan.seed, number)
    messages = {i: algorithm.down(now.state, number, i) for i in joined}
    name = type(algorithm).__name__
    blocks = [
        Block(ids, [messages[i].own for i in ids], [now.memory.get(i, {}) for i in ids])
        for ids in cut(joined, plan.blocks)
    ]
    results: list[BlockResult] = []
    if joined:
        task = RoundTask(name, number, messages[joined[0]].common, plan.seed)
        results = executor.map(train_block, task, blocks)
    accepted = {
        i: reply
        for block, result in zip(blocks, results, strict=True)
        for i, reply in zip(block.clients, result.replies, strict=True)
        if reply is not None
    }
    rejections = [text for result in results for text in result.rejections]
    if joined and not accepted:
        raise ClientError(f"round {number}, {name}: every reply was rejected; {rejections[0]}")
    total = add_blocks(result.total for result in results)
    state = algorithm.merge(
        executor, now.state, total, [accepted[i] for i in sorted(accepted)], seed_for(plan.seed, "merge", number)
    )
    memory = dict(now.memory) | {i: r.memory for i, r in accepted.items() if r.memory is not None}
    traffic = Traffic(down=sum(m.nbytes for m in messages.values()), up=sum(r.up_bytes for r in results))
    after = Standing(number, state, memory, now.traffic + traffic)
    facts = {"clients": len(joined), "rejected": len(rejections)} | _means(accepted) | traffic.metrics()
    return after, facts


def train_block(worker: Worker, task: RoundTask, block: Block) -> BlockResult:
    """Train the block's clients one after another and add their sums in that order."""
    total, replies, rejections, up_bytes = BlockSum(), [], [], 0
    common = to_device(task.common, worker.work.device)
    for client, own, memory in zip(block.clients, block.own, block.memory, strict=True):
        where = f"client {client}, round {task.round}, {task.algorithm}"
        rows = worker.data.clients[client]
        try:
            message = Message(common, to_device(own, worker.work.device))
            seed = seed_for(task.seed, "client", task.round, client)
            reply = worker.algorithm.client(worker.work, message, memory, rows, seed)
        except Exception as error:
            raise ClientError(
                f"{where}: {type(error).__name__}: {error} (training data {tuple(rows.x.shape)})"
            ) from error
        up_bytes += reply.nbytes
        if problem := _problem(reply, worker.work.params):
            replies.append(None)
            rejections.append(f"{where}: {problem}")
        else:
            total.add(reply.sums)
            replies.append(replace(reply, sums={}, metrics={k: float(v) for k, v in reply.metrics.items()}))
    return BlockResult(total.total, replies, rejections, up_bytes)


def to_device(payload: Payload, device: torch.device) -> Payload:
    """The payload on ``device``; itself where it is there."""
    return {
        name: Flat(x.layout, x.buffer.to(device)) if isinstance(x, Flat) else x.to(device)
        for name, x in payload.items()
    }


def _problem(reply: Reply, model: Flat) -> str | None:
    """Why this reply must not be averaged in, if so."""
    for name, x in (*reply.sums.items(), *reply.each.items()):
        if isinstance(x, Flat) and (x.layout != model.layout or x.buffer.dtype != model.buffer.dtype):
            return f"{name} does not have the model's names, shapes and type"
        values = data(x)
        # one sum finds every nan and infinity; only an overflow of the sum itself needs the closer look
        if values.is_floating_point() and not isfinite(values.sum()) and not values.isfinite().all():
            return f"{name} has values that are not finite"
    return None


def _means(accepted: Mapping[int, Reply]) -> dict[str, float]:
    """Means over clients of what they measured, in client order."""
    names = sorted({name for reply in accepted.values() for name in reply.metrics})
    values = {name: [float(r.metrics[name]) for _, r in sorted(accepted.items())] for name in names}
    return {f"train/{name}": sum(v) / len(v) for name, v in values.items()}
