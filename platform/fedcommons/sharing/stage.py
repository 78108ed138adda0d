"""The interface of sharing strategies, which decide the clients' training data in three steps.

make      each client contributes its real examples or examples generated from them
release   the strategy releases, withholds or privatises the contributions; a ``Release`` records what leaves a client
assign    the strategy assigns rows of one store to clients, with weights if the rows do not count equally

Each row's owner, the client that contributed it, stays recorded. A strategy is a frozen dataclass of its constants.
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
from fedcommons.data.federated import ClientDatasets
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import UserError, name_of, quote, require_type, user_code_context
from fedcommons.generators.generator import Receipt
from fedcommons.generators.requests import Contribution, GenerationRequest, GeneratorRecipe
from fedcommons.privacy.release import Release
from fedcommons.seeding import numpy_generator
from fedcommons.sharing import disclosure


@accepts_old_names(seen="n_sources", of_own="from_real_rows", of_made="from_generated", of_each="rows_by_client")
@dataclass(frozen=True, eq=False)
class Contributions:
    """The clients' contributions: m rows of ``store``, which begins with the clients' real data.

    rows: (m,) int64. owners: (m,), the client that contributed each row. receipts: receipt of the synthetic examples,
    by client. seen: by client, number of its real examples that are contributed or that the synthetic examples come
    from. of_labels: receipt of the class counts, by client.
    """

    store: Examples
    rows: np.ndarray
    owners: np.ndarray
    receipts: Mapping[int, Receipt | None]
    n_sources: Mapping[int, int]
    _: KW_ONLY
    of_labels: Mapping[int, Receipt | None] = field(default_factory=dict)

    @staticmethod
    def none(client_data: ClientDatasets) -> "Contributions":
        """Return contributions without rows: no client contributes."""
        return Contributions(client_data.clients.store, np.zeros(0, np.int64), np.zeros(0, np.int64), {}, {})

    @staticmethod
    def from_real_rows(client_data: ClientDatasets, rows_of_each: Sequence[np.ndarray]) -> "Contributions":
        """Return the contributions if client i contributes its real rows ``rows_of_each[i]``; no example is copied."""
        sizes = [len(rows) for rows in rows_of_each]
        owners, rows = np.repeat(np.arange(len(sizes)), sizes), np.concatenate(rows_of_each)
        return Contributions(client_data.clients.store, rows, owners, {}, dict(enumerate(sizes)))

    @staticmethod
    def from_generated(client_data: ClientDatasets, generated: Sequence[Contribution]) -> "Contributions":
        """Return the contributions if client i contributes ``drawn[i]``, which the store has after the real data.

        Raises:
            ValueError: contributed examples have another type or shape than the real examples.
        """
        real, new = client_data.clients.store, [contribution.examples for contribution in generated]
        for examples in new:
            if (examples.x.dtype, examples.x.shape[1:]) != (real.x.dtype, real.x.shape[1:]):
                kind = f"{examples.x.dtype} {tuple(examples.x.shape[1:])}"
                raise ValueError(
                    f"contributions must be {real.x.dtype} {client_data.shape} like real examples, not {kind}"
                )
        store = Examples(torch.cat([real.x, *(e.x for e in new)]), torch.cat([real.y, *(e.y for e in new)]))
        owners = np.repeat(np.arange(len(new)), [len(e) for e in new])
        receipts = {client: contribution.receipt for client, contribution in enumerate(generated)}
        seen = {client: contribution.n_sources for client, contribution in enumerate(generated)}
        of_labels = {client: contribution.of_labels for client, contribution in enumerate(generated)}
        return Contributions(store, np.arange(len(real), len(store)), owners, receipts, seen, of_labels=of_labels)

    def rows_by_client(self, n_clients: int) -> list[np.ndarray]:
        """Return the rows that each client contributes."""
        return [self.rows[self.owners == client] for client in range(n_clients)]

    def shuffled(self, n_clients: int, seed: int) -> list[np.ndarray]:
        """Permute all rows once and cut them into one part per client, of the size of the client's contribution."""
        sizes = np.bincount(self.owners, minlength=n_clients)
        return np.split(numpy_generator(seed, "pool").permutation(self.rows), np.cumsum(sizes)[:-1])

    def releases(self, *what: str) -> list[Release]:
        """Return a release for each contributing client, with its receipt; ``what``: names of what leaves the client.

        The class counts from which labels are drawn are a separate release.
        """
        events = []
        for client in np.unique(self.owners).tolist():
            receipt, of_labels = self.receipts.get(client) or Receipt(), self.of_labels.get(client)
            events.append(receipt.release(client, *what, seen=self.n_sources.get(client, 0)))
            if of_labels:
                events.append(of_labels.release(client, *CLASS_COUNTS))
        return events


