"""What one process trains with: a module, its optimizer, its weights and buffers as flat tensors, the local loop."""

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
from fedcommons.core.weighting import weight
from fedcommons.data.clients import ClientData, contents
from fedcommons.flat_tensors import Flat, copy, layout_of
from fedcommons.privacy.noise import SEED_ALONE, Noise, Source
from fedcommons.privacy.release import Release

ONE_EPOCH = LocalSGD(epochs=1, batch_size=32)


class Work:
    """What one process trains with: a LightningModule, its optimizer, the local loop and the clients' weighting.

    Built once per process and used for one client after another. The parameters are views of one flat buffer; frozen
    ones (``requires_grad = False`` when it was built) are no part of it, and the same in every process.
    ``buffers``: the floating buffers of the module's state (BatchNorm's statistics), views of a second flat buffer; the
    round engine loads the right client's. ``initial``, ``initial_buffers``: the values when the module was built.
    ``share``: of its work that a client does; the round engine sets it where a late client's partial work is taken.
    ``clock``: how far the federation is, which the module reads as ``self.current_epoch`` and so on.
    ``noise``: of the client's round, which the round engine sets, from ``source``; all that protects a release is drawn
    from it (``noise.call``).
    ``rates``: of the optimizer's groups in this round.
    ``instead``: what a local training gives in place of steps, where clients are batched (see ``batched``).
    ``graphs``: what trains by CUDA graphs, where that is asked for and the device is a GPU (see ``graphs``).
    ``hooks``: what calls the module's hooks in local training; None if it overrides none (see ``hooks``).
    ``evaluating``: its parts in evaluation mode when it was built, such as a frozen BatchNorm, which stay so.
    ``has_user_code``: whether a part of the module is the user's code, which may use any random number generator.
    ``listed``: under DP-SGD, how often the client has an example of these contents.
    ``trained``: what protects each local training and gradient since the round engine emptied it, before a client.

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
        self.share, self.clock, self.began = 1.0, Clock(gradient_clip_val=loop.clip_norm), (0, 0)
        self.instead: Callable[..., LocalResult] | None = None
        self.source, self.noise = source, Noise(source)
        self.trained: list[Release] = []
        self.listed: Mapping[bytes, int] = {}
        self.clock.attach(module)
        self.named = trained(module)
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
        self.optimizer, self.logged = optimizer, Logged(module)
        self.schedulers = Schedulers(optimizer, schedulers, module.lr_scheduler_step) if schedulers else None
        self.factor = 1.0
        self.rates: list[Any] = [group["lr"] for group in optimizer.param_groups]
        self._rates = self.rates
        self.evaluating = [part for part in module.modules() if not part.training] if module.training else []
        self.has_user_code = any(is_users(type(part)) for part in module.modules())
        self._places = [(name, p, p.data_ptr()) for name, p in self.named.items()]
        vars(module)["optimizers"] = lambda use_pl_optimizer=True: optimizer
        vars(module)["lr_schedulers"] = lambda: one_or_all([each.scheduler for each in schedulers])
        self.graphs, self.hooks = cuda_graphs.of(self), hooks.of(self)

    def begin(self, round: int, data: ClientData | None = None) -> None:
        """Set the clock and the rates to a client's round; ``data``: the client's. Round 0: of a job outside rounds."""
        if self.logged.metrics.objects:
            self.logged.metrics.put_back()
        before = max(0, round - 1)
        steps = self.loop.steps_for(len(data), data.n_own) if data is not None else 0
        self.began = before * self.loop.epochs, before * steps
        self.clock.set(round, *self.began)
        if self.loop.dp:
            self.listed = MappingProxyType(contents(data.x) if data is not None else {})
        if self.loop.schedule:
            self.factor = self.loop.schedule(round) if round else 1.0
            self.rates = [rate * self.factor for rate in self._rates]
        self.set_rates()

    def set_rates(self, lr: float | None = None) -> None:
        """Set all rates to ``lr``, by default to those of the round, and the schedulers to how they were built."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate if lr is None else lr
        if self.schedulers and lr is None:
            self.schedulers.begin(self.factor)

    def inputs(self, x: Tensor, y: Tensor) -> Tensor:
        """Return examples as the module's ``forward`` gets them: those of a batch that its hooks have transferred."""
        batch: Any = self.hooks.transfer((x, y)) if self.hooks else (x, y)
        return batch[0] if isinstance(batch, Sequence) else x

    @property
    def round(self) -> int:
        """The round, from 1; 0 in a job outside rounds."""
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
        """Train from ``start``. The trained weights are the worker's own buffer, overwritten by the next training.

        ``loss`` replaces the module's ``training_step``. ``add_to_grad`` may change the gradients before every step;
        under DP-SGD it must not use the data, as what it adds is neither clipped nor noised. ``lr``: the learning rate
        of all parameters and steps of this call; by default the module's own rates, times the round's factor.
        """
        return self.loop.run(self, start, data, seed, loss=loss, add_to_grad=add_to_grad, lr=lr)

    def gradient(self, at: Flat, data: ClientData) -> Flat:
        """The gradient of the mean loss over the client's data at ``at``, in evaluation mode, without augmentation.

        No DP-SGD protects it, so nothing is covered of a reply that was made with it, whatever it declares.
        """
        self.trained.append(BARE_GRADIENT)
        return self.loop.gradient(self, at, data)

    def times_listed(self, data: ClientData) -> int:
        """Return the most times that ``data`` lists an example: by its contents, over how often the client has these.

        A row of another client, or one that a method has made, counts as an example.
        """
        return max((-(-times // max(1, self.listed.get(of, 0))) for of, times in contents(data.x).items()), default=1)

    def weight(self, data: ClientData) -> float:
        """w_i, the client's weight in averages: 1 or n_i, by ``federation.weighting``."""
        return weight(self.weighting, data.size)

    def load(self, model: Flat) -> None:
        """Copy these weights into the module.

        Raises:
            ValueError: their names or shapes are not the module's.
        """
        if model.layout != self.params.layout:
            raise ValueError("the weights' names or shapes are not those of this process's module")
        self.params.buffer.copy_(model.buffer.detach())

    def load_buffers(self, buffers: Flat) -> None:
        """Copy these buffers into the module and reset its counters (batches seen) to their initial values."""
        if len(buffers):
            self.buffers.buffer.copy_(buffers.buffer)
        for counter, built in self.counters:
            counter.copy_(built)

    def copied(self, value: Any) -> Any:
        """Return the value with copies of those of its tensors that share memory with this worker's module.

        The next training overwrites them. Looked at are tensors, ``Flat`` and dicts, lists and tuples of them.
        """
        tensors = (*self.module.parameters(), *self.module.buffers())
        tensors += tuple(x for m in self.module.modules() for x in vars(m).values() if isinstance(x, Tensor))
        storages = {t.untyped_storage().data_ptr() for t in tensors if t.layout == torch.strided}
        return _copied(value, storages - {0})

    def gather(self) -> bool:
        """Copy values back into ``params`` where training has given a parameter other memory (``p.data = ...``).

        Returns:
            Whether a parameter had other memory.
        """
        moved = [(name, p) for name, p, place in self._places if p.data_ptr() != place]
        for name, parameter in moved:
            self.params[name].copy_(parameter.detach())
            parameter.data = self.params[name]
        return bool(moved)

    def train_mode(self) -> None:
        """Put the module into training mode, but for the parts that were not when it was built."""
        self.module.train()
        for part in self.evaluating:
            part.training = False

    def snapshot(self) -> Flat:
        """A copy of the module's weights."""
        return copy(self.params)

    def sgd(self, method: str, *, momentum: bool) -> tuple[float, float]:
        """(learning rate in this round, momentum) of SGD, for methods whose formulas need it.

        Raises:
            ValueError: the optimizer is not SGD, has several learning rates, or has momentum though it may not.
        """
        if self.schedulers:
            raise ValueError(f"{method} is defined for one learning rate in a round, and the module has a scheduler")
        groups = self.optimizer.param_groups
        if not isinstance(self.optimizer, torch.optim.SGD) or len(groups) != 1:
            kind = type(self.optimizer).__name__
            raise ValueError(
                f"{method} is defined for SGD with one learning rate, and the module's optimizer is {kind}"
            )
        group = groups[0]
        if group["nesterov"] or group["dampening"]:
            raise ValueError(f"{method} is not defined for SGD with Nesterov's momentum or dampening")
        if group["momentum"] and not momentum:
            raise ValueError(f"{method} is defined for SGD without momentum, and momentum is {group['momentum']:g}")
        return self.rates[0], group["momentum"]


def one_or_all(each: list[Any]) -> Any:
    """Return the schedulers as ``self.lr_schedulers()`` does: None, the one, or a list."""
    return each if len(each) > 1 else next(iter(each), None)


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
    """The module with these weights and floating buffers, copied into it; ``buffers`` may be empty: it keeps its own.

    Raises:
        ValueError: their names or shapes are not the module's.
    """
    own = trained(module)
    inner = _state_buffers(module)[0] if len(buffers) else {}
    if layout_of(own.items()) != model.layout or (inner and layout_of(inner.items()) != buffers.layout):
        raise ValueError("the weights' names or shapes are not the module's")
    with torch.no_grad():
        for mine, values in ((own, model), (inner, buffers)):
            for name, tensor in mine.items():
                tensor.copy_(values[name])
    return module


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained and sent; those with ``requires_grad = False`` stay the module's own."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def floating_buffers(module: nn.Module) -> Flat:
    """A copy of the floating buffers of the module's state, laid out as ``Work.buffers``; empty if it has none."""
    return _flat_views(_state_buffers(module)[0])


def _state_buffers(module: nn.Module) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The floating buffers in the module's state by name, and its other buffers."""
    saved = module.state_dict().keys()
    state = {name: b for name, b in module.named_buffers() if name in saved}
    floating = {name: b for name, b in state.items() if b.is_floating_point()}
    return floating, [b for b in state.values() if not b.is_floating_point()]


def _flat_views(named: Mapping[str, Tensor]) -> Flat:
    return Flat(
        layout_of(named.items()), torch.cat([t.detach().reshape(-1) for t in named.values()] or [torch.empty(0)])
    )
