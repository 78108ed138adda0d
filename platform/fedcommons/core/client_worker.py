"""Training objects of a worker process: module, optimizer, local training, and weights and buffers as flat tensors."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.core import cuda_graphs, hooks, optimizers
from fedcommons.core.digests import is_users
from fedcommons.core.local_training import BARE_GRADIENT, AddToGrad, LocalResult, LocalSGD, Loss
from fedcommons.core.logging_shim import Logged
from fedcommons.core.optimizers import Schedulers
from fedcommons.core.trainer_shim import Clock
from fedcommons.data.clients import ClientData, contents
from fedcommons.flat_tensors import Flat, copy, layout_of
from fedcommons.privacy.noise import SEED_ALONE, Noise, Source
from fedcommons.privacy.release import Release

ONE_EPOCH = LocalSGD(epochs=1, batch_size=32)


class Work:
    """Training objects of a worker process: a LightningModule, the optimizer, local training and the weighting rule.

    An instance is built once per process and trains one client after another. The trainable parameters are views of one
    flat buffer, ``params``. Frozen parameters (``requires_grad = False`` at construction) are not in this buffer and
    are equal in every process.

    ``buffers``: the floating-point buffers in the module's state (BatchNorm's statistics), views of a second flat
    buffer; the round engine loads the current client's values.
    ``initial``, ``initial_buffers``: the weights and buffers when the module was built.
    ``share``: fraction of the round's work that the client does; below 1 only for a straggler's partial work.
    ``number``: the client's number if the algorithm has the capability ``knows_number``; else None.
    ``clock``: progress of the federation, which the module reads as ``self.current_epoch`` and so on.
    ``noise``: generator of all noise that protects the client's data in this round (``noise.call``); the round engine
    creates it from ``source``.
    ``rates``: learning rates of the optimizer's parameter groups in this round.
    ``replacement``: function that is called instead of local training if clients train together (``vmap_clients``).
    ``graphs``: trainer with CUDA graphs, if requested and the device is a GPU (see ``cuda_graphs``); else None.
    ``hooks``: trainer that calls the module's hooks; None if the module overrides no hook (see ``hooks``).
    ``evaluating``: submodules that stay in evaluation mode, as at construction, such as a frozen BatchNorm.
    ``has_user_code``: whether a submodule is the user's code, which may use any random number generator.
    ``row_counts``: under DP-SGD, how often an example occurs in the client's data, by the example's contents.
    ``releases``: privacy ledger entries, one per local training or gradient; emptied before each client.

    Raises:
        ValueError: ``configure_optimizers`` does not return exactly one optimizer (see ``optimizers.read``).
    """

    def __init__(
        self,
        module: LightningModule,
        device: torch.device,
        loop: LocalSGD = ONE_EPOCH,
        weighting: str = "uniform",
        source: Source = SEED_ALONE,
    ) -> None:
        hooks.prepare(module)
        self.module, self.device, self.loop, self.weighting = module.to(device), device, loop, weighting
        self.share, self.clock, self.started_at = 1.0, Clock(gradient_clip_val=loop.clip_norm), (0, 0)
        self.replacement: Callable[..., LocalResult] | None = None
        self.number: int | None = None
        self.source, self.noise = source, Noise(source)
        self.releases: list[Release] = []
        self.row_counts: Mapping[bytes, int] = {}
        self.clock.attach(module)
        self.named = trainable_parameters(module)
        self.params = _flat_views(self.named)
        for name, parameter in self.named.items():
            parameter.data = self.params[name]
        floating, counters = _state_buffers(module)
        self.buffers = _flat_views(floating)
        for name, buffer in floating.items():
            buffer.data = self.buffers[name]
        self.counters = [(counter, counter.clone()) for counter in counters]
        self.initial, self.initial_buffers = self.snapshot(), copy(self.buffers)
        optimizer, schedulers = optimizers.read(module.configure_optimizers())
        if device.type == "cpu" and type(optimizer).__module__.startswith("torch.optim"):
            for group in optimizer.param_groups:
                group["foreach"] = group.get("foreach") or False  # torch's choice on a CPU, made once and not per step
        self.optimizer, self.logged = optimizer, Logged(module)
        self.schedulers = Schedulers(optimizer, schedulers, module.lr_scheduler_step) if schedulers else None
        self.factor = 1.0
        self.rates: list[Any] = [group["lr"] for group in optimizer.param_groups]
        self._rates = self.rates
        self.evaluating = [part for part in module.modules() if not part.training] if module.training else []
        self.has_user_code = any(is_users(type(part)) for part in module.modules())
        self._places = [(name, p, p.data_ptr()) for name, p in self.named.items()]
        vars(module)["optimizers"] = lambda use_pl_optimizer=True: optimizer
        each = [entry.scheduler for entry in schedulers]
        # As in Lightning, ``self.lr_schedulers()`` returns None, the only scheduler or a list.
        vars(module)["lr_schedulers"] = lambda: list(each) if len(each) > 1 else next(iter(each), None)
        self.graphs = cuda_graphs.Graphs(self) if loop.graphs and device.type == "cuda" else None
        self.hooks = hooks.Hooks(self) if hooks.overridden(module, hooks.CALLED) else None

    def begin(self, round: int, data: ClientData | None = None) -> None:
        """Set the clock and the learning rates for a client's work in ``round`` (0: a job outside of rounds).

        data: the client's training data, or None; the number of examples determines the global step of the clock.
        """
        if self.logged.metrics.objects:
            self.logged.metrics.put_back()
        before = max(0, round - 1)
        steps = self.loop.steps_for(len(data), data.n_own) if data is not None else 0
        self.started_at = before * self.loop.epochs, before * steps
        self.clock.set(round, *self.started_at)
        if self.loop.dp:
            self.row_counts = MappingProxyType(contents(data.x) if data is not None else {})
        if self.loop.schedule:
            self.factor = self.loop.schedule(round) if round else 1.0
            self.rates = [rate * self.factor for rate in self._rates]
        self.set_rates()

    def set_rates(self, lr: float | None = None) -> None:
        """Set all learning rates to ``lr``; if None, set the round's learning rates and reset the schedulers."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate if lr is None else lr
        if self.schedulers and lr is None:
            self.schedulers.begin(self.factor)

    def inputs(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the inputs for the module's ``forward``: ``x``, or ``x`` as changed by the module's transfer hooks."""
        batch: Any = self.hooks.transfer((x, y)) if self.hooks else (x, y)
        return batch[0] if isinstance(batch, Sequence) else x

    @property
    def round(self) -> int:
        """Number of the current round, from 1; 0 in a job outside of rounds, such as an evaluation before round 1."""
        return self.clock.round

    def local(
        self,
        start: Flat,
        data: ClientData,
        seed: int,
        *,
        loss: Loss | None = None,
        add_to_grad: AddToGrad | None = None,
        lr: float | None = None,
    ) -> LocalResult:
        """Train the client's module from the weights ``start``.

        Args:
            start: initial weights; they are copied into the module.
            data: training data.
            seed: seed for random numbers of the training.
            loss: function that replaces the module's ``training_step``; None: ``training_step``.
            add_to_grad: function that may change the gradients before every step; None: no change. Under DP-SGD it must
                not use the data, because the change is neither clipped nor noised.
            lr: learning rate for all parameters and steps; None: the module's learning rates times the factor of the
                schedule in this round.

        Returns:
            The trained weights, the mean metrics and the privacy ledger entry. The weights are the worker's buffer,
            which the next training overwrites.

        Raises:
            ValueError: ``data.extra_columns`` are used without ``loss`` or have another length than ``data``, or a
                target epsilon does not allow this training, for example after another training in the same round.
        """
        return self.loop.run(self, start, data, seed, loss=loss, add_to_grad=add_to_grad, lr=lr)

    def loss(self, batch: tuple[Tensor, ...], number: int = 0) -> Tensor:
        """Return the loss of the module's ``training_step`` on a batch. number: the batch's number."""
        loss = self.module.training_step(batch, number)
        assert isinstance(loss, Tensor)
        return loss

    def gradient(self, at: Flat, data: ClientData) -> Flat:
        """Return the gradient of the client's mean loss at the weights ``at``, in evaluation mode without augmentation.

        DP-SGD does not protect this gradient. So a reply that is computed with this gradient counts as unprotected
        (uncovered), whatever releases the reply declares.
        """
        self.releases.append(BARE_GRADIENT)
        self.load(at)
        self.module.eval()
        n, size, total = len(data), self.loop.batch_size, torch.zeros_like(at.buffer)
        for first in range(0, n, size):
            batch = tuple(t[first : first + size] for t in data.columns)
            value = self.loss(batch)
            parts = torch.autograd.grad(value, list(self.named.values()))
            total.add_(torch.cat([g.reshape(-1) for g in parts]), alpha=len(batch[1]) / n)
        return Flat(at.layout, total)

    def times_listed(self, data: ClientData) -> int:
        """Return the largest number of times that one example of the client occurs in ``data``.

        If k examples of the client are equal and occur in m rows, each counts m/k times, rounded up. Rows of other
        clients, and rows that a method has created, count as examples of the client.
        """
        return max(
            (-(-times // max(1, self.row_counts.get(content, 0))) for content, times in contents(data.x).items()),
            default=1,
        )

    def weight(self, data: ClientData) -> float:
        """Return w_i, the client's weight in averages: 1 or the number of examples n_i, by ``federation.weighting``."""
        return float(data.size) if self.weighting == "samples" else 1.0

    def load(self, model: Flat) -> None:
        """Copy the weights ``model`` into the module.

        Raises:
            ValueError: the names or shapes of the weights differ from the module's.
        """
        if model.layout != self.params.layout:
            raise ValueError("the weights' names or shapes are not those of this process's module")
        self.params.buffer.copy_(model.buffer.detach())

    def load_buffers(self, buffers: Flat) -> None:
        """Copy ``buffers`` into the module and reset the integer buffers (BatchNorm's number of batches)."""
        if len(buffers):
            self.buffers.buffer.copy_(buffers.buffer)
        for counter, built in self.counters:
            counter.copy_(built)

    def copied(self, value: Any) -> Any:
        """Return ``value`` with a copy in place of each tensor that shares memory with this worker's module.

        Without the copy, the next training would overwrite the tensor. ``value`` may be a tensor, a ``Flat``, or nested
        dicts, lists and tuples that contain tensors.
        """
        tensors = (*self.module.parameters(), *self.module.buffers())
        tensors += tuple(x for m in self.module.modules() for x in vars(m).values() if isinstance(x, Tensor))
        storages = {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}
        return _copied(value, storages - {0})

    def gather(self) -> bool:
        """Copy parameters that user code has moved (``p.data = ...``) back into the flat buffer ``params``.

        Returns:
            Whether any parameter was moved.
        """
        moved = [(name, p) for name, p, place in self._places if p.data_ptr() != place]
        for name, parameter in moved:
            self.params[name].copy_(parameter.detach())
            parameter.data = self.params[name]
        return bool(moved)

    def train_mode(self) -> None:
        """Put the module into training mode, except the submodules that were in evaluation mode at construction."""
        self.module.train()
        for part in self.evaluating:
            part.training = False

    def snapshot(self) -> Flat:
        """Return a copy of the module's weights."""
        return copy(self.params)

    def sgd(self, method: str, *, momentum: bool) -> tuple[float, float]:
        """Return (learning rate in this round, momentum) of SGD, for methods with both numbers in their formulas.

        method: name of the method in messages. momentum: whether the method allows momentum above 0.

        Raises:
            ValueError: the optimizer is not plain SGD, has several learning rates or a scheduler, or has momentum that
                the method does not allow.
        """
        if self.schedulers:
            raise ValueError(f"{method} is defined for one learning rate in a round, and the module has a scheduler")
        groups = self.optimizer.param_groups
        if not isinstance(self.optimizer, torch.optim.SGD) or len(groups) != 1:
            kind = type(self.optimizer).__name__
            raise ValueError(f"{method} is defined for SGD with one learning rate, and the optimizer is {kind}")
        group = groups[0]
        if group["nesterov"] or group["dampening"]:
            raise ValueError(f"{method} is not defined for SGD with Nesterov's momentum or dampening")
        if group["momentum"] and not momentum:
            raise ValueError(f"{method} is defined for SGD without momentum, and momentum is {group['momentum']:g}")
        return self.rates[0], group["momentum"]


def _copied(value: Any, storages: set[int]) -> Any:
    if isinstance(value, Flat):
        return copy(value) if value.buffer.untyped_storage().data_ptr() in storages else value
    if isinstance(value, Tensor):
        shares = value.layout == torch.strided and value.untyped_storage().data_ptr() in storages
        return value.detach().clone() if shares else value
    if type(value) is dict:
        return {name: _copied(part, storages) for name, part in value.items()}
    return type(value)(_copied(part, storages) for part in value) if type(value) in (list, tuple) else value


def module_with(module: LightningModule, model: Flat, buffers: Flat) -> LightningModule:
    """Copy weights and floating-point buffers into the module and return the module; empty ``buffers``: only weights.

    Raises:
        ValueError: the names or shapes of the weights or buffers differ from the module's.
    """
    weights = trainable_parameters(module)
    statistics = _state_buffers(module)[0] if len(buffers) else {}
    if layout_of(weights.items()) != model.layout or (statistics and layout_of(statistics.items()) != buffers.layout):
        raise ValueError("the weights' names or shapes are not the module's")
    with torch.no_grad():
        for tensors, values in ((weights, model), (statistics, buffers)):
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
    return module


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained and sent, by name: all parameters with ``requires_grad = True``."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def floating_buffers(module: nn.Module) -> Flat:
    """Return a copy of the floating-point buffers in the module's state, in the order of ``Work.buffers``."""
    return _flat_views(_state_buffers(module)[0])


def _state_buffers(module: nn.Module) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the floating-point buffers in the module's ``state_dict`` by name, and a list of the other buffers."""
    saved = module.state_dict().keys()
    state = {name: b for name, b in module.named_buffers() if name in saved}
    floating = {name: b for name, b in state.items() if b.is_floating_point()}
    return floating, [b for b in state.values() if not b.is_floating_point()]


def _flat_views(named: Mapping[str, Tensor]) -> Flat:
    return Flat(
        layout_of(named.items()), torch.cat([t.detach().reshape(-1) for t in named.values()] or [torch.empty(0)])
    )
