"""A network of two layers whose loss a test can change, and clients that train it: for steps as tensor programs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local import LocalSGD
from fedcommons.seeds import set_default_generator
from fedcommons.testing import Federation, digits

METHODS: list[Algorithm] = [
    FedAvg(), FedProx(mu=0.5), SCAFFOLD(), FedDyn(alpha=0.1), FedDyn(squared=False, clip=None), FedPVR(), FedNova(),
]  # fmt: skip
"""Methods without a loss of their own."""

Change = Callable[[Any, Tensor, Any], Tensor]

CHANGES: dict[str, Change] = {
    "reads its place": lambda module, loss, at: loss * (1 + at),
    "reads its clock": lambda module, loss, at: loss * (1 + module.current_epoch),
    "branches": lambda module, loss, at: loss * 2 if loss > 1 else loss,
    "draws from numpy": lambda module, loss, at: loss * float(np.random.beta(1, 1)),  # noqa: NPY002  (as users do)
    "draws from Python": lambda module, loss, at: loss * random.random(),
}
"""What a training step does with its loss, by the module, the loss and the place of the batch."""


class Net(LightningModule):
    """Logs a tensor and a number in its steps."""

    def __init__(
        self,
        optimizer: Callable[..., Any] | None = None,
        change: str = "",
        *,
        dropout: float = 0.0,
        norm: bool = False,
    ) -> None:
        super().__init__()
        layers = [nn.Linear(64, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 10)]
        self.layers, self.made, self.change = nn.Sequential(nn.Flatten(), *layers), optimizer, CHANGES.get(change)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float() / 255)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.log("right", (logits.argmax(1) == batch[1]).float().mean())
        self.log_dict({"number": float(len(batch[1]))})
        loss = F.cross_entropy(logits, batch[1])
        return self.change(self, loss, batch_idx) if self.change else loss

    def configure_optimizers(self) -> Any:
        return (self.made or (lambda p: torch.optim.SGD(p, 0.1)))(self.parameters())


def clients_of(module: Callable[[], LightningModule], sizes: Sequence[int], loop: LocalSGD) -> Federation:
    """Clients of these sizes whose module begins with the same weights in every process."""
    set_default_generator(0, "weights")
    weights = module().state_dict()

    def make() -> LightningModule:
        one = module()
        one.load_state_dict(weights)
        return one

    return replace(digits(sizes=sizes, method=FedAvg()), module=make).training(loop)


def nesterov(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)


def two_groups(p: Any) -> torch.optim.Optimizer:
    one, *others = p
    return torch.optim.SGD([{"params": [one], "lr": 0.2, "momentum": 0.5}, {"params": others}], 0.05)


def with_scheduler(p: Any) -> Any:
    sgd = torch.optim.SGD(p, 0.1)
    return [sgd], [torch.optim.lr_scheduler.StepLR(sgd, 1)]
