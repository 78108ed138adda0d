"""What a sharing stage is. It decides what clients train on, in three steps: `make -> release -> assign`.

make      each client contributes examples, of its own or made from them
release   what leaves the clients is made private, withheld or let go; a ``Release`` records what leaves
assign    who gets what, as rows of one store, with weights where rows do not count alike

The client that each row came from is known to the end. A stage is a frozen dataclass of its constants, in its own file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from math import inf
from numbers import Real
from operator import index
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from fedcommons.core.algorithm import Common, Shares
from fedcommons.core.communication import Traffic
from fedcommons.core.worker import RunData
from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Examples
from fedcommons.data.federated import Dealt
from fedcommons.errors import UserError, given, name_of, shown, somebodys
from fedcommons.generators.generator import Receipt
from fedcommons.generators.requests import Contribution, GeneratorRecipe, Need
from fedcommons.privacy.release import Release
from fedcommons.seeding import numpy_generator
from fedcommons.sharing import disclosure


@dataclass(frozen=True, eq=False)
class Contributions:
    """What the clients contribute: m rows of ``store``, which begins with the clients' real data.

    rows: (m,) int64; owners: (m,), the client that each row came from; receipts: by client, of made examples; seen: by
    client, how many of its real examples these are or were made from; of_labels: as receipts, of class counts.
    """

    store: Examples
    rows: np.ndarray
    owners: np.ndarray
    receipts: Mapping[int, Receipt | None]
    seen: Mapping[int, int]
    _: KW_ONLY
    of_labels: Mapping[int, Receipt | None] = field(default_factory=dict)

    @staticmethod
    def none(dealt: Dealt) -> "Contributions":
        """Nobody contributes."""
        return Contributions(dealt.own.store, np.zeros(0, np.int64), np.zeros(0, np.int64), {}, {})

    @staticmethod
    def of_own(dealt: Dealt, rows_of_each: Sequence[np.ndarray]) -> "Contributions":
        """Client i contributes its real rows ``rows_of_each[i]``; no example is copied."""
        owners = np.repeat(np.arange(len(rows_of_each)), [len(rows) for rows in rows_of_each])
        seen = {client: len(rows) for client, rows in enumerate(rows_of_each)}
        return Contributions(dealt.own.store, np.concatenate(rows_of_each), owners, {}, seen)

    @staticmethod
    def of_made(dealt: Dealt, drawn: Sequence[Contribution]) -> "Contributions":
        """Client i contributes ``drawn[i]``; the store has these after the real data.

        Raises:
            ValueError: they have another type or shape than the real examples.
        """
        real, new = dealt.own.store, [one.examples for one in drawn]
        for examples in new:
            if (examples.x.dtype, examples.x.shape[1:]) != (real.x.dtype, real.x.shape[1:]):
                kind = f"{examples.x.dtype} {tuple(examples.x.shape[1:])}"
                raise ValueError(f"contributions must be {real.x.dtype} {dealt.shape} like real examples, not {kind}")
        store = Examples(torch.cat([real.x, *(e.x for e in new)]), torch.cat([real.y, *(e.y for e in new)]))
        owners = np.repeat(np.arange(len(new)), [len(e) for e in new])
        receipts = {client: one.receipt for client, one in enumerate(drawn)}
        seen = {client: one.seen for client, one in enumerate(drawn)}
        of_labels = {client: one.of_labels for client, one in enumerate(drawn)}
        return Contributions(store, np.arange(len(real), len(store)), owners, receipts, seen, of_labels=of_labels)

    def of_each(self, n_clients: int) -> list[np.ndarray]:
        """The rows that each client contributes."""
        return [self.rows[self.owners == client] for client in range(n_clients)]

    def shuffled(self, n_clients: int, seed: int) -> list[np.ndarray]:
        """All rows, permuted once and cut into a part for each client, as large as its contribution."""
        sizes = np.bincount(self.owners, minlength=n_clients)
        return np.split(numpy_generator(seed, "pool").permutation(self.rows), np.cumsum(sizes)[:-1])

    def releases(self, *what: str) -> list[Release]:
        """An event for each contributing client, with its receipt: these things (``what``) leave it.

        Class counts that labels follow are an event of their own.
        """
        events = []
        for client in np.unique(self.owners).tolist():
            receipt, of_labels = self.receipts.get(client) or Receipt(), self.of_labels.get(client)
            events.append(receipt.release(client, *what, seen=self.seen.get(client, 0)))
            if of_labels:
                events.append(of_labels.release(client, *CLASS_COUNTS))
        return events


CLASS_COUNTS = ("class counts",)
"""Name of the release of the counts that labels follow."""


@dataclass(frozen=True, eq=False)
class Assigned:
    """Who gets what, as rows of the contributions' store.

    kept: each client's own rows; received: the rows it gets from the exchange, () where nobody gets any; weights: of
    each client's kept rows, then of its received ones, None where all are 1 (see ``ClientData``); n_own: how many of
    its rows count as its own in the rule of equal work, None for the sum of its weights; pool: all contributions, in
    the parts in which they were dealt, () where there is no pool; once: bytes of the exchange over all clients, up and
    down, None for those of the examples that travel, with their labels (``leaving.sent``); notes: what the user is
    told; views: of a noisy release, mu = sensitivity over noise of what each party sees.
    """

    kept: Sequence[np.ndarray]
    received: Sequence[np.ndarray] = ()
    weights: Sequence[np.ndarray] | None = None
    _: KW_ONLY
    n_own: Sequence[int] | np.ndarray | None = None
    pool: Sequence[np.ndarray] = ()
    once: int | None = None
    notes: Sequence[str] = ()
    views: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Shared:
    """The data of a run, the share p of what clients train on that came through sharing, its cost and its releases.

    owners: (rows of the store,), the client that each came from, -1 where no client holds it.
    disclosed: number of real examples that left their clients as they are. notes, views: see ``Assigned``.
    """

    data: RunData
    p: float
    traffic: Traffic
    owners: np.ndarray | None = None
    releases: Sequence[Release] = ()
    disclosed: int = 0
    notes: Sequence[str] = ()
    views: Mapping[str, float] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """For the summary: real examples that were disclosed raw, and how many clients hold a real one on average."""
        rows, own = self.data.clients.rows.flat, self.data.own.rows.flat
        n, held = len(own), int(torch.isin(rows, own).sum())
        return {"disclosed_raw": self.disclosed / n, "disclosed_examples": self.disclosed, "mean_copies": held / n}


class Stage(Protocol):
    """Constants in a frozen dataclass, and functions that do not change their arguments; every draw is keyed.

    Optional: ``needs`` (``Generating``); ``shorter`` (``TakesLong``); ``salts`` (``Salted``); ``beforehand``
    (``Forewarning``); ``serves_pool = True`` where the server holds the pool and may train on it; ``check(fields)``,
    which refuses an experiment by its fields (dotted names to values); ``check_dealt(dealt)``, which refuses data that
    the stage is not defined for. Both raise ``UserError``.
    """

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        """What each client contributes; ``drawn``: the images for ``needs`` (see ``Generating``), in their order."""
        ...

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        """The contributions that leave the clients, and the events that state what protects them.

        A client without an event whose made examples are contributed counts as uncovered. Real rows that are
        contributed, pooled or held by another client are uncovered whatever is stated.
        """
        ...

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        """Who gets which rows of it."""
        ...


@runtime_checkable
class Generating(Protocol):
    """A stage for which clients' generators are trained beforehand; a sweep trains them once for all its trials."""

    def needs(self, dealt: Dealt, recipe: GeneratorRecipe) -> Sequence[Need]:
        """What must be made before ``make`` is called: one ``Need`` per client, in client order."""
        ...


