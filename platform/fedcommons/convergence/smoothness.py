"""Smoothness L and strong convexity mu at one model, by Lanczos' iteration on Hessian-vector products.

L      = ||H||, the largest modulus of an eigenvalue of the Hessian H of f, the mean over clients of their mean losses
L_i    = L of f_i;  L_max = max_i L_i;  L~_avg: L of the mean loss on the pool
L_p    = max_i L of the loss on the training data of client i
mu     = the smallest eigenvalue of H, computed as L - ||L I - H||; not positive if f is not strongly convex

The losses are defined in ``estimators``, with the examples' weights, in evaluation mode, without augmentation. Products
are in the model's precision, sums over batches and clients in float64. The result is an eigenvalue within
``TOLERANCE``, and nearly always the largest. Of 12,000 random starts on spectra whose largest eigenvalue was 1 to 20 %
larger than the second, one start found the second (with a tolerance of 1e-3: 96 starts). On a part of the data
(``Part``) the Hessian is computed on the part; with fewer examples, L is larger on average.
"""

from collections.abc import Callable, Iterable
from math import isfinite, nan

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from fedcommons.convergence.estimators import BATCH, Direction, Part, clients_of, measurement_seed
from fedcommons.convergence.per_sample import Batch, require_apart
from fedcommons.core.block_sum import BlockSum, Total, add_blocks, cut
from fedcommons.core.client_worker import trainable_parameters
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import data
from fedcommons.seeding import generator, set_default_generator

TOLERANCE = 1e-5
"""The iteration ends when an eigenvalue certainly lies within this relative distance of the computed value."""

MOST = 100
"""The iteration ends at the latest after this number of products."""


def spectral_norm(
    apply: Callable[[Tensor], Tensor], start: Tensor, tolerance: float = TOLERANCE, most: int = MOST
) -> float:
    """Return max |eigenvalue| of the symmetric matrix H that ``apply`` applies, from the float64 vector ``start``.

    Lanczos' iteration, with three vectors in memory (ARPACK stores twenty): in the basis v_1, v_2, ... of the Krylov
    space H is tridiagonal, with ``diagonal`` and ``off_diagonal``. Let theta be its eigenvalue of largest modulus, and
    u the corresponding vector in the space of H. Then ||H u - theta u|| = beta |s|, s the last element of theta's
    eigenvector. So an eigenvalue of H lies within beta |s| of theta. The result is NaN if a product is not finite.
    """
    v, before, beta, eigenvalue = start / start.norm(), torch.zeros_like(start), 0.0, 0.0
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for _ in range(most):
        product = apply(v) - beta * before
        along = float(product @ v)
        product -= along * v
        diagonal.append(along)
        beta = float(product.norm())
        if not isfinite(beta):
            return nan
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off_diagonal, -1))  # eigh reads the lower half
        largest = int(np.abs(values).argmax())
        eigenvalue = abs(float(values[largest]))
        if beta * abs(vectors[-1, largest]) <= tolerance * eigenvalue:
            return eigenvalue
        off_diagonal.append(beta)
        v, before = product / beta, v
    return eigenvalue


def smoothness(
    executor: Executor, at: ModelTask, which: str, n_sets: int, blocks: int, part: Part | None = None
) -> float:
    """Return L of the mean of the clients' losses; with ``which="pool"``, L of the mean loss on the pool's examples."""
    apply = _hessian(executor, at, which, n_sets, blocks, part)
    return spectral_norm(apply, _start(at, 0))


def strong_convexity(executor: Executor, at: ModelTask, which: str, n_sets: int, blocks: int) -> float:
    """Return mu of the mean of the clients' losses, accurate to about 1e-5 L in float64, else to products' rounding."""
    apply, start = _hessian(executor, at, which, n_sets, blocks, None), _start(at, 0)
    largest = spectral_norm(apply, start, 1e-9, 1000)
    return largest - spectral_norm(lambda v: largest * v - apply(v), start, 1e-9, 1000)


