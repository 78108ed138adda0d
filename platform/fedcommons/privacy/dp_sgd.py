"""DP-SGD local training: per-example clipping, Gaussian noise, Poisson batches.

Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133, algorithm 1; FedDM (figures
3 and 10) uses it for its baselines.   C: clipping norm;  sigma: noise multiplier;  B: batch size;  n: number of
examples;  q = B/n: sampling rate.

Departs from the paper: an example whose gradient is not finite adds zero, because clipping cannot bound it; and the
noise consists of floating point numbers, which the proofs of privacy do not cover.

The noisy sum is divided by min(B, n), which the config and the public n decide. So the divisor is the same constant
for neighbouring data sets and for every batch. A division by the batch's actual size, or by a number that depends on a
secret n, would leak more than is counted (arXiv:2605.15648).

Gradients are computed one example at a time. This is exact for every module and loss, and on a CPU it was faster than
vectorised gradients. On a GPU it is slow, so one call may compute ``at_once`` gradients (``dp_sgd_vmap``).
``noise.py`` draws noise and batches on the CPU and copies them, so they are the same on every device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from fedcommons.privacy.accountants import noise_for, require_reachable
from fedcommons.privacy.noise import Stream
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.seeding import set_default_generator


def clipped(g: Tensor, clip: float) -> tuple[Tensor, float]:
    """Return g min(1, C/||g||), computed in place, and the bound C on its norm; zero if g is not finite."""
    factor = (clip / torch.linalg.vector_norm(g)).nan_to_num(0).clamp(max=1)
    return g.mul_(factor).nan_to_num_(0), clip  # one nan or infinite element sets the whole g to zero


class NoisySum:
    """A sum of vectors with noise. Its ``release`` states only the clipping and noise that really took place.

    bound: the largest norm of the added vectors, stated by the caller that clipped them, and at least C; infinite if
    a vector was not clipped. sigma: standard deviation of the noise over C; 0 before noise is added.
    """

    def __init__(self, zero: Tensor, clip: float) -> None:
        self.values, self.clip, self.bound, self.sigma = zero, clip, clip, 0.0

    def add(self, g: Tensor, norm: float = inf) -> None:
        """Add g, the vector of one example or the sum of several vectors, each with a norm of at most ``norm``."""
        self.values.add_(g)
        self.bound = max(self.bound, norm)

    def blur(self, sigma: float, noise: Stream) -> None:
        """Add N(0, sigma^2 C^2 I). Noise of a more precise type is added in that type, and the sum is rounded once."""
        kind = np.float64 if self.values.dtype == torch.float64 else np.float32
        normal = torch.from_numpy(noise.standard_normal(tuple(self.values.shape), dtype=kind)).to(self.values.device)
        if normal.dtype == self.values.dtype:
            self.values.add_(normal, alpha=sigma * self.clip)
        else:
            self.values.copy_(self.values + normal.mul_(sigma * self.clip))
        self.sigma = sigma

    @property
    def release(self) -> Release:
        """Return the protection of the sum for a batch of all examples (q = 1); a bound above C lowers its sigma."""
        sigma = self.sigma * (self.clip / self.bound)  # exactly ``self.sigma`` if no vector is longer than C
        return Release(mechanism=SAMPLED_GAUSSIAN, sigma=sigma, sensitivity=self.bound, steps=1)


@dataclass(frozen=True)
class Target:
    """The largest epsilon, at delta, that a client's local trainings may spend in ``rounds`` rounds, one per round."""

    epsilon: float
    delta: float
    rounds: int

    def sigma(self, q: float, steps: int) -> float:
        """Return the smallest sigma for a client that makes ``steps`` steps per round and takes part in all rounds.

        Raises:
            UserError: the target needs a sigma above ``accountants.LARGEST_SIGMA``.
        """
        course = q, steps * self.rounds, self.delta
        require_reachable(self.epsilon, *course)
        return noise_for(self.epsilon, *course)


@dataclass(frozen=True)
class DPSGD:
    """g <- ( sum_j g_j min(1, C/||g_j||) + N(0, sigma^2 C^2 I) ) / B over a Poisson sample with rate q = B/n."""

    noise_multiplier: float  # sigma
    clip: float  # C
    target: Target | None = None  # replaces sigma: each client's sigma then follows from the target
    at_once: int = 1  # examples per gradient call, in local training without a loss of the method

    def of_client(self, n: int, batch_size: int, steps: int) -> "DPSGD":
        """Return the DP-SGD with the sigma of a client that has n examples and makes ``steps`` steps per round."""
        if self.target is None:
            return self
        sigma = self.target.sigma(self.sampling_rate(n, batch_size), steps)
        return replace(self, noise_multiplier=sigma, target=None)

    @staticmethod
    def steps(n: int, batch_size: int) -> int:
        """Return the steps of an epoch: ceil(n/B), the number of batches of an epoch without privacy."""
        return -(-n // batch_size)

    @staticmethod
    def sampling_rate(n: int, batch_size: int) -> float:
        """Return q = min(1, B/n), in (0, 1]."""
        return min(1.0, batch_size / n)

    def sample(self, n: int, batch_size: int, draws: Stream) -> Tensor:
        """Return the rows of a batch, which has each of n rows with probability q, independently; it may be empty."""
        return torch.from_numpy(np.flatnonzero(draws.random(n) < self.sampling_rate(n, batch_size)))

    def gradients(
        self,
        params: Sequence[nn.Parameter],
        loss: Callable[[tuple[Tensor, ...], int], Tensor],
        batch: tuple[Tensor, ...],
        step: int,
        expected: int,
        noise: Stream,
        seeds: Sequence[int] = (),
    ) -> tuple[Tensor, Release]:
        """Set the parameters' gradients for this batch, with noise; ``expected``: B, the batch's expected size.

        seeds: one seed per example for torch's default generators, from which the example's loss draws; if empty, all
        losses draw from one stream.
        Returns the mean loss of the batch, zero for an empty batch, and the gradients' protection.
        """
        total = NoisySum(params[0].new_zeros(sum(p.numel() for p in params)), self.clip)
        losses = params[0].new_zeros(())
        n = len(batch[1])
        for j in range(n):
            if seeds:
                set_default_generator(seeds[j])
            value = loss(tuple(t[j : j + 1].clone() for t in batch), step)
            g = torch.cat([part.reshape(-1) for part in torch.autograd.grad(value, params, materialize_grads=True)])
            total.add(*clipped(g, self.clip))
            losses += value.detach()
        return losses / max(n, 1), self.put(total, params, expected, noise)

    def put(self, total: NoisySum, params: Sequence[nn.Parameter], expected: int, noise: Stream) -> Release:
        """Set the parameters' gradients to (sum + noise)/``expected``; return their protection."""
        total.blur(self.noise_multiplier, noise)
        mean = total.values.div_(expected)
        start = 0
        for p in params:
            p.grad = mean[start : start + p.numel()].view_as(p)
            start += p.numel()
        return total.release
