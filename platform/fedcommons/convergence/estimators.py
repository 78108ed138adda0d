"""Estimators of zeta^2, sigma^2 and delta^2 at one model, from moments of per-sample gradients.

x              the model's weights, a vector with P elements
D_i, n_i, N    examples of client i, their number, and the number of clients;  D~: the pool of shared examples
F(x, xi_j)     loss of example xi_j;  w_j: its weight in the loss, 1 if the examples have no weights
f_i(x)         (1/n_i) sum_j w_j F(x, xi_j): mean loss of client i, in evaluation mode, without augmentation
g_i            grad f_i(x): mean gradient of client i
g, g~          mean of g_i over clients; gradient of the mean loss on the pool D~
zeta^2       = (1/N) sum_i ||g_i - g||^2
sigma^2      = (1/N) sum_i E_{xi ~ D_i} ||grad F(x, xi) - g_i||^2,  per sample (a batch of B has sigma^2 / B)
sigma_avg^2    sigma^2 of one client with the examples of all clients;  sigma~_avg^2: of one client with the pool
delta^2      = ||g - g~||^2
mix            index for the exact mixtures (1 - p) D_i + p D~ of client i's data and the whole pool;  p: share of D~

All values follow from E||X - EX||^2 = E||X||^2 - ||EX||^2. So a few mean gradients and the squared norms of per-sample
gradients are enough, and ``per_sample`` computes these norms without storing the gradients. Gradients are computed in
the model's precision, in batches. Sums over batches and clients are in float64. Norms are Euclidean, over all
parameters of the model.

Measurements on a subset of the data (``Part``): a mean gradient over m of n_i examples has the squared standard error
v_i = (1/m - 1/n_i) S_i^2, with the sample variance S_i^2 of the gradients. The squared norm of this mean gradient is
too large by v_i on average. So v_i is subtracted, which makes every estimate unbiased, but possibly negative.
``laboratory.measure`` averages over disjoint subsets, whose spread gives the standard error.
Source: Fedssyn (Li et al., TMLR 2024), assumptions 1 and 2, lemma 1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcommons.convergence.per_sample import gradients
from fedcommons.core.block_sum import BlockSum, Total, add_blocks, cut
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import ClientData, Clients
from fedcommons.flat_tensors import data, sq_norm
from fedcommons.seeding import numpy_generator, seed_for, set_default_generator

BATCH = 32
"""Number of examples per forward and backward pass, equal on every machine; small, so that VGG-11 fits in memory."""

PIECE = 1 << 20
"""Number of elements of a gradient that are converted to float64 at a time, to save memory."""

PARTS = 8
"""Number of disjoint random subsets in a measurement on a part of the data; their spread gives the standard error."""


@dataclass(frozen=True)
class Part:
    """A random subset of each client's examples, one of ``PARTS`` disjoint subsets.

    samples: number of examples per client in all subsets. number: index of the subset; None: the union of all subsets.
    """

    samples: int
    number: int | None
    seed: int

    def rows(self, which: str, client: int, n: int) -> np.ndarray:
        """Return the indices, in 0 .. n - 1, of a client's examples in this subset.

        which: the data, "own", "train" or "pool" (``clients_of``). n: number of the client's examples. If subsets would
        have fewer than two examples, all n indices are returned.
        """
        m = min(self.samples, n)
        if m < 2 * PARTS:
            return np.arange(n)
        order = numpy_generator(self.seed, "measured", which, client).permutation(n)
        if self.number is None:
            return order[:m]
        return order[m * self.number // PARTS : m * (self.number + 1) // PARTS]

    def select(self, which: str, client: int, examples: ClientData) -> ClientData:
        """Return the client's examples that are in this subset; ``which``: see ``clients_of``."""
        rows = torch.from_numpy(self.rows(which, client, len(examples))).to(examples.y.device)
        weight = None if examples.weight is None else examples.weight[rows]
        return ClientData(examples.x[rows], examples.y[rows], weight)


