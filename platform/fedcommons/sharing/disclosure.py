"""Checks of the examples that leave the clients through a sharing strategy, independent of the strategy's declarations.

A real example (row of the store) leaves its owner if it is contributed, is in the pool, or is held by another client.
The privacy ledger counts such an example as raw (without a guarantee), even if a generator states a guarantee
(receipt). The client from which a synthetic row comes cannot be checked, so the strategy's statement is used.

Arguments of several functions: ``stage`` is the strategy's name for messages, ``store`` the examples that the
strategy uses (the real ones first), and ``owners`` the client from which each row of the store comes, -1 if unknown.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.core.communication import images_nbytes
from fedcommons.core.worker import RunData
from fedcommons.data.clients import digests
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError, quote
from fedcommons.generators.requests import Contribution, GenerationRequest
from fedcommons.privacy.release import Release

RAW = "raw examples"
"""Name in the privacy ledger of real examples that left a client unchanged."""


def require_unchanged(stage: str, client_data: ClientDatasets, store: Examples) -> None:
    """Check that the clients' real data are unchanged, and are the first rows of a strategy's ``store``.

    Raises:
        UserError: the real data changed, or ``store`` does not begin with the real data.
    """
    if client_data.now != client_data.before:
        raise UserError(
            f"sharing stage {stage} must not change the clients' real examples or rows, but it (or a component that "
            "ran before it) did: contribute changed copies instead."
        )
    real = client_data.clients.store
    if store is not real and store[slice(0, len(real))].digest != real.digest:
        raise UserError(
            f"sharing stage {stage} must give a store that begins with the clients' {len(real):,} unchanged real "
            "examples, but it does not: see Contributions.from_generated."
        )


def owners_of(stage: str, client_data: ClientDatasets, store: Examples, rows: np.ndarray, owners: Any) -> np.ndarray:
    """Return for each row of the store the client from which it comes (its owner); -1 if unknown.

    rows: (m,) contributed rows. owners: (m,) clients that the strategy states as owners of ``rows``. They are used for
    synthetic rows only. The owner of a real row follows from the partition.

    Raises:
        UserError: a stated owner is not a client, or the numbers of ``rows`` and ``owners`` differ.
    """
    stated = numbers(stage, "owners", owners, len(client_data.clients))
    if len(rows) != len(stated):
        raise UserError(f"sharing stage {stage} must give one owner per row, got {len(stated):,} for {len(rows):,}.")
    result = np.full(len(store), -1)
    result[rows] = stated
    result[: len(client_data.clients.store)] = -1
    real_rows = client_data.clients.rows
    result[real_rows.flat.numpy()] = np.repeat(np.arange(len(real_rows)), real_rows.sizes)
    return result


def numbers(stage: str, what: str, vector: Any, n: int) -> np.ndarray:
    """Return ``vector`` as (m,) int64, after a check that it contains integers in 0 ... n - 1.

    ``what``: name of the vector for messages. An empty vector may be of any type.

    Raises:
        UserError: a number is not an integer, or is not in 0 ... n - 1.
    """
    values = np.asarray(vector)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise UserError(f"sharing stage {stage} must give {what} as a vector of whole numbers, got {quote(vector)}.")
    if len(values) and not 0 <= values.min() <= values.max() < n:
        raise UserError(f"sharing stage {stage} gives {what} outside of 0 ... {n - 1}.")
    return values.astype(np.int64)


def own_counts(stage: str, n_own: Any, n_clients: int) -> np.ndarray | None:
    """Return ``Assigned.n_own``, the number of rows that count as a client's own, as a vector (n_clients,), or None.

    Raises:
        UserError: ``n_own`` is neither None nor one number of at least 0 for each client.
    """
    values = np.asarray(n_own)
    if n_own is not None and not (values.shape == (n_clients,) and values.dtype.kind in "iuf" and (values >= 0).all()):
        what = f"n_own as a number of 0 or more for each of {n_clients} clients"
        raise UserError(f"sharing stage {stage} must give {what}, got {quote(n_own)}.")
    return None if n_own is None else values


def sent(
    kept_rows: Sequence[np.ndarray],
    received: Sequence[np.ndarray],
    contributed: np.ndarray,
    pool: Sequence[np.ndarray],
    owners: np.ndarray,
    n_real: int,
) -> np.ndarray:
    """Return the row of each example that a strategy sends up to the server or down to a client, once per sending.

    A row is sent up once if at least one of these conditions holds:
    - it is in the pool of shared examples
    - a client other than its owner holds it
    - it is a real row that a client contributes
    - a client contributes it and no client holds it
    A row is sent down to each client that holds it and is not its owner. A row of the pool is also sent down to its
    owner if the owner receives it.

    Args:
        kept_rows: real rows that each client keeps; () if all clients keep their own rows.
        received: rows that each client gets by sharing; () if no client gets any.
        contributed: rows that clients contribute.
        pool: rows of the pool of shared examples, in the parts that were sent to clients.
        owners: client from which each row of the store comes; -1: unknown.
        n_real: number of real examples, which are the first rows of the store.
    """
    (keepers, own_rows), (receivers, new), (_, pooled) = (_pairs(part) for part in (kept_rows, received, pool))
    holders, rows = np.concatenate([keepers, receivers]), np.concatenate([own_rows, new])
    is_down = owners[rows] != holders
    is_down[len(own_rows) :] |= np.isin(new, pooled)
    at_server = contributed[(contributed < n_real) | ~np.isin(contributed, rows)]
    up, down = np.concatenate([rows[is_down], pooled, at_server]), holders[is_down] * len(owners) + rows[is_down]
    up = np.unique(up)
    return np.concatenate([up[owners[up] >= 0], np.unique(down) % len(owners)])


def nbytes(stage: str, client_data: ClientDatasets, stated: Any, sent: np.ndarray, soft: Tensor | None) -> int:
    """Return the number of bytes of the exchange, summed over clients.

    stated: number of bytes that the strategy states; None: the bytes of the examples in the rows ``sent`` and of their
    labels. soft: labels of the synthetic rows, if these labels are probabilities (see ``Contributions``).

    Raises:
        UserError: ``stated`` is neither None nor a number of bytes.
    """
    if stated is None:
        label, n_soft = client_data.label_nbytes, int((sent >= len(client_data.clients.store)).sum())
        more = 0 if soft is None else n_soft * (soft.shape[1] * soft.element_size() - label)
        return more + images_nbytes(len(sent), client_data.shape, client_data.itemsize, label)
    if isinstance(stated, int | np.integer) and stated >= 0:
        return int(stated)
    raise UserError(f"sharing stage {stage} must give nbytes as a whole number of bytes or None, got {quote(stated)}.")


def _pairs(of_clients: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return two vectors (clients, rows) with one entry for each row of each client."""
    none, sizes = np.zeros(0, np.int64), np.array([len(rows) for rows in of_clients], np.int64)
    return np.repeat(np.arange(len(sizes)), sizes), np.concatenate([none, *of_clients])


