"""Clients that are not in a round, or late: what an algorithm owes to them and they to it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedcommons.core.algorithm import BUFFERS, Algorithm, Facts
from fedcommons.core.rejections import records, told
from fedcommons.federation import rounds
from fedcommons.federation.rounds import Standing, answering
from fedcommons.federation.stragglers import Deadline, Fastest, Groups, PerClient, Rule, Slow
from fedcommons.testing.comparing import differing, listed, raw, require
from fedcommons.testing.federations import Federation
from fedcommons.testing.personal import models
from fedcommons.testing.spy import Spy


@dataclass(frozen=True)
class InTurn:
    """Another rule in each round: the first of ``rules`` in round 1, and the first again after the last."""

    rules: tuple[Rule, ...]

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> Mapping[int, float]:
        return self.rules[(round - 1) % len(self.rules)](joined, facts, round, seed)

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float]:
        """The mean over the rules."""
        each = [rule.arrival(n_clients, joining, seed) for rule in self.rules]  # pyright: ignore
        return [sum(of_one) / len(each) for of_one in zip(*each, strict=True)]


LATE = InTurn((
    PerClient((0.0, 0.2, 0.4, 0.6, 0.8)), Groups(0.4, 2), Deadline(1.0), Fastest(2, client_spread=0.0), Slow(0.5),
))  # fmt: skip
"""The rules for five clients, each of which has its round in five."""


def rounds_of(
    federation: Federation,
    algorithm: Algorithm,
    plan: rounds.Plan,
    played: Sequence[tuple[Standing, dict[str, float]]],
    start: Standing | None = None,
) -> list[tuple[list[int], list[int]]]:
    """For each round: the clients that were to take part, and those of them that were to answer."""
    before = [start or federation.start(algorithm, plan), *(now for now, _ in played)]
    return [answering(algorithm, plan, now.state, now.round + 1) for now in before[:-1]]


def play_with_absent_clients(algorithm: Algorithm, federation: Federation, plan: rounds.Plan) -> None:
    """A client that is not in a round keeps its memory as it was, and gets it back when it answers again."""
    spy, expected = Spy(algorithm), {}
    played = federation.play(spy, plan)
    answers = rounds_of(federation, algorithm, plan, played)
    for (now, _), (_, present) in zip(played, answers, strict=True):
        calls = dict(zip(present, (call for call in spy.calls if call.round == now.round), strict=True))
        for client, call in calls.items():
            wrong = differing(call.handed, expected.get(client, {}))
            require(not wrong, f"in round {now.round} client {client} did not get its memory back: {listed(wrong)}")
        expected |= {client: call.kept for client, call in calls.items() if call.kept is not None}
        of_all = {i: {n: x for n, x in kept.items() if n != BUFFERS} for i, kept in now.memory.items()}
        wrong = differing({client: raw(kept) for client, kept in of_all.items()}, expected)
        require(not wrong, f"round {now.round} of clients {present} left other memory than returned in {listed(wrong)}")
        is_finite = all(model.buffer.isfinite().all() for model in models(algorithm, plan, now))
        require(is_finite, f"after round {now.round} the model has values that are not finite")
    require_all_trained(federation, algorithm, plan, played, "")


def require_all_trained(
    federation: Federation,
    algorithm: Algorithm,
    plan: rounds.Plan,
    played: Sequence[tuple[Standing, dict[str, float]]],
    when: str,
) -> None:
    """Every client that was to answer in a round did so, and was not rejected."""
    answers = rounds_of(federation, algorithm, plan, played)
    for (now, facts), (joined, present) in zip(played, answers, strict=True):
        where, drawn = f"{when}in round {now.round}", facts["clients"]
        require(drawn == len(joined), f"{where} {drawn} clients were drawn instead of {len(joined)}")
        require(not now.rejected, f"{where} {told(records(now.rejected))}")
        found = math.isfinite(facts.get("train/loss", math.nan))
        require(found or not present, f"{where} the clients report no finite metric 'loss'")
