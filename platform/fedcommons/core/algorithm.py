"""Interface of federated algorithms: the four functions of ``Algorithm`` on messages, client memory, server state.

A *message* travels between server and client, and the bytes of messages are counted. *Memory* is data that a client
stores between rounds; it is never sent. *State* stays on the server, and ``state["model"]`` is the server model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, is_dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import Head, batch_norm_parameters
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.examples import Examples
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import UserError, name_of, quote
from fedcommons.flat_tensors import Flat, Payload, nbytes
from fedcommons.privacy.release import Release

State = Payload
"""State that the server stores from round to round: names to ``Flat`` or tensors.

``state["model"]`` is the server model. In every round, the engine evaluates this model and each entry "model/NAME".
A method with personal models of the clients (``Personal``) may have no server model.
"""


@dataclass(eq=False)
class Counts:
    """Function that returns the class counts of all N clients, (N, classes).

    At each call, every client sends its class counts to the server. nbytes: bytes that the clients have sent for the
    last call; 0 before the first call.
    """

    compute: Callable[[], Tensor]
    nbytes: int = 0

    def __call__(self) -> Tensor:
        counts = self.compute()
        self.nbytes = counts.nbytes
        return counts


@dataclass(frozen=True)
class Facts:
    """Public facts of a federation, and a function for the clients' class counts, which are not public.

    arrival: per client, the probability that the client takes part in a round and that its whole reply arrives; None if
    this probability has no known formula. counts: function that returns the number of examples per client and class,
    (N, classes). If a method or a straggler rule calls ``counts``, every client sends its class counts. The bytes are
    then counted, and the privacy ledger lists the class counts once, without a privacy guarantee (uncovered). shape:
    shape of an example. n_classes: number of classes; None if labels are not classes. head, batch_norm: names of the
    parameters of the module's ``head`` and of the BatchNorm layers, in the model's order; empty if the module has none.
    pool: number of examples in the server's pool of synthetic images; 0 if there is no pool yet. public: number of
    public examples, which belong to no client. ``down`` and ``merge`` do not get the facts, so ``start`` copies into
    the state the facts that these functions need.
    """

    n_clients: int
    sizes: Sequence[float]  # per client: number of examples n_i, or sum of the examples' weights
    rounds: int
    weighting: str = "uniform"  # rule for the weights of clients in averages
    arrival: Sequence[float] | None = None
    counts: Callable[[], Tensor] | None = None
    shape: tuple[int, ...] = ()
    n_classes: int | None = None
    head: tuple[str, ...] = ()
    batch_norm: tuple[str, ...] = ()
    pool: int = 0
    public: int = 0

    def __post_init__(self) -> None:
        if self.counts is not None and not isinstance(self.counts, Counts):
            object.__setattr__(self, "counts", Counts(self.counts))

    @property
    def counts_nbytes(self) -> int:
        """Bytes of the class counts that clients have sent; 0 if ``counts`` was never called."""
        return self.counts.nbytes if isinstance(self.counts, Counts) else 0

    @property
    def total_weight(self) -> float:
        """Sum of the weights w_i of all N clients in averages, including clients that do not take part in a round."""
        return float(sum(self.sizes) if self.weighting == "samples" else len(self.sizes))


@accepts_old_names(own="individual")
@dataclass(frozen=True)
class Message:
    """A message from the server to one client.

    common: the same object for all clients of a round; each worker process receives it once. individual: data for this
    client only.
    """

    common: Payload
    individual: Payload = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes that the client downloads."""
        return nbytes(self.common) + nbytes(self.individual)


