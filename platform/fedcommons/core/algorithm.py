"""Interface of federated algorithms: four functions over plain data, and the three kinds of data that never mix.

A *message* travels between server and client, and its bytes are counted. *Memory* stays with the client and is never
counted. *State* stays on the server, and ``state["model"]`` is the server model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import Head, batch_norm_parameters
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.weighting import total_weight
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.examples import Examples
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, nbytes
from fedcommons.privacy.release import Release

State = Payload
"""State that the server stores from round to round.

``state["model"]`` is the server model. It is evaluated in every round, and so is any other ``state["model/NAME"]``.
A method with personal models of the clients (``Personal``) may have no server model.
"""


@dataclass(eq=False)
class Counts:
    """Class counts of all clients, (N, classes), computed when the object is called.

    Every client sends its counts for a call, so ``nbytes`` stores the bytes of that traffic; 0: never called.
    """

    compute: Callable[[], Tensor]
    nbytes: int = 0

    def __call__(self) -> Tensor:
        counts = self.compute()
        self.nbytes = counts.nbytes
        return counts


@dataclass(frozen=True)
class Facts:
    """Public facts of a federation, and the clients' class counts, which are not public.

    arrival: per client, the probability that it takes part in a round and its whole reply arrives; None if no closed
    form is known. counts: returns the number of examples per class and client, (N, classes). If a method or a straggler
    rule calls ``counts`` in a run, every client sends its counts: the bytes are counted, and the privacy ledger lists
    the counts once, as uncovered. shape: of an example. n_classes: number of classes; None if labels are no classes.
    head, batch_norm: names of the parameters of the module's ``head`` and of its BatchNorm layers, in the model's
    order; empty if the module has none. pool: number of examples in the server's pool of synthetic images; 0 without a
    pool and before it is created. ``start`` copies the facts that ``down`` and ``merge`` need into the state.
    """

    n_clients: int
    sizes: Sequence[float]  # per client: number of examples, or sum of the examples' weights
    rounds: int
    weighting: str = "uniform"  # rule for the weights of clients in averages
    arrival: Sequence[float] | None = None
    counts: Callable[[], Tensor] | None = None
    shape: tuple[int, ...] = ()
    n_classes: int | None = None
    head: tuple[str, ...] = ()
    batch_norm: tuple[str, ...] = ()
    pool: int = 0

    def __post_init__(self) -> None:
        if self.counts is not None and not isinstance(self.counts, Counts):
            object.__setattr__(self, "counts", Counts(self.counts))

    @property
    def counts_nbytes(self) -> int:
        """Bytes of the class counts that clients have sent; 0 if ``counts`` was never called."""
        return self.counts.nbytes if isinstance(self.counts, Counts) else 0

    @property
    def total_weight(self) -> float:
        """Sum of the weights w_i over all N clients, whether they take part or not."""
        return total_weight(self.weighting, self.sizes)


@accepts_old_names(own="individual")
@dataclass(frozen=True)
class Message:
    """A message from the server to one client; ``own`` is for this client alone.

    ``common`` is the same object for all clients of a round, and each worker process receives it once.
    """

    common: Payload
    individual: Payload = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that one client downloads."""
        return nbytes(self.common) + nbytes(self.individual)