@dataclass(frozen=True, eq=False, kw_only=True)
class Moments:
    """Moments of the per-sample gradients at one model, for N sets of examples, usually one set per client.

    mean: (P,) float64, the mean over sets of the sets' mean gradients g_i. pooled: (P,) float64, the mean gradient over
    the examples of all sets. All other fields: (N,), a value per set. rows: number of examples n_i. sizes: sum of the
    examples' weights; n_i without weights. sq: ||g_i||^2. sq_mean: mean squared norm of the per-sample gradients. v:
    v_i, the squared standard error of g_i, which is 0 if all examples were measured.
    """

    mean: Tensor
    pooled: Tensor
    sizes: np.ndarray
    rows: np.ndarray
    sq: np.ndarray
    sq_mean: np.ndarray
    v: np.ndarray

    @property
    def zeta_sq(self) -> float:
        """Return zeta^2 = (1/N) sum_i ||g_i - g||^2 for the mean gradients g_i of the N sets and their mean g."""
        return self._rounded(self.mean_sq - self.sq_of_mean)

    @property
    def sigma_sq(self) -> float:
        """Return sigma^2, the variance of the per-sample gradients in a set, averaged over the N sets."""
        return self._rounded(float(self.sq_mean.mean()) - self.mean_sq)

    @property
    def sigma_avg_sq(self) -> float:
        """Return sigma_avg^2, the variance of per-sample gradients if one client had all examples of the N sets."""
        return self._rounded(self.sq_mean_of_pooled - self.sq_of_pooled)

    @property
    def mean_sq(self) -> float:
        """Return (1/N) sum_i (||g_i||^2 - v_i) for the sets' mean gradients g_i with squared standard errors v_i."""
        return float((self.sq - self.v).mean())

    @property
    def sq_of_mean(self) -> float:
        """Return ||g||^2 minus the squared standard error of g, where g is the mean of the sets' mean gradients."""
        return sq_norm(self.mean) - self.v_of_mean

    @property
    def sq_of_pooled(self) -> float:
        """Return ||m||^2 minus the squared standard error of m, where m is the mean gradient over all examples."""
        return sq_norm(self.pooled) - self.v_of_pooled

    @property
    def v_of_mean(self) -> float:
        """Return sum_i v_i / N^2, the squared standard error of ``mean``; v_i: squared standard error of g_i."""
        return float(self.v.sum()) / len(self.v) ** 2

    @property
    def v_of_pooled(self) -> float:
        """Return the squared standard error of ``pooled``, the mean gradient over all examples."""
        return float(self._shares**2 @ self.v)

    @property
    def sq_mean_of_pooled(self) -> float:
        """Return the mean squared norm of per-sample gradients, with weights normalised to mean 1 over all examples.

        ``sq_mean`` of client i uses weights normalised to mean 1 over client i's n_i examples. Let W_i be the sum of
        client i's weights w_j, n = sum_i n_i and W = sum_i W_i. Then the weight  w_j n_i / W_i  becomes  w_j n / W,  so
        ``sq_mean`` of client i has the factor  (n_i / n) (W_i n / (n_i W))^2  in the result.
        """
        shares, of_rows = self._shares, self.rows / self.rows.sum()
        return float((shares * (shares / of_rows)) @ self.sq_mean)

    @property
    def _shares(self) -> np.ndarray:
        return self.sizes / self.sizes.sum()

    def _rounded(self, value: float) -> float:
        """Return 0 for a negative value if all examples were measured, because the value is then a rounding error.

        An estimate from a subset of the examples is returned unchanged. It is unbiased, so it may be negative.
        """
        return value if self.v.any() else max(value, 0.0)


def delta_sq(clients: Moments, pool: Moments) -> float:
    """Return delta^2 = ||g - g~||^2, the squared distance between the clients' mean gradient g and the pool's g~."""
    shift = sq_norm(clients.mean - pool.pooled)
    return shift - clients.v_of_mean - pool.v_of_pooled


def mixed(clients: Moments, pool: Moments, p: float) -> tuple[float, float]:
    """Return (zeta^2, sigma^2) if the data of every client i were the exact mixture (1 - p) D_i + p D~.

    D_i: data of client i, with mean gradient g_i. D~: the pool, with mean gradient g~. p: share of the pool, in [0, 1].
    The mean gradient on a mixture is (1 - p) g_i + p g~. Both results are differences of means of squares. They equal
    the values of Lemma 1, up to rounding errors of 1e-15 ||g~||^2.
    """
    client_share, cross = 1 - p, float(clients.mean @ pool.pooled)
    shared = 2 * p * client_share * cross + p**2 * pool.sq_of_pooled
    mean_sq = client_share**2 * clients.mean_sq + shared  # mean of ||(1 - p) g_i + p g~||^2 over the clients i
    sq_of_mean = client_share**2 * clients.sq_of_mean + shared
    sq_mean = client_share * float(clients.sq_mean.mean()) + p * pool.sq_mean_of_pooled
    return mean_sq - sq_of_mean, sq_mean - mean_sq