@dataclass(frozen=True)
class Reply:
    """A client's reply to the server, the client's new memory, and metrics for the experimenter.

    sums, each: the engine adds the tensors in ``sums`` over clients; the server sees the tensors in ``each`` per
        client. A name in both stands for one tensor, which is sent once: ``sums[name]`` must equal
        ``each[name]`` times the client's ``weight``.
    metrics: measurements for the experimenter. They are not part of the message: their bytes are not counted, they have
        no epsilon, and neither ``merge`` nor another client sees them.
    releases: privacy ledger entries that state the protection of tensors by name. A tensor without a release counts as
        unprotected (uncovered). If a tensor was computed from the client's memory, a release may name the tensor only
        if all data in the memory were computed from protected results.
    """

    sums: Payload = field(default_factory=dict)  # tensors that the engine adds over clients: ``total`` in ``merge``
    each: Payload = field(default_factory=dict)  # ``merge`` gets these tensors of client i as ``replies[i].each``
    _: KW_ONLY
    weight: float = 1.0  # the client's weight in averages; ``sums`` are already multiplied by it
    memory: Payload | None = None  # replaces the client's memory; None leaves the memory unchanged
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)  # measurements for the experimenter only
    releases: Sequence[Release] = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes that the client uploads."""
        return nbytes({**self.each, **self.sums})


Merged = State | tuple[State, Mapping[str, float | Tensor]]
"""Result of ``merge``: the server's state after a round, or the state and numbers by name for the experimenter."""

Replies = Mapping[int, Reply]
"""Client number -> reply of the client in a round, in client order, without sums, memory and metrics."""


class Algorithm(Protocol):
    """A federated algorithm: a frozen dataclass of hyperparameters with these functions, which change no argument.

    A hyperparameter is declared as ``mu: Annotated[float, "[0, inf)"] = 0.01``: type, range and default. The string on
    the next line is the help text. ``start`` raises an error if the algorithm is not defined for the model or data.

    Optional protocols: ``ChoosesClients``, ``Shares``, ``Personal``, ``Adapts``. Optional attributes:

    ``capabilities = Capabilities(...)``: properties that change what the engine does or refuses (see ``Capabilities``).
    ``check(fields)``: raises ``UserError`` if the algorithm is not defined for an experiment's fields.
    ``noisy_steps()``: allows ``dp.target_epsilon`` to an algorithm without ``work.local``, which ``capabilities`` must
    state (``trains_locally=False``); returns the batch size and a client's number of noisy gradients per round; the
    algorithm adds the noise that ``DPSGD.of_client`` states.
    """

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        """Return the server's state before round 1.

        Args:
            model: initial weights of the clients' module, without frozen parameters.
            facts: public facts, such as the number of clients; ``down`` and ``merge`` do not get them.
            seed: seed of the run, for all random numbers of this call.

        Raises:
            UserError: the algorithm is not defined for the model, the data or the federation.
        """
        ...

    def down(self, state: State, round: int, client: int) -> Message:
        """Return the message that the server sends to a client, computed from the server's state.

        Args:
            state: the server's state before the round.
            round: number of the round, from 1.
            client: number of the client, from 0.
        """
        ...

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Run a client's work of a round in a worker process and return the reply.

        Args:
            work: training objects of the worker process; ``work.local`` trains the client's module.
            message: the message that ``down`` returned for this client and round.
            memory: the client's last ``Reply.memory`` that is not None; empty if there is none.
            data: the client's training data.
            round: number of the round, from 1.
            seed: seed for random numbers of this client and round.
        """
        ...

    def merge(
        self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> Merged:
        """Return the server's state after a round, or the pair (state, numbers).

        The numbers map names to finite numbers, such as ``{"staleness": 1.5}``, which rounds.jsonl, trackers and frames
        get as ``server/staleness``. They are computed from messages, so they need no privacy ledger entry.

        Args:
            executor: the run's workers. A training on the server must run as one job of ``executor``.
            state: the server's state before the round.
            total: float64 sums of ``Reply.sums`` over the clients whose replies are accepted.
            replies: client number -> accepted reply, without sums, memory and metrics; empty if no client takes part.
            round: number of the round, from 1.
            seed: seed for random numbers of this round on the server.
        """
        ...


@runtime_checkable
class ChoosesClients(Protocol):
    """An algorithm that chooses the participating clients of a round, in place of the engine's sampling."""

    def participants(self, state: State, round: int) -> Sequence[int]:
        """Return the numbers of a round's participants, each once; if there are none, only ``merge`` is called.

        Args:
            state: the server's state before the round.
            round: number of the round, from 1.
        """
        ...


@runtime_checkable
class Personal(Protocol):
    """An algorithm with a personal model per client, which the field ``evaluate.clients`` evaluates."""

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        """Return a client's personal model after a round, for the experimenter; the model's bytes are not counted.

        Args:
            state: the server's state after the round.
            memory: the client's memory; empty if the client has not taken part yet.
            message: the message that the client would download in the next round.

        Returns:
            A mapping with ``model``, a ``Flat`` of all weights, and optionally ``buffers``, BatchNorm's statistics.
            Without ``buffers``, the client uses the statistics that ``federation.buffers`` prescribes.
        """
        ...