@dataclass(frozen=True)
class Reply:
    """A client's reply to the server, its new memory, and its metrics for the experimenter.

    sums, each: a tensor under the same name in both is summed and also visible to the server by client. It travels
        once; its part of the sum is the tensor in ``each`` times ``weight``.
    metrics: measurements of the client for the experimenter. They are no message: they cost no bytes, have no epsilon,
        and reach neither ``merge`` nor a client.
    releases: protection of the tensors, by name. A tensor that no release names counts as unprotected (uncovered). A
        release may name a tensor computed from memory only if the memory was computed from protected results.
    """

    sums: Payload = field(default_factory=dict)  # the engine adds them over clients: ``total`` in merge
    each: Payload = field(default_factory=dict)  # travel separately: in merge's ``replies``
    _: KW_ONLY
    weight: float = 1.0  # the client's weight in averages; ``sums`` are already multiplied by it
    memory: Payload | None = None  # replaces the client's memory; None leaves the memory unchanged
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)  # for the experimenter only
    releases: Sequence[Release] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the client uploads."""
        if self.each and (both := self.sums.keys() & self.each.keys()):
            return nbytes(self.sums) + nbytes({name: x for name, x in self.each.items() if name not in both})
        return nbytes(self.sums) + nbytes(self.each)


Replies = Mapping[int, Reply]
"""Replies of a round by client, in client order, without sums, memory and metrics."""


class Algorithm(Protocol):
    """A federated algorithm: a frozen dataclass of its constants with these functions, which change no argument.

    A constant is ``mu: Annotated[float, "[0, inf)"] = 0.01``: type, range, default, and a line of help below it.
    ``start`` raises an error for a model or data that the algorithm is not defined for.

    Optional protocols: ``ChoosesClients``, ``Shares``, ``Personal``, ``TellsWork``. Optional attributes:
    ``trains_locally``, ``sees_statistics``, ``keeps_batch_norm``, ``refuses_batch_norm``, ``takes_partial``,
    ``needs_pool``, ``waits_for``, ``needs`` (see ``needed``), and

    ``watches_head = True``: the algorithm takes embeddings at the module's ``head`` (see ``features.Head``).
    ``needs_classes = True``: the algorithm works per class; labels that are no classes are refused.
    ``distils = True``: the server creates images and distils logits.
    ``trains_images = True``: the server trains images by the model's logits; unsuitable examples and models are
    refused.
    ``check(fields)``: raises ``UserError`` if the algorithm is not defined for an experiment's fields.
    """

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        """Return the server's state before round 1."""
        ...

    def down(self, state: State, round: int, client: int) -> Message:
        """Return the message that ``client`` downloads in ``round``."""
        ...

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Run one client's round in a worker process; ``memory`` is empty when the client first takes part."""
        ...

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        """Return the server's next state.

        total: float64 sums of ``Reply.sums`` over the clients. replies: the clients' replies without sums, memory and
        metrics; metrics are for the experimenter, and clients send what the server needs. An algorithm that trains on
        the server runs the training as one job of ``executor``.
        """
        ...


@runtime_checkable
class ChoosesClients(Protocol):
    """An algorithm that chooses a round's clients itself."""

    def participants(self, state: State, round: int) -> Sequence[int]:
        """Return the clients of ``round``, each once, in any order. Without clients, only ``merge`` is called."""
        ...


@runtime_checkable
class Personal(Protocol):
    """An algorithm with a personal model per client, which ``evaluate.clients`` evaluates."""

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        """Return the client's personal model after a round: ``model``, a ``Flat`` of all weights, maybe ``buffers``.

        state: the server's state. memory: the client's memory, empty if the client has not taken part yet. message: the
        message that the client would download in the next round. Without ``buffers`` (BatchNorm's statistics), the
        client uses the statistics that ``federation.buffers`` prescribes. Nothing travels: the result is for the
        experimenter.
        """
        ...


BUFFERS = "buffers"
"""Name of BatchNorm's statistics in replies. The engine averages them; algorithms do not see them by default.

An algorithm with the attribute ``sees_statistics = True`` gets client i's statistics in ``replies[i].each[BUFFERS]``.
With ``federation.buffers`` keep, the statistics stay with the clients. A model without BatchNorm has no statistics.
"""


def sees_statistics(algorithm: Algorithm) -> bool:
    """Return whether the algorithm requests every client's BatchNorm statistics."""
    return getattr(algorithm, "sees_statistics", False) is True


def keeps_batch_norm(algorithm: Algorithm) -> bool:
    """Return whether BatchNorm layers stay with the clients (attribute ``keeps_batch_norm = True``).

    Such a method needs a model with BatchNorm and ``federation.buffers`` keep; otherwise it is refused.
    """
    return getattr(algorithm, "keeps_batch_norm", False) is True


def refuses_batch_norm(algorithm: Algorithm) -> bool:
    """Return whether the algorithm refuses a model with BatchNorm (attribute ``refuses_batch_norm = True``)."""
    return getattr(algorithm, "refuses_batch_norm", False) is True


def takes_partial(algorithm: Algorithm) -> bool:
    """Return whether the algorithm accepts partial work of stragglers (attribute ``takes_partial = True``).

    Without this attribute, stragglers are dropped.
    """
    return getattr(algorithm, "takes_partial", False) is True


