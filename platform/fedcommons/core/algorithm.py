"""What a federated algorithm is: four functions over plain data, and the three kinds of data that never mix.

A *message* crosses the wire and is counted in bytes; *memory* stays with the client and is never counted; *state*
stays on the server, and ``state["model"]`` is the server model.
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
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, nbytes
from fedcommons.privacy.release import Release

State = Payload
"""What the server keeps from round to round.

``state["model"]`` is the server model. It is evaluated in every round, and so is any other ``state["model/NAME"]``.
A method whose clients have models of their own (``Personal``) may have no server model.
"""


@dataclass(eq=False)
class Counts:
    """Class counts of all clients, (N, classes), computed when they are asked for.

    Whoever asks has them sent by every client, so it is kept how many bytes that takes; 0: nobody has asked.
    """

    compute: Callable[[], Tensor]
    nbytes: int = 0

    def __call__(self) -> Tensor:
        counts = self.compute()
        self.nbytes = counts.nbytes
        return counts


@dataclass(frozen=True)
class Facts:
    """Public facts of a federation, and class counts, which are not.

    arrival: per client, the probability that it takes part in a round and its whole reply arrives; None where it is not
    known in closed form. counts: how many examples of each class every client has, (N, classes), computed when it
    is called. Who calls it in a run, a method or a straggler rule, makes every client send its counts: their bytes are
    counted, and the ledger lists them as uncovered, once. shape: of an example; n_classes: of the labels, None where
    these are no classes. head, batch_norm: names of the parameters of the module's ``head`` and of its BatchNorm
    layers, in the model's order; empty where it has none. pool: number of examples in the pool that the server holds; 0
    where it holds none, and before the pool is made. What ``down`` and ``merge`` need of it, ``start`` puts into
    the state.
    """

    n_clients: int
    sizes: Sequence[float]  # of the clients: their numbers of examples, or the sums of these examples' weights
    rounds: int
    weighting: str = "uniform"  # of clients in averages
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
        """Bytes of the class counts that clients have sent; 0 where nobody has called ``counts``."""
        return self.counts.nbytes if isinstance(self.counts, Counts) else 0

    @property
    def total_weight(self) -> float:
        """Sum of w_i over all N clients, whether they take part or not."""
        return total_weight(self.weighting, self.sizes)


@dataclass(frozen=True)
class Message:
    """Server to client. ``common`` is the same object for all clients of a round and is sent to each worker once."""

    common: Payload
    own: Payload = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes one client downloads."""
        return nbytes(self.common) + nbytes(self.own)


@dataclass(frozen=True)
class Reply:
    """Client to server, and what the client keeps.

    sums, each: a tensor may be summed and seen singly, under one name in both; it travels once. Then the sum is what is
        seen times ``weight``.
    metrics: what the experimenter sees of the client, as if looking over its shoulder. They are no message: they cost
        no bytes, have no epsilon, and reach neither ``merge`` nor a client.
    releases: what protects the tensors, by name. A tensor that no release names counts as unprotected (uncovered). Name
        a tensor that was made from memory only if the memory itself was made from protected results.
    """

    sums: Payload = field(default_factory=dict)  # added over clients by the engine; ``total`` in merge
    each: Payload = field(default_factory=dict)  # travel singly; in merge's ``replies``
    _: KW_ONLY
    weight: float = 1.0  # the client's weight in averages; its sums are already multiplied by it
    memory: Payload | None = None  # replaces the client's memory; None leaves it as it was
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)  # for the experimenter's record alone
    releases: Sequence[Release] = ()

    @property
    def nbytes(self) -> int:
        """Bytes the client uploads."""
        if self.each and (both := self.sums.keys() & self.each.keys()):
            return nbytes(self.sums) + nbytes({name: x for name, x in self.each.items() if name not in both})
        return nbytes(self.sums) + nbytes(self.each)


Replies = Mapping[int, Reply]
"""A round's replies by client, in client order, without their sums, memory and metrics."""


class Algorithm(Protocol):
    """A frozen dataclass of the algorithm's constants, with these functions. None changes its arguments.

    A constant is ``mu: Annotated[float, "[0, inf)"] = 0.01``: type, range, default, and a line of help below it.
    Optional are ``ChoosesClients``, ``Shares``, ``Personal``, ``TellsWork``, ``trains_locally``, ``sees_statistics``,
    ``keeps_batch_norm``, ``refuses_batch_norm``, ``takes_partial``, ``needs_pool``, ``waits_for``, ``needs`` (see
    ``needed``), ``watches_head = True`` for one that takes embeddings at the module's ``head`` (see ``features.Head``),
    ``needs_classes = True`` for one that works by class (labels that are no classes are refused), ``distils = True``
    for one whose server makes images and distils logits, ``trains_images = True`` where it trains them by the model's
    logits (examples and models that are not for it are refused), and ``check(fields)``, which raises ``UserError``
    where it is not defined for an experiment's fields. What model and data are not for it, ``start`` refuses.
    """

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        """The server's state before round 1."""
        ...

    def down(self, state: State, round: int, client: int) -> Message:
        """What ``client`` downloads in ``round``."""
        ...

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """One client's round, in a worker; ``memory`` is empty when the client is drawn for the first time."""
        ...

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        """The next state, from the float64 sums over clients (``total``) and the rest of their replies.

        ``replies`` has no metrics: these are the experimenter's, and what the server is to know is sent.
        An algorithm that trains on the server runs that training as one job of ``executor``.
        """
        ...