@runtime_checkable
class Adapts(Protocol):
    """A ``Personal`` algorithm whose clients train the model of ``personal`` on their examples, at evaluation only."""

    def adapt(self, work: Work, model: Flat, data: ClientData, seed: int) -> Flat:
        """Return the client's personal model. Nothing is sent, so no noise is needed.

        Args:
            work: training objects of the worker process; its module has the client's BatchNorm statistics.
            model: the model that ``personal`` returned for the client.
            data: the client's training data.
            seed: seed for random numbers of this client.
        """
        ...


BUFFERS = "buffers"
"""Name of BatchNorm's statistics in replies. The engine averages the statistics; an algorithm does not see them.

An algorithm with the capability ``sees_statistics`` gets client i's statistics in ``replies[i].each[BUFFERS]``.
With ``federation.buffers`` keep, the statistics stay with the clients. A model without BatchNorm has no statistics.
"""


def require_attributes(algorithm: Algorithm, module: nn.Module) -> None:
    """Check that the algorithm can train the clients' module.

    Raises:
        UserError: the module lacks an attribute, BatchNorm or a usable ``head`` that the algorithm needs, or the module
            has BatchNorm, which the algorithm refuses.
    """
    capabilities, method = capabilities_of(algorithm), getattr(algorithm, "shown_as", type(algorithm).__name__)
    for name, what in capabilities.needs.items():
        if not hasattr(module, name):
            raise UserError(
                f"{method} needs a model with an attribute {name}, and {type(module).__name__} has "
                f"none: {what}. model.name vae has it; a user-defined LightningModule can define it."
            )
    if capabilities.keeps_batch_norm and not batch_norm_parameters(module):
        raise UserError(f"{method} needs a model with BatchNorm, as --model.batch_norm true of cnn has.")
    if capabilities.refuses_batch_norm and batch_norm_parameters(module):
        raise UserError(f"{method} is not defined for a model with BatchNorm, whose statistics come from clients.")
    if capabilities.watches_head:
        try:
            Head(module)
        except ValueError as error:
            raise UserError(f"{method} takes embeddings at the model's head: {error}.") from None


@dataclass(frozen=True)
class Common:
    """Data that all clients have in common after an exchange before round 1.

    examples: the data, which become ``ClientData.commons`` of each client. nbytes: number of bytes of the exchange over
    all N clients; None: every example is uploaded once and downloaded by the N - 1 other clients. releases: privacy
    ledger entries of the exchange; a client without an entry counts as unprotected (uncovered).
    """

    examples: Examples
    nbytes: int | None = None
    releases: Sequence[Release] = ()


@runtime_checkable
class Shares(Protocol):
    """An algorithm whose clients share data computed from their examples, once before round 1."""

    def share(self, clients: Clients, n_classes: int | None, seed: int) -> Common:
        """Return the shared data, computed from the clients' training data.

        Args:
            clients: the training data of all clients, which must not be changed.
            n_classes: number of classes; None if labels are not classes.
            seed: seed for all random numbers.
        """
        ...


def repeats_of(algorithm: Algorithm) -> Mapping[str, str]:
    """Return the capability ``repeats``: name of a job's function -> name of the constant that repeats its work.

    Raises:
        UserError: ``repeats`` is no mapping, or a constant is missing or is no whole number.
    """
    repeats: Any = capabilities_of(algorithm).repeats
    if repeats and not is_dataclass(algorithm):
        raise UserError(f"{name_of(algorithm)}: the capability repeats needs a dataclass: add @dataclass(frozen=True).")
    try:
        constants = [getattr(algorithm, constant) for constant in repeats.values()]
        wrong = [n for n in constants if n is not None and not isinstance(n, int)]
    except (TypeError, AttributeError):
        wrong = [repeats]
    if wrong:
        raise UserError(
            f"{name_of(algorithm)}: the capability repeats must map jobs to the names of constants that are whole "
            f"numbers, got {quote(wrong[0])}."
        )
    return repeats
