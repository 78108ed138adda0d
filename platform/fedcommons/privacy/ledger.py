"""The privacy ledger: what each client released, the epsilon that it cost, and what no epsilon covers.

Two lines are kept apart: what clients put into a commons (synthetic images, copies, codes), and the updates of the
model, which every run sends. ``statement.py`` puts both into words.

Whoever makes a message or an artifact states in a ``Release`` what protects it. Without a statement it is uncovered.

Accountant: Renyi differential privacy of the subsampled Gaussian mechanism (Mironov et al. 2019), by Opacus; where
every event has q = 1, the exact curve of the Gaussian mechanism.
q: sampling rate;  sigma: noise multiplier;  delta: of the guarantee;  n_i: examples of client i.

Neighbouring data sets: one example of one client is blanked out, that is, it keeps its place but its gradient is zero.
Then n_i is the same for both, and so are q, the batch size B and the number of steps K, which depend on n_i; n_i is
public. Sums over Poisson samples of the two data sets have the distributions of Mironov et al. for data sets with and
without the example, at the same q. So the accountant's epsilon holds. Replacing an example by another one is two such
steps (blank it out, fill it again) and costs more epsilon than is printed.

The clients' data are disjoint, so the guarantee of all is the largest of theirs (parallel composition).
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
"""Why events that would be covered are not."""

Events = Mapping[int, Mapping[tuple[float, float], int]]
"""client -> (q, sigma) -> steps."""


@dataclass(frozen=True)
class Released:
    """What clients have released: covered events by client and mechanism, and the names of what left them.

    names: of what covered events protect. uncovered: name -> how often it left a client without protection.
    """

    covered: Events = field(default_factory=dict)
    names: tuple[str, ...] = ()
    uncovered: Mapping[str, int] = field(default_factory=dict)

    def and_also(self, new: Sequence[Release]) -> "Released":
        """This and these events. Clients without new covered ones share their counts with it."""
        if not new:
            return self
        names = dict.fromkeys((*self.names, *(name for event in new if event.covered for name in event.what)))
        return Released(_with(self.covered, new), tuple(names), _counted(self.uncovered, new))

    def of(self, client: int, delta: float) -> float:
        """The epsilon of the covered events of a client; 0 if it has none."""
        return composed(_spent(self.covered.get(client, {})), delta)

    def largest(self, delta: float) -> float:
        """The largest epsilon of all clients' covered events; 0 if there is none."""
        return max((self.of(client, delta) for client in self.covered), default=0.0)

    def record(self) -> dict[str, Any]:
        """Plain values, for checkpoints."""
        covered = [[i, *key, steps] for i, events in self.covered.items() for key, steps in events.items()]
        return {"covered": covered, "names": list(self.names), "uncovered": dict(self.uncovered)}


