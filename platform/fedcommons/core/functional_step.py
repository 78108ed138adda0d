"""A LightningModule's training step as a function of weights and batch, for ``torch.func`` and ``torch.vmap``."""

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fedcommons.core.logging_shim import Metrics


class Step(nn.Module):
    """Module whose ``forward`` runs the training step of another module and returns the loss and the logged values."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.inner = module
        self.training = module.training
        self.metrics = [metric for metric in Metrics(module).objects if isinstance(metric, Metric)]

    def forward(self, batch: tuple[Tensor, ...], number: int) -> tuple[Tensor, dict[str, Tensor]]:
        logged: dict[str, Tensor] = {}

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if isinstance(value, Metric):
                raise ValueError(f"training_step logs {name}, a torchmetrics object, which is no tensor function")
            logged[name] = torch.as_tensor(value, dtype=torch.float32).detach().reshape(())

        def log_dict(values: Mapping[str, Any], *args: Any, **options: Any) -> None:
            for name, value in values.items():
                log(name, value)

        before = {name: vars(self.inner).get(name) for name in ("log", "log_dict")}
        vars(self.inner).update(log=log, log_dict=log_dict)
        try:
            value = self.inner.training_step(batch, number)
        finally:
            vars(self.inner).update(before)
        if updated := [type(metric).__name__ for metric in self.metrics if metric.update_called]:
            raise ValueError(f"training_step updates {updated[0]}, a torchmetrics object, which is no tensor function")
        assert isinstance(value, Tensor)
        return value, logged
