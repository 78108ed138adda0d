"""DP-SGD local training: per-example clipping, Gaussian noise, Poisson batches.

Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133, algorithm 1; as FedDM (figures
3 and 10) uses it for its baselines.   C: clipping norm;  sigma: noise multiplier;  B: batch size;  q = B/n: sampling
rate.

Departs from the paper: an example whose gradient is not finite adds nothing, as no clipping bounds it; and the noise is
made of floating point numbers, which the proofs of privacy do not cover.

The noisy sum is divided by min(B, n), which the config and the public n decide: the same constant for neighbours and
for every batch drawn. Divided by the batch's own size, or by one that follows a secret n, it would leak more than is
counted (arXiv:2605.15648).

Gradients are computed one example at a time. This is exact for every module and loss, and on a CPU it was faster than
vectorised ways; on a GPU it is slow, and ``at_once`` examples may be one call (``dp_vectorised``). Noise and batches
are drawn on the CPU, by ``noise.py``, and copied, so they are the same on every device.
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
    """g min(1, C/||g||), computed in place, and the bound C on its norm; zero if g is not finite."""
    factor = (clip / torch.linalg.vector_norm(g)).nan_to_num(0).clamp(max=1)
    return g.mul_(factor).nan_to_num_(0), clip  # nan or infinite: all of it becomes zero


class NoisySum:
    """A sum of vectors with noise. Its ``release`` states only the clipping and noise that really took place.

    bound: the largest norm of the added vectors, as stated by the caller that clipped them; infinite if one was not
    clipped. sigma: standard deviation of the noise over C; 0 before noise is added.
    """

    def __init__(self, zero: Tensor, clip: float) -> None:
        self.values, self.clip, self.bound, self.sigma = zero, clip, clip, 0.0

    def add(self, g: Tensor, norm: float = inf) -> None:
        """Add g, the vector of an example, or the sum of several, whose norms are at most ``norm`` each."""
        self.values.add_(g)
        self.bound = max(self.bound, norm)

    def blur(self, sigma: float, noise: Stream) -> None:
        """Add N(0, sigma^2 C^2 I). Noise of a finer type is added in that type, and the sum is rounded once."""
        kind = np.float64 if self.values.dtype == torch.float64 else np.float32
        normal = torch.from_numpy(noise.standard_normal(tuple(self.values.shape), dtype=kind)).to(self.values.device)
        if normal.dtype == self.values.dtype:
            self.values.add_(normal, alpha=sigma * self.clip)
        else:
            self.values.copy_(self.values + normal.mul_(sigma * self.clip))
        self.sigma = sigma

    @property
    def release(self) -> Release:
        """What protects the sum, for a batch of all examples (q = 1); a vector longer than C counts as less noise."""
        sigma = self.sigma * (self.clip / self.bound)  # exact where no vector is longer
        return Release(mechanism=SAMPLED_GAUSSIAN, sigma=sigma, sensitivity=self.bound, steps=1)


@dataclass(frozen=True)
class Target:
    """An epsilon, with its delta, that a client's local trainings spend at most in so many rounds, one in each."""

    epsilon: float
    delta: float
    rounds: int

    def sigma(self, q: float, steps: int) -> float:
        """The smallest sigma for a client who makes so many steps a round and takes part in all rounds.

        Raises:
            UserError: even much noise does not reach the target.
        """
        course = q, steps * self.rounds, self.delta
        require_reachable(self.epsilon, *course)
        return noise_for(self.epsilon, *course)


@dataclass(frozen=True)
class DPSGD:
    """g <- ( sum_j g_j min(1, C/||g_j||) + N(0, sigma^2 C^2 I) ) / B over a Poisson sample with rate q = B/n."""

    noise_multiplier: float  # sigma
    clip: float  # C
    target: Target | None = None  # in place of sigma, which is then each client's own
    at_once: int = 1  # examples whose gradients are one call, in local training without a loss of the method's own

    def of_client(self, n: int, batch_size: int, steps: int) -> "DPSGD":
        """The same with the sigma of a client with n examples, who makes so many steps a round."""
        if self.target is None:
            return self
        sigma = self.target.sigma(self.sampling_rate(n, batch_size), steps)
        return replace(self, noise_multiplier=sigma, target=None)

    @staticmethod
    def steps(n: int, batch_size: int) -> int:
        """Steps of an epoch: ceil(n/B), as many as there are batches without privacy."""
        return -(-n // batch_size)

    @staticmethod
    def sampling_rate(n: int, batch_size: int) -> float:
        """q, in (0, 1]."""
        return min(1.0, batch_size / n)

    def sample(self, n: int, batch_size: int, draws: Stream) -> Tensor:
        """Rows of a batch: each of the n with probability q, independently; it may be empty."""
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
        """Set the parameters' gradients for this batch, noise included; ``expected``: B, the batch's expected size.

        seeds: one an example, of torch's default generators, from which its loss draws; without them all read on in one
        stream.
        Returns the mean loss of the batch, zero for an empty one, and what protects the gradients.
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
        """Set the parameters' gradients to the sum with noise, over ``expected``; what protects them."""
        total.blur(self.noise_multiplier, noise)
        mean = total.values.div_(expected)
        start = 0
        for p in params:
            p.grad = mean[start : start + p.numel()].view_as(p)
            start += p.numel()
        return total.release
