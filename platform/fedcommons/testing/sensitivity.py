"""The sensitivity test: check that a client's sent values depend on its data no more than the declared privacy allows.

The declared privacy is the list of the reply's releases (entries of the privacy ledger). The test runs a client's round
once on each of two neighbouring data sets (``neighbours``), with the same random numbers as noise. Both runs are called
sides. The second side gets the server messages of the first side. A noisy sum may differ by its sensitivity between the
sides. The test then uses the first side's sum in both sides, so this difference changes no later value (``sides``).
All other sent values must be equal, unless the client adds noise to a value outside of noisy sums (``judging``). Most
checks compare bits, so the result does not depend on chance. Each side has a separate module and memory for all rounds.

The test misses faults that occur only with other data or in later rounds, such as a threshold that these data do not
cross. The test does not check other channels: metrics (the experimenter's record), files, and training time. The test
uses a built-in module, so the test misses data that a user-defined module stores.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace

from fedcommons.core.algorithm import Algorithm, Message, Reply, Shares
from fedcommons.core.block_sum import BlockSum, add_blocks
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.returned import split_merged
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
from fedcommons.testing.judging import Output, faults_of_streams, first_and_count
from fedcommons.testing.neighbours import BLANKED, RELABELLED, REPLACED, Kind, apart
from fedcommons.testing.sensitivity_of_sharing import shared_faults
from fedcommons.testing.sides import Side, playing

SIZES = (6, 10, 4)
"""Number of examples of each client. A batch has 5 examples, so the last client's batches have all its examples."""

ROUNDS = 3

PRIVATE = DPSGD(noise_multiplier=1.0, clip=1.0)

UNLIKELY = 1e-6
"""Probability that the test rejects a method that samples examples at the declared rate."""


def what_leaves_a_client_moves_as_declared(algorithm: Algorithm, local: LocalSGD, seed: int = 0) -> None:
    """Check that a client sends equal values on two neighbouring data sets, with equal noise, except in noisy sums.

    A noisy sum may differ by at most its sensitivity if an example is blanked out. If an example is replaced, the sum
    may differ by twice its sensitivity.
    """
    federation = digits(SIZES, linear=True, method=algorithm).training(replace(local, dp=local.dp or PRIVATE))
    blanked = Play(algorithm, federation, BLANKED, seed)
    sentences = blanked.faults()
    if not sentences:
        sentences = Play(algorithm, federation, REPLACED if blanked.is_bare else RELABELLED, seed).faults()
    require(not sentences, first_and_count(sentences))


@dataclass
class Players:
    """The clients of one run (side) of the test: their worker, and their memory by client."""

    worker: Worker
    memory: dict[int, Payload] = field(default_factory=dict)

    def reply(self, task: RoundTask, individual: Payload, client: int, side: Side) -> Reply:
        """Run a client's round with the noise of ``side``, one of the two runs, and return a copy of the reply."""
        work, rows = self.worker.work, self.worker.data.clients[client]
        seed = seed_for(task.seed, "client", task.round, client)
        work.begin(task.round, rows)
        work.noise = Noise(SEED_ALONE, task.round, client)
        work.number = client if capabilities_of(self.worker.algorithm).knows_number else None
        message, memory = Message(task.common, individual), self.memory.get(client, {})
        with keyed_globals(seed, "client"), playing(side):
            reply = self.worker.algorithm.client(work, message, memory, rows, task.round, seed)
        new_memory = None if reply.memory is None else _copied(reply.memory)
        return replace(reply, sums=_copied(reply.sums), each=_copied(reply.each), memory=new_memory)