def moments(
    executor: Executor, at: ModelTask, which: str, n_sets: int, blocks: int, part: Part | None = None
) -> Moments:
    """Return the moments of the per-sample gradients of a model on the sets of examples ``which`` (``clients_of``).

    blocks: number of blocks of sets, which are summed in a fixed order, so that no result depends on the number of
    workers. part: the subset of each set's examples that is measured; None: all examples.
    """
    jobs = [(which, ids, part) for ids in cut(range(n_sets), blocks)]
    totals, scalars = zip(*executor.map(moments_of_block, at, jobs), strict=True)
    sums = {name: data(total) for name, total in add_blocks(totals).items()}
    sizes, rows, sq, sq_mean, v = np.concatenate(scalars).T
    mean = sums["gradient"].div_(n_sets)
    pooled = sums["pooled"].div_(sizes.sum()) if "pooled" in sums else mean
    return Moments(mean=mean, pooled=pooled, sizes=sizes, rows=rows, sq=sq, sq_mean=sq_mean, v=v)


def moments_of_block(
    worker: Worker, task: ModelTask, job: tuple[str, list[int], Part | None]
) -> tuple[Total, list[list[float]]]:
    """Return sums of gradients over the sets of examples in ``job``, and a list of scalars for each set.

    Sums: ``gradient``, the sum of the sets' mean gradients g_i, and, if the sets' sizes differ, ``pooled``, the sum of
    g_i times the size. Scalars of a set: (size, n_i, ||g_i||^2, mean squared norm of per-sample gradients, v_i). size:
    sum of the examples' weights. n_i: number of examples. v_i: squared standard error of g_i.
    """
    which, ids, part = job
    clients = clients_of(worker.data, which)
    sizes, totals = clients.rows.sizes, clients.rows.totals
    alike = totals.min() == totals.max()
    task.load(worker.work)
    total, scalars = BlockSum(), []
    for i in ids:
        examples = part.select(which, i, clients[i]) if part else clients[i]
        n, m = int(sizes[i]), len(examples)
        gradient, sq_mean = mean_gradient(worker, examples, measurement_seed(task, which, i, part))
        sq = float(gradient @ gradient)
        v = (1 / m - 1 / n) * (sq_mean - sq) * m / (m - 1) if m < n else 0.0
        size = float(totals[i])
        scalars.append([size, n, sq, sq_mean, v])
        total.add({"gradient": gradient} | ({} if alike else {"pooled": gradient * size}))
    return total.total, scalars


def clients_of(run: RunData, which: str) -> Clients:
    """Return the sets of examples that are measured.

    which: "own", the clients' real data; "train", the clients' training data, which may contain shared examples; or
    "pool", the pool of shared examples.

    Raises:
        ValueError: ``which`` is "pool", and the run has no pool.
    """
    clients = {"own": run.real, "train": run.clients, "pool": run.pool}[which]
    if clients is None:
        raise ValueError("no example is shared: without a pool, delta^2, sigma~_avg^2 and mixtures are not defined")
    return clients


def measurement_seed(at: ModelTask, which: str, client: int, part: Part | None) -> int:
    """Return the seed for random numbers that the module draws on a client's examples; all passes use this seed."""
    return seed_for(at.seed, "measured", which, client, -1 if part is None or part.number is None else part.number)


def mean_gradient(worker: Worker, examples: ClientData, seed: int = 0) -> tuple[Tensor, float]:
    """Return the mean gradient (P,), float64, of the examples, and the mean squared norm of per-sample gradients.

    The gradients are computed at the weights loaded in ``worker``. seed: seed for random numbers that the module draws.
    """
    work, n = worker.work, len(examples)
    total = torch.zeros(work.params.layout.size, dtype=torch.float64, device=work.device)
    total_sq = 0.0
    for first in range(0, n, BATCH):
        batch = [column[first : first + BATCH] for column in examples.columns]
        set_default_generator(seed, first)
        mean, sq_norms = gradients(work.module, batch)
        for into, piece in zip(total.split(PIECE), mean.split(PIECE), strict=True):
            into.add_(piece, alpha=len(batch[1]))  # the addition converts the piece to float64
        total_sq += float(sq_norms.sum(dtype=torch.float64))
        del mean, piece  # frees memory for the next batch
    return total.div_(n), total_sq / n