@runtime_checkable
class Salted(Protocol):
    """A stage that draws noise itself, not a generator of its."""

    def salts(self, dealt: Dealt) -> Sequence[bytes]:
        """The salts of all its noise where that is secret, each kept as an artifact's."""
        ...


@runtime_checkable
class Forewarning(Protocol):
    """A stage of which something can be told before its ``make``, which may take long."""

    def beforehand(self, dealt: Dealt) -> Sequence[str]:
        """What the user is told, by public numbers alone: nobody's examples decide it."""
        ...


@runtime_checkable
class TakesLong(Protocol):
    """A stage whose ``make`` takes long, as it trains something; ``--dry-run`` plays a shorter one in its place."""

    def shorter(self) -> tuple[Stage, float]:
        """A variant that contributes as many examples after less work, and how many times as long its own takes."""
        ...


def shorter_of(stage: Stage) -> tuple[Stage, float]:
    """A stage to play in a dry run, and how many times as long this one's ``make`` takes: itself, where it has none.

    Raises:
        UserError: what it gives is no such pair.
    """
    if not isinstance(stage, TakesLong):
        return stage, 1.0
    with somebodys(stage, "shorter"):
        told: Any = stage.shorter()
    match told:
        case (variant, Real() as times) if type(variant) is type(stage) and 0 < float(times) < inf:
            return variant, float(times)
    kind, what = type(stage).__name__, name_of(stage)
    raise UserError(
        f"{what}.shorter must give a {kind} that works less and a number above 0, how many times as long this one "
        f"takes, got {shown(told)}."
    )


