"""zeta^2 and sigma^2 at one model, over all the data of all clients.

f_i(x)      mean loss of client i on its data D_i, in evaluation mode, without augmentation
zeta^2    = (1/N) sum_i ||grad f_i(x) - grad f(x)||^2,  grad f the mean of grad f_i over clients
sigma^2   = (1/N) sum_i E_{xi ~ D_i} ||grad F(x, xi) - grad f_i(x)||^2,  per sample (a batch of B has sigma^2 / B)

Both follow from squared norms alone, E||g - g_bar||^2 = E||g||^2 - ||g_bar||^2, which ``per_sample`` finds without the
per-sample gradients. Gradients are taken in the model's precision, in batches; all sums over batches and clients are in
float64. Euclidean norm over all parameters. Not subsampled.
Source: Fedssyn (Li et al., TMLR 2024), assumptions 1 and 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcommons.convergence.per_sample import gradients
from fedcommons.federation.evaluation import ModelTask
from fedcommons.federation.executor import Executor
from fedcommons.federation.reduction import BlockSum, Total, add_blocks, cut
from fedcommons.federation.worker import Worker
from fedcommons.tensors import Flat, sq_norm

BATCH = 32
"""Examples in a pass: fixed, so that no bit depends on the machine, and few, so that VGG-11 needs little memory."""


@dataclass(frozen=True)
class Dissimilarity:
    """Gradient dissimilarity and per-sample stochastic noise over clients."""

    zeta_sq: float
    sigma_sq: float


def dissimilarity(executor: Executor, at: ModelTask, which: str, n_clients: int, blocks: int) -> Dissimilarity:
    """zeta^2 and sigma^2 at a model: ``which="own"``, on each client's real data; "train", on what it trains on."""
    jobs = [(which, ids) for ids in cut(range(n_clients), blocks)]
    parts = executor.map(gradients_of_block, at, jobs)
    total = add_blocks([part for part, _, _ in parts])["gradient"]
    sq_norms = [s for _, norms, _ in parts for s in norms]
    noises = [s for _, _, noise in parts for s in noise]
    zeta_sq = sum(sq_norms) / n_clients - sq_norm(total) / n_clients**2
    return Dissimilarity(max(zeta_sq, 0.0), sum(noises) / n_clients)


def gradients_of_block(
    worker: Worker, task: ModelTask, job: tuple[str, list[int]]
) -> tuple[Total, list[float], list[float]]:
    """The sum of the block's client gradients, their squared norms and their noises sigma_i^2."""
    which, ids = job
    clients = worker.data.own if which == "own" else worker.data.clients
    task.load(worker.work)
    total, sq_norms, noises = BlockSum(), [], []
    for i in ids:
        examples = clients[i]
        gradient, mean_sq = mean_gradient(worker, examples.x, examples.y)
        total.add({"gradient": gradient})
        sq_norms.append(sq_norm(gradient))
        noises.append(max(mean_sq - sq_norms[-1], 0.0))
    return total.total, sq_norms, noises


def mean_gradient(worker: Worker, x: Tensor, y: Tensor) -> tuple[Flat, float]:
    """The mean over examples of the per-example gradients (float64) and of their squared norms, at the loaded model."""
    work, n = worker.work, len(y)
    total = torch.zeros(work.params.layout.size, dtype=torch.float64, device=work.device)
    total_sq = 0.0
    for first in range(0, n, BATCH):
        batch = x[first : first + BATCH], y[first : first + BATCH]
        mean, sq_norms = gradients(work.module, batch)
        total.add_(mean, alpha=len(batch[1]))
        total_sq += float(sq_norms.sum(dtype=torch.float64))
    return Flat(work.params.layout, total / n), total_sq / n
