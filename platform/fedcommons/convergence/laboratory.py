"""Measurement of all convergence parameters at one model, together with the values that Lemma 1 predicts.

D_i: real data of client i; D~: the pool of shared examples; p: share of the pool in mixtures; f: the mean over clients
of their losses on D_i; L_i: smoothness of client i's loss. ``estimators`` defines zeta^2, sigma^2 and delta^2.

``gradient_sq``                      ||grad f||^2, on the clients' real data
``zeta_sq``, ``sigma_sq``            zeta^2 and sigma^2 on the clients' real data D_i, whatever clients train on
``sigma_avg_sq``                     sigma^2 of all clients' real examples together
``zeta_hat_sq``, ``sigma_hat_sq``    zeta^2 and sigma^2 on the clients' training data, real and shared
``zeta_mix_sq``, ``sigma_mix_sq``    zeta^2 and sigma^2 on the exact mixtures (1 - p) D_i + p D~ with the whole pool
``zeta_lemma1_sq``, ``sigma_lemma1_sq``  Lemma 1's predictions of the values on the mixtures, computed from ``zeta_sq``,
                                     ``sigma_sq``, ``sigma_pool_sq``, ``delta_sq`` and p
``sigma_pool_sq``, ``delta_sq``      sigma^2 of the pool; squared distance of the pool's gradient from grad f
``L_max``, ``L_p``                   largest L_i on the clients' real data; largest L_i on the training data
``L_pool``, ``L_lemma1``             smoothness of the loss on the pool; Lemma 1's upper bound for the mixtures

Without a pool, the values that need a pool are omitted. p is the share of shared examples over all clients, even if
single clients have different shares. If only random subsets of the data are measured, L is computed on the union of the
subsets. L is then too large on average and has no standard error.
Source: Fedssyn (Li et al., TMLR 2024), figures 5 and A.7.
"""

from dataclasses import dataclass
from statistics import fmean, stdev

from fedcommons.convergence import lemma1
from fedcommons.convergence.estimators import PARTS, Moments, Part, clients_of, delta_sq, mixed, moments
from fedcommons.convergence.smoothness import smoothness, smoothness_of_each
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.core.worker import RunData


@dataclass(frozen=True)
class Estimate:
    """An estimate of a convergence parameter.

    standard_error: computed from ``PARTS`` disjoint subsets if only a subset of the data was measured; 0 if all data
    were measured, and for the smoothness L, whose standard error is not known.
    """

    value: float
    standard_error: float = 0.0


@dataclass(frozen=True)
class Laboratory:
    """Workers, data and settings for the measurement of convergence parameters.

    p: share of the pool in the mixture of a client's real data and the pool, in [0, 1].
    blocks: number of blocks in which clients are summed in a fixed order, so that results do not depend on the number
    of workers. samples: number of examples that are measured per client; None: all. seed: seed for the random choice
    of these examples.
    """

    executor: Executor
    data: RunData
    p: float
    blocks: int
    samples: int | None = None
    seed: int = 0

    @property
    def subsampled(self) -> bool:
        """Return whether any client, or the pool, has more than ``samples`` examples, so that not all are measured."""
        measured = [clients for clients in (self.data.real, self.data.clients, self.data.pool) if clients is not None]
        return self.samples is not None and any(self.samples < clients.rows.sizes.max() for clients in measured)

    def measure(self, at: ModelTask, hessians: bool = False) -> dict[str, Estimate]:
        """Return the estimates by name (see the module's list) at the model ``at``.

        hessians: whether to estimate the smoothness values ``L_...`` too, which takes hundreds of passes over the data.
        """
        if self.samples is None or not self.subsampled:
            values = self._gradients(at, None) | (self._hessians(at, None) if hessians else {})
            return {name: Estimate(value) for name, value in values.items()}
        values = [self._gradients(at, Part(self.samples, k, self.seed)) for k in range(PARTS)]
        means = {
            name: Estimate(fmean(f[name] for f in values), stdev(f[name] for f in values) / PARTS**0.5)
            for name in values[0]
        }
        every = self._hessians(at, Part(self.samples, None, self.seed)) if hessians else {}
        return means | {name: Estimate(value) for name, value in every.items()}

    def nbytes(self, at: ModelTask, hessians: bool = False) -> int:
        """Return the bytes that all clients receive and send for ``measure``; the server measures the pool itself.

        Each client receives the model once. It has one data set, or two if its training and real data differ.
        If not all examples are measured, each data set is measured on ``PARTS`` subsets. For each measurement, the
        client sends the mean gradient in float64, and two numbers for the variances. With ``hessians``, it also sends
        the smoothness L_i of its loss on each data set.
        """
        sets = 1 if self.data.clients is self.data.real else 2
        up = (at.model.layout.size + 2) * 8 * (PARTS if self.subsampled else 1) + 8 * hessians
        return len(self.data.real) * (at.nbytes + sets * up)

    def moments(self, at: ModelTask, which: str, part: Part | None = None) -> Moments:
        """Return the moments of per-sample gradients on the sets of examples ``which``; see ``estimators.moments``."""
        return moments(self.executor, at, which, self._sets(which), self.blocks, part)

    def _sets(self, which: str) -> int:
        return len(clients_of(self.data, which))

    def _gradients(self, at: ModelTask, part: Part | None) -> dict[str, float]:
        own_moments = self.moments(at, "own", part)
        same = self.data.clients is self.data.real
        train = own_moments if same else self.moments(at, "train", part)
        values = {
            "gradient_sq": own_moments.sq_of_mean,
            "zeta_sq": own_moments.zeta_sq,
            "zeta_hat_sq": train.zeta_sq,
            "sigma_sq": own_moments.sigma_sq,
            "sigma_hat_sq": train.sigma_sq,
            "sigma_avg_sq": own_moments.sigma_avg_sq,
        }
        if self.data.pool is not None:
            pool, p = self.moments(at, "pool", part), self.p
            shift, noise = delta_sq(own_moments, pool), pool.sigma_avg_sq
            values["zeta_mix_sq"], values["sigma_mix_sq"] = mixed(own_moments, pool, p)
            values |= {
                "sigma_pool_sq": noise,
                "delta_sq": shift,
                "zeta_lemma1_sq": lemma1.zeta_sq(p, own_moments.zeta_sq),
                "sigma_lemma1_sq": lemma1.sigma_sq(p, own_moments.sigma_sq, noise, own_moments.zeta_sq, shift),
            }
        return values

    def _hessians(self, at: ModelTask, part: Part | None) -> dict[str, float]:
        values = {"L_max": max(self._each(at, "own", part))}
        same = self.data.clients is self.data.real
        values["L_p"] = values["L_max"] if same else max(self._each(at, "train", part))
        if self.data.pool is not None:
            values["L_pool"] = smoothness(self.executor, at, "pool", self._sets("pool"), self.blocks, part)
            values["L_lemma1"] = lemma1.smoothness(self.p, values["L_max"], values["L_pool"])
        return values

    def _each(self, at: ModelTask, which: str, part: Part | None) -> list[float]:
        return smoothness_of_each(self.executor, at, which, self._sets(which), self.blocks, part)
