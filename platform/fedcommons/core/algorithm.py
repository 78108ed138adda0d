"""What a federated algorithm is: four functions over plain data, and the three kinds of data that never mix.

A *message* crosses the wire and is counted in bytes; *memory* stays with the client and is never counted; *state*
stays on the server, and ``state["model"]`` is the server model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedcommons.core.executor import Executor
from fedcommons.core.local import Work
from fedcommons.data.clients import ClientData
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
    """Client to server, and what the client keeps."""

    sums: Payload = field(default_factory=dict)  # added over clients by the engine; ``total`` in merge
    each: Payload = field(default_factory=dict)  # travel singly; in merge's ``replies``
    weight: float = 1.0  # the client's weight in averages; the client has already multiplied its sums by it
    memory: Payload | None = None  # replaces the client's memory; None leaves it as it was
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)  # not counted: the simulation's, not a message

    @property
    def nbytes(self) -> int:
        """Bytes the client uploads."""
        return nbytes(self.sums) + nbytes(self.each)


class Algorithm(Protocol):
    """Hyper-parameters in a frozen dataclass, and these functions; none changes what it is given."""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        """The server's state before round 1."""
        ...

    def down(self, state: State, round: int, client: int) -> Message:
        """What ``client`` downloads in ``round``."""
        ...

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        """One client's round, in a worker; ``memory`` is empty at the first selection."""
        ...

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        """The next state from the float64 sums over clients and the replies in client order (their sums taken out).

        An algorithm that trains on the server does so through ``executor``, as one job.
        """
        ...
