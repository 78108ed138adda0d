"""The sensitivity test: does what leaves a client move with its data no further than its releases declare?

A client's round is played twice, on neighbouring data (``neighbours``), with the same noise; the second side gets
every message from the server of the first, and its noisy sums in the place of its own (``sides``). Then each noisy sum
may move by its sensitivity, and all else not at all, unless noise of its own is in it (``judging``). Most of it is a
comparison of bits, so it needs no luck. From round to round each side keeps its own memory and its own module.

Not found is what these neighbours do not set off: a threshold that they do not cross, a later round, another client.
Nor what goes other ways: metrics, which are the experimenter's record, files, the time that a client takes. The module
is one of ours, so what a module of one's own keeps is not seen.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedcommons.core.algorithm import Algorithm, Message, Reply, Shares
from fedcommons.core.block_sum import BlockSum, add_blocks
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import Worker
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.federation import rounds
from fedcommons.federation.client_block import RoundTask
from fedcommons.flat_tensors import Payload, data, like
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import SEED_ALONE, Noise
from fedcommons.seeding import keyed_globals, seed_for
from fedcommons.testing.comparing import differing, listed, raw, require
from fedcommons.testing.federations import Federation, digits
from fedcommons.testing.judging import Left, faults, told, too_few
from fedcommons.testing.neighbours import BLANKED, RELABELLED, REPLACED, Kind, apart
from fedcommons.testing.sensitivity_of_generators import shared_faults
from fedcommons.testing.sides import Side, playing
from fedcommons.testing.spreads import difference

SIZES = (6, 10, 4)
"""Examples of the clients; all of the last one's are in each of its batches, as these are of 5."""

ROUNDS = 3

PRIVATE = DPSGD(noise_multiplier=1.0, clip=1.0)

UNLIKELY = 1e-6
"""Probability with which the honest sampling of an example is called another one."""


def what_leaves_a_client_moves_as_declared(algorithm: Algorithm, local: LocalSGD, seed: int = 0) -> None:
    """On neighbouring data, with the same noise: by its sensitivity at most, and what has no noise not at all."""
    federation = digits(SIZES, linear=True, method=algorithm).training(replace(local, dp=local.dp or PRIVATE))
    blanked = Play(algorithm, federation, BLANKED, seed)
    found = blanked.faults()
    if not found:
        found = Play(algorithm, federation, REPLACED if blanked.is_bare else RELABELLED, seed).faults()
    require(not found, told(found))


@dataclass
class Players:
    """One side's clients: its worker, and their memory."""

    worker: Worker
    memory: dict[int, Payload] = field(default_factory=dict)

    def reply(self, task: RoundTask, own: Payload, client: int, side: Side) -> Reply:
        """A client's round, as the engine plays it."""
        work, rows = self.worker.work, self.worker.data.clients[client]
        seed = seed_for(task.seed, "client", task.round, client)
        work.begin(task.round, rows)
        work.noise = Noise(SEED_ALONE, task.round, client)
        message, memory = Message(task.common, own), self.memory.get(client, {})
        with keyed_globals(seed, "client"), playing(side):
            reply = self.worker.algorithm.client(work, message, memory, rows, task.round, seed)
        kept = None if reply.memory is None else _copied(reply.memory)
        return replace(reply, sums=_copied(reply.sums), each=_copied(reply.each), memory=kept)


