"""DP-SGD training on canaries. The noisy sums of the steps give an estimate of epsilon (``white_box_estimate``).

A canary is an example whose gradient has a known random direction in the space of all parameters of a module. The
training is the clients' local loop, or the vectorised steps that train generators.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.func import functional_call

from fedcommons.audits.lower_bound import coins
from fedcommons.audits.white_box_estimate import Estimate, estimate
from fedcommons.core.client_worker import Work, trainable_parameters
from fedcommons.core.local_training import LocalSGD
from fedcommons.data.clients import ClientData
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import Draws, Noise, of_audit
from fedcommons.seeding import numpy_generator

STEEP = 10.0
"""Norm of a canary's gradient divided by the clipping norm C; above 1, so that the audit detects missing clipping."""


def directions(k: int, d: int, seed: int) -> Tensor:
    """Draw k random directions in d parameters: (k, d) orthogonal rows of length 1.

    Raises:
        ValueError: k > d.
    """
    if k > d:
        raise ValueError(f"at most {d} directions are orthogonal in {d} parameters, got {k}")
    return torch.linalg.qr(torch.from_numpy(numpy_generator(seed, "directions").standard_normal((d, k)))).Q.T.float()


class Directed(LightningModule):
    """A module in which example (j, factor) has the gradient steepness * factor * u[j], at all values of the weights.

    u: (k, d), one direction per row, in the d parameters of ``module``. factor: 1 if direction j is included, else 0.
    """

    def __init__(self, module: nn.Module, u: Tensor, steepness: float) -> None:
        super().__init__()
        self.module, self.u, self.steepness = module, u, steepness

    def forward(self, j: Tensor, there: Tensor) -> Tensor:
        weights = torch.cat([p.reshape(-1) for p in trainable_parameters(self.module).values()])
        return (self.steepness * there * (self.u.index_select(0, j.view(-1)) @ weights)).mean()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def of_local_steps(loop: LocalSGD, module: nn.Module, k: int, seed: int, delta: float = 1e-5) -> Estimate:
    """Train a copy of the module on k canary directions by the clients' local loop; return the estimate of epsilon.

    Raises:
        ValueError: the module has fewer than k parameters, or fewer than two directions are included or excluded.
    """
    assert loop.dp is not None
    inside, directed = coins(k, numpy_generator(seed, "coins")), _directed(module, k, loop.dp.clip, seed)
    steps: list[Tensor] = []

    def watch(params: Mapping[str, nn.Parameter]) -> None:
        steps.append(directed.u @ _gradient(directed))

    work, factors = Work(directed, torch.device("cpu"), loop), torch.from_numpy(inside).float()
    work.noise = Noise(of_audit(seed), seed)
    data = ClientData(torch.arange(k), factors)
    spent = work.local(work.initial, data, seed, add_to_grad=watch).spent
    scores = torch.stack(steps).double() * (min(loop.batch_size, k) / loop.dp.clip)
    return estimate(scores.numpy(), inside, spent, delta)


def of_vectorised_steps(
    dp: DPSGD, module: nn.Module, k: int, batch_size: int, epochs: int, seed: int, delta: float = 1e-5
) -> Estimate:
    """Train a copy of the module on k canary directions by ``dp_sgd_vmap.steps``; return the estimate of epsilon."""
    inside, directed = coins(k, numpy_generator(seed, "coins")), _directed(module, k, dp.clip, seed)
    steps, releases = [], []
    for release in dp_sgd_vmap.steps(
        directed, directed.configure_optimizers(), lambda named, *row: functional_call(directed, named, row),
        [torch.arange(k), torch.from_numpy(inside).float()], lambda *_: [], dp,
        batch_size=batch_size, epochs=epochs, physical_batch=k, noise=Draws(of_audit(seed), (seed,)),
    ):  # fmt: skip
        steps.append(directed.u @ _gradient(directed))
        releases.append(release)
    (release_of_step,) = set(releases)
    scores = torch.stack(steps).double() * (min(batch_size, k) / dp.clip)
    return estimate(scores.numpy(), inside, replace(release_of_step, steps=len(releases)), delta)


def _directed(module: nn.Module, k: int, clip: float, seed: int) -> Directed:
    d = sum(p.numel() for p in trainable_parameters(module).values())
    return Directed(deepcopy(module), directions(k, d, seed), STEEP * clip)


def _gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in trainable_parameters(module).values() if p.grad is not None])
