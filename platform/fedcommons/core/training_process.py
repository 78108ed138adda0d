"""Protocol of the training objects of a process, which local training uses: module, weights, optimizer, noise, ...

``client_worker.Work`` implements the Protocol. ``local_training``, ``hooks`` and ``cuda_graphs`` use only the Protocol.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.optim import Optimizer

from fedcommons.core.logging_shim import Logged
from fedcommons.core.optimizers import Schedulers
from fedcommons.core.trainer_shim import Clock
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat
from fedcommons.privacy.noise import Noise
from fedcommons.privacy.release import Release


class TrainingProcess(Protocol):
    """Training objects of a process that trains one client after another; ``Work`` describes each attribute."""

    module: LightningModule
    device: torch.device
    loop: Any
    named: dict[str, nn.Parameter]
    params: Flat
    buffers: Flat
    optimizer: Optimizer
    schedulers: Schedulers | None
    rates: list[Any]
    clock: Clock
    logged: Logged
    started_at: tuple[int, int]
    share: float
    noise: Noise
    releases: list[Release]
    replacement: Callable[..., Any] | None
    graphs: Any
    hooks: Any
    has_user_code: bool

    def load(self, model: Flat) -> None: ...

    def set_rates(self, lr: float | None = None) -> None: ...

    def times_listed(self, data: ClientData) -> int: ...

    def gather(self) -> bool: ...

    def train_mode(self) -> None: ...