@dataclass(frozen=True)
class Ledger:
    """What clients have released: into a commons, which is all before round 1 and some in rounds, and as updates.

    given_away: of each client, the most of its examples that one uncovered event gave away (``Release.seen``).
    before: the covered events of what was shared before round 1; they are among those of ``commons``.
    outlived: names of what outlived a client beside messages and memory (``core.watched``). Noise is no protection
    where later steps and clients see the data otherwise, so of these rounds nothing is covered.
    leaks: what else shows data to all trainings of the rounds, by name, and why nothing of these rounds is covered.
    exposed: the clients of which a training in some round is not covered. No epsilon of their rounds is stated.
    """

    commons: Released = field(default_factory=Released)
    updates: Released = field(default_factory=Released)
    given_away: Mapping[int, int] = field(default_factory=dict)
    before: Events = field(default_factory=dict)
    outlived: tuple[str, ...] = ()
    leaks: Mapping[str, str] = field(default_factory=dict)
    exposed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, shared: Iterable[Release]) -> Self:
        """The ledger before round 1, with what was shared before; all of it is a commons."""
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
            round: the releases.
            outlived: names of what outlived a client in the round.
            leaks: what else shows data to the round's trainings, by name, and why nothing is covered.
            exposed: the clients of which a training is not covered.
        """
        if not (round or outlived or exposed):
            return self
        outlived = tuple(sorted({*self.outlived, *outlived}))
        leaks = {**self.leaks, **leaks}
        if why := OUTLIVED if outlived else "".join(f"uncovered: {name}" for name in [*leaks][:1]):
            exposed = {*exposed, *(int(event.client) for event in round if event.covered)}
            round = [replace(event, mechanism=None, why=why) if event.covered else event for event in round]
        commons = self.commons.and_also([event for event in round if event.commons])
        updates = self.updates.and_also([event for event in round if not event.commons])
        given_away = _most(self.given_away, round)
        return Ledger(commons, updates, given_away, self.before, outlived, leaks, self.exposed.union(exposed))

    @property
    def uncovered(self) -> Mapping[str, int]:
        """Name -> how often it left a client without protection."""
        shared, sent = self.commons.uncovered, {**self.updates.uncovered, **dict.fromkeys(self.outlived, 1)}
        sent |= {name: 1 for name in self.leaks if name not in shared}
        return {name: shared.get(name, 0) + sent.get(name, 0) for name in (*shared, *sent)}

    def of_rounds(self, client: int, delta: float) -> float | None:
        """Return the epsilon of a client's updates and of what it put into a commons in rounds.

        None: a training of the client is not covered.
        """
        if client in self.exposed:
            return None
        before, spent = self.before.get(client, {}), dict(self.updates.covered.get(client, {}))
        for event, steps in self.commons.covered.get(client, {}).items():
            spent[event] = spent.get(event, 0) + steps - before.get(event, 0)
        return composed(_spent({event: steps for event, steps in spent.items() if steps}), delta)

    def largest_of_rounds(self, delta: float) -> float | None:
        """Return the largest ``of_rounds`` of all clients: 0 if none has released anything, None if one has none."""
        if self.exposed:
            return None
        clients = {**self.commons.covered, **self.updates.covered}
        return max((self.of_rounds(client, delta) or 0.0 for client in clients), default=0.0)

    def of_all(self, client: int, delta: float) -> float | None:
        """The epsilon of all that a client has released; None if any release of any client is uncovered."""
        if self.uncovered:
            return None
        shared, sent = (of.covered.get(client, {}) for of in (self.commons, self.updates))
        return composed(_spent(shared) + _spent(sent), delta)

    def record(self) -> dict[str, Any]:
        """The ledger as plain values, for checkpoints."""
        given_away = [[i, n] for i, n in self.given_away.items()]
        before = Released(self.before).record()["covered"]
        shared, sent = self.commons.record(), self.updates.record()
        lasting = {"before": before, "outlived": list(self.outlived), "leaks": dict(self.leaks)}
        lasting["exposed"] = sorted(self.exposed)
        return {"commons": shared, "updates": sent, "given_away": given_away, **lasting}


def read(record: Mapping[str, Any]) -> Ledger:
    """The ledger that wrote this ``record``.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not a ledger's record.
    """
    given_away = {int(client): int(n) for client, n in record["given_away"]}
    before = _events(record.get("before", ()))  # earlier versions did not write these four
    outlived = tuple(map(str, record.get("outlived", ())))
    leaks = {str(name): str(why) for name, why in record.get("leaks", {}).items()}
    commons, updates = _read(record["commons"]), _read(record["updates"])
    exposed = frozenset(map(int, record.get("exposed", ())))
    if "exposed" not in record and updates.uncovered:  # any client may be one
        exposed = frozenset({*commons.covered, *updates.covered, -1})
    return Ledger(commons, updates, given_away, before, outlived, leaks, exposed)


def _events(covered: Iterable[Sequence[float]]) -> Events:
    events: dict[int, dict[tuple[float, float], int]] = {}
    for client, q, sigma, steps in covered:
        event = Release(int(client), mechanism=SAMPLED_GAUSSIAN, q=float(q), sigma=float(sigma), steps=int(steps))
        event = replace(event, sensitivity=1.0)  # that there was a bound is not written
        if not event.covered:
            raise ValueError(f"an event is not covered: {event.flaw or 'it has no noise'}")
        events.setdefault(event.client, {})[event.q, event.sigma] = event.steps
    return events


def _read(record: Mapping[str, Any]) -> Released:
    events = _events(record["covered"])
    uncovered = {str(name): int(times) for name, times in record["uncovered"].items()}
    return Released(events, tuple(map(str, record["names"])), uncovered)


def _with(events: Events, new: Iterable[Release]) -> Events:
    """These events and the new covered ones, as a new mapping; clients without new events share their counts."""
    after, own = dict(events), {}
    for event in new:
        if event.covered:
            mine = own.setdefault(int(event.client), dict(events.get(event.client, {})))
            how = float(event.q), float(event.sigma)  # plain numbers, which checkpoints can hold
            mine[how] = mine.get(how, 0) + int(event.steps)
    return after | own


def _counted(uncovered: Mapping[str, int], new: Iterable[Release]) -> Mapping[str, int]:
    """These counts and those of the new uncovered events, by name."""
    after = dict(uncovered)
    for event in new:
        for name in () if event.covered else event.named or ("something without a name",):
            after[name] = after.get(name, 0) + 1
    return after


def _most(given_away: Mapping[int, int], new: Iterable[Release]) -> Mapping[int, int]:
    """The largest number of examples of each client that an uncovered event gave away, before or now."""
    after = dict(given_away)
    for event in new:
        if event.seen and not event.covered:
            after[int(event.client)] = max(int(event.seen), after.get(event.client, 0))
    return after


def _spent(events: Mapping[tuple[float, float], int]) -> Spent:
    return tuple((q, sigma, steps) for (q, sigma), steps in sorted(events.items()))


def refuse_large_delta(delta: float, sizes: Sequence[int]) -> None:
    """Refuse a delta so large that publishing one example would satisfy it; ``sizes``: the clients' n_i.

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
    """The same of a ledger in which something is covered, so that an epsilon may be printed at this delta.

    Raises:
        UserError: see ``refuse_large_delta``.
    """
    if ledger.commons.covered or ledger.updates.covered:
        refuse_large_delta(delta, sizes)
