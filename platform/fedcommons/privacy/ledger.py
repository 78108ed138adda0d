"""The privacy ledger: the releases of each client, the epsilon that they cost, and the releases without an epsilon.

The ledger counts two kinds of releases separately: contributions to a commons (synthetic images, copies, codes), and
updates of the model, which every run sends. ``statement.py`` describes both in words.

The creator of a message or an artifact states its protection in a ``Release``. Without a statement it is uncovered.

Accountant: Renyi differential privacy of the subsampled Gaussian mechanism (Mironov et al. 2019), by Opacus; if every
release has q = 1, the exact curve of the Gaussian mechanism.
q: sampling rate;  sigma: noise multiplier;  delta: of the guarantee;  n_i: number of examples of client i.

Neighbouring data sets: one example of one client is blanked out, that is, it stays in place but its gradient is zero.
Then n_i is the same for both data sets, and so are q, the batch size B and the number of steps K, which depend on n_i;
n_i is public. Sums over Poisson samples of the two data sets have the distributions of Mironov et al. for data sets
with and without the example, at the same q. So the accountant's epsilon holds. Replacing an example by another example
takes two such steps (blank it out, fill it again) and costs more epsilon than is printed.

The clients' data are disjoint, so the epsilon for all clients is the largest of a client (parallel composition).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from fedcommons.errors import UserError
from fedcommons.privacy.accountants import Spent, composed
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release

NOTHING: Mapping[str, str] = MappingProxyType({})

OUTLIVED = "something beside messages and memory outlived a client"
"""The reason why releases with protection are uncovered."""

Events = Mapping[int, Mapping[tuple[float, float], int]]
"""client -> (q, sigma) -> steps."""


@dataclass(frozen=True)
class Released:
    """All releases of the clients: covered releases by client and mechanism, and the names of the released data.

    names: names in covered releases. uncovered: name -> number of releases without protection.
    """

    covered: Events = field(default_factory=dict)
    names: tuple[str, ...] = ()
    uncovered: Mapping[str, int] = field(default_factory=dict)

    def and_also(self, new: Sequence[Release]) -> "Released":
        """Return these and the new releases. Clients without a new covered release share their counts with ``self``."""
        if not new:
            return self
        names = dict.fromkeys((*self.names, *(name for event in new if event.covered for name in event.what)))
        return Released(_with(self.covered, new), tuple(names), _counted(self.uncovered, new))

    def epsilon(self, client: int, delta: float) -> float:
        """Return the epsilon of a client's covered releases; 0 if the client has none."""
        return composed(_spent(self.covered.get(client, {})), delta)

    def largest_epsilon(self, delta: float) -> float:
        """Return the largest epsilon of covered releases over all clients; 0 if there is no covered release."""
        return max((self.epsilon(client, delta) for client in self.covered), default=0.0)

    def record(self) -> dict[str, Any]:
        """Return plain values, for checkpoints."""
        covered = [[i, *key, steps] for i, events in self.covered.items() for key, steps in events.items()]
        return {"covered": covered, "names": list(self.names), "uncovered": dict(self.uncovered)}


