"""Straggler rules: which clients of a round are stragglers (too slow), and which share of its work each one has done.

A rule is a frozen dataclass of constants. The engine calls it with ``(joined, facts, round, seed)``: the participants,
the federation's public facts, the round and the run's seed. The rule returns a mapping from each straggler to the share
of its local work, in [0, 1], that is done when the server stops waiting. The partial work arrives as the straggler's
reply if the share is above 0 and partial work is accepted (the method's ``takes_partial``, or ``straggler.partial``);
else no reply arrives.
Random numbers are keyed by (seed, round, client), or by (seed, client) if they are constant over rounds. So they do not
depend on the worker or on other random numbers.
If a rule reads class counts (``facts.counts``), clients send them, and the privacy ledger lists them as uncovered.

Optional members of a rule:

arrival(n_clients, joining, seed)    returns per client the probability that its whole reply arrives if it takes part,
                                     in a round of ``joining`` uniformly sampled clients; None: no closed form
check_clients(n_clients, joining)    raises ``UserError`` if the constants do not fit the number of clients
capabilities                         ``Capabilities(leaves_partial=True)`` if the rule can return shares above 0

The time t_i of client i in round r is log-normal: ln t_i = c z_i + s e_ir. z_i (per client) and e_ir (per client and
round) are standard normal; c: ``client_spread``;  s: ``spread``. The unit is the median time of all clients and rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import erfc, exp, log, sqrt
from typing import Annotated, ClassVar

from fedcommons.core.algorithm import Facts
from fedcommons.core.capabilities import Capabilities
from fedcommons.errors import UserError, quote, user_code_context
from fedcommons.federation import client_sampling
from fedcommons.seeding import numpy_generator

Rule = Callable[[Sequence[int], Facts, int, int], Mapping[int, float]]
"""Function (participants, facts, round, seed) -> mapping from each straggler to the share of its work that is done."""


@dataclass(frozen=True)
class Independent:
    """Each client is a straggler with probability q, independently of other clients."""

    q: Annotated[float, "[0, 1)"] = 0.0
    """probability that a participant's reply does not arrive"""

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        return {i: 0.0 for i in joined if _uniform(seed, "straggles", round, i) < self.q}

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float]:
        """Return for each client the probability 1 - q that its reply arrives in a round in which it takes part."""
        return [1 - self.q] * n_clients


@dataclass(frozen=True)
class PerClient:
    """Client i is a straggler with probability q_i, independently of other clients."""

    qs: Annotated[tuple[float, ...], "[0, 1)"] = ()
    """probability that the client's reply does not arrive, one number per client"""

    def check_clients(self, n_clients: int, joining: int | None) -> None:
        """Check that the rule has one probability for each of the N clients."""
        if len(self.qs) != n_clients:
            raise UserError(
                f"straggler.qs must hold one probability for each of the {n_clients} clients, got {len(self.qs)}."
            )

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        return {i: 0.0 for i in joined if _uniform(seed, "straggles", round, i) < self.qs[i]}

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float]:
        """Return for each client i the probability 1 - q_i that its reply arrives."""
        return [1 - q for q in self.qs]


@dataclass(frozen=True)
class Groups:
    """Groups of g clients with consecutive numbers fail together with probability q, independently of other groups."""

    q: Annotated[float, "[0, 1)"] = 0.0
    """probability that a group's replies do not arrive"""
    group_size: Annotated[int, "[1, 1e9]"] = 2
    """g, clients per group: clients with consecutive numbers, such as the clients of one network"""

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        groups = {i // self.group_size for i in joined}
        failed = {group for group in groups if _uniform(seed, "group fails", round, group) < self.q}
        return {i: 0.0 for i in joined if i // self.group_size in failed}

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float]:
        """Return for each client the probability 1 - q that its reply arrives in a round in which it takes part."""
        return [1 - self.q] * n_clients


@dataclass(frozen=True)
class Deadline:
    """The server stops waiting at time T; a client that needs a time t > T has done the share T/t of its work."""

    capabilities: ClassVar[Capabilities] = Capabilities(leaves_partial=True)
    deadline: Annotated[float, "(0, inf)"] = 2.0
    """T, in multiples of the median time that clients need for their local work"""
    spread: Annotated[float, "[0, 100]"] = 0.5
    """standard deviation of the logarithm of a client's times, from round to round"""
    client_spread: Annotated[float, "[0, 100]"] = 0.5
    """standard deviation, over clients, of the logarithm of their median times; 0: all are equally fast"""

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        times = _log_times(joined, round, seed, self.spread, self.client_spread)
        most = log(self.deadline)
        return {i: exp(most - time) for i, time in times.items() if time > most}

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float]:
        """Return for each client i the probability that its time is at most T: Phi((ln T - c z_i)/s).

        c, s: client_spread, spread. z_i: the client's slowness. Phi: standard normal distribution function.
        """
        log_margins = [log(self.deadline) - self.client_spread * _slowness(seed, i) for i in range(n_clients)]
        return [erfc(-x / (self.spread * sqrt(2))) / 2 if self.spread else float(x >= 0) for x in log_margins]


