"""DP-SGD local training: per-example clipping, Gaussian noise, Poisson batches.

Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133, algorithm 1. FedDM's paper uses
DP-SGD for its baselines (figures 3 and 10).   C: clipping norm;  sigma: noise multiplier;  B: expected batch size;
n: number of the client's examples;  q = B/n: sampling rate;  g_j: gradient of the loss on example j.

Departs from the paper: an example whose gradient is not finite adds zero, because clipping cannot bound the gradient.
The noise consists of floating point numbers, which the proofs of privacy do not cover.

The noisy sum is divided by min(B, n). B is in the configuration and n is public, so the divisor is the same for
neighbouring data sets and for every batch. A division by the actual number of examples in the batch, or by a secret n,
would disclose more than the accountant counts (arXiv:2605.15648).

Gradients are computed one example at a time. This is exact for every module and loss, and on a CPU it was faster than
vectorised gradients. On a GPU it is slow, so one call may compute ``at_once`` gradients (``dp_sgd_vmap``).
``noise.py`` draws noise and batches on the CPU and copies them to the device, so they are equal on every device.
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
    """Clip the gradient g in place to g min(1, clip/||g||), or to 0 if g is not finite; return (g, clip)."""
    factor = (clip / torch.linalg.vector_norm(g)).nan_to_num(0).clamp(max=1)
    return g.mul_(factor).nan_to_num_(0), clip  # one nan or infinite element sets the whole g to zero


class NoisySum:
    """A sum of clipped gradients, with or without noise. ``release`` states the clipping and noise that were applied.

    values: the sum, a vector. clip: C, the clipping norm.
    bound: largest norm of an added vector, at least C; infinite if a vector was added without a stated norm.
    sigma: standard deviation of the noise over C; 0 before noise is added.
    """

    def __init__(self, zero: Tensor, clip: float) -> None:
        self.values, self.clip, self.bound, self.sigma = zero, clip, clip, 0.0

    def add(self, g: Tensor, norm: float = inf) -> None:
        """Add g: one example's gradient or a sum of gradients, each with a norm of at most ``norm`` (inf: unknown)."""
        self.values.add_(g)
        self.bound = max(self.bound, norm)

    def blur(self, sigma: float, noise: Stream) -> None:
        """Add noise N(0, sigma^2 C^2 I) to the sum (C: clipping norm); round once, to the type of the sum."""
        kind = np.float64 if self.values.dtype == torch.float64 else np.float32
        normal = torch.from_numpy(noise.standard_normal(tuple(self.values.shape), dtype=kind)).to(self.values.device)
        if normal.dtype == self.values.dtype:
            self.values.add_(normal, alpha=sigma * self.clip)
        else:
            self.values.copy_(self.values + normal.mul_(sigma * self.clip))
        self.sigma = sigma

    @property
    def release(self) -> Release:
        """Return the privacy ledger entry: q = 1 (no sampling), sigma = standard deviation of noise / ``bound``."""
        sigma = self.sigma * (self.clip / self.bound)  # exactly ``self.sigma`` if no vector is longer than C
        return Release(mechanism=SAMPLED_GAUSSIAN, sigma=sigma, sensitivity=self.bound, steps=1)


@dataclass(frozen=True)
class Target:
    """The largest epsilon, at delta, that a client may spend in ``rounds`` rounds with one local training per round."""

    epsilon: float
    delta: float
    rounds: int

    def sigma(self, q: float, steps: int) -> float:
        """Return the smallest noise multiplier that keeps a client within the target if it takes part in all rounds.

        q: sampling rate of a step. steps: number of steps per round.

        Raises:
            UserError: the target epsilon needs a noise multiplier above ``accountants.LARGEST_SIGMA``.
        """
        course = q, steps * self.rounds, self.delta
        require_reachable(self.epsilon, *course)
        return noise_for(self.epsilon, *course)


@dataclass(frozen=True)
class DPSGD:
    """The settings of DP-SGD, which replaces the gradient g by

        ( sum_j g_j min(1, C/||g_j||) + N(0, sigma^2 C^2 I) ) / min(B, n)

    The sum is over a batch that contains each of the n examples with probability min(1, B/n), independently.
    C: clipping norm;  sigma: noise multiplier;  B: batch size;  g_j: gradient on example j.
    """

    noise_multiplier: float  # sigma, the standard deviation of the noise divided by C
    clip: float  # C, the clipping norm
    target: Target | None = None  # if set, each client's sigma is computed from this target epsilon
    at_once: int = 1  # examples per gradient call in local training, unless the method defines the loss

    def of_client(self, n: int, batch_size: int, steps: int) -> "DPSGD":
        """Return the settings of a client with n examples, in which a noise multiplier replaces a target epsilon."""
        if self.target is None:
            return self
        sigma = self.target.sigma(self.sampling_rate(n, batch_size), steps)
        return replace(self, noise_multiplier=sigma, target=None)

    @staticmethod
    def steps(n: int, batch_size: int) -> int:
        """Return ceil(n / batch_size), the number of steps per epoch, as in training without privacy."""
        return -(-n // batch_size)

    @staticmethod
    def sampling_rate(n: int, batch_size: int) -> float:
        """Return min(1, batch_size / n), the probability that an example is in a batch."""
        return min(1.0, batch_size / n)

    def sample(self, n: int, batch_size: int, draws: Stream) -> Tensor:
        """Draw a Poisson batch, maybe empty: sorted indices, each of the n with probability min(1, batch_size / n)."""
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
        """Set ``p.grad`` of the parameters to the noisy sum of the batch's clipped gradients, divided by ``expected``.

        expected: min(B, n), for batch size B and n examples of the client. seeds: one seed per example of the batch,
        for torch's default generators, which the loss uses. If ``seeds`` is empty, all losses draw from one stream.
        Returns the batch's mean loss (zero for an empty batch) and the privacy ledger's entry for the gradients.
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
        """Set the gradients of ``params`` to (``total`` + noise)/``expected`` (batch size); return the ledger entry."""
        total.blur(self.noise_multiplier, noise)
        mean = total.values.div_(expected)
        start = 0
        for p in params:
            p.grad = mean[start : start + p.numel()].view_as(p)
            start += p.numel()
        return total.release
