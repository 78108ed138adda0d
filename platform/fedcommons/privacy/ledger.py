"""The privacy ledger: which data left each client (releases), the epsilon they cost, and data without a guarantee.

The ledger counts two kinds of releases separately. Contributions to a commons are data that clients shared (synthetic
images, copies of examples, codes). Updates of the model are sent in every run. ``statement.py`` describes both in text.

The code that creates a message or a set of synthetic images states its protection in a ``Release``. A release is
covered if its epsilon can be computed. Without a statement it is uncovered, that is, without a privacy guarantee.

Accountant: Renyi differential privacy of the subsampled Gaussian mechanism (Mironov et al. 2019), by Opacus. If every
release has q = 1, the exact formula of the Gaussian mechanism is used.
q: sampling rate;  sigma: noise multiplier;  delta: the delta of the (epsilon, delta) guarantee;  n_i: number of
examples of client i.

Neighbouring data sets: one example of one client is blanked out, that is, it stays in place but its gradient is zero.
So both data sets have the same n_i, which is public, and the same q, batch size B and number of steps K, which depend
on n_i. Sums over Poisson samples of the two data sets have the distributions of Mironov et al. for data sets with and
without the example, at the same q. So the accountant's epsilon holds. Replacing an example by another example takes two
such changes (blank it out, fill it again) and costs more epsilon than is printed.

The clients' data are disjoint, so the epsilon of all clients is the largest epsilon of a client (parallel composition).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Self

from fedcommons.errors import UserError
from fedcommons.privacy.accountants import Spent, composed
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release

NOTHING: Mapping[str, str] = MappingProxyType({})

OUTLIVED = "something beside messages and memory outlived a client"
"""The reason why noisy releases get no guarantee: objects other than messages and memory carry data between clients.

Checkpoints store this text as a part of names, so it must not change.
"""

Events = Mapping[int, Mapping[tuple[float, float], int]]
"""client -> (sampling rate q, noise multiplier sigma) -> number of steps."""


@dataclass(frozen=True)
class Released:
    """Data that the clients have released, of one kind (contributions to a commons, or updates of the model).

    covered: number of steps of releases with a privacy guarantee, by client and by (q, sigma): sampling rate and noise
    multiplier. names: names of the data in releases with a guarantee. uncovered: name of data -> number of releases
    without a guarantee.
    """

    covered: Events = field(default_factory=dict)
    names: tuple[str, ...] = ()
    uncovered: Mapping[str, int] = field(default_factory=dict)

    def and_also(self, new: Sequence[Release]) -> "Released":
        """Return the releases of ``self`` and ``new`` together; ``self`` does not change."""
        if not new:
            return self
        names = dict.fromkeys((*self.names, *(name for event in new if event.covered for name in event.what)))
        bare = [event.named or ("something without a name",) for event in new if not event.covered]
        uncovered = Counter(self.uncovered) + Counter(chain.from_iterable(bare))
        return Released(_with(self.covered, new), tuple(names), uncovered)

    def epsilon(self, client: int, delta: float) -> float:
        """Return the epsilon, at ``delta``, of a client's covered releases; 0 if the client has no covered release."""
        return composed(_spent(self.covered.get(client, {})), delta)

    def largest_epsilon(self, delta: float) -> float:
        """Return the largest ``epsilon`` over clients, at ``delta``; 0 if no release has a privacy guarantee."""
        return max((self.epsilon(client, delta) for client in self.covered), default=0.0)

    def record(self) -> dict[str, Any]:
        """Return the releases as lists, dicts and numbers, which a checkpoint can store as JSON."""
        covered = [[i, *key, steps] for i, events in self.covered.items() for key, steps in events.items()]
        return {"covered": covered, "names": list(self.names), "uncovered": dict(self.uncovered)}


