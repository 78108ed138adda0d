"""The interface of sharing strategies (class ``Stage``), which decide the clients' training data in three steps.

make      each client contributes real examples, or synthetic examples generated from its real examples
release   the strategy releases, withholds or privatises the contributions; a ``Release`` (privacy ledger entry) records
          the data that leave a client
assign    the strategy assigns examples (rows of one store) to clients, with weights if examples do not count equally

The client that contributed an example stays recorded as the example's owner. A strategy is a frozen dataclass of its
constants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.functional import one_hot

from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import UserError, name_of, quote, user_code_context
from fedcommons.generators.generator import Receipt
from fedcommons.generators.requests import Contribution, GenerationRequest, GeneratorRecipe
from fedcommons.privacy.release import Release
from fedcommons.seeding import numpy_generator


@accepts_old_names(seen="n_sources", of_own="from_real_rows", of_made="from_generated", of_each="rows_by_client")
@dataclass(frozen=True, eq=False)
class Contributions:
    """The examples that the clients contribute to sharing: m rows of a store.

    store: all examples; the first rows are the clients' real data.
    rows: (m,) int64 row numbers of the contributed examples. owners: (m,) client that contributed each of these rows.
    receipts: client -> privacy protection of its synthetic examples (``Receipt``); None: no protection.
    n_sources: client -> number of its real examples that it contributes or from which its synthetic examples come.
    of_labels: client -> privacy protection of its class counts, from which labels are drawn.
    soft: soft labels, the probabilities of the classes of each synthetic example, float (number of synthetic examples,
        classes), in the order of the store; the labels in the store are then not used. None: the labels are classes.
    """

    store: Examples
    rows: np.ndarray
    owners: np.ndarray
    receipts: Mapping[int, Receipt | None]
    n_sources: Mapping[int, int]
    _: KW_ONLY
    of_labels: Mapping[int, Receipt | None] = field(default_factory=dict)
    soft: torch.Tensor | None = None

    @staticmethod
    def none(client_data: ClientDatasets) -> "Contributions":
        """Return empty contributions, for a strategy in which no client contributes an example."""
        return Contributions(client_data.clients.store, np.zeros(0, np.int64), np.zeros(0, np.int64), {}, {})

    @staticmethod
    def from_real_rows(client_data: ClientDatasets, rows_of_each: Sequence[np.ndarray]) -> "Contributions":
        """Return contributions in which client i contributes the real examples with row numbers ``rows_of_each[i]``."""
        sizes = [len(rows) for rows in rows_of_each]
        owners, rows = np.repeat(np.arange(len(sizes)), sizes), np.concatenate(rows_of_each)
        return Contributions(client_data.clients.store, rows, owners, {}, dict(enumerate(sizes)))

    @staticmethod
    def from_generated(client_data: ClientDatasets, generated: Sequence[Contribution]) -> "Contributions":
        """Return contributions in which client i contributes the synthetic examples ``generated[i]``.

        The store of the result has the real examples first, then the synthetic examples. Labels (n, classes) of floats
        are soft labels; if any client has soft labels, classes of other clients become one-hot vectors.

        Raises:
            ValueError: synthetic examples have another type or shape than the real examples.
        """
        real, new = client_data.clients.store, [contribution.examples for contribution in generated]
        for examples in new:
            if (examples.x.dtype, examples.x.shape[1:]) != (real.x.dtype, real.x.shape[1:]):
                kind = f"{examples.x.dtype} {tuple(examples.x.shape[1:])}"
                raise ValueError(f"contributions must be {real.x.dtype} {client_data.shape} like real data, not {kind}")
        labels, soft = [e.y for e in new], None
        if (classes := client_data.n_classes) is not None and any(y.is_floating_point() for y in labels):
            soft = torch.cat([y if y.is_floating_point() else one_hot(y, classes).float() for y in labels])
            labels = [y.argmax(1) if y.is_floating_point() else y for y in labels]
        store = Examples(torch.cat([real.x, *(e.x for e in new)]), torch.cat([real.y, *labels]))
        owners = np.repeat(np.arange(len(new)), [len(e) for e in new])
        receipts = {client: contribution.receipt for client, contribution in enumerate(generated)}
        seen = {client: contribution.n_sources for client, contribution in enumerate(generated)}
        of_labels = {client: contribution.of_labels for client, contribution in enumerate(generated)}
        rows = np.arange(len(real), len(store))
        return Contributions(store, rows, owners, receipts, seen, of_labels=of_labels, soft=soft)

    def rows_by_client(self, n_clients: int) -> list[np.ndarray]:
        """Return one vector per client with the row numbers of the examples that it contributes."""
        return [self.rows[self.owners == client] for client in range(n_clients)]

    def shuffled(self, n_clients: int, seed: int) -> list[np.ndarray]:
        """Permute all rows once. Return a vector of row numbers per client, with the length of its contribution."""
        sizes = np.bincount(self.owners, minlength=n_clients)
        return np.split(numpy_generator(seed, "pool").permutation(self.rows), np.cumsum(sizes)[:-1])

    def releases(self, *what: str) -> list[Release]:
        """Return a privacy ledger entry (release) per contributing client, with the protection that its receipt states.

        The class counts are a separate entry. ``what``: names of the data that leave a client ("synthetic images").
        """
        events = []
        for client in np.unique(self.owners).tolist():
            receipt, of_labels = self.receipts.get(client) or Receipt(), self.of_labels.get(client)
            events.append(receipt.release(client, *what, seen=self.n_sources.get(client, 0)))
            if of_labels:
                events.append(of_labels.release(client, *CLASS_COUNTS))
        return events


WithReleases = tuple[Contributions, Sequence[Release]]
"""The contributions that leave the clients, and the privacy ledger entries (releases) that state their protection."""

CLASS_COUNTS = ("class counts",)
"""Name of the privacy ledger entry of the class counts from which labels are drawn."""


@accepts_old_names(kept="own_rows", once="nbytes")
@dataclass(frozen=True, eq=False)
class Assigned:
    """The examples on which each client trains, as row numbers in the contributions' store: one vector per client.

    own_rows: real rows that the client keeps. received: rows that it gets by sharing; () if no client gets any.
    weights: weights in the loss of ``own_rows``, then of ``received``; None if all are 1 (see ``ClientData``).
    n_own: for each client, the number of its own rows. A client that also has shared rows trains fewer epochs, in
        proportion to own rows / all rows (``LocalSGD.epochs_for``). None: the sum of the client's weights is used.
    pool: all contributed rows, in the parts that were sent to clients; () if there is no pool of shared examples.
    nbytes: bytes sent up and down, summed over clients; None: bytes of the examples and labels sent (``disclosure``).
    notes: messages to the user. views: party that sees noisy data -> privacy parameter mu, sensitivity / noise.
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