@runtime_checkable
class ChoosesClients(Protocol):
    """An algorithm that chooses a round's clients itself."""

    def participants(self, state: State, round: int) -> Sequence[int]:
        """The clients of ``round``, each once, in any order. If there are none, only ``merge`` is called."""
        ...


@runtime_checkable
class Personal(Protocol):
    """An algorithm whose clients have models of their own, which ``evaluate.clients`` judges."""

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        """What a client would use after a round: ``model``, a ``Flat`` of all its weights, and maybe ``buffers``.

        state: the server's. memory: the client's, empty if it has not taken part yet. message: what it would download
        in the next round. buffers: BatchNorm's statistics; without them those that the client has by
        ``federation.buffers``. Nothing travels: this is the experimenter's look at the client.
        """
        ...


BUFFERS = "buffers"
"""Name of BatchNorm's statistics in replies. The engine averages them; algorithms do not see them by default.

An algorithm with the attribute ``sees_statistics = True`` gets each client's in ``replies[i].each[BUFFERS]``, unless
``federation.buffers`` is keep: then they stay with the clients. A model without BatchNorm has none.
"""


def sees_statistics(algorithm: Algorithm) -> bool:
    """Whether the algorithm asks for every client's BatchNorm statistics."""
    return getattr(algorithm, "sees_statistics", False) is True


def keeps_batch_norm(algorithm: Algorithm) -> bool:
    """Whether BatchNorm stays with its clients, by its attribute ``keeps_batch_norm = True``.

    Such a method is refused for a model without BatchNorm, and unless ``federation.buffers`` is keep.
    """
    return getattr(algorithm, "keeps_batch_norm", False) is True


def refuses_batch_norm(algorithm: Algorithm) -> bool:
    """Whether it is not defined for a model with BatchNorm, by its attribute ``refuses_batch_norm = True``."""
    return getattr(algorithm, "refuses_batch_norm", False) is True


def takes_partial(algorithm: Algorithm) -> bool:
    """Whether the algorithm takes what a late client has done, by its attribute ``takes_partial = True``.

    Without it, late clients are dropped.
    """
    return getattr(algorithm, "takes_partial", False) is True


def needs_pool(algorithm: Algorithm) -> bool:
    """Whether its server trains on a pool that it holds, by its attribute ``needs_pool = True``.

    Such a method is refused with a sharing stage that gives the server none.
    """
    return getattr(algorithm, "needs_pool", False) is True


def needed(algorithm: Algorithm) -> Mapping[str, str]:
    """The algorithm's ``needs``: attributes of its clients' module, beside Lightning's, and their meaning."""
    return getattr(algorithm, "needs", {})


def require_attributes(algorithm: Algorithm, module: nn.Module) -> None:
    """See that the module has what the algorithm needs.

    Raises:
        UserError: it lacks an attribute.
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
    """What all clients hold in common after an exchange before round 1.

    examples: become each client's ``ClientData.commons``. nbytes: traffic of the exchange over all clients; None: of
    examples that go up once and down to N - 1 others. releases: what left; clients without one count as uncovered.
    """

    examples: Examples
    nbytes: int | None = None
    releases: Sequence[Release] = ()


@runtime_checkable
class Shares(Protocol):
    """An algorithm whose clients share something once, before round 1."""

    def share(self, clients: Clients, n_classes: int | None, seed: int) -> Common:
        """What is shared, made from ``clients``, the clients' training data; every draw is keyed by ``seed``.

        n_classes: None where labels are no classes; with ``needs_classes = True`` it never is.
        """
        ...


def trains_locally(algorithm: Algorithm) -> bool:
    """Whether its clients make local steps, by ``work.local``; not with its attribute ``trains_locally = False``.

    ``--dry-run`` counts none, and fields of such steps are refused; with ``needs_pool`` they are the server's.
    """
    return getattr(algorithm, "trains_locally", True) is not False


@runtime_checkable
class TellsWork(Protocol):
    """An algorithm that works beside its clients' local steps, and tells ``--dry-run`` how much.

    A round takes  c + sum_k n_k s_k  seconds:  n_k pieces of kind k (``pieces``), of s_k seconds each, and c for local
    steps and all else. The s_k are found from short rounds of variants that differ in their n_k (``smaller``). Of a
    server that trains in ``merge``:

        def pieces(self, facts, loop, round, clients):
            return {"server_steps": self.epochs * 8}

        def smaller(self, times):
            return [(replace(self, epochs=epochs), 1) for epochs in (1, 1 + times)]
    """

    def pieces(self, facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int]) -> Mapping[str, float]:
        """How many pieces of each kind, by names of its own, a round has in which these clients reply.

        loop: how clients train locally; these steps are counted anyway, unless ``trains_locally`` is False.
        """
        ...

    def smaller(self, times: int) -> "Sequence[tuple[Algorithm, int]]":
        """Variants of itself that are timed, each in a round of one client with so many examples, of any classes.

        The first has as little work as can be. There is one more than there are kinds, at least; where it is to stand
        out, a kind has ``times`` pieces more. Runs whose variants are equal share prices, so a constant that changes no
        price stands at its default in them.
        """
        ...
