"""FedPVR: SCAFFOLD's correction is applied only to the last layers, in which the clients' models differ most.

Li et al., "On the effectiveness of partial variance reduction in federated learning with heterogeneous data", CVPR
2023, arXiv:2212.02191, algorithm 1.   The symbols are those of scaffold.py. The control variates c of the server and
c_i of client i exist, and are sent, for the selected layers only.

Departs from the paper: patterns select the layers. The default is all linear layers. For VGG-11 these are the layers of
the authors' code, which corrects every weight and bias after the 16th. Clients are weighted as in scaffold.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedcommons.algorithms.scaffold import SCAFFOLD, controlled, require_sgd
from fedcommons.core.algorithm import Facts, Message, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.features import layers_of, matching_layers
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, select, zeros_like


@dataclass(frozen=True)
class FedPVR:
    """SCAFFOLD (option 2) on the layers whose names match a pattern, FedAvg on the other layers.

    Patterns use the syntax of file name patterns. A layer's name is a parameter's name without the last component. None
    selects all layers whose weight is a matrix, that is, linear layers. An empty string selects no layer.

    Raises:
        UserError: a pattern matches no layer, or ``layers`` is None and no layer is linear.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(adds_updates=True)

    layers: str | None = None
    """corrected layers: name patterns such as network.head.*, separated by commas; default: all linear layers"""

    def check(self, fields: Mapping[str, Any]) -> None:
        require_sgd("fedpvr", fields, momentum=False)

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        control = zeros_like(select(model, corrected_layers(model, self.layers)))
        everybody = torch.tensor(facts.total_weight, dtype=torch.float64)
        return {"model": model, "control": control, "everybody": everybody}

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, str]:
        """Return the names of the corrected layers that ``layers`` selects, separated by commas."""
        return {"layers": layers_of(corrected_layers(model, self.layers))}

    down, merge = SCAFFOLD.down, SCAFFOLD.merge

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        eta, _ = work.sgd("FedPVR", momentum=False)
        return controlled(work, message, memory, data, seed, eta)


def corrected_layers(model: Flat, patterns: str | None) -> list[str]:
    """Return the parameter names of the layers that match a pattern (None: linear layers), in the model's order."""
    if patterns is not None:
        return matching_layers(model, patterns, "fedpvr.layers")
    dims: dict[str, int] = {}
    for name, x in model.items():
        layer = name.rpartition(".")[0]
        dims[layer] = max(x.dim(), dims.get(layer, 0))
    if 2 not in dims.values():
        raise UserError(f"fedpvr.layers must name layers, as no layer is linear; the layers are {', '.join(dims)}.")
    return [name for name in model if dims[name.rpartition(".")[0]] == 2]
