"""FedGEN: the server trains a feature generator on the clients' heads, and clients train on generated features.

Zhu, Hong and Zhou, "Data-free knowledge distillation for heterogeneous federated learning", ICML 2021,
arXiv:2105.10056, equations 4 to 6 and algorithm 1.   x: server model;  y_i: client i's model after its local steps;
f_i: client i's loss;  h: the model's ``head``;  G(eps, y): features of class y from noise eps, in the space of the
head's input (feature_generator.py);  CE: cross entropy;  r: round, from 1;  w_i: the client's weight;  p(y): share of
class y among the examples of the clients that took part so far.

    client:  f_i(y_i) + weight decay^r E_{y ~ p, eps} CE(h(G(eps, y)), y);      x <- x + sum_i w_i (y_i - x) / sum_i w_i
    server:  G <- steps of Adam down J(G), the losses of the round's heads h_i on G's features (feature_generator.py)

Each client transfers 2 Mc + Mg bytes per round: Mc for the model in each direction, and Mg for the generator with its
BatchNorm statistics and p(y). It also uploads class counts, 8 bytes per class, which no epsilon covers. The server does
not sample a class that no client of the round has. Clients may sample a class that no client has, but only in the first
round, in which p(y) is uniform. With ``weight`` 0 the trained model is FedAvg's.

Departs from the paper: the server weights the losses of the clients' heads by label counts (``ensemble`` weighted);
equation 4 has the loss of their mean logits (``ensemble`` mean). As in the released code, clients train on G's features
from round ``first`` on, because G is untrained before. ``weight``, ``decay`` and uniform noise are those of the
released code. An example counts in p(y) once per round in which its client took part. Until G has been trained on a
class, p(y) is 0 for this class, and the term of ``kl`` skips its examples. The gradient of f_i is clipped
before the gradient of the loss on G's features is added. That loss uses no client data, so DP-SGD need not clip its
gradient.

The released code has ``labels`` uniform, ``kl`` 10, ``weight_decay`` 0.01 and ``lr_decay`` 0.98. It counts rounds from
0. Its class counts start at 1 and count the examples in a round's batches, not all examples. It multiplies ``weight``
by the ratio of features to examples in a client's step. Its ``weight`` decays to a minimum of 1e-4 and is 0 after a
client's 20th epoch. It multiplies losses (B,) by weights (B, 1); the mean of this (B, B) matrix is the mean loss times
the mean weight. Here ``ensemble`` weighted multiplies each loss by its weight. ``train/loss`` is f_i.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms.feature_generator import STATISTICS, draw_noise, features, labels_at, train, untrained
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import summed_weight
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import Head, head_parameters
from fedcommons.core.local_training import AddToGrad, Batch, Loss
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, flat, flatten, put, scale, select, sub, zeros_like
from fedcommons.flat_tensors import data as values
from fedcommons.privacy.release import Release
from fedcommons.seeding import generator

MANY = 64
"""Number of a client's steps whose noise and features are computed at once."""


