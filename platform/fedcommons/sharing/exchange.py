"""The exchange of examples before round 1: run the steps of a sharing strategy, and check and account their results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import numpy as np
import torch

from fedcommons.core.algorithm import Common, Shares
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.communication import Traffic
from fedcommons.core.worker import RunData
from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError, require_type, user_code_context
from fedcommons.generators.requests import Contribution
from fedcommons.privacy.release import Release
from fedcommons.sharing import disclosure
from fedcommons.sharing.stage import Assigned, Contributions, Stage


@dataclass(frozen=True, eq=False, kw_only=True)
class Shared:
    """The result of sharing: the clients' training data, the traffic, and the privacy ledger entries (``releases``).

    p: share of received examples among all clients' training examples. owners: for each row of the store, the client
    from which it came; -1: unknown. disclosed: number of real examples that left their clients unchanged.
    notes, views: messages to the user, and privacy per party (see ``Assigned``).
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
        """Return entries of the run's summary: disclosed real examples, and mean number of clients per example."""
        rows, own_rows = self.data.clients.rows.flat, self.data.real.rows.flat
        n, holdings = len(own_rows), int(torch.isin(rows, own_rows).sum())
        return {"disclosed_raw": self.disclosed / n, "disclosed_examples": self.disclosed, "mean_copies": holdings / n}


def share(stage: Stage, client_data: ClientDatasets, generated: Sequence[Contribution] = ()) -> Shared:
    """Run all three steps of a sharing strategy; ``generated``: one result per generation request of the strategy."""
    return share_contributed(stage, client_data, contribute(stage, client_data, generated))