CLASS_COUNTS = ("class counts",)
"""Name of the release of the class counts from which labels are drawn."""


@accepts_old_names(kept="own_rows", once="nbytes")
@dataclass(frozen=True, eq=False)
class Assigned:
    """The rows of the contributions' store that each client gets.

    kept: each client's own rows. received: rows that each client gets from the exchange, () if no client gets any.
    weights: weights of each client's kept rows, then of its received rows; None if all are 1 (see ``ClientData``).
    n_own: number of each client's rows that count as its own in the rule of equal work; None: the sum of its weights.
    pool: all contributions, in the parts that were sent to clients; () if there is no pool.
    once: bytes of the exchange, up and down, summed over clients; None: bytes of the sent examples and labels
    (``disclosure.sent``). notes: messages to the user.
    views: for each party that sees a noisy release, mu = sensitivity / noise.
    """

    own_rows: Sequence[np.ndarray]
    received: Sequence[np.ndarray] = ()
    weights: Sequence[np.ndarray] | None = None
    _: KW_ONLY
    n_own: Sequence[int] | np.ndarray | None = None
    pool: Sequence[np.ndarray] = ()
    nbytes: int | None = None
    notes: Sequence[str] = ()
    views: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Shared:
    """The data of a run after sharing, with the share p of received training rows, the cost and the releases.

    owners: (rows of the store,), the client that each row came from, -1 if no client holds it.
    disclosed: number of real examples that left their clients unchanged. notes, views: see ``Assigned``.
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
        """Return, for the summary, the real examples disclosed raw and the mean number of clients per real example."""
        rows, own_rows = self.data.clients.rows.flat, self.data.real.rows.flat
        n, holdings = len(own_rows), int(torch.isin(rows, own_rows).sum())
        return {"disclosed_raw": self.disclosed / n, "disclosed_examples": self.disclosed, "mean_copies": holdings / n}


class Stage(Protocol):
    """A sharing strategy: a frozen dataclass of constants, whose functions do not change arguments; draws are keyed.

    Optional functions: ``needs`` (see ``Generating``), ``shorter`` (``TakesLong``), ``salts`` (``Salted``) and
    ``beforehand`` (``Forewarning``). ``check(fields)`` refuses an experiment by its fields (dotted names to values);
    ``check_data(client_data)`` refuses data for which the strategy is not defined; both raise ``UserError``.
    The attribute ``serves_pool = True`` states that the server holds the pool and may train on it.
    """

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Return the clients' contributions; ``drawn``: images for ``needs`` (see ``Generating``), in that order."""
        ...

    def release(
        self, client_data: ClientDatasets, contributed: Contributions
    ) -> tuple[Contributions, Sequence[Release]]:
        """Return the contributions that leave the clients, and the releases that state their protection.

        A client that contributes synthetic examples without a release counts as unprotected. Real rows that are
        contributed, pooled or assigned to another client count as unprotected, whatever the strategy states.
        """
        ...

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign rows of the released contributions to clients."""
        ...


@runtime_checkable
class Generating(Protocol):
    """A strategy that uses generators' images; generators are trained beforehand, once for all trials of a sweep."""

    def requests(self, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        """Return the generation requests to run before ``make``: one per client, in client order."""
        ...


@runtime_checkable
class Salted(Protocol):
    """A strategy that draws noise itself, without a generator."""

    def salts(self, client_data: ClientDatasets) -> Sequence[bytes]:
        """Return the salts of all noise if the noise is secret; each salt is stored as the salt of an artifact."""
        ...


@runtime_checkable
class Forewarning(Protocol):
    """A strategy that can report messages before ``make``, which may take long."""

    def beforehand(self, client_data: ClientDatasets) -> Sequence[str]:
        """Return messages to the user, which depend on public numbers only and not on any client's examples."""
        ...


@runtime_checkable
class TakesLong(Protocol):
    """A strategy whose ``make`` trains something and takes long; ``--dry-run`` runs a shorter variant instead."""

    def shorter(self) -> tuple[Stage, float]:
        """Return a variant with less work but equal contributions, and the factor by which this one is slower."""
        ...


def shorter_of(stage: Stage) -> tuple[Stage, float]:
    """Return the strategy to run in a dry run, and the factor by which the ``make`` of ``stage`` is slower.

    A strategy without ``shorter`` is returned itself, with factor 1.

    Raises:
        UserError: ``shorter`` does not return a strategy of the same type and a positive finite number.
    """
    if not isinstance(stage, TakesLong):
        return stage, 1.0
    with user_code_context(stage, "shorter"):
        result: Any = stage.shorter()
    match result:
        case (variant, Real() as times) if type(variant) is type(stage) and 0 < float(times) < inf:
            return variant, float(times)
    kind, what = type(stage).__name__, name_of(stage)
    raise UserError(
        f"{what}.shorter must give a {kind} that works less and a number above 0, how many times as long this one "
        f"takes, got {quote(result)}."
    )


def serves_pool(stage: Stage) -> bool:
    """Return whether the server holds the pool: the strategy has the attribute ``serves_pool = True``."""
    return getattr(stage, "serves_pool", False) is True


def share(stage: Stage, client_data: ClientDatasets, generated: Sequence[Contribution] = ()) -> Shared:
    """Apply a sharing strategy; ``drawn``: the images for its ``needs``."""
    return share_contributed(stage, client_data, contribute(stage, client_data, generated))


def contribute(stage: Stage, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
    """Return the result of the strategy's ``make``.

    Raises:
        ClientError: ``make`` failed or did not return contributions.
    """
    with user_code_context(stage, "make"):
        return _contributions(stage.make(client_data, generated))


def _contributions(contributed: Any) -> Contributions:
    require_type(Examples, require_type(Contributions, contributed).store, "Examples as Contributions.store")
    for name in ("rows", "owners"):
        require_type(np.ndarray, getattr(contributed, name), f"an array as Contributions.{name}")
    for name in ("receipts", "n_sources", "of_labels"):
        require_type(Mapping, getattr(contributed, name), f"a mapping as Contributions.{name}")
    return contributed


def _released(result: Any) -> tuple[Contributions, Sequence[Release]]:
    if not (isinstance(result, Sequence) and len(result) == 2):
        raise ValueError(f"it must give a pair of Contributions and a list of Release, got {type(result).__name__}")
    events = require_type(Iterable, result[1], "a pair of Contributions and a list of Release")
    return _contributions(result[0]), tuple(events)  # an iterator can be read only once


def share_contributed(stage: Stage, client_data: ClientDatasets, contributed: Contributions) -> Shared:
    """Apply ``release`` and ``assign`` of a strategy to the clients' contributions.

    Real rows that leave a client count as unprotected, whatever the strategy declares (see ``disclosure``).

    Raises:
        UserError: the strategy changes the clients' real data, or returns rows or releases without an owner.
        ClientError: a function of the strategy failed or returned another type.
    """
    with user_code_context(stage, "release"):
        contributed, releases = _released(stage.release(client_data, contributed))
    with user_code_context(stage, "assign"):
        assigned = require_type(Assigned, stage.assign(client_data, contributed), "an Assigned")
        return _shared(stage, client_data, contributed, releases, assigned)


def _shared(
    stage: Stage,
    client_data: ClientDatasets,
    contributed: Contributions,
    releases: Sequence[Release],
    assigned: Assigned,
) -> Shared:
    name, store = type(stage).__name__, contributed.store
    releases = disclosure.events(f"sharing stage {name}", releases, len(client_data.clients))
    real = Clients(store, client_data.clients.rows)
    clients, kept_rows = real, list[np.ndarray]()
    received, parts = (_checked(name, what, getattr(assigned, what), len(store)) for what in ("received", "pool"))
    if received or assigned.weights is not None:
        kept_rows = _checked(name, "own_rows", assigned.own_rows, len(store))
        rows = [np.concatenate(both) for both in zip(kept_rows, received, strict=True)] if received else kept_rows
        if len(rows) != len(real):
            raise UserError(f"sharing stage {name} must give rows to each of {len(real)} clients, got {len(rows)}.")
        clients = Clients(store, Rows.from_lists(rows, assigned.weights), _counted(name, assigned.n_own, len(real)))
    pool = Clients(store, parts) if (parts := [part for part in parts if len(part)]) else None
    disclosure.require_unchanged(name, client_data, store)
    rows = disclosure.numbers(name, "contributed rows", contributed.rows, len(store))
    owners = disclosure.owners_of(name, client_data, store, rows, contributed.owners)
    leaving = np.concatenate([disclosure.held_by_others(clients, owners), *parts])
    disclosure.require_known(name, client_data, leaving, owners)
    examples = partial(disclosure.sent, kept_rows, received, rows, parts, owners, client_data.n_total)
    # a real row also leaves if a synthetic row is a bit-for-bit copy
    copied = disclosure.copied(store, len(client_data.clients.store), np.unique(leaving))
    leaving = np.union1d(np.union1d(rows, leaving), copied)
    is_real = leaving < len(client_data.clients.store)
    disclosed = leaving[is_real & (owners[leaving] >= 0)]
    releases = disclosure.with_undeclared(releases, owners[leaving[~is_real]].tolist(), client_data.clients.sizes)
    return Shared(
        data=RunData(clients, real, pool=pool, serves=pool is not None and serves_pool(stage)),
        p=sum(map(len, received)) / sum(clients.sizes),
        traffic=Traffic(once=disclosure.nbytes(name, client_data, assigned.nbytes, examples)),
        owners=owners,
        releases=disclosure.with_raw(releases, owners[disclosed], len(client_data.clients)),
        disclosed=len(disclosed),
        notes=assigned.notes,
        views=assigned.views,
    )


def _checked(stage: str, what: str, each: Sequence[np.ndarray], n: int) -> list[np.ndarray]:
    return [disclosure.numbers(stage, what, rows, n) for rows in each]


def _counted(stage: str, n_own: Any, n_clients: int) -> np.ndarray | None:
    values = np.asarray(n_own)
    if n_own is not None and not (values.shape == (n_clients,) and values.dtype.kind in "iuf" and (values >= 0).all()):
        raise UserError(
            f"sharing stage {stage} must give n_own as a number of 0 or more for each of {n_clients} clients, "
            f"got {quote(n_own)}."
        )
    return None if n_own is None else values


def require_once(stage: Stage, shared: Shared) -> None:
    """Check that no client trains on a real row more than once if training is private (see ``disclosure``)."""
    if shared.data.clients is not shared.data.real:
        disclosure.require_once(type(stage).__name__, shared.data.clients.rows, shared.data.real.rows)


def require_own(
    stage: Stage, client_data: ClientDatasets, needs: Sequence[GenerationRequest], generated: Sequence[Contribution]
) -> None:
    """Check that private generators were trained on their own client's examples only (see ``disclosure``)."""
    private = [any(r and r.release(0).covered for r in (draw.receipt, draw.of_labels)) for draw in generated]
    disclosure.require_own(type(stage).__name__, client_data, needs, private)


def share_by_method(shared: Shared, algorithm: object, n_classes: int | None, seed: int) -> Shared:
    """Return the clients' data after the method's own sharing before the first round, if any (``Shares``).

    Raises:
        UserError: the method changes the clients' examples, or declares releases of clients that do not exist.
    """
    if not isinstance(algorithm, Shares):
        return shared
    data, name = shared.data, type(algorithm).__name__
    before = data.clients.store[slice(None)].digest
    with user_code_context(algorithm, "share"):
        common = require_type(Common, algorithm.share(data.clients, n_classes, seed))
        require_type(Examples, common.examples, "Examples as Common.examples")
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
        data=replace(data, clients=clients, real=clients if data.real is data.clients else data.real),
        traffic=shared.traffic + Traffic(once=nbytes),
        releases=[*shared.releases, *disclosure.with_undeclared(releases, range(len(clients)), clients.sizes)],
    )
