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

from fedcommons.algorithms.partial_sharing import download, initial_state, merge_shared, personal_model, train_client
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload


@dataclass(frozen=True)
class FedBN:
    """FedAvg on all parameters except those of BatchNorm layers, which each client keeps."""

    capabilities: ClassVar[Capabilities] = Capabilities(keeps_batch_norm=True)

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return initial_state(model, facts.batch_norm)

    def down(self, state: State, round: int, client: int) -> Message:
        return download(state)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return train_client(work, message, memory, data, seed)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return merge_shared(state, total, replies)

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return personal_model(state, memory, message)
