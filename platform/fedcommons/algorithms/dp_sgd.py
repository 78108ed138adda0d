"""DP-SGD local training: per-example clipping, Gaussian noise, Poisson batches.

Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133, algorithm 1; as FedDM (figures
3 and 10) uses it for its baselines.   C: clipping norm;  sigma: noise multiplier;  B: batch size;  q = B/n: sampling
rate.

Departs from the paper: nothing known. Examples are taken one at a time: exact for every module and loss, and on a CPU
quicker than the vectorised ways (tried); on a GPU slow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DPSGD:
    """g <- ( sum_j g_j min(1, C/||g_j||) + N(0, sigma^2 C^2 I) ) / B over a Poisson sample with rate q = B/n."""

    noise_multiplier: float  # sigma
    clip: float  # C

    @staticmethod
    def steps(n: int, batch_size: int) -> int:
        """Steps of an epoch: as many as there are batches without privacy, an incomplete one counted."""
        return -(-n // batch_size)

    @staticmethod
    def sampling_rate(n: int, batch_size: int) -> float:
        """q, in (0, 1]."""
        return min(1.0, batch_size / n)

    def sample(self, n: int, batch_size: int, draws: torch.Generator) -> Tensor:
        """Rows of a batch: each of the n with probability q, independently; it may be empty."""
        return (torch.rand(n, generator=draws) < self.sampling_rate(n, batch_size)).nonzero().flatten()

    def gradients(
        self,
        params: Sequence[nn.Parameter],
        loss: Callable[[tuple[Tensor, ...], int], Tensor],
        batch: tuple[Tensor, ...],
        step: int,
        expected: int,
        noise: torch.Generator,
    ) -> Tensor:
        """Set the parameters' gradients for this batch, noise included; ``expected``: B, the batch's expected size.

        Returns the mean loss of the batch, zero for an empty one.
        """
        total = torch.zeros(sum(p.numel() for p in params), device=noise.device, dtype=params[0].dtype)
        losses = torch.zeros((), device=noise.device)
        n = len(batch[1])
        for j in range(n):
            value = loss(tuple(t[j : j + 1] for t in batch), step)
            g = torch.cat([part.reshape(-1) for part in torch.autograd.grad(value, params)])
            total.add_(g.mul_((self.clip / torch.linalg.vector_norm(g)).clamp(max=1)))
            losses += value.detach()
        sd = self.noise_multiplier * self.clip
        total.add_(torch.randn(total.shape, generator=noise, device=noise.device, dtype=total.dtype), alpha=sd)
        total.div_(expected)
        start = 0
        for p in params:
            p.grad = total[start : start + p.numel()].view_as(p)
            start += p.numel()
        return losses / max(n, 1)
