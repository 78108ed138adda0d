"""The round loop of a federation: sample clients, send messages, train blocks of clients, add replies, merge.

Blocks and results do not depend on the number of workers.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import index

import torch
from torch import Tensor

from fedcommons.core.aggregation import Aggregation
from fedcommons.core.algorithm import BUFFERS, Algorithm, ChoosesClients, Facts, Message, Reply, State
from fedcommons.core.attacks import Attack
from fedcommons.core.averaging import summed_weight
from fedcommons.core.block_sum import add_blocks, cut
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.communication import Traffic
from fedcommons.core.executor import Executor, WorkerDied
from fedcommons.core.rejections import Largest, Rejected, count_rejections, largest, unusable
from fedcommons.core.returned import require_message, require_state, split_merged
from fedcommons.core.updates import NO_STEPS, Updates
from fedcommons.core.worker import give_back_freed
from fedcommons.errors import ClientError, DivergenceError, UserError, require_type, user_code_context
from fedcommons.federation.central_dp import CentralDP, Clip
from fedcommons.federation.client_block import CPU, BlockResult, ClientTask, Form, RoundTask, train_block
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.client_sampling import joining, participants, poisson_participants
from fedcommons.federation.round_metrics import all_rejected, mean_metrics
from fedcommons.federation.server_executor import AtServer
from fedcommons.federation.single_replies import add_up, aggregate
from fedcommons.federation.stragglers import Rule
from fedcommons.flat_tensors import EMPTY, Flat, Layout, data, flat, like, nbytes, scale, to_device
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.noise import SEED_ALONE, Noise, Source
from fedcommons.privacy.release import Release
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class Plan:
    """The constants of a federation: public facts, participation, number of blocks, seed and rules for replies."""

    facts: Facts
    participation: float  # C, the share of clients that take part in a round
    blocks: int  # largest number of blocks into which a round's clients are cut
    seed: int
    straggler_rule: Rule | None = None  # None: no client is a straggler
    keep_buffers: bool = False  # BatchNorm's statistics stay with the clients instead of being averaged
    max_norm: float | None = None  # updates with a larger L2 norm are rejected
    take_partial: bool | None = None  # whether stragglers' partial work is accepted; None: as the algorithm declares
    leaks: Mapping[str, str] = field(default_factory=dict)  # name -> reason why no round has a privacy guarantee
    updates: Updates = NO_STEPS  # the engine's steps on updates, such as compression
    poisson: bool = False  # each client takes part independently, instead of a fixed number of clients
    central: CentralDP | None = None  # clipping of clients' updates and noise on their sum
    source: Source = SEED_ALONE  # the source of the server's noise and of Poisson sampling
    aggregation: Aggregation | None = None  # the rule that replaces the mean of the updates; None: the mean
    attack: Attack | None = None  # the attack of Byzantine clients; None: all clients are honest

    @property
    def expected(self) -> float:
        """Return m, the expected number of participants per round."""
        n, share = self.facts.n_clients, self.participation
        return n * share if self.poisson else joining(n, share)


@dataclass(frozen=True)
class Standing:
    """The state of a federation after a round: all values that the next round depends on and that a checkpoint stores.

    state: the method's server state. memory: the tensors that each client stores from round to round.
    buffers: the module's floating point buffers, averaged over clients. They are empty if the module has no buffers,
    before round 1, and if clients store the buffers in their memory (under the name ``BUFFERS``).
    rejected: the clients with rejected replies. largest: the reply with the largest norm in the last round that had
    replies; if the next round fails, this reply may be the cause. ledger: the privacy ledger of all rounds so far.
    clip: clipping norm of the next round's updates with ``Plan.central``; None: that of round 1.

    The last three fields are for the record only, so no checkpoint stores them. stragglers: straggler of the round ->
    share of its work (``sample_clients``). participants: clients to which the server sent a message in the round; None:
    all clients. rejected_now: participants whose replies the server rejected in the round.
    """

    round: int
    state: State
    memory: ClientMemory = field(default_factory=ClientMemory)
    traffic: Traffic = field(default_factory=Traffic)  # bytes since the start of the run
    buffers: Flat = field(default_factory=lambda: EMPTY)
    _: KW_ONLY
    rejected: Mapping[int, Rejected] = field(default_factory=dict)
    largest: Largest | None = None
    ledger: Ledger = field(default_factory=Ledger)
    clip: float | None = None
    stragglers: Mapping[int, float] = field(default_factory=dict)
    participants: Sequence[int] | None = None
    rejected_now: Sequence[int] = ()

    @property
    def has_model(self) -> bool:
        """Return whether the method has a server model; a method with personalised models may have none."""
        return "model" in self.state

    @property
    def model(self) -> Flat:
        """Return the server model.

        Raises:
            UserError: the method has no server model.
        """
        if not self.has_model:
            raise UserError("this method has no server model, only personalised models of clients (evaluate.clients).")
        return flat(self.state, "model")

    @property
    def layout(self) -> Layout | None:
        """Return the names and shapes of the weights of a model in the state; None if the state has no model."""
        return next((flat(self.state, n).layout for n in self.state if n.partition("/")[0] == "model"), None)


def run(
    algorithm: Algorithm, executor: Executor, plan: Plan, start: Standing
) -> Iterator[tuple[Standing, dict[str, float]]]:
    """Run the rounds after ``start.round``; after each round, yield the federation's state and the round's metrics.

    The server's tensors are on the CPU, even if ``start.state`` was computed on a GPU.

    Raises:
        ClientError: a client failed (the error names client, round and algorithm), all replies of a round were
            rejected, or the merged state has nan or infinity (the error names the client with the largest reply).
    """
    now = replace(start, state=to_device(start.state, CPU))
    for number in range(start.round + 1, plan.facts.rounds + 1):
        now, facts = _round(algorithm, executor, plan, now, number)
        if now.memory.in_files:  # memories are in files only if RAM is short
            give_back_freed()
        yield now, facts


def sample_clients(algorithm: Algorithm, plan: Plan, state: State, number: int) -> tuple[list[int], dict[int, float]]:
    """Return the participants of round ``number``, and the stragglers among the participants.

    Args:
        state: the server's state before the round.

    Returns:
        The participants in ascending order, and straggler -> share of its work in the reply (0: no reply arrives).

    Raises:
        ClientError: the algorithm chose an unknown client, or a client twice; the straggler rule returned a client that
            does not take part, or a share outside of [0, 1]; or the algorithm or the rule raised an error.
    """
    n, late, at = plan.facts.n_clients, {}, f"round {number}"
    if isinstance(algorithm, ChoosesClients):
        with user_code_context(algorithm, "participants", at):
            joined = sorted(index(i) for i in algorithm.participants(state, number))
            if len(set(joined)) < len(joined) or (joined and not 0 <= joined[0] <= joined[-1] < n):
                raise ValueError(f"participants must be some of {n} clients, each once, got {joined}")
    elif plan.poisson:
        joined = poisson_participants(n, plan.participation, plan.seed, number, plan.source)
    else:
        joined = participants(n, plan.participation, plan.seed, number)
    if plan.straggler_rule:
        with user_code_context(plan.straggler_rule, "__call__", at):
            late = require_type(
                Mapping, plan.straggler_rule(list(joined), plan.facts, number, plan.seed), "a share of work by client"
            )
            participant_set = set(joined)
            if wrong := {i: share for i, share in late.items() if i not in participant_set or not 0 <= share <= 1}:
                raise ValueError(
                    f"stragglers must be some of {joined}, each with a share of work in [0, 1], got {wrong}"
                )
    accepts_partial = capabilities_of(algorithm).takes_partial if plan.take_partial is None else plan.take_partial
    return joined, {i: late[i] if accepts_partial else 0.0 for i in joined if i in late}


def answering(algorithm: Algorithm, plan: Plan, state: State, number: int) -> tuple[list[int], list[int]]:
    """Return the participants of round ``number``, and those participants whose whole or partial reply arrives.

    Arguments and errors are those of ``sample_clients``.
    """
    joined, late = sample_clients(algorithm, plan, state, number)
    return joined, [i for i in joined if late.get(i, 1.0)]


CLASS_COUNTS = Release(what=("class counts",), commons=True, reason="read by the method or the straggler rule")
"""The privacy ledger's entry for a client's class counts. Every client sends them once, if ``Facts.counts`` is read."""


def with_counts(now: Standing, facts: Facts) -> Standing:
    """If ``facts.counts`` has been read, return ``now`` with the class counts added to privacy ledger and traffic.

    If the ledger already contains the class counts, return ``now`` unchanged.
    """
    if not facts.counts_nbytes or not now.ledger.uncovered.keys().isdisjoint(CLASS_COUNTS.named):
        return now
    ledger = now.ledger.after([CLASS_COUNTS] * facts.n_clients)
    return replace(now, ledger=ledger, traffic=now.traffic + Traffic(once=facts.counts_nbytes))


@dataclass(frozen=True)
class Call:
    """A round before training: its clients and the jobs for the workers.

    joined: the participants. stragglers: straggler -> share of its work. sent: traffic of the messages to clients.
    task: the input that all blocks share. blocks: the clients whose replies arrive, with their messages.
    """

    joined: list[int]
    stragglers: dict[int, float]
    sent: Traffic
    task: RoundTask
    blocks: list[list[ClientTask]]


def call(algorithm: Algorithm, plan: Plan, now: Standing, number: int) -> Call:
    """Prepare round ``number``: sample the clients, get their messages from the method, cut the clients into blocks."""
    joined, late = sample_clients(algorithm, plan, now.state, number)
    messages: dict[int, Message] = {}
    common, user_code = dict[str, Flat | Tensor](), user_code_context(algorithm, "down")
    with user_code:
        for i in joined:
            user_code.at = (f"client {i}", f"round {number}")
            messages[i] = message = algorithm.down(now.state, number, i)
            require_message(message, common)
            common = messages[joined[0]].common
    name, updates = type(algorithm).__name__, plan.updates
    if plan.central:
        clip = Clip(now.clip or plan.central.clip, plan.central.quantile is not None)
        updates = replace(updates, on_client=(*updates.on_client, clip), private=True)
    task = RoundTask(
        algorithm=name, round=number, common=common, seed=plan.seed, buffers=now.buffers, max_norm=plan.max_norm,
        keep_buffers=plan.keep_buffers, buffers_singly=capabilities_of(algorithm).sees_statistics,
        updates=updates, singly=bool(plan.aggregation or (plan.attack and plan.attack.is_on_updates)),
    )  # fmt: skip
    shares = {i: late.get(i, 1.0) for i in joined}
    tasks = [ClientTask(i, messages[i].individual, now.memory.get(i, {}), shares[i]) for i in joined if shares[i]]
    of_all = nbytes(common) + now.buffers.buffer.nbytes
    down = {i: of_all + nbytes(m.individual) for i, m in messages.items()}
    sent = Traffic(down=sum(down.values()), lost=sum(down[i] for i in joined if not shares[i]))
    return Call(joined, late, sent, task, cut(tasks, plan.blocks))


def _round(
    algorithm: Algorithm, executor: Executor, plan: Plan, now: Standing, number: int
) -> tuple[Standing, dict[str, float]]:
    name = type(algorithm).__name__
    called = call(algorithm, plan, now, number)
    joined, blocks = called.joined, called.blocks
    results = _train(executor, called.task, blocks) if blocks else []
    if called.task.singly:
        add_up(results, plan.attack, number, plan.seed, plan.max_norm)
    total, accepted, rejected = _accept(results)
    if blocks and not accepted:
        raise all_rejected(name, number, rejected, now.largest)
    if is_skipped := plan.aggregation is not None and len(accepted) < plan.aggregation.least:
        total, accepted = {}, {}  # too few replies for the aggregation rule: like a round without replies
    elif plan.aggregation:
        total = aggregate(plan.aggregation, total, accepted)
    norms = {client: norm for r in results for client, norm in r.norms.items() if client in accepted}
    top = largest(number, norms) or now.largest
    # ``merge`` gets replies without memory, which stays with the clients, and without the experimenter's metrics.
    replies = {i: Reply({}, r.each, weight=r.weight, releases=r.releases) for i, r in accepted.items()}
    state, buffers, reported, clip = now.state, now.buffers, dict[str, float](), now.clip
    if BUFFERS in total:
        mean = scale(flat(total, BUFFERS), 1 / summed_weight(replies))
        buffers = Flat(mean.layout, mean.buffer.to(now.buffers.buffer.dtype if len(now.buffers) else torch.float32))
        total = {n: x for n, x in total.items() if n != BUFFERS}
    probed = _probe(algorithm, executor, plan, now, number) if plan.central and not accepted else []
    if plan.central:  # also without replies, as the accountant counts noise in each round
        total = total or {name: like(x, torch.zeros_like(data(x))) for name, x in _accept(probed)[0].items()}
        used, noise = clip or plan.central.clip, Noise(plan.source, plan.seed, number)
        total, replies, clip = plan.central.noised(total, used, plan.expected, noise)
        reported |= {} if plan.central.quantile is None else {"privacy/clip": used}
    # If clients take part but no reply arrives, the round skips ``merge``, so the state does not change.
    if replies or (not joined and not plan.poisson):
        with user_code_context(algorithm, "merge", f"round {number}"):
            seed = seed_for(plan.seed, "merge", number)
            merged = algorithm.merge(AtServer(executor), now.state, total, replies, number, seed)
            state, numbers = split_merged(merged)
            reported |= numbers
            require_state(state, now.layout, has_model=now.has_model)
        if flaw := unusable(state) or unusable({"buffers": buffers}):
            text = f"round {number}, {name}: the merged {flaw}"
            if top is None:  # no reply has arrived in any round
                raise DivergenceError(text)
            raise DivergenceError(f"{text}; among the replies, {top} (see federation.max_norm)", top.client, top.round)
    memory = now.memory.updated(number, {i: r.memory for i, r in accepted.items() if r.memory is not None})
    traffic = called.sent + Traffic(up=sum(r.up_bytes for r in results))
    outlived = {name for r in (*results, *probed) for name in r.outlived}
    exposed = {client for r in results for client in r.exposed}
    ledger = now.ledger.after([event for r in results for event in r.releases], outlived, plan.leaks, exposed)
    totals, refused = now.traffic + traffic, count_rejections(now.rejected, rejected)
    after = Standing(
        number, state, memory, traffic=totals, buffers=buffers, rejected=refused, largest=top, ledger=ledger, clip=clip,
        stragglers=called.stragglers, participants=None if len(joined) == plan.facts.n_clients else joined,
        rejected_now=sorted(rejected),
    )  # fmt: skip
    after = with_counts(after, plan.facts)
    facts = {"clients": len(joined), "rejected": len(rejected)} | mean_metrics(accepted) | reported | traffic.metrics()
    if plan.aggregation:
        facts["skipped"] = int(is_skipped)
    if plan.straggler_rule:
        facts |= {"stragglers": len(called.stragglers), "comm/lost_bytes": traffic.lost}
    return after, facts


def _probe(algorithm: Algorithm, executor: Executor, plan: Plan, now: Standing, number: int) -> list[BlockResult]:
    """Train one client, in a round without replies, for the shapes of the zeros to which the server adds noise."""
    called = call(algorithm, replace(plan, participation=1.0, poisson=False, straggler_rule=None), now, number)
    return _train(executor, called.task, [called.blocks[0][:1]])


def _train(executor: Executor, task: RoundTask, blocks: Sequence[Sequence[ClientTask]]) -> list[BlockResult]:
    """Train the blocks. If a block ends its process, train its clients one by one, so that an error names the cause."""
    try:
        return executor.map(train_block, task, blocks)
    except WorkerDied as died:
        block, where = blocks[died.job], f"round {task.round}, {task.algorithm}: the process that trained"
        for member in block:
            try:
                executor.map(train_block, task, [[member]])
            except WorkerDied as again:
                text = f"client {member.client}, {where} it died {again.times} times (out of memory?): {again.reason}"
                raise ClientError(text, member.client, task.round) from died
        raise ClientError(
            f"clients {[m.client for m in block]}, {where} them died {died.times} times, though each client can "
            f"be trained alone (out of memory?): {died.reason}"
        ) from died


def _accept(results: Sequence[BlockResult]) -> tuple[dict[str, Flat | Tensor], dict[int, Reply], dict[int, str]]:
    """Return the tensors summed over clients, the accepted replies by client, and rejected client -> reason.

    A form is the names, shapes and types of a reply's summed tensors. If forms differ, the most frequent form is
    accepted; in a tie, the form of the client with the lowest number.
    """
    replies = {client: pair for result in results for client, pair in sorted(result.replies.items())}
    rejected = {client: reason for result in results for client, reason in result.rejected.items()}
    counts = Counter(form for form, _ in replies.values())
    right = max(counts, key=lambda form: counts[form], default=())
    for client, (form, _) in replies.items():
        if form != right:
            rejected[client] = f"it sent {_describe(form)}, most clients {_describe(right)}"
    accepted = {client: reply for client, (form, reply) in replies.items() if form == right}
    return add_blocks([r.sums[right] for r in results if right in r.sums]), accepted, rejected


def _describe(form: Form) -> str:
    return ", ".join(f"{name} ({dtype})" for name, _, dtype in form) or "nothing"