@dataclass(frozen=True)
class Ledger:
    """All data that the clients have released in the run. A release with a privacy guarantee is called covered.

    commons: releases of data that clients shared (contributions to a commons). updates: releases of model updates.
    before: numbers of steps of the covered releases before round 1, which are a part of ``commons``.
    n_disclosed: client -> largest number of the client's examples that one uncovered release disclosed.
    outlived: names of objects, such as global variables, that a client's training has changed and the next client can
    read (``core.state_leaks``). leaks: name -> reason, for other objects through which data without noise enter all
    trainings of a round. If a round adds an object to ``outlived`` or ``leaks``, this round and all later rounds have
    no covered release.
    exposed: clients that ran a training without a privacy guarantee. No epsilon is stated for such a client's rounds.
    """

    commons: Released = field(default_factory=Released)
    updates: Released = field(default_factory=Released)
    n_disclosed: Mapping[int, int] = field(default_factory=dict)
    before: Events = field(default_factory=dict)
    outlived: tuple[str, ...] = ()
    leaks: Mapping[str, str] = field(default_factory=dict)
    exposed: frozenset[int] = frozenset()

    @classmethod
    def before_rounds(cls, shared: Iterable[Release]) -> Self:
        """Return the ledger before round 1; ``shared``: the data that clients shared before round 1 (the commons)."""
        events = list(shared)
        commons = Released().and_also(events)
        return cls(commons, Released(), _most({}, events), commons.covered)

    def after(
        self,
        round: Sequence[Release],
        outlived: Collection[str] = (),
        leaks: Mapping[str, str] = NOTHING,
        exposed: Collection[int] = (),
    ) -> "Ledger":
        """Return this ledger with the releases of one more round.

        Args:
            round: the releases of the round.
            outlived: names of objects that carried data from a client of the round to later clients; see ``Ledger``.
            leaks: name -> reason, for other objects that carried data without noise into the round; see ``Ledger``.
            exposed: the clients that ran a training without a privacy guarantee in the round.
        """
        if not (round or outlived or exposed):
            return self
        outlived = tuple(sorted({*self.outlived, *outlived}))
        leaks = {**self.leaks, **leaks}
        if reason := OUTLIVED if outlived else "".join(f"uncovered: {name}" for name in [*leaks][:1]):
            exposed = {*exposed, *(int(event.client) for event in round if event.covered)}
            round = [replace(event, mechanism=None, reason=reason) if event.covered else event for event in round]
        commons = self.commons.and_also([event for event in round if event.commons])
        updates = self.updates.and_also([event for event in round if not event.commons])
        given_away = _most(self.n_disclosed, round)
        return Ledger(commons, updates, given_away, self.before, outlived, leaks, self.exposed.union(exposed))

    @property
    def uncovered(self) -> Mapping[str, int]:
        """Return name of the data -> number of releases without a privacy guarantee.

        The objects in ``outlived`` and ``leaks`` count as one release each.
        """
        shared, sent = self.commons.uncovered, {**self.updates.uncovered, **dict.fromkeys(self.outlived, 1)}
        sent |= {name: 1 for name in self.leaks if name not in shared}
        return Counter(shared) + Counter(sent)

    def epsilon_of_rounds(self, client: int, delta: float) -> float | None:
        """Return the epsilon, at ``delta``, of all data that a client released in rounds, without data before round 1.

        The result is None if a training of the client has no privacy guarantee.
        """
        if client in self.exposed:
            return None
        kinds = self.before, self.commons.covered, self.updates.covered
        before, shared, sent = (Counter(covered.get(client, {})) for covered in kinds)
        return composed(_spent(sent + (shared - before)), delta)

    def largest_epsilon_of_rounds(self, delta: float) -> float | None:
        """Return the largest ``epsilon_of_rounds`` over clients; 0 without releases, None if one value is None."""
        if self.exposed:
            return None
        clients = {**self.commons.covered, **self.updates.covered}
        return max((self.epsilon_of_rounds(client, delta) or 0.0 for client in clients), default=0.0)

    def epsilon_of_all(self, client: int, delta: float) -> float | None:
        """Return the epsilon, at ``delta``, of all releases of a client.

        The result is None if any release of any client has no privacy guarantee.
        """
        if self.uncovered:
            return None
        shared, sent = (released.covered.get(client, {}) for released in (self.commons, self.updates))
        return composed(_spent(shared) + _spent(sent), delta)

    def record(self) -> dict[str, Any]:
        """Return the ledger as lists, dicts and numbers, which a checkpoint can store as JSON."""
        return {
            "commons": self.commons.record(),
            "updates": self.updates.record(),
            "given_away": [[i, n] for i, n in self.n_disclosed.items()],
            "before": Released(self.before).record()["covered"],
            "outlived": list(self.outlived),
            "leaks": dict(self.leaks),
            "exposed": sorted(self.exposed),
        }


