"""FedPer: the clients share the first layers of the model, and each has last layers of its own.

Arivazhagan et al., "Federated learning with personalization layers", 2019, arXiv:1912.00818, algorithms 1 and 2.
Symbols as in kept_part.py: x are the base layers, h_i the personalization layers of client i.

Departs from the paper: clients are weighted as in FedAvg (in the paper by n_i: ``federation.weighting samples``), and
all layers are trained together in the same local steps. The personal layers are the module's ``head``, or are chosen by
patterns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fedcommons.algorithms.partial_sharing import download, merged, own_model, parted, trained
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import layers_of
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload


@dataclass(frozen=True)
class FedPer:
    """FedAvg on the base layers; each client keeps its personal layers from round to round.

    With all layers personal, clients train alone; with none it is FedAvg.

    Raises:
        UserError: a pattern matches no layer, or no pattern was given and the model has no ``head``.
    """

    layers: str | None = None
    """personal layers: patterns such as network.last*, separated by commas; default: the model's head"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return parted(model, personal_layers(model, self.layers, facts.head))

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, str]:
        """Return the names of the personal layers."""
        return {"layers": layers_of(personal_layers(model, self.layers, facts.head))}

    def down(self, state: State, round: int, client: int) -> Message:
        return download(state)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return trained(work, message, memory, data, seed)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return merged(state, total, replies)

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return own_model(state, memory, message)


def personal_layers(model: Flat, patterns: str | None, head: Sequence[str]) -> list[str]:
    """Names of the parameters in the layers that match (a layer: a parameter's name without its last part)."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in model))
    there = f"the layers are {', '.join(layers)}."
    if patterns is None:
        if not head:
            raise UserError(f"fedper.layers must be given, as the model names no head; {there}")
        return list(head)
    chosen = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in chosen:
        if not any(fnmatchcase(layer, pattern) for layer in layers):
            raise UserError(f"fedper.layers: {pattern!r} matches no layer; {there}")
    return [name for name in model if any(fnmatchcase(name.rpartition(".")[0], pattern) for pattern in chosen)]