def needs_pool(algorithm: Algorithm) -> bool:
    """Return whether the server trains on a pool of synthetic images (attribute ``needs_pool = True``).

    Such a method is refused with a sharing strategy that leaves the server without a pool.
    """
    return getattr(algorithm, "needs_pool", False) is True


def needed(algorithm: Algorithm) -> Mapping[str, str]:
    """Return ``needs``: attributes required of the clients' module in addition to Lightning's, with their meaning."""
    return getattr(algorithm, "needs", {})


def require_attributes(algorithm: Algorithm, module: nn.Module) -> None:
    """Check that the module has what the algorithm needs.

    Raises:
        UserError: an attribute, BatchNorm or a usable ``head`` is missing, or the module has refused BatchNorm layers.
    """
    for name, what in needed(algorithm).items():
        if not hasattr(module, name):
            raise UserError(
                f"{type(algorithm).__name__} needs a model with an attribute {name}, and {type(module).__name__} has "
                f"none: {what}. model.name vae has it; a LightningModule of your own can."
            )
    if keeps_batch_norm(algorithm) and not batch_norm_parameters(module):
        raise UserError(
            f"{type(algorithm).__name__} needs a model with BatchNorm, as --model.batch_norm true of cnn has."
        )
    if refuses_batch_norm(algorithm) and batch_norm_parameters(module):
        raise UserError(
            f"{type(algorithm).__name__} is not defined for a model with BatchNorm, whose statistics come from clients."
        )
    if getattr(algorithm, "watches_head", False):
        try:
            Head(module)
        except ValueError as error:
            raise UserError(f"{type(algorithm).__name__} takes embeddings at the model's head: {error}.") from None


@dataclass(frozen=True)
class Common:
    """Data that all clients have in common after an exchange before round 1.

    examples: become each client's ``ClientData.commons``. nbytes: traffic of the exchange over all clients; None: every
    example is uploaded once and downloaded by the N - 1 other clients. releases: privacy ledger entries of the
    exchange; clients without an entry count as uncovered.
    """

    examples: Examples
    nbytes: int | None = None
    releases: Sequence[Release] = ()


@runtime_checkable
class Shares(Protocol):
    """An algorithm whose clients share something once, before round 1."""

    def share(self, clients: Clients, n_classes: int | None, seed: int) -> Common:
        """Return the shared data, computed from the clients' training data; every random draw is keyed by ``seed``.

        n_classes: number of classes; None if labels are no classes, which ``needs_classes = True`` excludes.
        """
        ...


def trains_locally(algorithm: Algorithm) -> bool:
    """Return whether the clients take local steps by ``work.local`` (not with ``trains_locally = False``).

    Without local steps, ``--dry-run`` counts no steps of clients, and fields of local steps are refused. If the
    algorithm has ``needs_pool``, the fields describe the server's steps.
    """
    return getattr(algorithm, "trains_locally", True) is not False


@runtime_checkable
class TellsWork(Protocol):
    """An algorithm with work outside its clients' local steps, whose amount it reports to ``--dry-run``.

    A round takes  c + sum_k n_k s_k  seconds:  n_k pieces of kind k (``pieces``), of s_k seconds each, and c for local
    steps and everything else. ``--dry-run`` estimates s_k from short rounds of variants with different n_k
    (``smaller``). Example of a server that trains in ``merge``:

        def pieces(self, facts, loop, round, clients):
            return {"server_steps": self.epochs * 8}

        def smaller(self, times):
            return [(replace(self, epochs=epochs), 1) for epochs in (1, 1 + times)]
    """

    def pieces(self, facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int]) -> Mapping[str, float]:
        """Return the number of pieces of work by kind in a round in which ``clients`` reply.

        The algorithm chooses the names of the kinds. loop: how clients train locally; ``--dry-run`` already counts
        local steps, unless ``trains_locally`` is False.
        """
        ...

    def smaller(self, times: int) -> "Sequence[tuple[Algorithm, int]]":
        """Return variants of the algorithm to time, each with the number of examples of the single client.

        Each variant is timed in a round of one client, whose examples may have any classes. The first variant has the
        least possible work. There is at least one variant more than kinds; to measure a kind, a variant has ``times``
        more pieces of this kind. Runs with equal variants share the measured times, so variants use the default of
        every constant that does not change the time.
        """
        ...