def copied(store: Examples, n_real: int, rows: np.ndarray) -> np.ndarray:
    """Return the real rows of which a synthetic row in ``rows`` is a bit-for-bit copy.

    Two kinds of real examples are ignored, because a synthetic example may equal them by chance: examples that occur
    several times in the real data, and examples whose values are all the same. n_real: number of real examples.
    """
    synthetic = rows[rows >= n_real]
    if not len(synthetic):
        return synthetic
    return copied_rows(store.x[:n_real], store.x[torch.from_numpy(synthetic)])


def copied_rows(real: Tensor, synthetic: Tensor) -> np.ndarray:
    """Return the numbers of those rows of ``real`` that equal a row of ``synthetic`` bit for bit; see ``copied``."""
    of_real, of_synthetic = digests(real), set(digests(synthetic))
    times = Counter(of_real)
    met = [row for row, content in enumerate(of_real) if content in of_synthetic and times[content] == 1]
    return np.array([row for row in met if (real[row] != real[row].reshape(-1)[0]).any()], np.int64)


def require_known(stage: str, client_data: ClientDatasets, rows: np.ndarray, owners: np.ndarray) -> None:
    """Check that every synthetic row in ``rows`` has a known owner, the client from whose data it was computed.

    Raises:
        UserError: some synthetic rows have no known owner.
    """
    unknown = np.unique(rows[(rows >= len(client_data.clients.store)) & (owners[rows] < 0)])
    if len(unknown):
        raise UserError(
            f"sharing stage {stage} assigns {len(unknown):,} synthetic rows that no client contributed (such as row "
            f"{unknown[0]}): list them as contributions of the client from whose data they were computed."
        )