class Stage(Protocol):
    """A sharing strategy: a frozen dataclass of constants.

    Functions do not change their arguments and seed random draws by ``client_data.seed``. Six functions are optional.
    requests, shorter, salts and beforehand are described in ``Generating``, ``TakesLong``, ``Salted``, ``Forewarning``.
    check(fields) raises ``UserError`` if the experiment's fields (dotted names to values) do not fit the strategy.
    check_data(client_data) raises ``UserError`` if the strategy is not defined for the clients' data.

    ``capabilities = Capabilities(serves_pool=True)``: the server holds the pool of shared examples and may train on it.
    """

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Return the clients' contributions; ``generated``: one result per generation request (``Generating``)."""
        ...

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return the contributions that leave the clients, and the privacy ledger entries that state their protection.

        If a client contributes synthetic examples without an entry, the ledger counts them as unprotected. Real rows
        that are contributed, pooled or assigned to another client always count as unprotected.
        """
        ...

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Return each client's training examples: rows of the store of the released contributions."""
        ...


@runtime_checkable
class Generating(Protocol):
    """A sharing strategy that needs synthetic images; generators are trained before a sweep, once for all trials."""

    def requests(self, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        """Return the generation requests to run before ``make``: one per client, in the order of the clients."""
        ...


@runtime_checkable
class Salted(Protocol):
    """A sharing strategy that draws noise itself, without a generator."""

    def salts(self, client_data: ClientDatasets) -> Sequence[bytes]:
        """Return the salts (secret random bytes, see ``privacy.salts``) of all noise, for runs with secret noise."""
        ...


@runtime_checkable
class Forewarning(Protocol):
    """A sharing strategy that reports messages before ``make`` runs, because ``make`` may take long."""

    def beforehand(self, client_data: ClientDatasets) -> Sequence[str]:
        """Return messages to the user. They may depend on public numbers only, not on any client's examples."""
        ...


@runtime_checkable
class TakesLong(Protocol):
    """A sharing strategy whose ``make`` takes long; ``--dry-run`` runs a variant with fewer steps instead."""

    def shorter(self) -> tuple[Stage, float]:
        """Return a variant with less work but equal contribution sizes, and how many times slower ``self`` is."""
        ...


def shorter_of(stage: Stage) -> tuple[Stage, float]:
    """Return the strategy to run in a dry run, and the factor by which ``stage`` is slower than this strategy.

    If ``stage`` has no function ``shorter``, return ``stage`` and factor 1.

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
    what = f"a {type(stage).__name__} with less work and a factor above 0, by which this one takes longer"
    raise UserError(f"{name_of(stage)}.shorter must return {what}, got {quote(result)}.")