def smoothness_of_each(
    executor: Executor, at: ModelTask, which: str, n_sets: int, blocks: int, part: Part | None = None
) -> list[float]:
    """Return L_i of every client; each client sends one scalar."""
    jobs = [(which, ids, part) for ids in cut(range(n_sets), blocks)]
    return [value for block in executor.map(smoothness_of_block, at, jobs) for value in block]


def smoothness_of_block(worker: Worker, task: ModelTask, job: tuple[str, list[int], Part | None]) -> list[float]:
    """Return L_i of each client in the job's ``ids``, by a separate iteration per client."""
    which, ids, part = job
    task.load(worker.work)
    norms = []
    for i in ids:
        batches, seed = _batches(worker, which, i, part), measurement_seed(task, which, i, part)
        start = _start(task, i).to(worker.work.device)
        norms.append(spectral_norm(lambda v, b=batches, s=seed: hessian_vector(worker.work.module, b, v, s), start))
    return norms


def products_of_block(worker: Worker, task: Direction, job: tuple[str, list[int], Part | None]) -> Total:
    """Return the sum over the clients ``ids`` of H_i v / N; for the pool, of (n_i / n) H_i v, n = sum_i n_i."""
    which, ids, part = job
    task.at.load(worker.work)
    total, sizes, v = BlockSum(), clients_of(worker.data, which).rows.sizes, task.v.to(worker.work.device)
    examples = int(sizes.sum())
    for i in ids:
        seed = measurement_seed(task.at, which, i, part)
        product = hessian_vector(worker.work.module, _batches(worker, which, i, part), v, seed)
        weight = float(sizes[i]) / examples if which == "pool" else 1 / len(sizes)
        total.add({"product": product * weight})
    return total.total


def hessian_vector(module: LightningModule, batches: Iterable[Batch], v: Tensor, seed: int = 0) -> Tensor:
    """Return H v for the Hessian H of the mean loss over all examples of the batches, (P,) float64, in evaluation mode.

    seed: seed of the module's random draws, which must be the same for every v, because H depends on the draws.

    Raises:
        ValueError: the parameters are in half precision, or a layer mixes samples.
    """
    parameters = list(trainable_parameters(module).values())
    if any(p.dtype.itemsize < 4 for p in parameters):
        raise ValueError(
            f"the model is in {parameters[0].dtype}, whose Hessian-vector products are rounding noise; use float32"
        )
    module.eval()
    require_apart(module)
    pieces = v.split([p.numel() for p in parameters])
    parts = [piece.view_as(p).to(p.dtype) for piece, p in zip(pieces, parameters, strict=True)]
    total, n = torch.zeros_like(v), 0
    for batch in batches:
        set_default_generator(seed, n)
        loss = module.training_step(tuple(batch), 0)
        assert isinstance(loss, Tensor)
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
        along = torch.stack([(g * part).sum() for g, part in zip(first, parts, strict=True)]).sum()
        second = torch.autograd.grad(along, parameters, allow_unused=True, materialize_grads=True)
        total.add_(torch.cat([s.reshape(-1) for s in second]), alpha=len(batch[1]))
        n += len(batch[1])
    return total / n


def _hessian(
    executor: Executor, at: ModelTask, which: str, n_sets: int, blocks: int, part: Part | None
) -> Callable[[Tensor], Tensor]:
    jobs = [(which, ids, part) for ids in cut(range(n_sets), blocks)]

    def apply(v: Tensor) -> Tensor:
        return data(add_blocks(executor.map(products_of_block, Direction(at, v), jobs))["product"])

    return apply


def _start(at: ModelTask, client: int) -> Tensor:
    size = at.model.layout.size
    return torch.randn(size, generator=generator("Lanczos", client), dtype=torch.float64)


def _batches(worker: Worker, which: str, client: int, part: Part | None) -> list[Batch]:
    examples = clients_of(worker.data, which)[client]
    examples = part.select(which, client, examples) if part else examples
    return list(zip(*(column.split(BATCH) for column in examples.columns), strict=True))