class Play:
    """Some rounds of both sides. is_bare: whether something was declared as protected by nothing, after ``faults``."""

    def __init__(self, algorithm: Algorithm, federation: Federation, kind: Kind, seed: int) -> None:
        own = federation.data.clients
        scaled = Clients(Examples(own.store.x / 255, own.store.y), own.rows, commons=own.commons)
        both = apart(scaled, range(len(own)), kind, seed)
        self.sides = [replace(federation, data=replace(federation.data, clients=each, own=each)) for each in both]
        self.algorithm, self.kind, self.seed, self.is_bare = algorithm, kind, seed, False
        self.sampled: dict[int, list[tuple[int, int, float]]] = {}  # of each client: sums it is in, steps, q

    def faults(self) -> list[str]:
        """A sentence for each fault of the first round that has one."""
        algorithm, plans = self.algorithm, [side.plan(ROUNDS, seed=self.seed) for side in self.sides]
        now, there = (side.start(algorithm, plan) for side, plan in zip(self.sides, plans, strict=True))
        if unequal := differing(raw(now.state), raw(there.state)):
            return [f"the server's {listed(unequal)} before round 1 follows the clients' class counts"]
        players = [Players(side.build(deepcopy(algorithm))(side.data)) for side in self.sides]
        executor = self.sides[0].serial(algorithm)
        if isinstance(algorithm, Shares) and (found := shared_faults(algorithm, self.kind, self.seed)):
            return found
        for number in range(1, ROUNDS + 1):
            called, found, replies = rounds.call(algorithm, plans[0], now, number), [], {}
            for block in called.blocks:
                for client, own in zip(block.clients, block.own, strict=True):
                    replies[client], said = self._compared(players, called.task, own, client)
                    found += [f"round {number}, client {client}: {each}" for each in said]
            if found:
                return found
            total = add_blocks([_total(reply) for reply in replies.values()])
            sent = {i: replace(reply, sums={}, memory=None, metrics={}) for i, reply in replies.items()}
            state = algorithm.merge(executor, now.state, total, sent, number, seed_for(self.seed, "merge", number))
            now = rounds.Standing(number, state)
        return [said for client in self.sampled if (said := self._of_sampling(client))]

    def _compared(self, players: list[Players], task: RoundTask, own: Payload, client: int) -> tuple[Reply, list[str]]:
        """The first side's reply, and the faults of both."""
        first, before = Side(self.seed), dict(players[0].memory)
        second = Side(self.seed, follows=first, times=self.kind.times)
        reply = players[0].reply(task, own, client, first)
        try:
            other = players[1].reply(task, own, client, second)
        except Exception as error:
            return reply, [f"{self.kind.said} it raises {type(error).__name__}: {error}"]

        def spread() -> dict[str, Tensor]:
            if not first.loose:
                return {}
            alone = Players(self.sides[0].build(self.algorithm)(self.sides[0].data), before)
            raised = alone.reply(task, own, client, Side(self.seed, follows=first, times=1.0, raised=1.0))
            sent, there = {**reply.sums, **reply.each}, {**raised.sums, **raised.each}
            same = [name for name in sent if name in there and data(sent[name]).shape == data(there[name]).shape]
            return {name: difference(data(sent[name]), data(there[name])) for name in same}

        here, there = (Left({**r.sums, **r.each}, r.releases, r.weight) for r in (reply, other))
        found = faults(here, there, (first, second), self.kind, spread) or too_few(here, there, first, self.kind)
        self.is_bare |= any(not event.covered for event in reply.releases)
        pairs = zip(first.sums, second.sums, strict=False)
        steps = [(event.steps, event.q) for event in here.covered]
        moved = sum(one.release.covered and one.moved(two) > 0 for one, two in pairs)
        counted = moved, sum(n for n, _ in steps), max((q for _, q in steps), default=1.0)
        self.sampled.setdefault(client, []).append(counted)
        for side, answer in zip(players, (reply, other), strict=True):
            if answer.memory is not None:
                side.memory[client] = answer.memory
        return reply, found

    def _of_sampling(self, client: int) -> str:
        """Of an example that is in more sums than it would be at the declared rate."""
        from scipy.stats import binom  # half a second to import

        of_round = self.sampled[client]
        moved, steps, q = sum(m for m, _, _ in of_round), sum(n for _, n, _ in of_round), max(q for _, _, q in of_round)
        if moved == 0 or binom.sf(moved - 1, max(moved, steps), q) >= UNLIKELY:
            return ""
        return (
            f"an example of client {client} is in {moved} noisy sums of {steps} steps, and the rate declared is {q:g}"
        )


def _copied(payload: Payload) -> Payload:
    return {name: like(x, data(x).detach().clone()) for name, x in payload.items()}


def _total(reply: Reply):
    block = BlockSum()
    block.add(reply.sums)
    return block.total
