"""IFCA: k clusters of clients, each with a model; a client trains the model that has the smallest loss on its data.

Ghosh et al., "An efficient framework for clustered federated learning", NeurIPS 2020, arXiv:2006.04088, algorithm 1.
theta_j: model of cluster j, of k;  f_i: client i's mean loss;  c_i: client i's cluster;  y_i: client i's model after
local SGD from theta_(c_i);  w_i: client i's weight;  S_j: the round's clients with c_i = j.

    c_i = argmin_j f_i(theta_j);   theta_j <- theta_j + sum_(i in S_j) w_i (y_i - theta_j) / sum_(i in S_j) w_i

Each client downloads all k models and uploads one model and c_i. The loss f_i is computed in evaluation mode without
augmentation, on all training data of the client. The engine evaluates each theta_j on the test data. A client's
personal model is the model of its last cluster; before its first round, it is theta_0.

The choice c_i depends on private data without noise. So under DP-SGD the privacy ledger lists the reply as uncovered.
Models with BatchNorm are refused, because the engine would average the statistics over all clusters.

Departs from the paper: theta_0 has the model's initial weights. The other k - 1 models have the same tensors with their
entries in random order, instead of newly drawn weights. No layers are shared between clusters. ``average`` gradients is
the paper's option I if clients make one full-batch step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedcommons.core.algorithm import Facts, Merged, Message, Replies, Reply, State
from fedcommons.core.averaging import summed_weight
from fedcommons.core.block_sum import BlockSum
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import CHUNK
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, flat, flatten, scalar, scale, sub
from fedcommons.privacy.release import Release
from fedcommons.seeding import generator, set_default_generator


@dataclass(frozen=True)
class IFCA:
    """Each client trains the model theta_j with the smallest loss on its data; the server averages models per cluster.

    With k = 1 this is FedAvg.

    Raises:
        UserError: the k initial models would be equal.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(refuses_batch_norm=True)

    k: Annotated[int, "[1, 1000]"] = 2
    """number of clusters"""
    spread: Annotated[float, "[0, 1e30]"] = 0.0
    """standard deviation of noise on the initial weights of all models but the first (use it with pretrained weights);
    0: the entries of each tensor are permuted instead"""
    average: Annotated[str, "models | gradients"] = "models"
    """divisor of a cluster's sum of updates: weight of the cluster's clients (models) or of all clients of the round
    (gradients)"""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Refuse weights from a file if their entries would be permuted, as only theta_0 would then be pretrained."""
        if fields["model.weights"] is not None and self.k > 1 and not self.spread:
            raise UserError("ifca.spread must be above 0 with model.weights: 0 permutes the entries of the weights.")

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        models = [model, *(self._redrawn(model, generator(seed, "cluster", j)) for j in range(1, self.k))]
        has_values = not model.buffer.is_meta  # a check before the run has no values
        if has_values and any(other.buffer.equal(model.buffer) for other in models[1:]):
            raise UserError(
                "ifca.spread must be above 0 for a model whose initial weights are equal in each tensor: the models "
                "of all clusters would be equal."
            )
        return {f"model/cluster{j}": theta for j, theta in enumerate(models)}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message(state)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        thetas = [flat(message.common, f"model/cluster{j}") for j in range(self.k)]
        losses = torch.stack([mean_loss(work, theta, data, seed) for theta in thetas]).nan_to_num(nan=inf).tolist()
        c = losses.index(min(losses))
        y, metrics, _ = work.local(thetas[c], data, seed)
        delta, w = sub(y, thetas[c]), work.weight(data)
        each = {"delta": delta, "cluster": torch.tensor(c)}
        release = Release(what=tuple(each), reason="the cluster is chosen by losses without noise")
        memory = {"cluster": torch.tensor(c)}
        # ``merge`` does not use the sum over all clusters; the engine limits the norm of summed tensors (max_norm).
        return Reply({"delta": scale(delta, w)}, each, weight=w, memory=memory, metrics=metrics, releases=[release])

    def merge(
        self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> Merged:
        after, sizes = dict(state), dict[str, float]()
        for j in range(self.k):
            theta = flat(state, f"model/cluster{j}")
            members = {i: reply for i, reply in replies.items() if scalar(reply.each, "cluster") == j}
            sizes[f"cluster{j}"] = len(members)
            if members:
                updates = BlockSum()
                for reply in members.values():
                    updates.add({"delta": scale(flat(reply.each, "delta"), reply.weight)})
                weight = summed_weight(members if self.average == "models" else replies)
                after[f"model/cluster{j}"] = add(theta, flat(updates.sums, "delta"), 1 / weight)
        return after, sizes

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return {"model": state[f"model/cluster{int(scalar(memory, 'cluster')) if memory else 0}"]}

    def _redrawn(self, model: Flat, draws: torch.Generator) -> Flat:
        """Return another initial model: ``model`` with noise, or with the entries of each tensor in a random order."""
        if self.spread:
            noise = torch.randn(model.buffer.shape, generator=draws, dtype=model.buffer.dtype)
            return add(model, Flat(model.layout, noise.to(model.buffer.device)), self.spread)
        orders = {name: torch.randperm(x.numel(), generator=draws).to(x.device) for name, x in model.items()}
        return flatten({name: x.reshape(-1)[orders[name]].reshape(x.shape) for name, x in model.items()})


def mean_loss(work: Work, model: Flat, data: ClientData, seed: int) -> Tensor:
    """Return the mean of ``training_step`` over the client's examples in evaluation mode, a scalar.

    seed: seed for the module's random draws, which are equal for all models.
    """
    work.load(model)
    work.module.eval()
    set_default_generator(seed, "loss")
    total = torch.zeros((), device=model.buffer.device)
    with torch.no_grad():
        for first in range(0, len(data), CHUNK):
            batch = tuple(column[first : first + CHUNK] for column in data.columns)
            value = work.loss(batch)
            total = total + value * (len(batch[1]) / len(data))
    return total
