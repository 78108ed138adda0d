"""What leaves the clients through a sharing stage, seen in the rows that it gives out and not in what it declares.

A real row leaves its owner as a contribution, in the pool, or where another client holds it. No generator's receipt is
about it: it counts as raw, whatever was declared. What a row was made from cannot be seen, and is taken from the stage.
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
from fedcommons.data.federated import Dealt
from fedcommons.errors import UserError, shown
from fedcommons.generators.requests import Need
from fedcommons.privacy.release import Release

RAW = "raw examples"
"""The ledger's name of real examples that left a client as they are."""


def require_unchanged(stage: str, dealt: Dealt, store: Examples) -> None:
    """See that the clients' real data are what was dealt, in place and as the first rows of a stage's ``store``.

    Raises:
        UserError: they are not.
    """
    if dealt.now != dealt.before:
        raise UserError(
            f"sharing stage {stage} must not change the clients' real examples or rows, and it did, or a part that ran "
            "before it in this process: contribute changed copies instead."
        )
    real = dealt.own.store
    if store is not real and store[slice(0, len(real))].digest != real.digest:
        raise UserError(
            f"sharing stage {stage} must give a store that begins with the clients' {len(real):,} real examples as "
            "they are, and it does not: see Contributions.of_made."
        )


def owners_of(stage: str, dealt: Dealt, store: Examples, rows: np.ndarray, owners: Any) -> np.ndarray:
    """The client that each row of the store came from, -1 where none is known.

    rows: the contributed ones; owners: of these. A real row's owner is the client that it was dealt to, whatever is
    stated.

    Raises:
        UserError: owners do not exist, or are not as many as rows.
    """
    stated = numbers(stage, "owners", owners, len(dealt.own))
    if len(rows) != len(stated):
        raise UserError(
            f"sharing stage {stage} gives {len(rows):,} contributed rows and {len(stated):,} owners of them."
        )
    found = np.full(len(store), -1)
    found[rows] = stated
    found[: len(dealt.own.store)] = -1
    own = dealt.own.rows
    found[own.flat.numpy()] = np.repeat(np.arange(len(own)), own.sizes)
    return found


def numbers(stage: str, what: str, given: Any, n: int) -> np.ndarray:
    """Numbers of rows or clients as (m,) int64, checked; an empty vector may be of any type.

    Raises:
        UserError: one is no whole number, or is not in 0 ... n - 1.
    """
    values = np.asarray(given)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise UserError(f"sharing stage {stage} must give {what} as a vector of whole numbers, got {shown(given)}.")
    if len(values) and not 0 <= values.min() <= values.max() < n:
        raise UserError(f"sharing stage {stage} gives {what} outside of 0 ... {n - 1}.")
    return values.astype(np.int64)


def sent(
    kept: Sequence[np.ndarray],
    received: Sequence[np.ndarray],
    contributed: np.ndarray,
    pool: Sequence[np.ndarray],
    owners: np.ndarray,
    n_real: int,
) -> int:
    """Count the examples of a stage's exchange: up to the server and down to the clients.

    A row goes up once where it is in the pool, where a client holds it that does not own it, or where it was
    contributed and is real, or held by no client. It comes down to each other client that receives it, and out of a
    pool, which is dealt to all, to its owner too. A made row that only its owner holds travels nowhere.

    Args:
        kept, received: rows of each client (see ``Assigned``), () where each keeps its own, or none receives any.
        contributed: rows that clients contribute.
        pool: rows of the pool, in parts.
        owners: of each row of the store, -1 where no client owns it.
        n_real: rows of the store that are real examples, the first ones.
    """
    (keepers, own), (receivers, new) = _pairs(kept), _pairs(received)
    _, pooled = _pairs(pool)
    foreign, down = owners[own] != keepers, (owners[new] != receivers) | np.isin(new, pooled)
    given = np.concatenate([own[foreign], new[down], pooled])
    at_server = contributed[(contributed < n_real) | ~np.isin(contributed, np.concatenate([own, new]))]
    places = np.concatenate([keepers[foreign], receivers[down]]) * len(owners)
    once_each = np.unique(places + np.concatenate([own[foreign], new[down]]))
    return int((owners[np.union1d(given, at_server)] >= 0).sum()) + len(once_each)


def nbytes(stage: str, dealt: Dealt, stated: Any, examples: Callable[[], int]) -> int:
    """Return the bytes of the exchange: those that the stage states, or of as many examples as are counted.

    Raises:
        UserError: it states no number of bytes.
    """
    if stated is None:
        return images_nbytes(examples(), dealt.shape, dealt.itemsize, dealt.label_nbytes)
    if isinstance(stated, int | np.integer) and stated >= 0:
        return int(stated)
    raise UserError(f"sharing stage {stage} must give once as a whole number of bytes, or None, got {shown(stated)}.")


