"""The round loop: participants, messages, training in fixed blocks, sum, merge."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import index

import torch
from torch import Tensor

from fedcommons.core.algorithm import (
    BUFFERS,
    Algorithm,
    ChoosesClients,
    Facts,
    Message,
    Reply,
    State,
    sees_statistics,
    takes_partial,
)
from fedcommons.core.averaging import summed_weight
from fedcommons.core.block_sum import add_blocks, cut
from fedcommons.core.communication import Traffic
from fedcommons.core.executor import Executor, WorkerDied
from fedcommons.core.rejections import Largest, Rejected, counted, largest, unusable
from fedcommons.core.returned import require_message, require_state
from fedcommons.core.worker import give_back_freed
from fedcommons.errors import ClientError, UserError, given, somebodys
from fedcommons.federation.client_block import CPU, NOT_FINITE, Block, BlockResult, Form, RoundTask, train_block
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.client_sampling import participants
from fedcommons.federation.server_executor import AtServer
from fedcommons.federation.stragglers import Rule
from fedcommons.flat_tensors import EMPTY, Flat, Layout, flat, nbytes, scale, to_device
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.release import Release
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class Plan:
    """A federation's public facts and schedule."""

    facts: Facts
    participation: float
    blocks: int
    seed: int
    late: Rule | None = None  # says who is late; None: nobody is
    keep_buffers: bool = False  # BatchNorm's statistics stay with the clients instead of being averaged
    max_norm: float | None = None  # updates with a larger norm are rejected
    take_partial: bool | None = None  # take what late clients have done; None: as the algorithm asks for
    leaks: Mapping[str, str] = field(default_factory=dict)  # what leaves all rounds uncovered, by name, and why


@dataclass(frozen=True)
class Standing:
    """The state of a federation after ``round``: all that the next round depends on, and what a checkpoint holds.

    buffers: the module's floating buffers, averaged over clients. They are empty if the module has none, before round
    1, and if clients keep theirs (in their memory, under the name ``BUFFERS``).
    rejected: the clients with rejected replies. largest: the largest reply of the last round that had replies; if the
    next round fails, it may have been too large. ledger: what clients have released, before round 1 and since.
    late: who was late in the round, for the record only; see ``drawn``.
    """

    round: int
    state: State
    memory: ClientMemory = field(default_factory=ClientMemory)
    traffic: Traffic = field(default_factory=Traffic)  # totals since the start
    buffers: Flat = field(default_factory=lambda: EMPTY)
    _: KW_ONLY
    rejected: Mapping[int, Rejected] = field(default_factory=dict)
    largest: Largest | None = None
    ledger: Ledger = field(default_factory=Ledger)
    late: Mapping[int, float] = field(default_factory=dict)

    @property
    def has_model(self) -> bool:
        """Whether there is a server model: a method whose clients have models of their own needs none."""
        return "model" in self.state

    @property
    def model(self) -> Flat:
        """The server model.

        Raises:
            UserError: there is none.
        """
        if not self.has_model:
            raise UserError("this method has no server model: its clients have models of their own (evaluate.clients).")
        return flat(self.state, "model")

    @property
    def layout(self) -> Layout | None:
        """Names and shapes of the server model's weights, if there is one."""
        return self.model.layout if self.has_model else None


def run(
    algorithm: Algorithm, executor: Executor, plan: Plan, start: Standing
) -> Iterator[tuple[Standing, dict[str, float]]]:
    """Play the rounds after ``start.round`` and yield, after each, the federation's state and the round's facts.

    The server is on the CPU, wherever the state before round 1 was computed.

    Raises:
        ClientError: a client failed (the error names client, round and algorithm), all replies of a round were
            rejected, or the merged state is ``unusable`` (the error names the client with the largest reply).
    """
    now = replace(start, state=to_device(start.state, CPU))
    for number in range(start.round + 1, plan.facts.rounds + 1):
        now, facts = _round(algorithm, executor, plan, now, number)
        if now.memory.in_files:  # RAM is short
            give_back_freed()
        yield now, facts