@dataclass(frozen=True)
class Fastest:
    """The server waits for the fastest k replies; a round with at most k clients has no stragglers."""

    k: Annotated[int, "[1, 1e9]"] = 1
    """replies that the server waits for"""
    spread: Annotated[float, "[0, 100]"] = 0.5
    """standard deviation of the logarithm of a client's times, from round to round"""
    client_spread: Annotated[float, "[0, 100]"] = 0.5
    """standard deviation, over clients, of the logarithm of their median times; 0: all are equally fast"""

    def check_clients(self, n_clients: int, joining: int | None) -> None:
        """Check that k is at most the number of clients per round."""
        if joining is not None and self.k > joining:
            raise UserError(f"straggler.k must be at most the number of clients in a round, {joining}, got {self.k}.")

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        times = _log_times(joined, round, seed, self.spread, self.client_spread)
        return dict.fromkeys(sorted(joined, key=lambda i: (times[i], i))[self.k :], 0.0)

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float] | None:
        """Return for each client the probability k/|S| of being one of the k fastest of |S| participants.

        None if the probability depends on the client: the median times differ, or the times are constant.
        """
        alike = not self.client_spread and self.spread
        return [min(1.0, self.k / joining)] * n_clients if alike else None


@dataclass(frozen=True)
class Slow:
    """FedProx' stragglers: a share of a round's clients trains only x epochs, x uniform in 1 .. client.epochs.

    Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, arXiv:1812.06127, section 5.2.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(leaves_partial=True)
    share: Annotated[float, "[0, 1]"] = 0.5
    """share of a round's clients that do only part of their epochs"""

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        order = sorted(joined, key=lambda i: (_uniform(seed, "is slow", round, i), i))
        return {
            i: 1 - _uniform(seed, "work done", round, i)
            for i in order[: client_sampling.joining(len(joined), self.share)]
        }

    def arrival(self, n_clients: int, joining: int, seed: int) -> list[float]:
        """Return per client the probability 1 - m/|S| that it is not one of the m stragglers of |S| participants."""
        return [1 - client_sampling.joining(joining, self.share) / joining] * n_clients


def arrival(rule: Rule | None, n_clients: int, joining: float | None, seed: int) -> tuple[float, ...] | None:
    """Return, per client, the probability that the client takes part in a round and its whole reply arrives.

    The result is stored as ``Facts.arrival``. It is None if the probabilities have no closed form.
    rule: the straggler rule; None: no client is a straggler. joining: number of clients that are sampled uniformly per
    round (with Poisson sampling, its mean); None if the method chooses the clients (no closed form).

    Raises:
        ClientError: the rule's ``arrival`` raised an error, or did not return one probability in [0, 1] per client.
    """
    if joining is None:
        return None
    in_time = None if rule else [1.0] * n_clients
    if closed_form := getattr(rule, "arrival", None):
        with user_code_context(rule, "arrival"):
            in_time = closed_form(n_clients, joining, seed)
            if in_time is not None and (len(in_time) != n_clients or not all(0 <= p <= 1 for p in in_time)):
                raise ValueError(f"it must return a probability for each of {n_clients} clients, got {quote(in_time)}")
    return None if in_time is None else tuple(joining / n_clients * p for p in in_time)


def _log_times(clients: Sequence[int], round: int, seed: int, spread: float, client_spread: float) -> dict[int, float]:
    return {
        i: client_spread * _slowness(seed, i) + spread * numpy_generator(seed, "time", round, i).standard_normal()
        for i in clients
    }


def _slowness(seed: int, client: int) -> float:
    """Return z_i, the client's standard normal slowness, which is constant over rounds."""
    return numpy_generator(seed, "slowness", client).standard_normal()


def _uniform(*key: int | str) -> float:
    return numpy_generator(*key).random()
