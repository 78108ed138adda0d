"""FedBN: clients keep their BatchNorm layers local, because the distributions of their features differ.

Li et al., "FedBN: Federated learning on non-IID features via local batch normalization", ICLR 2021, arXiv:2102.07623,
algorithm 1.   The personal parameters h_i of ``partial_sharing.py`` are the scales and shifts of client i's BatchNorm
layers.

BatchNorm's running statistics also stay with the clients. They are buffers, and ``federation.buffers keep`` keeps
buffers on the clients. A client's model is evaluated with that client's scales, shifts and statistics.

Departs from the paper: clients are weighted as in FedAvg. A client that has not taken part yet has untrained BatchNorm
layers.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedcommons.algorithms import partial_sharing
from fedcommons.core.algorithm import Facts, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.flat_tensors import Flat


@dataclass(frozen=True)
class FedBN:
    """FedAvg on all parameters except those of BatchNorm layers, which each client keeps."""

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True, keeps_batch_norm=True)

    down, client = partial_sharing.down, partial_sharing.client
    merge, personal = partial_sharing.merge, partial_sharing.personal

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return partial_sharing.initial_state(model, facts.batch_norm)