def _pairs(of_clients: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(clients, rows): one entry for each row of each client."""
    none, sizes = np.zeros(0, np.int64), np.array([len(rows) for rows in of_clients], np.int64)
    return np.repeat(np.arange(len(sizes)), sizes), np.concatenate([none, *of_clients])


def elsewhere(clients: Clients, owners: np.ndarray) -> np.ndarray:
    """The rows that a client holds of another, or of nobody known, once for each that does."""
    holders, held = np.repeat(np.arange(len(clients)), clients.rows.sizes), clients.rows.flat.numpy()
    return held[owners[held] != holders]


def copied(store: Examples, n_real: int, rows: np.ndarray) -> np.ndarray:
    """Return the real rows that made ones among ``rows`` repeat bit for bit: these were copied, and not made.

    A real example that several rows have, or that is one number everywhere, may be met by chance and does not count.
    """
    made = rows[rows >= n_real]
    if not len(made):
        return made
    of_real, of_made = digests(store.x[:n_real]), set(digests(store.x[torch.from_numpy(made)]))
    times = Counter(of_real)
    met = [row for row, one in enumerate(of_real) if one in of_made and times[one] == 1]
    return np.array([row for row in met if (store.x[row] != store.x[row].reshape(-1)[0]).any()], np.int64)


def require_known(stage: str, dealt: Dealt, given: np.ndarray, owners: np.ndarray) -> None:
    """Refuse made rows of which nobody knows whose data are in them.

    Raises:
        UserError: some rows of ``given`` are.
    """
    unknown = np.unique(given[(given >= len(dealt.own.store)) & (owners[given] < 0)])
    if len(unknown):
        raise UserError(
            f"sharing stage {stage} gives out {len(unknown):,} made rows that no client contributed (such as row "
            f"{unknown[0]}), so nobody knows whose data are in them: make them contributions of their owners."
        )


def events(what: str, releases: Iterable[Any], n_clients: int) -> list[Release]:
    """These events as a list; ``what``: the part that declares them. One without a client may only count names.

    Raises:
        UserError: one is no release, or of a client that does not exist.
    """
    declared = list(releases)
    for event in declared:
        if type(event) is not Release:
            raise UserError(f"{what} must declare what leaves as Release, got {shown(event)}.")
        if not (isinstance(event.what, tuple) and all(isinstance(name, str) for name in event.what)):
            raise UserError(f"{what} must name what leaves as a tuple of names, got {shown(event.what)}.")
        if not (isinstance(event.seen, Integral) and event.seen >= 0):
            raise UserError(f"{what} declares that {shown(event.seen)} examples were seen: it must be a whole number.")
        nobody = event.client == -1 and not event.covered and not event.seen
        if not nobody and not (isinstance(event.client, Integral) and 0 <= event.client < n_clients):
            raise UserError(
                f"{what} declares a release of client {shown(event.client)}, and clients are 0 ... {n_clients - 1}."
            )
    return declared


def with_undeclared(releases: Sequence[Release], givers: Iterable[int], sizes: Sequence[int]) -> list[Release]:
    """These events, and an uncovered one, of all its examples, for every giver without an event."""
    silent = sorted(set(givers) - {release.client for release in releases})
    return [*releases, *(Release(client, ("undeclared",), seen=sizes[client]) for client in silent)]


def with_raw(releases: Sequence[Release], left: np.ndarray, n_clients: int) -> list[Release]:
    """These events, and an uncovered one for every client of which more raw examples left than uncovered events say.

    left: owners of the real rows that left, each row once.
    """
    told = np.zeros(n_clients, np.int64)
    for event in releases:
        if not event.covered and event.client >= 0:
            told[event.client] = max(told[event.client], event.seen)
    counts = np.bincount(left, minlength=n_clients)
    return [*releases, *(Release(i, (RAW,), seen=int(counts[i])) for i in np.flatnonzero(counts > told).tolist())]


def require_once(stage: str, rows: Rows, own: Rows) -> None:
    """Refuse real rows that a client trains on several times; ``own``: the rows as they were dealt.

    DP-SGD bounds what each listed row does to a step, and a noisy mean what it adds, so a row that is listed k times
    may do k times as much. Weights do no harm: the gradient of a weighted loss is clipped all the same.

    Raises:
        UserError: a client does.
    """
    held, store = rows.flat.numpy(), int(max(rows.flat.max(), own.flat.max())) + 1
    places = np.repeat(np.arange(len(rows)), rows.sizes) * store + held
    listed, times = np.unique(places[np.isin(held, own.flat.numpy())], return_counts=True)
    if (times > 1).any():
        client = listed[times > 1][0] // store
        mine = times[listed // store == client]
        raise UserError(
            f"sharing stage {stage} must list no real row twice where something is private, and lists "
            f"{int((mine > 1).sum()):,} rows of client {client} up to {mine.max()} times: each time adds to what an "
            "example reveals."
        )


def require_own(stage: str, dealt: Dealt, needs: Sequence[Need], private: Sequence[bool]) -> None:
    """Refuse generators said to be private whose examples are not their client's own, each at most once.

    A receipt is about the examples that a generator sees, and the ledger charges it to one client: another's example
    would cost that one nothing, and one that is seen k times may do k times as much. private: of each client's.

    Raises:
        UserError: one saw others.
    """
    clients = [need.client for need in needs]
    if any(private) and clients != list(range(len(dealt.own))):
        raise UserError(
            f"sharing stage {stage} must need one private generator a client, in the order of the clients, as the "
            f"ledger charges each once, and needs those of clients {shown(clients)}."
        )
    for need, is_private in zip(needs, private, strict=True):
        if not is_private:
            continue
        if not _contents(need.examples) <= _contents(dealt.own.store[dealt.own.rows[need.client]]):
            raise UserError(
                f"sharing stage {stage} must train client {need.client}'s private generator on examples of its own, "
                "each at most once, as its receipt speaks of no others."
            )


def _contents(examples: Examples) -> Counter[bytes]:
    pairs = zip(examples.x.numpy(), examples.y.numpy(), strict=True)
    return Counter(x.tobytes() + y.tobytes() for x, y in pairs)