def serves_pool(stage: Stage) -> bool:
    """Whether the server holds the pool, by its attribute ``serves_pool = True``."""
    return getattr(stage, "serves_pool", False) is True


def share(stage: Stage, dealt: Dealt, drawn: Sequence[Contribution] = ()) -> Shared:
    """Apply a stage; ``drawn``: the images for its ``needs``."""
    return share_contributed(stage, dealt, contribute(stage, dealt, drawn))


def contribute(stage: Stage, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
    """What the stage's ``make`` gives.

    Raises:
        ClientError: it failed, or gave something else.
    """
    with somebodys(stage, "make"):
        return _contributions(stage.make(dealt, drawn))


def _contributions(contributed: Any) -> Contributions:
    given(Examples, given(Contributions, contributed).store, "Examples as Contributions.store")
    for name in ("rows", "owners"):
        given(np.ndarray, getattr(contributed, name), f"an array as Contributions.{name}")
    for name in ("receipts", "seen", "of_labels"):
        given(Mapping, getattr(contributed, name), f"a mapping as Contributions.{name}")
    return contributed


def _released(told: Any) -> tuple[Contributions, Sequence[Release]]:
    if not (isinstance(told, Sequence) and len(told) == 2):
        raise ValueError(f"it must give a pair of Contributions and a list of Release, got {type(told).__name__}")
    events = given(Iterable, told[1], "a pair of Contributions and a list of Release")
    return _contributions(told[0]), tuple(events)  # they may be such as can be read once


def share_contributed(stage: Stage, dealt: Dealt, contributed: Contributions) -> Shared:
    """Apply the rest of a stage to what clients contribute.

    What its rows show does not depend on what it declares: real rows that leave a client are uncovered (``leaving``).

    Raises:
        UserError: it changes the clients' real data, or gives out rows or events of nobody.
        ClientError: it failed, or gave something else.
    """
    with somebodys(stage, "release"):
        contributed, releases = _released(stage.release(dealt, contributed))
    with somebodys(stage, "assign"):
        assigned = given(Assigned, stage.assign(dealt, contributed), "an Assigned")
        return _shared(stage, dealt, contributed, releases, assigned)


def _shared(
    stage: Stage, dealt: Dealt, contributed: Contributions, releases: Sequence[Release], assigned: Assigned
) -> Shared:
    name = type(stage).__name__
    releases = disclosure.events(f"sharing stage {name}", releases, len(dealt.own))
    store = contributed.store
    own = Clients(store, dealt.own.rows)
    clients, kept = own, list[np.ndarray]()
    received, parts = (_checked(name, what, getattr(assigned, what), len(store)) for what in ("received", "pool"))
    if received or assigned.weights is not None:
        kept = _checked(name, "kept", assigned.kept, len(store))
        rows = [np.concatenate(both) for both in zip(kept, received, strict=True)] if received else kept
        if len(rows) != len(own):
            raise UserError(f"sharing stage {name} must give rows to each of {len(own)} clients, got {len(rows)}.")
        clients = Clients(store, Rows.of(rows, assigned.weights), _counted(name, assigned.n_own, len(own)))
    pool = Clients(store, parts) if (parts := [part for part in parts if len(part)]) else None
    disclosure.require_unchanged(name, dealt, store)
    rows = disclosure.numbers(name, "contributed rows", contributed.rows, len(store))
    owners = disclosure.owners_of(name, dealt, store, rows, contributed.owners)
    given = np.concatenate([disclosure.elsewhere(clients, owners), *parts])
    disclosure.require_known(name, dealt, given, owners)
    examples = partial(disclosure.sent, kept, received, rows, parts, owners, dealt.n_total)
    copied = disclosure.copied(store, len(dealt.own.store), np.unique(given))  # of those that leave their owner
    given = np.union1d(np.union1d(rows, given), copied)
    is_real = given < len(dealt.own.store)
    left = given[is_real & (owners[given] >= 0)]
    releases = disclosure.with_undeclared(releases, owners[given[~is_real]].tolist(), dealt.own.sizes)
    return Shared(
        data=RunData(clients, own, pool=pool, serves=pool is not None and serves_pool(stage)),
        p=sum(map(len, received)) / sum(clients.sizes),
        traffic=Traffic(once=disclosure.nbytes(name, dealt, assigned.once, examples)),
        owners=owners,
        releases=disclosure.with_raw(releases, owners[left], len(dealt.own)),
        disclosed=len(left),
        notes=assigned.notes,
        views=assigned.views,
    )


def _checked(stage: str, what: str, each: Sequence[np.ndarray], n: int) -> list[np.ndarray]:
    return [disclosure.numbers(stage, what, rows, n) for rows in each]


def _counted(stage: str, n_own: Any, n_clients: int) -> np.ndarray | None:
    if n_own is None:
        return None
    values = np.asarray(n_own)
    if values.shape != (n_clients,) or values.dtype.kind not in "iuf" or not (values >= 0).all():
        raise UserError(
            f"sharing stage {stage} must give n_own as a number of 0 or more for each of {n_clients} clients, "
            f"got {shown(n_own)}."
        )
    return values


def require_once(stage: Stage, shared: Shared) -> None:
    """Refuse a stage by which a client trains on a real row several times, where that is private (see ``leaving``)."""
    if shared.data.clients is not shared.data.own:
        disclosure.require_once(type(stage).__name__, shared.data.clients.rows, shared.data.own.rows)


def require_own(stage: Stage, dealt: Dealt, needs: Sequence[Need], drawn: Sequence[Contribution]) -> None:
    """Refuse a stage whose private generators saw other examples than their client's own (see ``leaving``)."""
    private = [any(r and r.release(0).covered for r in (one.receipt, one.of_labels)) for one in drawn]
    disclosure.require_own(type(stage).__name__, dealt, needs, private)


def share_by_method(shared: Shared, algorithm: object, n_classes: int | None, seed: int) -> Shared:
    """What clients hold after the algorithm has shared something before the federation, if it does (``Shares``).

    Raises:
        UserError: it changes the clients' examples, or declares releases of nobody.
    """
    if not isinstance(algorithm, Shares):
        return shared
    data, name = shared.data, type(algorithm).__name__
    before = data.clients.store[slice(None)].digest
    with somebodys(algorithm, "share"):
        common = given(Common, algorithm.share(data.clients, n_classes, seed))
        given(Examples, common.examples, "Examples as Common.examples")
        x, y = common.examples.x, common.examples.y
        nbytes = len(data.clients) * (x.nbytes + y.nbytes) if common.nbytes is None else index(common.nbytes)
    if nbytes < 0:
        raise UserError(f"{name}.share must give Common.nbytes as at least 0, got {nbytes}.")
    if data.clients.store[slice(None)].digest != before:
        raise UserError(f"{name}.share must not change the clients' examples, and it does.")
    clients = data.clients.with_commons(common.examples)
    releases = disclosure.events(f"{name}.share", common.releases, len(clients))
    return replace(
        shared,
        data=replace(data, clients=clients, own=clients if data.own is data.clients else data.own),
        traffic=shared.traffic + Traffic(once=nbytes),
        releases=[*shared.releases, *disclosure.with_undeclared(releases, range(len(clients)), clients.sizes)],
    )