class Play:
    """The rounds of a method, run on two neighbouring data sets.

    is_bare: whether a client declared a value as unprotected (set by ``faults``). sampled: for each client, one triple
    per round: the number of noisy sums that differ between the data sets, the declared number of steps, and q, the
    declared sampling rate.
    """

    def __init__(self, algorithm: Algorithm, federation: Federation, kind: Kind, seed: int) -> None:
        clients = federation.data.clients
        scaled = Clients(Examples(clients.store.x / 255, clients.store.y), clients.rows, commons=clients.commons)
        both = apart(scaled, range(len(clients)), kind, seed)
        self.sides = [replace(federation, data=replace(federation.data, clients=each, real=each)) for each in both]
        self.algorithm, self.kind, self.seed, self.is_bare = algorithm, kind, seed, False
        self.sampled: dict[int, list[tuple[int, int, float]]] = {}

    def faults(self) -> list[str]:
        """Run the rounds, stop at the first round with faults, and return a sentence for each fault.

        A fault is a value that differs more between the two data sets than declared, or a wrong sampling rate.
        """
        algorithm, plans = self.algorithm, [side.plan(ROUNDS, seed=self.seed) for side in self.sides]
        now, other_start = (side.start(algorithm, plan) for side, plan in zip(self.sides, plans, strict=True))
        if unequal := differing(raw(now.state), raw(other_start.state)):
            return [f"the server's {listed(unequal)} before round 1 depends on the clients' class counts"]
        players = [Players(side.build(deepcopy(algorithm))(side.data)) for side in self.sides]
        executor = self.sides[0].serial(algorithm)
        if isinstance(algorithm, Shares) and (sentences := shared_faults(algorithm, self.kind, self.seed)):
            return sentences
        for number in range(1, ROUNDS + 1):
            called, sentences, replies = rounds.call(algorithm, plans[0], now, number), [], {}
            for block in called.blocks:
                for member in block:
                    client = member.client
                    replies[client], client_faults = self._compared(players, called.task, member.individual, client)
                    sentences += [f"round {number}, client {client}: {each}" for each in client_faults]
            if sentences:
                return sentences
            block = BlockSum()
            for reply in replies.values():
                block.add(reply.sums)
            total, seed = add_blocks([block.total]), seed_for(self.seed, "merge", number)
            sent = {i: replace(reply, sums={}, memory=None, metrics={}) for i, reply in replies.items()}
            state, _ = split_merged(algorithm.merge(executor, now.state, total, sent, number, seed))
            now = rounds.Standing(number, state)
        return [sentence for client in self.sampled if (sentence := self._of_sampling(client))]

    def _compared(
        self, players: list[Players], task: RoundTask, own_payload: Payload, client: int
    ) -> tuple[Reply, list[str]]:
        """Run a client on both neighbouring data sets; return the first reply and a sentence per fault (``faults``)."""
        first, before = Side(self.seed), dict(players[0].memory)
        sides = first, first.follower(self.kind.times)
        reply = players[0].reply(task, own_payload, client, first)
        try:
            other = players[1].reply(task, own_payload, client, sides[1])
        except Exception as error:
            return reply, [f"{self.kind.words} it raises {type(error).__name__}: {error}"]

        def again(side: Side) -> Output:
            alone = Players(self.sides[0].build(self.algorithm)(self.sides[0].data), before)
            return _output(alone.reply(task, own_payload, client, side))

        sent = _output(reply)
        sentences = faults_of_streams(sent, _output(other), sides, self.kind, again)
        self.is_bare |= any(not event.covered for event in reply.releases)
        pairs = zip(*(side.sums for side in sides), strict=False)
        moved = sum(first_sum.release.covered and first_sum.moved(second_sum) > 0 for first_sum, second_sum in pairs)
        counted = moved, sum(r.steps for r in sent.covered), max((r.q for r in sent.covered), default=1.0)
        self.sampled.setdefault(client, []).append(counted)
        for side, answer in zip(players, (reply, other), strict=True):
            if answer.memory is not None:
                side.memory[client] = answer.memory
        return reply, sentences

    def _of_sampling(self, client: int) -> str:
        """Return a sentence if the client's changed example is in more noisy sums than q allows, else an empty text."""
        from scipy.stats import binom  # this import takes half a second

        each_moved, each_steps, rates = zip(*self.sampled[client], strict=True)
        moved, steps, q = sum(each_moved), sum(each_steps), max(rates)
        if moved == 0 or binom.sf(moved - 1, max(moved, steps), q) >= UNLIKELY:
            return ""
        steps_moved = f"an example of client {client} is in the noisy sums of {moved} of {steps} steps"
        return f"{steps_moved}, more than the declared sampling rate {q:g} allows"


def _copied(payload: Payload) -> Payload:
    return {name: like(x, data(x).detach().clone()) for name, x in payload.items()}


def _output(reply: Reply) -> Output:
    return Output({**reply.sums, **reply.each}, reply.releases, reply.weight)