@dataclass(frozen=True)
class FedGEN:
    """FedAvg whose clients also learn from features that a generator, trained on the server, makes per class.

    Local loss f_i(y_i) + weight decay^r E CE(h(G(eps, y)), y).  f_i: client i's loss;  y_i: its model;  r: round;  CE:
    cross entropy;  h: the model's head;  G(eps, y): generated features of class y from noise eps.

    Raises:
        UserError: the model has no head, the head does not start with a linear layer, or a parameter of the head is
            frozen or belongs to BatchNorm.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(adds_updates=True, watches_head=True, needs_classes=True)

    weight: Annotated[float, "[0, 1e38]"] = 10.0
    """weight of the cross entropy on generated features in the clients' loss; 0 is FedAvg"""
    decay: Annotated[float, "(0, 1]"] = 0.98
    """factor by which weight and kl are multiplied in each round"""
    kl: Annotated[float, "[0, 1e38]"] = 0.0
    """weight of KL(prediction on a generated feature || prediction on an example of its class) (released code: 10)"""
    first: Annotated[int, "[1, 1e9]"] = 2
    """first round in which clients learn from the generator; in round 1 the generator is untrained"""
    noise: Annotated[str, "uniform | normal"] = "uniform"
    """distribution of the generator's noise: uniform on [0, 1), or standard normal"""
    noise_size: Annotated[int, "[1, 1e6]"] = 64
    """length of the generator's noise vector"""
    hidden: Annotated[int, "[1, 1e6]"] = 512
    """width of the generator's hidden layer"""
    batch_size: Annotated[int, "[2, 1e9]"] = 32
    """generated features in a step of the server, and in a step of a client"""
    iterations: Annotated[int, "[1, 1e9]"] = 50
    """training steps of the generator on the server in a round"""
    server_lr: Annotated[float, "(0, 1e38]"] = 3e-4
    """learning rate of Adam for the generator"""
    lr_decay: Annotated[float, "(0, 1]"] = 1.0
    """factor by which server_lr is multiplied after each round (released code: 0.98)"""
    weight_decay: Annotated[float, "[0, 1e38]"] = 0.0
    """weight decay of Adam for the generator (released code: 0.01)"""
    diversity: Annotated[float, "[0, 1e38]"] = 1.0
    """eta, weight of the diversity term in the generator's loss"""
    ensemble: Annotated[str, "weighted | mean"] = "weighted"
    """generator's loss: heads' losses weighted by label counts, or loss of the heads' mean logits (mean, equation 4)"""
    labels: Annotated[str, "counts | uniform"] = "counts"
    """distribution of sampled classes: the clients' class counts, or uniform (released code)"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        assert facts.n_classes is not None
        width = _width(model, facts)
        g = untrained(facts.n_classes, width, self.noise_size, self.hidden, model.buffer, seed)
        nothing = zeros_like(select(g, [name for name in g if name not in STATISTICS]))
        return {"model": model, "generator": g, "first": nothing, "second": nothing, "steps": torch.tensor(0),
                "seen": torch.zeros(facts.n_classes, dtype=torch.int64)}  # fmt: skip

    def down(self, state: State, round: int, client: int) -> Message:
        seen = values(state["seen"])
        shares = self._cumulated(seen if seen.any() else torch.ones_like(seen)).to(values(state["model"]).dtype)
        return Message({"model": state["model"], "generator": state["generator"], "shares": shares})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, factor, head = flat(message.common, "model"), self.decay**round, Head(work.module)
        learns, w, names = round >= self.first, work.weight(data), head_parameters(work.module)
        steps = work.loop.steps_for(len(data), data.n_own)
        add_to_grad = self._learn(head, message, steps, factor, seed) if learns and self.weight else None
        distils = learns and self.kl > 0
        loss = self._distil(work, head, message, steps * work.loop.accumulate, factor, seed) if distils else None
        with head.watched() if distils else nullcontext():
            y, metrics, spent = work.local(x, data, seed, loss=loss, add_to_grad=add_to_grad)
        delta = sub(y, x)
        body, head_delta = select(delta, [name for name in delta if name not in names]), select(delta, names)
        return Reply(
            {"body": scale(body, w), "head": scale(head_delta, w)},
            {"head": head_delta, "counts": torch.bincount(data.y, minlength=len(values(message.common["shares"])))},
            weight=w,
            metrics=metrics,
            releases=[spent.with_names("body", "head"), Release(what=("counts",))],
        )

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        x = after = flat(state, "model")
        for part in (flat(total, "body"), flat(total, "head")):
            after = put(after, add(select(x, part.layout.names), part, 1 / summed_weight(replies)))
        deltas = [flat(reply.each, "head") for reply in replies.values()]
        counts = torch.stack([values(reply.each["counts"]) for reply in replies.values()])
        heads = {name: torch.stack([x[name] + delta[name] for delta in deltas]) for name in deltas[0]}
        cumulated = self._cumulated(counts.sum(0))
        payload = {**state, "heads": flatten(heads), "counts": counts, "cumulated": cumulated}
        trained = executor.map(train, ServerTask(self, payload, round), [seed])[0]
        steps, seen = values(state["steps"]) + self.iterations, values(state["seen"]) + counts.sum(0)
        return {**state, "model": after, **trained, "steps": steps, "seen": seen}

    def _cumulated(self, counts: Tensor) -> Tensor:
        """Return the cumulated class shares from which the labels of generated features are sampled.

        The shares are proportional to ``counts``. If the option ``labels`` is uniform, all classes with a count above 0
        have equal shares.
        """
        shares = (counts > 0).double() if self.labels == "uniform" else counts.double()
        return shares.cumsum(0) / shares.sum()

    def _learn(self, head: Head, message: Message, steps: int, factor: float, seed: int) -> AddToGrad:
        """Return a function that adds the gradient of the loss on generated features to the head's gradients.

        The loss is ``weight`` times ``factor`` times the cross entropy. steps: approximate number of local steps.
        """
        g, shares = flat(message.common, "generator"), values(message.common["shares"])
        shape, parameters = (self.batch_size, self.noise_size), list(head.layer.parameters())

        def make(steps: Sequence[int]) -> tuple[Tensor, Tensor]:
            draws = [generator("features", seed, step) for step in steps]
            y = labels_at(shares, torch.stack([torch.rand(shape[0], generator=d) for d in draws]).to(shares))
            eps = torch.stack([draw_noise(self.noise, shape, d) for d in draws]).to(shares)
            return features(g, eps.flatten(0, 1), y.flatten()).unflatten(0, y.shape), y

        at, number = in_chunks(steps, make), count()

        def add_to_grad(params: Mapping[str, nn.Parameter]) -> None:
            z, y = at(next(number))
            gradients = torch.autograd.grad(F.cross_entropy(_evaluated(head, z), y), parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(gradient, alpha=self.weight * factor)

        return add_to_grad

    def _distil(self, work: Work, head: Head, message: Message, steps: int, factor: float, seed: int) -> Loss:
        """Return a loss function: the module's loss plus a KL term towards the head's prediction on generated features.

        The KL term is zero for an example of a class on which the generator has not been trained.
        """
        g, shape = flat(message.common, "generator"), (work.loop.batch_size, self.noise_size)
        shares = values(message.common["shares"])
        is_trained = shares.diff(prepend=shares.new_zeros(1)) > 0  # no KL term for classes with share 0

        def make(steps: Sequence[int]) -> tuple[Tensor]:
            noises = [draw_noise(self.noise, shape, generator("kl", seed, step)) for step in steps]
            return (torch.stack(noises).to(g.buffer),)

        at = in_chunks(steps, make)

        def loss(batch: Batch, step: int) -> Tensor:
            value = work.loss(batch, step)
            predicted, (eps,) = head.outputs.log_softmax(1), at(step)
            with torch.no_grad():
                target = _evaluated(head, features(g, eps[: len(predicted)], batch[1])).log_softmax(1)
            each = F.kl_div(predicted, target, reduction="none", log_target=True).sum(1) * is_trained[batch[1]]
            return value + self.kl * factor * (each * batch[2] if len(batch) > 2 else each).mean()

        return loss


def _width(model: Flat, facts: Facts) -> int:
    """Return the number of inputs of the model's head, after checking that FedGEN can use the head."""
    head = facts.head
    if not head:
        raise UserError("fedgen needs a model that names its head, the layer that maps the embedding to the logits.")
    if frozen := [name for name in head if name not in model.layout.parts]:
        raise UserError(f"fedgen needs a head whose parameters are all trained, and {frozen[0]} is frozen.")
    if normed := [name for name in head if name in facts.batch_norm]:
        raise UserError(
            f"fedgen needs a head without BatchNorm, whose statistics the server lacks; {normed[0]} is of BatchNorm."
        )
    shape = tuple(model[head[0]].shape)
    if len(shape) != 2:
        raise UserError(f"fedgen needs a head that begins with a linear layer, and {head[0]} has shape {shape}.")
    return shape[1]


def in_chunks(steps: int, make: Callable[[Sequence[int]], tuple[Tensor, ...]]) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a function that maps a step's number, from 0, to the step's tensors.

    make: function that computes the tensors of a list of steps, stacked with one row per step. One call of ``make`` for
    ``MANY`` steps launches fewer kernels on a GPU than ``MANY`` calls. steps: approximate number of all steps.
    """
    cache: dict[int, tuple[Tensor, ...]] = {}

    def at(step: int) -> tuple[Tensor, ...]:
        first = step - step % MANY
        if first not in cache or step - first >= len(cache[first][0]):
            cache.clear()
            with torch.no_grad():
                cache[first] = make(range(first, max(step + 1, min(first + MANY, steps))))
        return tuple(t[step - first] for t in cache[first])

    return at


def _evaluated(head: Head, z: Tensor) -> Tensor:
    """Return the head's logits for features z, without dropout, so that no random number is drawn."""
    head.layer.eval()
    logits = head.layer(z)
    head.layer.train()
    return logits
