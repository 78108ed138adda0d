"""FedPer: clients share the first layers of the model, and each client trains personal last layers.

Arivazhagan et al., "Federated learning with personalization layers", 2019, arXiv:1912.00818, algorithms 1 and 2. In the
symbols of ``partial_sharing.py``, x are the shared base layers and h_i the personalization layers of client i.

Departs from the paper: clients are weighted as in FedAvg; ``federation.weighting samples`` gives the paper's weights,
the clients' numbers of examples. Each local step trains all layers together. The personal layers are the module's
``head``, unless patterns (``layers``) select others.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedcommons.algorithms import partial_sharing
from fedcommons.core.algorithm import Facts, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.flat_tensors import Flat


@dataclass(frozen=True)
class FedPer:
    """FedAvg on the base layers; each client keeps its personal layers from round to round.

    If all layers are personal, clients train alone. If no layer is personal, this is FedAvg.

    Raises:
        UserError: a pattern matches no layer, or ``layers`` is None and the model has no ``head``.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    layers: str | None = None
    """personal layers: name patterns such as network.last*, separated by commas; default: the model's head"""

    down, client = partial_sharing.down, partial_sharing.client
    merge, personal = partial_sharing.merge, partial_sharing.personal
    effective_constants = partial_sharing.effective_constants

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return partial_sharing.initial_state(model, partial_sharing.personal_layers(self, model, facts.head))
