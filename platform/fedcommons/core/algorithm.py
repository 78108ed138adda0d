"""What a federated algorithm is: four functions over plain data, and the three kinds of data that never mix.

A *message* crosses the wire and is counted in bytes; *memory* stays with the client and is never counted; *state*
stays on the server, and ``state["model"]`` is the server model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedcommons.core.executor import Executor
from fedcommons.core.local import Work
from fedcommons.core.release import Release
from fedcommons.core.weighting import total_weight
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.examples import Examples
from fedcommons.tensors import Flat, Payload, nbytes

State = Payload
"""What the server keeps from round to round.

``state["model"]`` is the server model and is evaluated; other models, as ``state["model/NAME"]``, are too.
"""


@dataclass(frozen=True)
class Facts:
    """What everybody may know of a federation."""

    n_clients: int
    sizes: Sequence[int]  # training examples per client
    rounds: int
    weighting: str = "uniform"  # of clients in averages

    @property
    def total_weight(self) -> float:
        """sum of w_i over all N clients, drawn or not."""
        return total_weight(self.weighting, self.sizes)


@dataclass(frozen=True)
class Message:
    """Server to client: ``common`` is the same object for all clients of a round and travels once per worker."""

    common: Payload
    own: Payload = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes one client downloads."""
        return nbytes(self.common) + nbytes(self.own)


@dataclass(frozen=True)
class Reply:
    """Client to server, and what the client keeps.

    releases: what protects the tensors, by name; what none of them names counts as uncovered. A tensor that is made
    from memory is covered only if what the memory was made from was.
    """

    sums: Payload = field(default_factory=dict)  # added over clients by the engine; ``total`` in merge
    each: Payload = field(default_factory=dict)  # travel singly; in merge's ``replies``
    weight: float = 1.0  # the client's weight in averages; the client has already multiplied its sums by it
    memory: Payload | None = None  # replaces the client's memory; None leaves it as it was
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)  # not counted: the simulation's, not a message
    releases: Sequence[Release] = ()

    @property
    def nbytes(self) -> int:
        """Bytes the client uploads."""
        return nbytes(self.sums) + nbytes(self.each)


Replies = Mapping[int, Reply]
"""A round's replies by client, in client order; sums and memory are taken out."""


class Algorithm(Protocol):
    """Its own constants in a frozen dataclass, and these functions; none changes what it is given.

    A constant is ``mu: Annotated[float, "[0, inf)"] = 0.01``: type, range, default, and a line of help below it. An
    algorithm may have besides: ``ChoosesClients``, ``Shares``, ``sees_statistics``, and ``check(flat)``, which raises
    ``UserError`` for an experiment that it is not defined for (``flat``: its fields, such as ``client.optimizer``).
    """

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        """The server's state before round 1."""
        ...

    def down(self, state: State, round: int, client: int) -> Message:
        """What ``client`` downloads in ``round``."""
        ...

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """One client's round, in a worker; ``memory`` is empty at the first selection."""
        ...

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        """The next state from the float64 sums over clients and their replies.

        An algorithm that trains on the server does so through ``executor``, as one job.
        """
        ...


@runtime_checkable
class ChoosesClients(Protocol):
    """An algorithm that names a round's clients itself."""

    def participants(self, state: State, round: int) -> Sequence[int]:
        """The clients of ``round``, each once, in any order; none: a round of the server alone, merged all the same."""
        ...


BUFFERS = "buffers"
"""Name of BatchNorm's statistics in replies. They are the engine's: it averages them, and algorithms do not see them.

An algorithm with the attribute ``sees_statistics = True`` finds each client's in ``replies[i].each[BUFFERS]``, unless
``federation.buffers`` is keep: then they stay with the clients. A model without BatchNorm has none.
"""


def sees_statistics(algorithm: Algorithm) -> bool:
    """Whether the algorithm asks for BatchNorm's statistics of every client."""
    return getattr(algorithm, "sees_statistics", False) is True


@dataclass(frozen=True)
class Common:
    """What all clients hold alike after an exchange before the federation; nbytes: over all clients, up and down.

    examples: in each client's ``ClientData.commons``. releases: what left clients; one of whom none tells is uncovered.
    """

    examples: Examples
    nbytes: int
    releases: Sequence[Release] = ()


@runtime_checkable
class Shares(Protocol):
    """An algorithm whose clients share something once, before the federation."""

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        """What they share of ``clients``, that which they train on; every draw is keyed by ``seed``."""
        ...
