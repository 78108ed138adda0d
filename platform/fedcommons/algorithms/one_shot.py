"""One-shot Fedssyn: clients send synthetic images once, and the server trains the classifier on these images only.

It follows Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data
heterogeneity", TMLR 2024, arXiv:2306.13263. Figure 3 of that paper shows such a model, trained centrally on synthetic
images.

x: server model;  S: pool of all clients' synthetic images;  F(x, s): loss of x on image s;  x <- argmin over x of the
mean of F(x, s) over s in S.

No client takes part in any round. A round is ``server_epochs`` passes of the server over the pool, with the learning
rate and batch size of ``client``. So only the pool leaves the clients, and its privacy ledger entry (release) decides
the overall guarantee. ``dp.local`` has no effect, as no client trains. Models with BatchNorm are refused, because
BatchNorm's statistics would come from clients.

Departs from the paper: in the paper, this training is a reference for comparison, not a federated method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_training import ServerTask, train_on_pool
from fedcommons.core.algorithm import ClientData, Facts, Message, Replies, Reply, State, Work
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.executor import Executor
from fedcommons.flat_tensors import Flat, Payload


@dataclass(frozen=True)
class OneShot:
    """The server trains on its pool of synthetic images by SGD, ``server_epochs`` epochs in each round."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        needs_pool=True, refuses_batch_norm=True, trains_locally=False, repeats={"train_on_pool": "server_epochs"}
    )

    server_epochs: Annotated[int | None, "[1, 1e9]"] = None
    """epochs of the server on its pool of synthetic images in a round; default: client.epochs"""

    start, down = FedAvg.start, FedAvg.down

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, int]:
        """Return the ``server_epochs`` that a run uses: the option, or ``epochs`` (client.epochs) if it is None."""
        return {"server_epochs": self.server_epochs or epochs}

    def participants(self, state: State, round: int) -> Sequence[int]:
        """Return an empty list, because no client takes part."""
        return []

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Raise an error: the engine never calls this, as no client takes part."""
        raise NotImplementedError

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {"model": executor.map(train_on_pool, ServerTask(self, state, round), [seed])[0]}
