"""Steps of the engine on clients' updates, between local training and the method's ``merge``.

A reply's *update* is all its floating-point tensors in ``Reply.sums``, divided by the reply's weight, without scalars
(such as FedNova's number of steps) and without BatchNorm's statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedcommons.core.algorithm import BUFFERS, Reply
from fedcommons.flat_tensors import Payload


class ClientStep(Protocol):
    """A step on a client's reply before the reply is sent, such as compression."""

    def __call__(self, reply: Reply, nbytes: int, memory: Payload, seed: int) -> tuple[Reply, int]:
        """Return the changed reply and the number of bytes that the client sends for it.

        Args:
            reply: the reply of the method, or of the previous step.
            nbytes: number of bytes of ``reply``.
            memory: the client's memory before the round, on the CPU, with the errors of compression.
            seed: seed of the client and the round.
        """
        ...


@dataclass(frozen=True)
class Updates:
    """The steps of the engine on a reply in a worker process, in order.

    private: whether the engine checks that a client's training leaves no data for the next one (``core.state_leaks``).
    """

    on_client: Sequence[ClientStep] = ()
    private: bool = False


ERROR = "error of "
"""Prefix of the entries of a client's memory that contain errors of compression. A method does not see the entries."""


def without_errors(memory: Payload) -> Payload:
    """Return a client's memory without the errors of compression."""
    return {name: x for name, x in memory.items() if not name.startswith(ERROR)}


NO_STEPS = Updates()
"""No steps: clients send, and ``merge`` gets, what the method returns."""


def is_update(name: str, values: Tensor) -> bool:
    """Return whether the tensor ``values``, named ``name`` in ``Reply.sums``, is a part of the update."""
    return name != BUFFERS and values.dim() > 0 and values.is_floating_point()