def events(what: str, releases: Iterable[Any], n_clients: int) -> list[Release]:
    """Check declared privacy ledger entries and return them as a list; ``what``: name of the declaring component.

    An entry with client -1 belongs to no client. It must be unprotected and disclose no example.

    Raises:
        UserError: an entry is not a ``Release``, has invalid names or numbers, or names a client that does not exist.
    """
    declared = list(releases)
    for event in declared:
        if type(event) is not Release:
            raise UserError(f"{what} must declare the data that leave a client as Release, got {quote(event)}.")
        if not (isinstance(event.what, tuple) and all(isinstance(name, str) for name in event.what)):
            raise UserError(f"{what} must state Release.what as a tuple of names, got {quote(event.what)}.")
        client, n = event.client, event.n_disclosed
        if not (isinstance(n, Integral) and n >= 0):
            raise UserError(f"{what} must give Release.n_disclosed as a whole number of at least 0, got {quote(n)}.")
        names_no_client = client == -1 and not event.covered and not n
        if not names_no_client and not (isinstance(client, Integral) and 0 <= client < n_clients):
            clients = f"clients are 0 ... {n_clients - 1}"
            raise UserError(f"{what} declares a release of client {quote(client)}, but {clients}.")
    return declared


def with_undeclared(releases: Sequence[Release], givers: Iterable[int], sizes: Sequence[int]) -> list[Release]:
    """Return ``releases``, plus an unprotected entry for each client in ``givers`` that has no entry.

    The entry states that all ``sizes[client]`` examples were disclosed. givers: clients that share synthetic examples.
    """
    silent = sorted(set(givers) - {release.client for release in releases})
    return [*releases, *(Release(client, ("undeclared",), n_disclosed=sizes[client]) for client in silent)]


def with_raw(releases: Sequence[Release], rows: np.ndarray, n_clients: int) -> list[Release]:
    """Return ``releases``, plus one unprotected entry per client that disclosed more real examples than it declared.

    rows: owner of each real example that left its client, with one entry per example.
    """
    declared = np.zeros(n_clients, np.int64)
    for event in releases:
        if not event.covered and event.client >= 0:
            declared[event.client] = max(declared[event.client], event.n_disclosed)
    counts = np.bincount(rows, minlength=n_clients)
    more = np.flatnonzero(counts > declared).tolist()
    return [*releases, *(Release(i, (RAW,), n_disclosed=int(counts[i])) for i in more)]


def require_once(stage: object, data: RunData) -> None:
    """Check that no client's training data contain a real example twice.

    DP-SGD bounds the effect of each listed row on a step, and a noisy mean bounds each row's contribution. So an
    example that is listed k times may have k times the effect. Weights of examples do no harm, because the gradient of
    a weighted loss is clipped too.

    Raises:
        UserError: a client's training data contain a real example more than once.
    """
    if data.clients is data.real:
        return
    rows, own_rows = data.clients.rows, data.real.rows
    listed_rows, store = rows.flat.numpy(), int(max(rows.flat.max(), own_rows.flat.max())) + 1
    places = np.repeat(np.arange(len(rows)), rows.sizes) * store + listed_rows
    listed, times = np.unique(places[np.isin(listed_rows, own_rows.flat.numpy())], return_counts=True)
    if (times > 1).any():
        client = listed[times > 1][0] // store
        uses = times[listed // store == client]
        raise UserError(
            f"sharing stage {type(stage).__name__} must list no real row twice if training or sharing is private, but "
            f"it lists {int((uses > 1).sum()):,} rows of client {client} up to {uses.max()} times: each repetition "
            "reveals more of the example."
        )


def require_own(
    stage: object, client_data: ClientDatasets, needs: Sequence[GenerationRequest], generated: Sequence[Contribution]
) -> None:
    """Check that private generators are trained only on their own client's examples, and once on each example.

    The privacy ledger charges the guarantee of a generator (its receipt) to one client. So the privacy loss of another
    client's example would not be recorded, and an example that occurs k times may have k times the effect.
    needs: generation requests with the generators' training examples. generated: one result per request.

    Raises:
        UserError: a private generator is trained on other examples, or on an example more than once.
    """
    name, clients = type(stage).__name__, [need.client for need in needs]
    private = [any(r and r.release(0).covered for r in (draw.receipt, draw.of_labels)) for draw in generated]
    if any(private) and clients != list(range(len(client_data.clients))):
        raise UserError(
            f"sharing stage {name} must request one private generator per client, in the order of the clients, as the "
            f"ledger charges each client once, but it requests generators of the clients {quote(clients)}."
        )
    store, rows = client_data.clients.store, client_data.clients.rows
    for need, is_private in zip(needs, private, strict=True):
        if is_private and not _contents(need.examples) <= _contents(store[rows[need.client]]):
            raise UserError(
                f"sharing stage {name} must train client {need.client}'s private generator only on this client's own "
                "examples, each at most once, as the privacy guarantee covers no other use."
            )


def _contents(examples: Examples) -> Counter[bytes]:
    pairs = zip(examples.x.numpy(), examples.y.numpy(), strict=True)
    return Counter(x.tobytes() + y.tobytes() for x, y in pairs)
