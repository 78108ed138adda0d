"""FedGEN's feature generator G, and its training by the server in one executor job.

G(eps, y) = A_2 relu(BN(A_1 [eps, onehot(y)])):  eps: noise, (B, noise_size);  y: a class;  A_1, A_2: affine maps;  z:
values of G, embeddings (B, d), the input of the module's ``head``;  h_k: client k's head after its local steps;  n_ky:
number of client k's examples of class y;  W_k(y) = n_ky / sum_k n_ky over the round's clients, 0 if all n_ky are 0;
CE: cross entropy;  b, c: examples of a batch;  eta: weight of the diversity term.

    J(G) = mean_b sum_k W_k(y_b) CE(h_k(z_b), y_b)
         + eta exp( - mean_{b,c} [ |eps_b - eps_c|^2 / noise_size * |z_b - z_c|_1 / d ] )
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.algorithm import State
from fedcommons.core.features import Head
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Flat, data, flat, flatten, scalar
from fedcommons.seeding import generator

if TYPE_CHECKING:
    from fedcommons.algorithms.fedgen import FedGEN

STATISTICS = ("norm.mean", "norm.variance")
"""Names of the generator's tensors that are not parameters: BatchNorm's running statistics."""

MOMENTUM = 0.1
"""Momentum of BatchNorm's running statistics, which is torch's default."""


def untrained(n_classes: int, width: int, noise_size: int, hidden: int, like: Tensor, seed: int) -> Flat:
    """Return an untrained generator with torch's initialisation and the dtype of ``like``; width: feature length."""
    draws = generator(seed, "feature generator")

    def affine(inputs: int, *shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=draws) - 1) / inputs**0.5

    inputs = noise_size + n_classes
    parts = {
        "first.weight": affine(inputs, hidden, inputs),
        "first.bias": affine(inputs, hidden),
        "norm.weight": torch.ones(hidden),
        "norm.bias": torch.zeros(hidden),
        "last.weight": affine(hidden, width, hidden),
        "last.bias": affine(hidden, width),
        "norm.mean": torch.zeros(hidden),
        "norm.variance": torch.ones(hidden),
    }
    return flatten({name: part.to(like.dtype) for name, part in parts.items()})


def features(g: Mapping[str, Tensor], eps: Tensor, y: Tensor, *, training: bool = False) -> Tensor:
    """Return the features G(eps, y), (B, d), of noise eps, (B, noise_size), and classes y, (B,).

    With ``training``, BatchNorm uses batch statistics and updates its running statistics.
    """
    classes = g["first.weight"].shape[1] - eps.shape[1]
    one_hot = torch.eye(classes, dtype=eps.dtype, device=eps.device)[y]
    hidden = F.linear(torch.cat([eps, one_hot], 1), g["first.weight"], g["first.bias"])
    mean, variance = g["norm.mean"], g["norm.variance"]
    normed = F.batch_norm(hidden, mean, variance, g["norm.weight"], g["norm.bias"], training, MOMENTUM)
    return F.linear(F.relu(normed), g["last.weight"], g["last.bias"])


def draw_noise(kind: str, shape: tuple[int, ...], draws: torch.Generator) -> Tensor:
    """Draw the generator's noise: uniform on [0, 1) (``kind`` uniform) or standard normal."""
    draw = torch.rand if kind == "uniform" else torch.randn
    return draw(*shape, generator=draws)


def labels_at(cumulated: Tensor, at: Tensor) -> Tensor:
    """Return the class at each quantile ``at``, in [0, 1), of cumulated class shares; no class with share 0 occurs."""
    return torch.searchsorted(cumulated, at * cumulated[-1], right=True)


def label_weights(counts: Tensor) -> Tensor:
    """Return each client's share of all examples of a class, (K, classes); zero if no client has the class."""
    return counts / counts.sum(0).clamp(min=1)


def diversity(eps: Tensor, z: Tensor) -> Tensor:
    """Return exp(-mean over pairs of (mean squared difference of noises * mean absolute difference of features)).

    The value is 1 if all noises give the same feature. So minimising the value spreads the features of different
    noises.
    """
    noise_distance = torch.cdist(eps, eps, compute_mode="donot_use_mm_for_euclid_dist").square() / eps.shape[1]
    return torch.exp(-(noise_distance * torch.cdist(z, z, p=1) / z.shape[1]).mean())


def train(worker: Worker, task: ServerTask["FedGEN"], seed: int) -> State:
    """Train the generator and return it with Adam's two moments; ``seed`` keys labels and noises.

    The task has the server's state, and ``heads``: parameters of K clients' heads, stacked (K, ...); ``counts``:
    numbers of examples per client and class, (K, classes); ``cumulated``: cumulated class shares for sampling labels.
    """
    work, head, how, payload = worker.work, Head(worker.work.module), task.method, task.payload
    work.load_buffers(work.initial_buffers)
    work.module.eval()
    before = {name: flat(payload, name) for name in ("generator", "first", "second")}
    g, first, second = ({name: t.clone().to(work.device) for name, t in x.items()} for x in before.values())
    trained = {name: t.requires_grad_() for name, t in g.items() if name not in STATISTICS}
    lr = how.server_lr * how.lr_decay ** (task.round - 1)
    adam, steps = torch.optim.Adam(trained.values(), lr, weight_decay=how.weight_decay), scalar(payload, "steps")
    for name, t in trained.items():
        adam.state[t] = {"step": torch.tensor(steps), "exp_avg": first[name], "exp_avg_sq": second[name]}
    skipped = len(work.module.head) + 1  # pyright: ignore  (Head has checked the attribute)
    heads = {name[skipped:]: t.to(work.device) for name, t in flat(payload, "heads").items()}
    weights = label_weights(data(payload["counts"])).to(next(iter(g.values())))
    shape, draws = (how.iterations, how.batch_size), generator(seed, "features")
    labels = labels_at(data(payload["cumulated"]), torch.rand(shape, generator=draws)).to(work.device)
    noises = draw_noise(how.noise, (*shape, how.noise_size), draws).to(weights)

    def all_logits(z: Tensor) -> Tensor:  # logits (K, B, classes)
        return torch.vmap(lambda parameters: functional_call(head.layer, parameters, (z,)))(heads)

    for eps, y in zip(noises, labels, strict=True):
        z = features(g, eps, y, training=True)
        logits = all_logits(z)
        if how.ensemble == "mean":
            loss = F.cross_entropy(logits.mean(0), y)
        else:
            each = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none")
            loss = (weights[:, y] * each.view(len(logits), -1)).sum(0).mean()
        loss = loss + how.diversity * diversity(eps, z)
        adam.zero_grad()
        loss.backward()
        adam.step()
    moments = [{n: adam.state[t][key] for n, t in trained.items()} for key in ("exp_avg", "exp_avg_sq")]
    after = zip(before.items(), (g, *moments), strict=True)
    return {name: Flat(x.layout, flatten(x_new).buffer.cpu()) for (name, x), x_new in after}