def contribute(stage: Stage, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
    """Return the clients' contributions: call the sharing strategy's ``make`` and check the result's types.

    Raises:
        ClientError: ``make`` failed or did not return ``Contributions``.
    """
    with user_code_context(stage, "make"):
        return _contributions(stage.make(client_data, generated))


def _contributions(contributed: Any) -> Contributions:
    require_type(Examples, require_type(Contributions, contributed).store, "Examples as Contributions.store")
    for name in ("rows", "owners"):
        require_type(np.ndarray, getattr(contributed, name), f"an array as Contributions.{name}")
    for name in ("receipts", "n_sources", "of_labels"):
        require_type(Mapping, getattr(contributed, name), f"a mapping as Contributions.{name}")
    if contributed.soft is not None:
        require_type(torch.Tensor, contributed.soft, "a tensor or None as Contributions.soft")
    return contributed


def share_contributed(stage: Stage, client_data: ClientDatasets, contributed: Contributions) -> Shared:
    """Apply ``release`` and ``assign`` of a sharing strategy to the clients' contributions, and check the results.

    The privacy ledger counts real rows that leave a client as unprotected, whatever the strategy declares (see
    ``disclosure``).

    Raises:
        UserError: the strategy changed the clients' real data, or returned rows without a known owner, or ledger
            entries of clients that do not exist.
        ClientError: a function of the strategy failed or returned another type.
    """
    with user_code_context(stage, "release"):
        result, pair = stage.release(client_data, contributed), "a pair of Contributions and a list of Release"
        if not (isinstance(result, Sequence) and len(result) == 2):
            raise ValueError(f"it must return {pair}, got {type(result).__name__}")
        contributed, releases = _contributions(result[0]), tuple(require_type(Iterable, result[1], pair))
    with user_code_context(stage, "assign"):
        assigned = require_type(Assigned, stage.assign(client_data, contributed), "an Assigned")
        return _shared(stage, client_data, contributed, releases, assigned)


def _shared(
    stage: Stage, client_data: ClientDatasets, contributed: Contributions, releases: Sequence[Any], assigned: Assigned
) -> Shared:
    name, store, real_data = type(stage).__name__, contributed.store, client_data.clients
    n_clients, n_real = len(real_data), len(real_data.store)

    def row_numbers(what: str, each: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [disclosure.numbers(name, what, rows, len(store)) for rows in each]

    releases = disclosure.events(f"sharing stage {name}", releases, n_clients)
    received, parts = row_numbers("received", assigned.received), row_numbers("pool", assigned.pool)
    real = clients = Clients(store, real_data.rows)
    labelled = store if contributed.soft is None else _with_soft_labels(name, client_data, store, contributed.soft)
    kept_rows: list[np.ndarray] = []
    if received or assigned.weights is not None:
        kept_rows = row_numbers("own_rows", assigned.own_rows)
        rows = [np.concatenate(both) for both in zip(kept_rows, received, strict=True)] if received else kept_rows
        if len(rows) != n_clients:
            raise UserError(f"sharing stage {name} must give rows to each of {n_clients} clients, got {len(rows)}.")
        n_own = disclosure.own_counts(name, assigned.n_own, n_clients)
        clients = Clients(labelled, Rows.from_lists(rows, assigned.weights), n_own)
    parts = [part for part in parts if len(part)]
    pool = Clients(labelled, parts) if parts else None
    disclosure.require_unchanged(name, client_data, store)
    rows = disclosure.numbers(name, "contributed rows", contributed.rows, len(store))
    owners = disclosure.owners_of(name, client_data, store, rows, contributed.owners)
    holders, client_rows = np.repeat(np.arange(n_clients), clients.rows.sizes), clients.rows.flat.numpy()
    leaving = np.concatenate([client_rows[owners[client_rows] != holders], *parts])
    disclosure.require_known(name, client_data, leaving, owners)
    sent = disclosure.sent(kept_rows, received, rows, parts, owners, n_real)
    # A real example also leaves its client if a synthetic example is a bit-for-bit copy of it.
    copied = disclosure.copied(store, n_real, np.unique(leaving))
    leaving = np.union1d(np.union1d(rows, leaving), copied)
    disclosed = leaving[(leaving < n_real) & (owners[leaving] >= 0)]
    givers = owners[leaving[leaving >= n_real]].tolist()
    releases = disclosure.with_undeclared(releases, givers, real_data.sizes)
    return Shared(
        data=RunData(clients, real, pool=pool, serves=pool is not None and capabilities_of(stage).serves_pool),
        p=sum(map(len, received)) / sum(clients.sizes),
        traffic=Traffic(once=disclosure.nbytes(name, client_data, assigned.nbytes, sent, contributed.soft)),
        owners=owners,
        releases=disclosure.with_raw(releases, owners[disclosed], n_clients),
        disclosed=len(disclosed),
        notes=assigned.notes,
        views=assigned.views,
    )


def _with_soft_labels(name: str, client_data: ClientDatasets, store: Examples, soft: torch.Tensor) -> Examples:
    """Return the store with labels (n, classes): one-hot vectors of real examples, then ``soft``.

    Raises:
        UserError: the data set has no classes, or ``soft`` has not one probability distribution per synthetic row.
    """
    n, classes = len(client_data.clients.store), client_data.n_classes
    if classes is None:
        raise UserError(f"sharing stage {name} gives soft labels, but labels of the data set are not classes.")
    probabilities, shape = soft.float(), (len(store) - n, classes)
    is_right = soft.is_floating_point() and soft.shape == shape and bool((probabilities >= 0).all())
    if not is_right or bool(((probabilities.sum(1) - 1).abs() > 0.01).any()):
        raise UserError(
            f"sharing stage {name} must give soft labels as floats of shape {shape}, at least 0 and with sum 1 in each "
            f"row, got {soft.dtype} of shape {tuple(soft.shape)}."
        )
    one_hot = torch.nn.functional.one_hot(store.y[:n], classes).float()
    return replace(store, y=torch.cat([one_hot, probabilities]))


def share_by_method(shared: Shared, algorithm: object, n_classes: int | None, seed: int) -> Shared:
    """Return ``shared`` with the examples that a federated method itself shares before round 1 (see ``Shares``).

    A method without the function ``share`` changes nothing.

    Raises:
        UserError: the method changed the clients' examples, or declared ledger entries of clients that do not exist.
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
        raise UserError(f"{name}.share must return Common.nbytes of at least 0, got {nbytes}.")
    if data.clients.store[slice(None)].digest != before:
        raise UserError(f"{name}.share must not change the clients' examples, but it did.")
    clients, own_rows = data.clients.with_commons(common.examples), data.real.rows
    releases = disclosure.events(f"{name}.share", common.releases, len(clients))
    releases = disclosure.with_undeclared(releases, range(len(clients)), clients.sizes)
    copied = disclosure.copied_rows(data.real.store[own_rows.flat].x, x)  # raw, whatever the method declares
    owners = np.repeat(np.arange(len(own_rows)), own_rows.sizes)[copied]
    return replace(
        shared,
        data=replace(data, clients=clients, real=clients if data.real is data.clients else data.real),
        traffic=shared.traffic + Traffic(once=nbytes),
        releases=[*shared.releases, *disclosure.with_raw(releases, owners, len(clients))],
        disclosed=shared.disclosed + len(copied),
    )