@dataclass(frozen=True)
class Ledger:
    """All releases of the clients: into a commons (all releases before round 1 and some in rounds), and as updates.

    given_away: client -> largest number of its examples that one uncovered release disclosed (``Release.seen``).
    before: the covered releases before round 1; ``commons`` contains them too.
    outlived: names of objects other than messages and memory that changed with a client's training and stayed
    (``core.state_leaks``). Later steps and clients see the data in them without noise, so no release of these rounds
    is covered.
    leaks: name -> reason, for other objects that show data to all trainings of the rounds. No release of these rounds
    is covered.
    exposed: the clients with an uncovered training in some round. No epsilon of their rounds is stated.
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
        """Return the ledger before round 1, with the releases before round 1, which all belong to a commons."""
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
            outlived: see ``Ledger``, for the round.
            leaks: see ``Ledger``, for the round.
            exposed: the clients with an uncovered training in the round.
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
        """Return name -> number of releases without protection."""
        shared, sent = self.commons.uncovered, {**self.updates.uncovered, **dict.fromkeys(self.outlived, 1)}
        sent |= {name: 1 for name in self.leaks if name not in shared}
        return {name: shared.get(name, 0) + sent.get(name, 0) for name in (*shared, *sent)}

    def epsilon_of_rounds(self, client: int, delta: float) -> float | None:
        """Return the epsilon of a client's updates and of its contributions to a commons in rounds.

        None: a training of the client is uncovered.
        """
        if client in self.exposed:
            return None
        before, spent = self.before.get(client, {}), dict(self.updates.covered.get(client, {}))
        for event, steps in self.commons.covered.get(client, {}).items():
            spent[event] = spent.get(event, 0) + steps - before.get(event, 0)
        return composed(_spent({event: steps for event, steps in spent.items() if steps}), delta)

    def largest_epsilon_of_rounds(self, delta: float) -> float | None:
        """Return the largest ``of_rounds`` over clients: 0 without releases, None if a client has no epsilon."""
        if self.exposed:
            return None
        clients = {**self.commons.covered, **self.updates.covered}
        return max((self.epsilon_of_rounds(client, delta) or 0.0 for client in clients), default=0.0)

    def epsilon_of_all(self, client: int, delta: float) -> float | None:
        """Return the epsilon of all releases of a client; None if any release of any client is uncovered."""
        if self.uncovered:
            return None
        shared, sent = (released.covered.get(client, {}) for released in (self.commons, self.updates))
        return composed(_spent(shared) + _spent(sent), delta)

    def record(self) -> dict[str, Any]:
        """Return the ledger as plain values, for checkpoints."""
        given_away = [[i, n] for i, n in self.n_disclosed.items()]
        before = Released(self.before).record()["covered"]
        shared, sent = self.commons.record(), self.updates.record()
        lasting = {"before": before, "outlived": list(self.outlived), "leaks": dict(self.leaks)}
        lasting["exposed"] = sorted(self.exposed)
        return {"commons": shared, "updates": sent, "given_away": given_away, **lasting}


def read(record: Mapping[str, Any]) -> Ledger:
    """Return the ledger whose ``Ledger.record`` is ``record``.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the argument is not a ledger's record.
    """
    given_away = {int(client): int(n) for client, n in record["given_away"]}
    before = _events(record.get("before", ()))  # earlier versions wrote no before, outlived, leaks and exposed
    outlived = tuple(map(str, record.get("outlived", ())))
    leaks = {str(name): str(reason) for name, reason in record.get("leaks", {}).items()}
    commons, updates = _read(record["commons"]), _read(record["updates"])
    exposed = frozenset(map(int, record.get("exposed", ())))
    if "exposed" not in record and updates.uncovered:  # any client may have been exposed
        exposed = frozenset({*commons.covered, *updates.covered, -1})
    return Ledger(commons, updates, given_away, before, outlived, leaks, exposed)


def _events(covered: Iterable[Sequence[float]]) -> Events:
    events: dict[int, dict[tuple[float, float], int]] = {}
    for client, q, sigma, steps in covered:
        event = Release(int(client), mechanism=SAMPLED_GAUSSIAN, q=float(q), sigma=float(sigma), steps=int(steps))
        event = replace(event, sensitivity=1.0)  # the record omits the bound, which a covered release always has
        if not event.covered:
            raise ValueError(f"an event is not covered: {event.flaw or 'it has no noise'}")
        events.setdefault(event.client, {})[event.q, event.sigma] = event.steps
    return events


def _read(record: Mapping[str, Any]) -> Released:
    events = _events(record["covered"])
    uncovered = {str(name): int(times) for name, times in record["uncovered"].items()}
    return Released(events, tuple(map(str, record["names"])), uncovered)


def _with(events: Events, new: Iterable[Release]) -> Events:
    """Return a new mapping of the events and the new covered releases; clients without new ones share their counts."""
    after, changed = dict(events), {}
    for event in new:
        if event.covered:
            steps_by_mechanism = changed.setdefault(int(event.client), dict(events.get(event.client, {})))
            how = float(event.q), float(event.sigma)  # plain numbers, which checkpoints can hold
            steps_by_mechanism[how] = steps_by_mechanism.get(how, 0) + int(event.steps)
    return after | changed


def _counted(uncovered: Mapping[str, int], new: Iterable[Release]) -> Mapping[str, int]:
    """Return the number of uncovered releases by name, with the new releases added."""
    after = dict(uncovered)
    for event in new:
        for name in () if event.covered else event.named or ("something without a name",):
            after[name] = after.get(name, 0) + 1
    return after


def _most(given_away: Mapping[int, int], new: Iterable[Release]) -> Mapping[int, int]:
    """Return the largest number of each client's examples that an uncovered release disclosed, before or now."""
    after = dict(given_away)
    for event in new:
        if event.n_disclosed and not event.covered:
            after[int(event.client)] = max(int(event.n_disclosed), after.get(event.client, 0))
    return after


def _spent(events: Mapping[tuple[float, float], int]) -> Spent:
    return tuple((q, sigma, steps) for (q, sigma), steps in sorted(events.items()))


def refuse_large_delta(delta: float, sizes: Sequence[int]) -> None:
    """Check that delta is so small that publishing one example would not satisfy it; ``sizes``: the clients' n_i.

    Raises:
        UserError: delta is 1/n_i or more for some client.
    """
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    if delta * sizes[largest] >= 1:
        raise UserError(
            f"dp.delta must be below 1/n_i = {1 / sizes[largest]:.3g}, got {delta:g}: client {largest} has "
            f"{sizes[largest]} examples, and at such a delta it could publish one of them."
        )


def require_small_delta(ledger: Ledger, delta: float, sizes: Sequence[int]) -> None:
    """Check delta if the ledger has a covered release, so that an epsilon may be printed at this delta.

    Raises:
        UserError: see ``refuse_large_delta``.
    """
    if ledger.commons.covered or ledger.updates.covered:
        refuse_large_delta(delta, sizes)