def drawn(algorithm: Algorithm, plan: Plan, state: State, number: int) -> tuple[list[int], dict[int, float]]:
    """The participants of round ``number``, and the late ones; ``state``: the server's before the round.

    A late client has the share of its work that its reply brings, 0 if it does not come.

    Raises:
        ClientError: the algorithm chose a client that does not exist, or the same one twice; or the rule names a late
            one that does not take part, or a share outside of [0, 1]; or one of them failed.
    """
    n, late, at = plan.facts.n_clients, {}, f"round {number}"
    if isinstance(algorithm, ChoosesClients):
        with somebodys(algorithm, "participants", at):
            joined = sorted(index(i) for i in algorithm.participants(state, number))
            if len(set(joined)) < len(joined) or (joined and not 0 <= joined[0] <= joined[-1] < n):
                raise ValueError(f"participants must be some of {n} clients, each once, got {joined}")
    else:
        joined = participants(n, plan.participation, plan.seed, number)
    if plan.late:
        with somebodys(plan.late, "__call__", at):
            late = given(Mapping, plan.late(list(joined), plan.facts, number, plan.seed), "a share of work by client")
            there = set(joined)
            if wrong := {i: share for i, share in late.items() if i not in there or not 0 <= share <= 1}:
                raise ValueError(
                    f"late clients must be some of {joined}, each with a share of work in [0, 1], got {wrong}"
                )
    taken = takes_partial(algorithm) if plan.take_partial is None else plan.take_partial
    return joined, {i: late[i] if taken else 0.0 for i in joined if i in late}


def answering(algorithm: Algorithm, plan: Plan, state: State, number: int) -> tuple[list[int], list[int]]:
    """The participants of round ``number``, and those whose reply arrives, whole or in part; see ``drawn``."""
    joined, late = drawn(algorithm, plan, state, number)
    return joined, [i for i in joined if late.get(i, 1.0)]


CLASS_COUNTS = Release(what=("class counts",), commons=True, why="read by the method or the straggler rule")
"""What every client sends once as soon as somebody reads ``Facts.counts``."""


def with_counts(now: Standing, facts: Facts) -> Standing:
    """The same state in which the clients have sent their class counts, if these were read and are not sent yet."""
    if not facts.counts_nbytes or not now.ledger.uncovered.keys().isdisjoint(CLASS_COUNTS.named):
        return now
    ledger = now.ledger.after([CLASS_COUNTS] * facts.n_clients)
    return replace(now, ledger=ledger, traffic=now.traffic + Traffic(once=facts.counts_nbytes))


@dataclass(frozen=True)
class Call:
    """A round before training: the participants, the late ones, their download, and the jobs of those who reply."""

    joined: list[int]
    late: dict[int, float]
    sent: Traffic
    task: RoundTask
    blocks: list[Block]


def call(algorithm: Algorithm, plan: Plan, now: Standing, number: int) -> Call:
    """Draw the clients of round ``number``, make their messages and cut the clients into blocks."""
    joined, late = drawn(algorithm, plan, now.state, number)
    messages: dict[int, Message] = {}
    common, asked = dict[str, Flat | Tensor](), somebodys(algorithm, "down")
    with asked:
        for i in joined:
            asked.at = (f"client {i}", f"round {number}")
            messages[i] = message = algorithm.down(now.state, number, i)
            require_message(message, common)
            common = messages[joined[0]].common
    name = type(algorithm).__name__
    task = RoundTask(
        algorithm=name,
        round=number,
        common=common,
        seed=plan.seed,
        buffers=now.buffers,
        keep_buffers=plan.keep_buffers,
        buffers_singly=sees_statistics(algorithm),
        max_norm=plan.max_norm,
    )
    shares = {i: late.get(i, 1.0) for i in joined}
    blocks = [
        Block(ids, [messages[i].own for i in ids], [now.memory.get(i, {}) for i in ids], [shares[i] for i in ids])
        for ids in cut([i for i in joined if shares[i]], plan.blocks)
    ]
    of_all = nbytes(common) + now.buffers.buffer.nbytes
    down = {i: of_all + nbytes(m.own) for i, m in messages.items()}
    sent = Traffic(down=sum(down.values()), lost=sum(down[i] for i in joined if not shares[i]))
    return Call(joined, late, sent, task, blocks)


