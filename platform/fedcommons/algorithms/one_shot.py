"""One-shot Fedssyn: clients send synthetic images once, and the server trains the classifier on this pool alone.

After Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
TMLR 2024, arXiv:2306.13263, whose figure 3 has such a model as the central one on synthetic images.

x: server model;  S: the pool, all clients' synthetic images;  x <- argmin over x of the mean of F(x, s) over s in S.

No client takes part in any round: a round is ``server_epochs`` passes of the server over the pool, by ``client``'s rate
and batch size. So nothing leaves the clients but what went into the pool, whose release decides the overall guarantee.
``dp.local`` changes nothing, as nobody trains locally. BatchNorm, whose statistics come from clients, is refused.

Departs from the paper: there it is a bound to compare with, and no federation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fedcommons.algorithms.server_training import OnPool, train_on_pool
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalSGD
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, flat


@dataclass(frozen=True)
class OneShot:
    """x <- ``server_epochs`` of SGD from x on the pool."""

    needs_pool = True
    refuses_batch_norm = True
    trains_locally = False

    server_epochs: Annotated[int | None, "[1, 1e9]"] = None
    """passes of the server over the pool in a round; default: client.epochs"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, int]:
        """Return the server's passes over the pool in a round."""
        return {"server_epochs": self.server_epochs or epochs}

    def participants(self, state: State, round: int) -> Sequence[int]:
        """Nobody."""
        return []

    def down(self, state: State, round: int, client: int) -> Message:
        """Never called: nobody takes part."""
        raise NotImplementedError

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Never called: nobody takes part."""
        raise NotImplementedError

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        task = OnPool(flat(state, "model"), self.server_epochs, round)
        return {"model": executor.map(train_on_pool, task, [seed])[0]}

    def pieces(self, facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int]) -> Mapping[str, float]:
        """Steps of the server on a batch of the pool."""
        return {"server_steps": (self.server_epochs or loop.epochs) * -(-facts.pool // loop.batch_size)}

    def smaller(self, times: int) -> Sequence[tuple["OneShot", int]]:
        return [(replace(self, server_epochs=epochs), 1) for epochs in (1, 1 + times)]
