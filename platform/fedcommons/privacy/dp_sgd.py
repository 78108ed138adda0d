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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from fedcommons.privacy.accountants import noise_for, require_reachable
from fedcommons.privacy.noise import Draws, Stream
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, UNCOVERED, Release
from fedcommons.privacy.weight_guard import WRITTEN, Written
from fedcommons.seeding import set_default_generator


def clipped(g: Tensor, clip: float) -> tuple[Tensor, float]:
    """Clip g in place to a norm of at most ``clip``; set g to 0 if g is not finite. Return g and ``clip``."""
    factor = (clip / torch.linalg.vector_norm(g)).nan_to_num(0).clamp(max=1)
    return g.mul_(factor).nan_to_num_(0), clip  # if one element is nan or infinite, all of g becomes zero


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
        """Return the settings for a client with n examples, with the noise multiplier that a target epsilon needs."""
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
        """Draw a Poisson batch: each of n indices with probability min(1, batch_size / n), sorted. It may be empty."""
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


Sample = tuple[tuple[Tensor, ...], list[int], Stream]
"""A Poisson batch: its columns, a seed per example (see ``Draws.seeds``), and the stream of the step's noise."""


@dataclass
class PrivateStep:
    """A callable that makes one DP-SGD step of a client's local training and stores the step's privacy ledger entry.

    draws: source of the batches and of the noise. n: number of the client's examples. gradients: function that sets
    the noisy gradients (``DPSGD.gradients``, bound to parameters and loss). changes: functions that each step then
    calls in this order, among them the optimizer's step. guard: detector of writes by user code.
    """

    dp: DPSGD
    draws: Draws
    n: int
    batch_size: int
    gradients: Callable[..., tuple[Tensor, Release]]
    changes: Sequence[Callable[[], object]]
    guard: Written
    releases: set[Release] = field(default_factory=set)

    def __call__(self, sample: Sample, number: int) -> Tensor:
        batch, seeds, noise = sample
        self.guard.begin()
        value, release = self.gradients(batch, number, min(self.batch_size, self.n), noise, seeds)
        self.releases.add(release)
        for change in self.changes:
            change()
        return value

    def samples(
        self, columns: Sequence[Tensor], augment: Callable[[Tensor, list[int]], Tensor] | None, epoch: int
    ) -> Iterator[Sample]:
        """Yield the Poisson batches of the epoch with index ``epoch``, counted from 0.

        columns: all examples of the client, n rows in each column. augment: function of (images, seeds) that changes
        the images of a batch; None: no change.
        """
        steps = self.dp.steps(self.n, self.batch_size)
        for step in range(epoch * steps, (epoch + 1) * steps):
            chosen = self.dp.sample(self.n, self.batch_size, self.draws.stream("batch", step))
            rows, all_seeds = chosen.to(columns[0].device), self.draws.seeds(self.n, step)
            seeds = [all_seeds[j] for j in chosen.tolist()] if all_seeds else []
            batch = [t[rows] for t in columns]
            if augment and len(chosen):
                batch[0] = augment(batch[0], seeds)
            yield tuple(batch), seeds, self.draws.stream("noise", step)

    def release(self, steps: int, listed: int, *, is_moved: bool) -> Release:
        """Return one privacy ledger entry for all steps. If the steps' entries differ, the result states no guarantee.

        listed: see ``compose_steps``. is_moved: whether user code has moved a parameter to memory that the guard does
        not see.
        """
        if uncovered := self.guard.unprotected or (WRITTEN if is_moved else None):
            return uncovered
        if len(self.releases) != 1:
            return UNCOVERED
        (release,) = self.releases
        return compose_steps(release, self.dp.sampling_rate(self.n, self.batch_size), steps, listed)


def compose_steps(release: Release, q: float, steps: int, listed: int) -> Release:
    """Return the privacy ledger entry of ``steps`` sampled steps. release: the entry of one step without sampling.

    q: sampling rate. listed: m, the maximum number of copies of an example in the data.
    C: clipping norm;  sigma: noise multiplier. An example with m copies is in a batch with probability
    q' = 1 - (1 - q)^m, and adds a gradient of norm at most m C. So a step discloses at most as much as a sampled
    Gaussian mechanism with sampling rate q' and noise multiplier sigma / m. This holds because
    the divergence is convex and the example's contribution is a mixture over the number of copies in the batch.
    """
    if listed > 1:
        release = replace(release, sigma=release.sigma / listed, sensitivity=release.sensitivity * listed)
        q = 1 - (1 - q) ** listed
    return replace(release, q=q, steps=steps)
