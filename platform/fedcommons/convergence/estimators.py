"""zeta^2, sigma^2 and delta^2 at one model, from the moments of the clients' and the pool's per-sample gradients.

f_i(x)         (1/n_i) sum_j w_j F(x, xi_j): mean loss of client i on its data, weighted if its examples have weights
               w_j, in evaluation mode, without augmentation;  g_i = grad f_i(x)
F(x, xi_j)     loss of one example, times its weight w_j if it has a weight
g, g~          mean of g_i over clients; gradient of the mean loss on the pool D~
zeta^2       = (1/N) sum_i ||g_i - g||^2
sigma^2      = (1/N) sum_i E_{xi ~ D_i} ||grad F(x, xi) - g_i||^2,  per sample (a batch of B has sigma^2 / B)
sigma_avg^2  = sigma^2 of one client with all clients' examples; sigma~_avg^2: of one client with the pool's examples
delta^2      = ||g - g~||^2
mix            of client i: the exact mixture (1 - p) D_i + p D~, with the whole pool

All values follow from E||X - EX||^2 = E||X||^2 - ||EX||^2. So a few mean gradients and the squared norms of per-sample
gradients are enough, and ``per_sample`` computes these norms without storing the gradients. Gradients are computed in
the model's precision, in batches; sums over batches and clients are in float64. Norms are Euclidean, over all
parameters.

Subsampled (``Part``): a mean gradient over m of n_i examples has the squared standard error v_i = (1/m - 1/n_i) S_i^2,
S_i^2: sample variance of the gradients. Its squared norm is too large by v_i on average. v_i is subtracted, so that
every estimate is unbiased; an estimate may be negative. ``laboratory.measure`` averages over disjoint parts, whose
spread gives the standard error.
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
"""Examples per pass. Fixed, so that results do not depend on the machine; small, so that VGG-11 fits in memory."""

PIECE = 1 << 20
"""Number of elements that are converted to float64 at a time."""

PARTS = 8
"""Number of disjoint random parts of a subsampled measurement; the spread of their values gives its standard error."""


@dataclass(frozen=True)
class Part:
    """Part ``number`` of ``PARTS`` disjoint parts of ``samples`` random examples per client; number None: all parts."""

    samples: int
    number: int | None
    seed: int

    def rows(self, which: str, client: int, n: int) -> np.ndarray:
        """Return the rows of a client's n examples in this part: at least two; all rows if n is too small to split."""
        m = min(self.samples, n)
        if m < 2 * PARTS:
            return np.arange(n)
        order = numpy_generator(self.seed, "measured", which, client).permutation(n)
        if self.number is None:
            return order[:m]
        return order[m * self.number // PARTS : m * (self.number + 1) // PARTS]

    def select(self, which: str, client: int, examples: ClientData) -> ClientData:
        """Return the client's examples that are in the part."""
        rows = torch.from_numpy(self.rows(which, client, len(examples))).to(examples.y.device)
        weight = None if examples.weight is None else examples.weight[rows]
        return ClientData(examples.x[rows], examples.y[rows], weight)


@dataclass(frozen=True, eq=False, kw_only=True)
class Moments:
    """Moments of the per-sample gradients of N sets of examples at one model.

    mean, pooled: (P,) float64, mean of g_i over sets, and mean over all examples; sizes: (N,), n_i or the sum
    of the set's weights;  rows: (N,) n_i;  sq: (N,) ||g_i||^2;  sq_mean: (N,) E||grad F||^2;  v: (N,) squared standard
    error of g_i, 0 if all examples were measured.
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
        """Return zeta^2 of the sets."""
        return self._rounded(self.mean_sq - self.sq_of_mean)

    @property
    def sigma_sq(self) -> float:
        """Return sigma^2 of the sets, per sample."""
        return self._rounded(float(self.sq_mean.mean()) - self.mean_sq)

    @property
    def sigma_sq_of_each(self) -> np.ndarray:
        """Return E||grad F - g_i||^2 of each set, (N,)."""
        return self.sq_mean - self.sq + self.v

    @property
    def sigma_avg_sq(self) -> float:
        """Return sigma_avg^2, per sample: sigma^2 of one client with all examples."""
        return self._rounded(self.sq_mean_of_pooled - self.sq_of_pooled)

    @property
    def mean_sq(self) -> float:
        """Return (1/N) sum_i ||g_i||^2."""
        return float((self.sq - self.v).mean())

    @property
    def sq_of_mean(self) -> float:
        """Return ||g||^2."""
        return sq_norm(self.mean) - self.v_of_mean

    @property
    def sq_of_pooled(self) -> float:
        """Return the squared norm of the gradient of the mean loss over all examples."""
        return sq_norm(self.pooled) - self.v_of_pooled

    @property
    def v_of_mean(self) -> float:
        """Return the squared standard error of g."""
        return float(self.v.sum()) / len(self.v) ** 2

    @property
    def v_of_pooled(self) -> float:
        """Return the squared standard error of the mean gradient over all examples."""
        return float(self._shares**2 @ self.v)

    @property
    def sq_mean_of_pooled(self) -> float:
        """Return E||grad F||^2 over all examples, with weights w_j normalised to mean 1 over all examples.

        ``sq_mean`` of client i uses weights normalised to mean 1 over its own examples. So the weight  w_j n_i / W_i
        becomes  w_j n / W,  W_i = sum_j w_j, n and W the sums over clients. Client i then has the factor
        (n_i / n) (W_i n / (n_i W))^2.
        """
        shares, of_rows = self._shares, self.rows / self.rows.sum()
        return float((shares * (shares / of_rows)) @ self.sq_mean)

    @property
    def _shares(self) -> np.ndarray:
        return self.sizes / self.sizes.sum()

    def _rounded(self, value: float) -> float:
        """Return zero for a value that is negative due to rounding; an estimate from a part may stay negative."""
        return value if self.v.any() else max(value, 0.0)


@dataclass(frozen=True)
class Direction:
    """A model and a vector (P,) in the space of its parameters."""

    at: ModelTask
    v: Tensor

    @property
    def nbytes(self) -> int:
        return self.at.nbytes + self.v.nbytes


def delta_sq(clients: Moments, pool: Moments) -> float:
    """Return delta^2 = ||g - g~||^2, the shift of the pool."""
    shift = sq_norm(clients.mean - pool.pooled)
    return shift - clients.v_of_mean - pool.v_of_pooled


def mixed(clients: Moments, pool: Moments, p: float) -> tuple[float, float]:
    """Return (zeta_mix^2, sigma_mix^2) of the exact mixtures, whose gradients are (1 - p) g_i + p g~; p in [0, 1].

    Both are differences of means of squares, which are algebraically equal to Lemma 1. Rounding: about 1e-15 ||g~||^2.
    """
    client_share, cross = 1 - p, float(clients.mean @ pool.pooled)
    shared = 2 * p * client_share * cross + p**2 * pool.sq_of_pooled
    mean_sq = client_share**2 * clients.mean_sq + shared  # (1/N) sum_i ||(1 - p) g_i + p g~||^2
    sq_of_mean = client_share**2 * clients.sq_of_mean + shared
    sq_mean = client_share * float(clients.sq_mean.mean()) + p * pool.sq_mean_of_pooled
    return mean_sq - sq_of_mean, sq_mean - mean_sq


def moments(
    executor: Executor, at: ModelTask, which: str, n_sets: int, blocks: int, part: Part | None = None
) -> Moments:
    """Return the moments at a model on the sets ``which`` (``clients_of``), in fixed blocks; part None: all data."""
    jobs = [(which, ids, part) for ids in cut(range(n_sets), blocks)]
    totals, scalars = zip(*executor.map(moments_of_block, at, jobs), strict=True)
    sums = {name: data(total) for name, total in add_blocks(totals).items()}
    sizes, rows, sq, sq_mean, v = np.concatenate(scalars).T
    mean = sums["gradient"].div_(n_sets)
    pooled = sums["pooled"].div_(sizes.sum()) if "pooled" in sums else mean
    return Moments(mean=mean, pooled=pooled, sizes=sizes, rows=rows, sq=sq, sq_mean=sq_mean, v=v)


def zeta_sq_of_each(executor: Executor, at: ModelTask, which: str, moments: Moments, blocks: int) -> np.ndarray:
    """Return ||g_i - g||^2 of each set, (N,), by a second pass in which clients get g; ``moments``: of all the data."""
    jobs = [(which, ids) for ids in cut(range(len(moments.sq)), blocks)]
    along = np.concatenate(executor.map(along_of_block, Direction(at, moments.mean), jobs))
    return moments.sq - 2 * along + sq_norm(moments.mean)


def along_of_block(worker: Worker, task: Direction, job: tuple[str, list[int]]) -> list[float]:
    """Return <g_i, v> of each set in the job's ``ids``."""
    which, ids = job
    clients, v = clients_of(worker.data, which), task.v.to(worker.work.device)
    task.at.load(worker.work)
    keys = [measurement_seed(task.at, which, i, None) for i in ids]  # as in the first pass
    return [float(mean_gradient(worker, clients[i], key)[0] @ v) for i, key in zip(ids, keys, strict=True)]


def moments_of_block(
    worker: Worker, task: ModelTask, job: tuple[str, list[int], Part | None]
) -> tuple[Total, list[list[float]]]:
    """Return the sum of g_i over the sets ``ids``, the sum of n_i g_i if sizes differ, and the scalars of each set.

    Scalars: (n_i or the sum of its weights, n_i, ||g_i||^2, E||grad F||^2, v_i).
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
    """Return the measured sets of examples: "own", the clients' real data; "train", their training data; "pool".

    Raises:
        ValueError: ``which`` is "pool" and there is no pool.
    """
    clients = {"own": run.real, "train": run.clients, "pool": run.pool}[which]
    if clients is None:
        raise ValueError("nothing is in the commons: without a pool there is no delta^2, sigma~_avg^2 or mixture")
    return clients


def measurement_seed(at: ModelTask, which: str, client: int, part: Part | None) -> int:
    """Return the seed of a module's random draws on a client's examples, which is the same in every pass."""
    return seed_for(at.seed, "measured", which, client, -1 if part is None or part.number is None else part.number)


def mean_gradient(worker: Worker, examples: ClientData, seed: int = 0) -> tuple[Tensor, float]:
    """Return the mean gradient (P,), float64, of the examples at the loaded model, and the mean squared gradient norm.

    seed: seed of the module's random draws.
    """
    work, n = worker.work, len(examples)
    total = torch.zeros(work.params.layout.size, dtype=torch.float64, device=work.device)
    total_sq = 0.0
    for first in range(0, n, BATCH):
        batch = [column[first : first + BATCH] for column in examples.columns]
        set_default_generator(seed, first)
        mean, sq_norms = gradients(work.module, batch)
        for into, piece in zip(total.split(PIECE), mean.split(PIECE), strict=True):
            into.add_(piece, alpha=len(batch[1]))  # to float64, piece by piece
        total_sq += float(sq_norms.sum(dtype=torch.float64))
        del mean, piece  # frees memory for the next batch
    return total.div_(n), total_sq / n
