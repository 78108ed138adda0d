"""User-level central differential privacy: each client's update is clipped, and the server adds noise to the sum.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR 2018,
arXiv:1710.06963, algorithm 1 (DP-FedAvg, flat clipping, fixed denominator); Andrew, Thakkar, McMahan and Ramaswamy,
"Differentially private learning with adaptive clipping", NeurIPS 2021, arXiv:1905.03871, algorithm 1 and theorem 1.

Delta_i: update of client i (``core/updates.py``);  S: clipping norm;  z: noise multiplier;  m: expected number of
participants per round;  gamma: quantile of the norms that S follows;  eta = 0.2;  c_i = 1/2 if ||Delta_i|| <= S, else
-1/2;  sums run over the participants whose replies the server accepts.

    mean update <- (sum_i Delta_i min(1, S / ||Delta_i||) + N(0, z_Delta^2 S^2 I)) / m
    b <- 1/2 + (sum_i c_i + N(0, sigma_b^2)) / m;   S <- S exp(-eta (b - gamma))
    z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2);   without gamma, S is constant and z_Delta = z

One client changes the sum of updates by at most S and the sum of c_i by at most 1/2. By theorem 1, both noisy sums
together cost as much privacy as one Gaussian mechanism with noise multiplier z.

Departs from the papers: clients have equal weights, and an update that is not finite counts as zero, so no reply is
rejected because of its content. sigma_b is max(m/20, z) instead of m/20, because z_Delta exists only for 2 sigma_b > z.
"""

from dataclasses import dataclass, replace
from math import exp, isfinite, log, sqrt

import torch
from torch import Tensor

from fedcommons.core.algorithm import Replies, Reply
from fedcommons.core.updates import is_update
from fedcommons.flat_tensors import Flat, Payload, data, like
from fedcommons.privacy.noise import Noise

UNCLIPPED = "unclipped"
"""Name of a client's number c_i in its reply, and of the sum of these numbers."""

LEARNING_RATE = 0.2
"""eta, step size of the clipping norm."""

CLIPS = (1e-30, 1e30)
"""Smallest and largest clipping norm S."""


@dataclass(frozen=True)
class Clip:
    """The client's step: clip the update to the L2 norm ``clip``; counts: also send the number c_i."""

    clip: float
    counts: bool

    def __call__(self, reply: Reply, nbytes: int, memory: Payload, seed: int) -> tuple[Reply, int]:
        """Return the reply with the clipped update and weight 1, and its number of bytes; see ``ClientStep``.

        Raises:
            ValueError: the reply has a tensor that clipping does not bound.
        """
        names = [name for name, x in reply.sums.items() if not is_update(name, data(x))]
        if bare := [*names, *reply.each]:
            raise ValueError(f"dp.central adds noise to sums of updates only, and clients also send {', '.join(bare)}")
        update = {name: data(x) / reply.weight for name, x in reply.sums.items()}
        length = sqrt(sum(float(x.double().square().sum()) for x in update.values()))
        is_long = not length <= self.clip
        if not isfinite(length):  # the client keeps its memory, which nan would spoil, as if the reply was rejected
            update, reply = {name: torch.zeros_like(x) for name, x in update.items()}, replace(reply, memory=None)
        elif is_long:  # slightly shorter than ``clip``, so that rounding of the product cannot exceed it
            least = max(torch.finfo(x.dtype).eps for x in update.values())
            update = {name: x * (self.clip / length * (1 - 2 * least)) for name, x in update.items()}
        sums: dict[str, Flat | Tensor] = {name: like(x, update[name]) for name, x in reply.sums.items()}
        if self.counts:
            sums[UNCLIPPED] = torch.tensor(-0.5 if is_long else 0.5)
            nbytes += 4
        return replace(reply, sums=sums, weight=1.0), nbytes


@dataclass(frozen=True)
class CentralDP:
    """The server's step. clip: S in round 1. noise: z. quantile: gamma, which S follows; None: S is constant.

    target: the epsilon from which z was computed, if any.
    """

    clip: float
    noise: float
    quantile: float | None = None
    target: float | None = None

    def deviations(self, expected: float) -> tuple[float, float]:
        """Return z_Delta and sigma_b; expected: m, the expected number of participants per round."""
        if self.quantile is None:
            return self.noise, 0.0
        of_count = max(expected / 20, self.noise)
        return (self.noise**-2 - (2 * of_count) ** -2) ** -0.5, of_count

    def noised(
        self, total: Payload, clip: float, expected: float, noise: Noise
    ) -> tuple[dict[str, Flat | Tensor], Replies, float]:
        """Return the noisy sums, replies whose weights add up to m, and the clipping norm S of the next round.

        The replies are equal in all rounds, so neither the number of accepted replies nor their clients reach the
        method's ``merge``.

        Args:
            total: float64 sums over the clients; zeros if no client has replied.
            clip: S in this round.
            expected: m, the expected number of participants per round.
            noise: the source of the round's noise.
        """
        of_update, of_count = self.deviations(expected)
        draws, noisy = noise.call("central dp"), dict[str, Flat | Tensor]()
        for name, x in total.items():
            deviation = of_count if name == UNCLIPPED else of_update * clip
            normal = draws.stream_for(data(x), name).standard_normal(tuple(data(x).shape))
            noisy[name] = like(x, data(x) + deviation * torch.as_tensor(normal))
        if self.quantile is not None:
            share = 0.5 + float(data(noisy.pop(UNCLIPPED))) / expected
            change = LEARNING_RATE * (share - self.quantile)
            clip = exp(min(max(log(clip) - change, log(CLIPS[0])), log(CLIPS[1])))
        n = max(1, round(expected))
        return noisy, dict.fromkeys(range(n), Reply(weight=expected / n)), clip