def read(record: Mapping[str, Any]) -> Ledger:
    """Return the ledger that ``Ledger.record`` has converted to ``record``.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: ``record`` does not have the form of a ``Ledger.record``.
    """
    given_away = {int(client): int(n) for client, n in record["given_away"]}
    before = _events(record.get("before", ()))  # records of earlier versions lack "before" and the entries below
    outlived = tuple(map(str, record.get("outlived", ())))
    leaks = {str(name): str(reason) for name, reason in record.get("leaks", {}).items()}
    commons, updates = _read(record["commons"]), _read(record["updates"])
    exposed = frozenset(map(int, record.get("exposed", ())))
    # Old records do not list exposed clients, so all clients count as exposed. The -1 stands for unknown clients.
    if "exposed" not in record and updates.uncovered:
        exposed = frozenset({*commons.covered, *updates.covered, -1})
    return Ledger(commons, updates, given_away, before, outlived, leaks, exposed)


def _events(covered: Iterable[Sequence[float]]) -> Events:
    protected = Release(mechanism=SAMPLED_GAUSSIAN, sensitivity=1.0)  # records omit the sensitivity; any is valid
    events = [replace(protected, client=int(i), q=float(q), sigma=float(s), steps=int(k)) for i, q, s, k in covered]
    for event in events:
        if not event.covered:
            raise ValueError(f"a release in the record is not covered: {event.flaw or 'it has no noise'}")
    return _with({}, events)


def _read(record: Mapping[str, Any]) -> Released:
    events = _events(record["covered"])
    uncovered = {str(name): int(times) for name, times in record["uncovered"].items()}
    return Released(events, tuple(map(str, record["names"])), uncovered)


def _with(events: Events, new: Iterable[Release]) -> Events:
    """Return ``events`` plus the steps of the releases in ``new`` that have a guarantee; ``events`` does not change."""
    added = dict[int, Counter[tuple[float, float]]]()
    for event in new:
        if event.covered:  # plain numbers, which a checkpoint can store as JSON
            client = int(event.client)
            steps = added.setdefault(client, Counter(events.get(client, {})))
            steps[float(event.q), float(event.sigma)] += int(event.steps)
    return {**events, **added}


def _most(given_away: Mapping[int, int], new: Iterable[Release]) -> Mapping[int, int]:
    """Return client -> largest number of examples that one release without a guarantee has disclosed."""
    after = dict(given_away)
    for event in new:
        if event.n_disclosed and not event.covered:
            after[int(event.client)] = max(int(event.n_disclosed), after.get(event.client, 0))
    return after


def _spent(events: Mapping[tuple[float, float], int]) -> Spent:
    return tuple((q, sigma, steps) for (q, sigma), steps in sorted(events.items()))


def refuse_large_delta(delta: float, sizes: Sequence[int]) -> None:
    """Check that delta is below 1/n_i for each client i; ``sizes``: n_i, the numbers of examples.

    Raises:
        UserError: delta is 1/n_i or more for some client.
    """
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    if delta * sizes[largest] >= 1:
        raise UserError(
            f"dp.delta must be below 1/n_i = {1 / sizes[largest]:.3g}, got {delta:g}: client {largest} has "
            f"{sizes[largest]} examples, and at such a delta the client could publish one example."
        )


def require_small_delta(ledger: Ledger, delta: float, sizes: Sequence[int]) -> None:
    """Check that delta is small enough (``refuse_large_delta``), if the ledger has releases with a privacy guarantee.

    Raises:
        UserError: delta is 1/n_i or more for some client with n_i examples.
    """
    if ledger.commons.covered or ledger.updates.covered:
        refuse_large_delta(delta, sizes)
