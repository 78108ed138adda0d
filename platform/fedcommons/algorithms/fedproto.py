"""FedProto: clients share the mean embedding of each class and no model.

Tan et al., "FedProto: Federated prototype learning across heterogeneous clients", AAAI 2022, arXiv:2105.00243,
equations 3 to 8 and algorithm 1.   y_i: client i's model, in its memory;  f_i: client i's loss;  z: embedding of an
example, the input of the module's ``head``;  C_i^j: prototype of class j at client i, the mean of z over its n_ij
examples of that class;  C^j: the server's prototype of class j;  d: length of z;  lam: weight of the distance to
prototypes, >= 0.

    C^j = sum_i n_ij C_i^j / sum_i n_ij;   local loss  f_i(y) + lam mean_examples ||z - C^label||^2 / d

The server has no model, so no server model is evaluated. Client i's personal model is y_i. This model predicts, by
equation 4, argmin_j ||z - C^j|| among the classes j that have a prototype. While no class has a prototype, or if
``predict`` is head, the model predicts the class with the largest logit.

Departs from the paper: the loss has each example's embedding z, as in the authors' code; the paper's loss has the local
prototype C_i^j in place of z. Equation 6 also divides by the number of clients; here C^j is the mean of z over all
examples of class j of the round's clients. If no client of the round has class j, C^j stays. All clients start with the
same untrained model. No epsilon covers the prototypes, which have no noise. The server gets sums of n_ij over clients.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import Head
from fedcommons.core.local_training import Batch
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, flat
from fedcommons.flat_tensors import data as values
from fedcommons.privacy.release import Release


@dataclass(frozen=True)
class FedProto:
    """Clients share mean embeddings of classes (prototypes), and each client trains a personal model near them.

    Local loss f_i(y) + lam mean ||z - C^label||^2 / d, over examples whose class has a prototype.  f_i(y): client i's
    loss of its model y;  z: an example's embedding, of length d;  C^label: the server's prototype of the example's
    class.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(watches_head=True, needs_classes=True)

    lam: Annotated[float, "[0, 1e38]"] = 1.0
    """lambda, weight of the squared distance between embeddings and prototypes, >= 0"""
    predict: Annotated[str, "prototype | head"] = "prototype"
    """how personal models predict a class in evaluation: by the nearest prototype (equation 4), or by the head"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        assert facts.n_classes is not None
        nothing = torch.zeros(facts.n_classes, 0)  # length 0, as the embedding length is unknown before round 1
        return {"prototypes": nothing, "known": torch.zeros(facts.n_classes), "untrained": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"prototypes": state["prototypes"], "known": state["known"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        prototypes, has_prototype = values(message.common["prototypes"]), values(message.common["known"])
        head = Head(work.module)

        def loss(batch: Batch, step: int) -> Tensor:
            value = work.loss(batch, step)
            if not prototypes.shape[1]:
                return value
            far = (head.inputs.flatten(1) - prototypes[batch[1]]).square().mean(1) * has_prototype[batch[1]]
            return value + self.lam * (far * batch[2] if len(batch) > 2 else far).mean()

        with head.watched():
            trained = work.local(flat(memory, "own") if memory else work.initial, data, seed, loss=loss)
            new_memory = {"own": work.snapshot()}
            sums, counts = _embedded(work, head, data, len(has_prototype))
        return Reply(
            {"embeddings": sums, "counts": counts},
            memory=new_memory,
            metrics=trained.metrics,
            releases=[Release(what=("embeddings", "counts"))],
        )

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        sums, counts = values(total["embeddings"]), values(total["counts"])[:, None]
        old = values(state["prototypes"])
        before = old if old.shape[1] else torch.zeros_like(sums, dtype=old.dtype)
        means = (sums / counts.clamp(min=1)).to(before.dtype)
        has_prototype = torch.maximum(values(state["known"]), (counts[:, 0] > 0).float())
        return {**state, "prototypes": torch.where(counts > 0, means, before), "known": has_prototype}

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return {**message.common, "model": memory["own"] if memory else state["untrained"]}

    def predictions(self, work: Work, personal: Payload, x: Tensor) -> Tensor | None:
        """Return the predicted classes by the nearest prototype, or None to let the engine use the head's logits."""
        prototypes, has_prototype = values(personal["prototypes"]), values(personal["known"])
        if self.predict == "head" or not prototypes.shape[1]:
            return None
        head = Head(work.module)
        with head.watched():
            work.module(x)
        far = (head.inputs.flatten(1)[:, None] - prototypes).square().sum(2)
        return far.masked_fill(has_prototype == 0, torch.inf).argmin(1)


def _embedded(work: Work, head: Head, data: ClientData, n_classes: int) -> tuple[Tensor, Tensor]:
    """Return each class's sum of embeddings (classes, d), in evaluation mode, and number of examples (classes,)."""
    work.module.eval()
    embeddings = []
    with torch.no_grad():
        for first in range(0, len(data), work.loop.batch_size):
            work.module(data.x[first : first + work.loop.batch_size])
            embeddings.append(head.inputs.flatten(1))
    work.module.train()
    z, one_hot = torch.cat(embeddings), torch.nn.functional.one_hot(data.y, n_classes).to(embeddings[0].dtype)
    return one_hot.T @ z, one_hot.sum(0)
