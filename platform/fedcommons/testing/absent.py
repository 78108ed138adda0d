"""Checks of clients' memory and replies in rounds in which clients are absent or are stragglers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedcommons.core.algorithm import BUFFERS, Algorithm, Facts
from fedcommons.core.rejections import records, rejection_summary
from fedcommons.federation.rounds import Plan, Standing, answering
from fedcommons.federation.stragglers import Deadline, Fastest, Groups, PerClient, Rule, Slow
from fedcommons.testing.comparing import Results, raw, require, require_same
from fedcommons.testing.federations import Federation
from fedcommons.testing.personal import models
from fedcommons.testing.spy import Spy


@dataclass(frozen=True)
class InTurn:
    """A straggler rule that applies its ``rules`` in turn, one per round, and starts again after the last rule."""

    rules: tuple[Rule, ...]

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> Mapping[int, float]:
        return self.rules[(round - 1) % len(self.rules)](joined, facts, round, seed)

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float]:
        """Return for each client the probability that its whole reply arrives in a round, averaged over the rules."""
        each = [rule.arrival(n_clients, joining, seed) for rule in self.rules]  # pyright: ignore
        return [sum(of_one) / len(each) for of_one in zip(*each, strict=True)]


LATE = InTurn((
    PerClient((0.0, 0.2, 0.4, 0.6, 0.8)), Groups(0.4, 2), Deadline(1.0), Fastest(2, client_spread=0.0), Slow(0.5),
))  # fmt: skip
"""Straggler rules for five clients; each rule applies in one of five rounds."""


def rounds_of(
    federation: Federation, algorithm: Algorithm, plan: Plan, played: Results, start: Standing | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return two lists per round: the clients that take part, and those among them whose reply reaches the server."""
    before = [start or federation.start(algorithm, plan), *(now for now, _ in played)]
    return [answering(algorithm, plan, now.state, now.round + 1) for now in before[:-1]]


def play_with_absent_clients(algorithm: Algorithm, federation: Federation, plan: Plan) -> None:
    """Check that an absent client's memory stays unchanged, and that the client gets this memory in its next round."""
    spy, expected = Spy(algorithm), {}
    played = federation.run(spy, plan)
    answers = rounds_of(federation, algorithm, plan, played)
    for (now, _), (_, present) in zip(played, answers, strict=True):
        calls = dict(zip(present, (call for call in spy.calls if call.round == now.round), strict=True))
        for client, call in calls.items():
            where = f"in round {now.round} client {client}"
            require_same(call.handed, expected.get(client, {}), f"{where} did not get its previous memory:")
        expected |= {client: call.memory_copy for client, call in calls.items() if call.memory_copy is not None}
        of_all = {i: {n: x for n, x in memory.items() if n != BUFFERS} for i, memory in now.memory.items()}
        stored, where = {client: raw(memory) for client, memory in of_all.items()}, f"after round {now.round}"
        require_same(stored, expected, f"{where} the stored memory differs from the returned memory of clients")
        is_finite = all(model.buffer.isfinite().all() for model in models(algorithm, plan, now))
        require(is_finite, f"{where} the model has values that are not finite")
    require_all_trained(federation, algorithm, plan, played, "")


def require_all_trained(federation: Federation, algorithm: Algorithm, plan: Plan, played: Results, when: str) -> None:
    """Check that the planned clients took part in each round, and that the server rejected none of their replies."""
    answers = rounds_of(federation, algorithm, plan, played)
    for (now, facts), (joined, present) in zip(played, answers, strict=True):
        where, n_sampled = f"{when}in round {now.round}", facts["clients"]
        require(n_sampled == len(joined), f"{where} {n_sampled} clients were sampled instead of {len(joined)}")
        require(not now.rejected, f"{where} {rejection_summary(records(now.rejected))}")
        is_finite = math.isfinite(facts.get("train/loss", math.nan))
        require(is_finite or not present, f"{where} the clients report no finite metric 'loss'")
