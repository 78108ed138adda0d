"""The data that leave the clients through a sharing strategy, as its assigned rows show, whatever it declares.

A real row leaves its owner as a contribution, in the pool, or if another client holds it. A generator's receipt never
covers a real row: the row counts as raw, whatever was declared. The source of a synthetic row cannot be checked; the
strategy's statement is used.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from fedcommons.core.communication import images_nbytes
from fedcommons.data.clients import Clients, Rows, digests
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError, quote
from fedcommons.generators.requests import GenerationRequest
from fedcommons.privacy.release import Release

RAW = "raw examples"
"""The ledger's name of real examples that left a client unchanged."""


def require_unchanged(stage: str, client_data: ClientDatasets, store: Examples) -> None:
    """Check that the clients' real data are unchanged, in place and as the first rows of a strategy's ``store``.

    Raises:
        UserError: the real data changed, or ``store`` does not begin with them.
    """
    if client_data.now != client_data.before:
        raise UserError(
            f"sharing stage {stage} must not change the clients' real examples or rows, and it did, or a part that ran "
            "before it in this process: contribute changed copies instead."
        )
    real = client_data.clients.store
    if store is not real and store[slice(0, len(real))].digest != real.digest:
        raise UserError(
            f"sharing stage {stage} must give a store that begins with the clients' {len(real):,} real examples as "
            "they are, and it does not: see Contributions.from_generated."
        )


def owners_of(stage: str, client_data: ClientDatasets, store: Examples, rows: np.ndarray, owners: Any) -> np.ndarray:
    """Return the owner of each row of the store, the client that it came from; -1 if unknown.

    rows: the contributed rows; owners: their stated owners. The partition decides a real row's owner, whatever the
    strategy states.

    Raises:
        UserError: owners do not exist, or their number differs from the number of rows.
    """
    stated = numbers(stage, "owners", owners, len(client_data.clients))
    if len(rows) != len(stated):
        raise UserError(
            f"sharing stage {stage} gives {len(rows):,} contributed rows and {len(stated):,} owners of them."
        )
    result = np.full(len(store), -1)
    result[rows] = stated
    result[: len(client_data.clients.store)] = -1
    real_rows = client_data.clients.rows
    result[real_rows.flat.numpy()] = np.repeat(np.arange(len(real_rows)), real_rows.sizes)
    return result


def numbers(stage: str, what: str, vector: Any, n: int) -> np.ndarray:
    """Check row or client numbers and return them as (m,) int64; an empty vector may be of any type.

    Raises:
        UserError: a number is not an integer, or is not in 0 ... n - 1.
    """
    values = np.asarray(vector)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise UserError(f"sharing stage {stage} must give {what} as a vector of whole numbers, got {quote(vector)}.")
    if len(values) and not 0 <= values.min() <= values.max() < n:
        raise UserError(f"sharing stage {stage} gives {what} outside of 0 ... {n - 1}.")
    return values.astype(np.int64)


def sent(
    kept_rows: Sequence[np.ndarray],
    received: Sequence[np.ndarray],
    contributed: np.ndarray,
    pool: Sequence[np.ndarray],
    owners: np.ndarray,
    n_real: int,
) -> int:
    """Count the examples that a strategy sends up to the server and down to the clients.

    A row is sent up once if it is in the pool, if a client other than its owner holds it, if it is a contributed real
    row, or if it is a contributed row that no client holds. It is sent down to each other client that receives it; a
    received row of the pool is sent to its owner too. A synthetic row that only its owner holds is not sent.

    Args:
        kept, received: rows of each client (see ``Assigned``); () if clients keep their own rows, or receive none.
        contributed: rows that clients contribute.
        pool: rows of the pool, in parts.
        owners: owner of each row of the store, -1 if no client owns it.
        n_real: number of real examples, which are the first rows of the store.
    """
    (keepers, own_rows), (receivers, new) = _pairs(kept_rows), _pairs(received)
    _, pooled = _pairs(pool)
    foreign, down = owners[own_rows] != keepers, (owners[new] != receivers) | np.isin(new, pooled)
    sent_up = np.concatenate([own_rows[foreign], new[down], pooled])
    at_server = contributed[(contributed < n_real) | ~np.isin(contributed, np.concatenate([own_rows, new]))]
    places = np.concatenate([keepers[foreign], receivers[down]]) * len(owners)
    once_each = np.unique(places + np.concatenate([own_rows[foreign], new[down]]))
    return int((owners[np.union1d(sent_up, at_server)] >= 0).sum()) + len(once_each)