def _round(
    algorithm: Algorithm, executor: Executor, plan: Plan, now: Standing, number: int
) -> tuple[Standing, dict[str, float]]:
    name = type(algorithm).__name__
    called = call(algorithm, plan, now, number)
    joined, blocks = called.joined, called.blocks
    results = _train(executor, called.task, blocks)
    total, accepted, rejected = _accept(results)
    if blocks and not accepted:
        raise _all_rejected(name, number, rejected, now.largest)
    norms = {client: norm for r in results for client, norm in r.norms.items() if client in accepted}
    top = largest(number, norms) or now.largest
    # memory is the client's and metrics are the experimenter's: the server sees neither
    replies = {i: replace(reply, memory=None, metrics={}) for i, reply in accepted.items()}
    state, buffers = now.state, now.buffers
    if BUFFERS in total:
        mean = scale(flat(total, BUFFERS), 1 / summed_weight(replies))
        kind = now.buffers.buffer.dtype if len(now.buffers) else torch.float32
        buffers = Flat(mean.layout, mean.buffer.to(kind))
        total = {n: x for n, x in total.items() if n != BUFFERS}
    if accepted or not joined:  # a round without a reply changes nothing
        with somebodys(algorithm, "merge", f"round {number}"):
            seed = seed_for(plan.seed, "merge", number)
            state = algorithm.merge(AtServer(executor), now.state, total, replies, number, seed)
            require_state(state, now.layout, has_model=now.has_model)
        if why := unusable(state) or unusable({"buffers": buffers}):
            text = f"round {number}, {name}: the merged {why}"
            if top is None:  # no reply has come yet
                raise ClientError(text)
            raise ClientError(f"{text}; of the replies {top} (see federation.max_norm)", top.client, top.round)
    memory = now.memory.updated(number, {i: r.memory for i, r in accepted.items() if r.memory is not None})
    traffic = called.sent + Traffic(up=sum(r.up_bytes for r in results))
    outlived = {name for r in results for name in r.outlived}
    exposed = {client for r in results for client in r.exposed}
    ledger = now.ledger.after([event for r in results for event in r.releases], outlived, plan.leaks, exposed)
    totals, refused = now.traffic + traffic, counted(now.rejected, rejected)
    after = Standing(
        number, state, memory, traffic=totals, buffers=buffers, rejected=refused, largest=top, ledger=ledger,
        late=called.late,
    )  # fmt: skip
    after = with_counts(after, plan.facts)
    facts = {"clients": len(joined), "rejected": len(rejected)} | _means(accepted) | traffic.metrics()
    if plan.late:
        facts |= {"stragglers": len(called.late), "comm/lost_bytes": traffic.lost}
    return after, facts


def _all_rejected(name: str, number: int, rejected: Mapping[int, str], before: Largest | None) -> ClientError:
    """The error for a round without an accepted reply; it names the client that most likely caused it.

    That is the client of the previous round whose reply was far too large, if there is one: the merged model may be
    finite and yet so large that nobody can train it. Else it is the first client that was rejected.
    """
    if before and before.stands_out and all(why.endswith(NOT_FINITE) for why in rejected.values()):
        text = f"round {number}, {name}: no reply was finite; of the replies {before} (see federation.max_norm)"
        return ClientError(text, before.client, before.round)
    client, why = next(iter(rejected.items()))
    return ClientError(f"round {number}, {name}: every reply was rejected; client {client}: {why}", client, number)


def _train(executor: Executor, task: RoundTask, blocks: Sequence[Block]) -> list[BlockResult]:
    if not blocks:
        return []
    try:
        return executor.map(train_block, task, blocks)
    except WorkerDied as error:
        raise _blame(executor, task, blocks[error.job], error) from error


def _blame(executor: Executor, task: RoundTask, block: Block, died: WorkerDied) -> ClientError:
    """Which client of the block it was: each is trained alone."""
    for client in block.clients:
        try:
            executor.map(train_block, task, [block.alone(client)])
        except WorkerDied as again:
            text = (
                f"client {client}, round {task.round}, {task.algorithm}: the process that trained it died "
                f"{again.times} times (out of memory?): {again.why}"
            )
            return ClientError(text, client, task.round)
    return ClientError(
        f"clients {block.clients}, round {task.round}, {task.algorithm}: the process that trained them died "
        f"{died.times} times, though each of them can be trained alone (out of memory?): {died.why}"
    )


def _accept(
    results: Sequence[BlockResult],
) -> tuple[dict[str, Flat | Tensor], dict[int, Reply], dict[int, str]]:
    """The sum over clients, their replies in client order, and the rejected clients with reasons.

    If replies have different forms, the form that most clients sent is accepted; in a tie, the first client's.
    """
    replies = {client: pair for result in results for client, pair in sorted(result.replies.items())}
    rejected = {client: why for result in results for client, why in result.rejected.items()}
    counts = Counter(form for form, _ in replies.values())
    right = max(counts, key=lambda form: counts[form], default=())
    for client, (form, _) in replies.items():
        if form != right:
            rejected[client] = f"it sent {_describe(form)}, most clients {_describe(right)}"
    accepted = {client: reply for client, (form, reply) in replies.items() if form == right}
    return add_blocks([r.sums[right] for r in results if right in r.sums]), accepted, rejected


def _describe(form: Form) -> str:
    return ", ".join(f"{name} ({dtype})" for name, _, dtype in form) or "nothing"


def _means(accepted: Mapping[int, Reply]) -> dict[str, float]:
    """Mean of each metric over the clients that have it, added in client order."""
    names = sorted({name for reply in accepted.values() for name in reply.metrics})
    replies = [reply for _, reply in sorted(accepted.items())]
    values = {name: [float(r.metrics[name]) for r in replies if name in r.metrics] for name in names}
    return {f"train/{name}": sum(v) / len(v) for name, v in values.items()}