def nbytes(stage: str, client_data: ClientDatasets, stated: Any, examples: Callable[[], int]) -> int:
    """Return the bytes of the exchange: the stated number, or the bytes of the counted ``examples``.

    Raises:
        UserError: the stated value is not a number of bytes.
    """
    if stated is None:
        return images_nbytes(examples(), client_data.shape, client_data.itemsize, client_data.label_nbytes)
    if isinstance(stated, int | np.integer) and stated >= 0:
        return int(stated)
    raise UserError(f"sharing stage {stage} must give nbytes as a whole number of bytes, or None, got {quote(stated)}.")


def _pairs(of_clients: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (clients, rows) with one entry for each row of each client."""
    none, sizes = np.zeros(0, np.int64), np.array([len(rows) for rows in of_clients], np.int64)
    return np.repeat(np.arange(len(sizes)), sizes), np.concatenate([none, *of_clients])


def held_by_others(clients: Clients, owners: np.ndarray) -> np.ndarray:
    """Return the rows held by a client that does not own them, repeated once per holder (owner -1: unknown)."""
    holders, rows = np.repeat(np.arange(len(clients)), clients.rows.sizes), clients.rows.flat.numpy()
    return rows[owners[rows] != holders]


def copied(store: Examples, n_real: int, rows: np.ndarray) -> np.ndarray:
    """Return the real rows of which synthetic rows among ``rows`` are bit-for-bit copies.

    Real examples that occur several times, or whose values are all equal, may be equal by chance and do not count.
    """
    synthetic = rows[rows >= n_real]
    if not len(synthetic):
        return synthetic
    of_real, of_made = digests(store.x[:n_real]), set(digests(store.x[torch.from_numpy(synthetic)]))
    times = Counter(of_real)
    met = [row for row, content in enumerate(of_real) if content in of_made and times[content] == 1]
    return np.array([row for row in met if (store.x[row] != store.x[row].reshape(-1)[0]).any()], np.int64)


def require_known(stage: str, client_data: ClientDatasets, rows: np.ndarray, owners: np.ndarray) -> None:
    """Check that every synthetic row of ``given`` has a known owner, whose data it contains.

    Raises:
        UserError: some rows of ``given`` have no known owner.
    """
    unknown = np.unique(rows[(rows >= len(client_data.clients.store)) & (owners[rows] < 0)])
    if len(unknown):
        raise UserError(
            f"sharing stage {stage} gives out {len(unknown):,} made rows that no client contributed (such as row "
            f"{unknown[0]}), so nobody knows whose data are in them: make them contributions of their owners."
        )


def events(what: str, releases: Iterable[Any], n_clients: int) -> list[Release]:
    """Check declared releases and return them as a list; ``what``: name of the component that declares them.

    A release with client -1 belongs to no client; it must be unprotected and disclose no example.

    Raises:
        UserError: an entry is not a release, or is a release of a client that does not exist.
    """
    declared = list(releases)
    for event in declared:
        if type(event) is not Release:
            raise UserError(f"{what} must declare what leaves as Release, got {quote(event)}.")
        if not (isinstance(event.what, tuple) and all(isinstance(name, str) for name in event.what)):
            raise UserError(f"{what} must name what leaves as a tuple of names, got {quote(event.what)}.")
        if not (isinstance(event.n_disclosed, Integral) and event.n_disclosed >= 0):
            raise UserError(
                f"{what} declares that {quote(event.n_disclosed)} examples were seen: it must be a whole number."
            )
        nobody = event.client == -1 and not event.covered and not event.n_disclosed
        if not nobody and not (isinstance(event.client, Integral) and 0 <= event.client < n_clients):
            raise UserError(
                f"{what} declares a release of client {quote(event.client)}, and clients are 0 ... {n_clients - 1}."
            )
    return declared


def with_undeclared(releases: Sequence[Release], givers: Iterable[int], sizes: Sequence[int]) -> list[Release]:
    """Return ``releases``, plus an unprotected release of all examples for every giver without a release."""
    silent = sorted(set(givers) - {release.client for release in releases})
    return [*releases, *(Release(client, ("undeclared",), n_disclosed=sizes[client]) for client in silent)]


def with_raw(releases: Sequence[Release], rows: np.ndarray, n_clients: int) -> list[Release]:
    """Return ``releases``, plus an unprotected release for every client with more raw examples out than declared.

    left: owners of the real rows that left their client, each row once.
    """
    declared = np.zeros(n_clients, np.int64)
    for event in releases:
        if not event.covered and event.client >= 0:
            declared[event.client] = max(declared[event.client], event.n_disclosed)
    counts = np.bincount(rows, minlength=n_clients)
    return [
        *releases,
        *(Release(i, (RAW,), n_disclosed=int(counts[i])) for i in np.flatnonzero(counts > declared).tolist()),
    ]


def require_once(stage: str, rows: Rows, own_rows: Rows) -> None:
    """Check that no client trains on a real row more than once; ``own``: the rows of the partition.

    DP-SGD bounds the effect of each listed row on a step, and a noisy mean bounds its contribution. So a row that is
    listed k times may have k times the effect. Weights are harmless: the gradient of a weighted loss is clipped too.

    Raises:
        UserError: a client trains on a real row more than once.
    """
    listed_rows, store = rows.flat.numpy(), int(max(rows.flat.max(), own_rows.flat.max())) + 1
    places = np.repeat(np.arange(len(rows)), rows.sizes) * store + listed_rows
    listed, times = np.unique(places[np.isin(listed_rows, own_rows.flat.numpy())], return_counts=True)
    if (times > 1).any():
        client = listed[times > 1][0] // store
        uses = times[listed // store == client]
        raise UserError(
            f"sharing stage {stage} must list no real row twice where something is private, and lists "
            f"{int((uses > 1).sum()):,} rows of client {client} up to {uses.max()} times: each time adds to what an "
            "example reveals."
        )


def require_own(
    stage: str, client_data: ClientDatasets, needs: Sequence[GenerationRequest], private: Sequence[bool]
) -> None:
    """Check that private generators see only their client's own examples, each at most once.

    A receipt covers the examples that a generator sees, and the ledger charges it to one client. An example of another
    client would cost that client nothing, and an example seen k times may have k times the effect. private: whether
    each client's generator is private.

    Raises:
        UserError: a private generator sees other examples, or an example more than once.
    """
    clients = [need.client for need in needs]
    if any(private) and clients != list(range(len(client_data.clients))):
        raise UserError(
            f"sharing stage {stage} must need one private generator a client, in the order of the clients, as the "
            f"ledger charges each once, and needs those of clients {quote(clients)}."
        )
    for need, is_private in zip(needs, private, strict=True):
        if not is_private:
            continue
        if not _contents(need.examples) <= _contents(client_data.clients.store[client_data.clients.rows[need.client]]):
            raise UserError(
                f"sharing stage {stage} must train client {need.client}'s private generator on examples of its own, "
                "each at most once, as its receipt speaks of no others."
            )


def _contents(examples: Examples) -> Counter[bytes]:
    pairs = zip(examples.x.numpy(), examples.y.numpy(), strict=True)
    return Counter(x.tobytes() + y.tobytes() for x, y in pairs)
