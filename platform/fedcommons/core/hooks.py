"""Calls of a LightningModule's hooks in a client's local training, in the order of Lightning's Trainer.

A client's local training corresponds to one ``Trainer.fit``. Lightning's order (pytorch_lightning 2.6) is

    configure_callbacks, prepare_data, setup, configure_model           once per process, when the module is built
    on_fit_start, on_train_start                                        per client, with its local steps in between
    on_train_epoch_start, the epoch's batches, on_train_epoch_end
    on_train_end, on_fit_end, teardown

and for every batch

    on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer, on_train_batch_start
    optimizer_step( training_step, on_before_zero_grad, optimizer_zero_grad, on_before_backward, backward,
                    the method's gradient correction, on_after_backward, on_before_optimizer_step,
                    configure_gradient_clipping )
    on_train_batch_end

A module that overrides no hook of ``CALLED`` is trained by the plain steps of ``LocalSGD``. After each client, all
changes that hooks have made to the module are undone, so no result depends on the process in which a client is trained.

Restrictions of hooks:

``configure_callbacks``  must return no callbacks
``on_before_batch_transfer``, ``transfer_batch_to_device``, ``on_after_batch_transfer``  refused with methods that train
                         on other examples (MOON, FedMix, FedProto, FedGEN, FedDM, distillation)
``on_train_batch_start``  -1 for a client's first batch skips the rest of the epoch
``on_validation_*``, ``on_save_checkpoint``, ``on_load_checkpoint``, ``train_dataloader``, ``val_dataloader``,
                         ``configure_sharded_model``, hooks of Lightning 1  refused, because nothing calls them
``on_test_*``, ``on_predict_*``, ``test_step``, ``predict_step``  not called
hooks per client, and ``register_hook``  refused with ``dp.local``, ``client.batched``, ``client.graphs``,
                         ``client.precision fp16-mixed``, and methods without local steps

Departs from Lightning: ``client.clip_norm`` clips before the federated method's gradient correction.
A ``configure_gradient_clipping`` of the module runs after the correction. The transfer hooks also run before
``training_step`` and ``validation_step`` outside of local training (evaluation, estimators).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from inspect import signature
from typing import Any

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from fedcommons.core.local_training import LocalSGD
from fedcommons.core.module_state import Saved
from fedcommons.core.optimizers import plain_step
from fedcommons.core.steps import AddToGrad, Batch, Loss, autocast
from fedcommons.core.trainer_shim import Clock
from fedcommons.core.training_process import TrainingProcess
from fedcommons.data.clients import ClientData

FIT = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end",
    "teardown",
)  # fmt: skip
"""Hooks before and after a client's epochs."""

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that may replace a batch before the module gets the batch."""

CLIPPING = ("configure_gradient_clipping", "clip_gradients")

STEP = (
    "on_train_batch_start", "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward",
    "backward", "on_after_backward", "on_before_optimizer_step", *CLIPPING, "on_train_batch_end",
)  # fmt: skip
"""Hooks that are called in every step; these hooks can read batches, gradients or the optimizer."""

CALLED = (*FIT, *TRANSFER, *STEP, "lr_scheduler_step")
"""All hooks that are called in the local training of each client."""

REFUSED = {
    **dict.fromkeys(
        ("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
         "on_validation_batch_start", "on_validation_batch_end", "on_validation_model_zero_grad",
         "on_validation_model_eval", "on_validation_model_train"),
        "several processes evaluate a model, each on some chunks of the data: log metrics in validation_step",
    ),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "checkpoints hold weights and the server's state"),
    **dict.fromkeys(("train_dataloader", "val_dataloader"), "the data set of the experiment is partitioned: --data"),
    "configure_sharded_model": "use configure_model",
    **dict.fromkeys(
        ("training_step_end", "training_epoch_end", "validation_step_end", "validation_epoch_end", "on_epoch_start",
         "on_epoch_end", "on_batch_start", "on_batch_end"),
        "Lightning 2 has no such hook",
    ),
}  # fmt: skip
"""Name of a hook of Lightning 1 or 2 that is never called here -> reason or alternative, for the error message."""


def overrides(module: LightningModule, name: str) -> bool:
    """Return whether the module object or its class overrides the hook ``name`` of LightningModule."""
    default = getattr(LightningModule, name, None)
    return name in vars(module) or getattr(type(module), name, default) is not default


def overridden(module: LightningModule, names: Sequence[str]) -> list[str]:
    """Return the hooks among ``names`` that the module overrides."""
    return [name for name in names if overrides(module, name)]


def require_called(module: LightningModule) -> None:
    """Check that the module has no hook that would never be called.

    Raises:
        ValueError: the module has a hook of ``REFUSED``, or a hook of ``CALLED`` that is not a function.
    """
    for name in overridden(module, tuple(REFUSED)):
        raise ValueError(f"its hook {name} is never called here: {REFUSED[name]}")
    for name in overridden(module, CALLED):
        if not callable(getattr(module, name)):
            raise ValueError(f"its hook {name} is no function")


def prepare(module: LightningModule) -> None:
    """Call the hooks that run once per process, such as ``setup``; a second call for a module does nothing.

    Raises:
        ValueError: the module configures callbacks, which need a Trainer.
    """
    if vars(module).get("_is_prepared"):
        return
    Clock().attach(module)
    if callbacks := module.configure_callbacks():
        each = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        names = ", ".join(type(callback).__name__ for callback in each)
        raise ValueError(f"configure_callbacks returns {names}, and callbacks are never called here: use hooks")
    module.prepare_data()
    module.setup(stage=TrainerFn.FITTING)
    module.configure_model()
    for name in overridden(module, ("training_step", "validation_step")):
        step = getattr(module, name)
        # Like Lightning, pass only the batch to a training_step or validation_step without the argument batch_idx.
        if not is_param_in_hook_signature(step, "batch_idx", min_args=2):
            vars(module)[name] = partial(_without_index, step)
    vars(module)["_is_prepared"] = True


def _without_index(step: Callable[[Any], Any], batch: Any, _: int) -> Any:
    return step(batch)


class Hooks:
    """Trainer for the clients of one process that calls the module's hooks.

    Raises:
        ValueError: an attribute of the module cannot be copied, so the next client would see changes of the attribute.
    """

    def __init__(self, work: TrainingProcess) -> None:
        self.work, self.module, self.clock = work, work.module, work.clock
        self.clips_itself = bool(overridden(self.module, CLIPPING))
        self.optimizer = LightningOptimizer(work.optimizer)
        self.optimizer.step = self._step_in_hook
        self._in_step, self._is_clipped = False, False
        self._ended: tuple[Mapping[str, Tensor], Batch, int] = {}, (), 0  # arguments of on_train_batch_end
        if overridden(self.module, TRANSFER):
            for name in overridden(self.module, ("training_step", "validation_step")):
                vars(self.module)[name] = self._after_transfer(getattr(self.module, name))
        vars(self.module)["optimizers"] = self._optimizers
        self._saved = Saved(work, (self, self.optimizer))

    def train(
        self, loop: LocalSGD, data: ClientData, seed: int, epochs: int, own_loss: Loss | None,
        correct: AddToGrad | None,
    ) -> list[Tensor]:  # fmt: skip
        """Run a client's epochs, restore the module afterwards, and return the loss of every step.

        own_loss: the method's loss function; None: the module's ``training_step``. correct: the method's function that
        changes the gradients of every step; None: no change.

        Raises:
            ValueError: a hook has unfrozen or replaced a parameter, skipped all batches, not called the closure, or set
                an attribute of the Trainer that has no effect; or ``dp.local`` is on, whose steps call no hooks.
        """
        if loop.dp:
            raise ValueError("dp.local calls no hooks in its steps")
        work, module, clock, losses = self.work, self.module, self.clock, list[Tensor]()
        (first_epoch, first_step), last = work.started_at, loop.steps_of(len(data), 1) - 1
        loss = autocast(own_loss or module.training_step, work.device.type, loop.precision)
        self._saved.put_attributes_back()  # ``training_step`` may have changed attributes outside of local training
        if not module.training:
            work.train_mode()
        try:
            for parameter in module.parameters():
                parameter.grad = None
            clock.training, clock.current_epoch, clock.global_step = True, first_epoch, first_step
            module.on_fit_start()
            module.on_train_start()
            for epoch in range(epochs):
                clock.current_epoch = first_epoch + epoch
                module.on_train_epoch_start()
                for step, batches in enumerate(loop.steps(data, seed, epoch)):
                    at, number = (loop.accumulate * k for k in (step, len(losses) if own_loss else step))
                    value = self._step(loss, batches, at, number, correct, len(data.columns))
                    losses += [] if value is None else [value]
                    clock.global_step = first_step + len(losses)
                    if work.schedulers:
                        work.schedulers.after("step", at + len(batches))
                        if value is None or step == last:
                            work.schedulers.after("epoch", epoch + 1)
                    if value is None:
                        break
                    module.on_train_batch_end(*self._ended)
                module.on_train_epoch_end()
            clock.current_epoch = first_epoch + epochs
            module.on_train_end()
            module.on_fit_end()
            module.teardown(stage=TrainerFn.FITTING)
            self._saved.require_same_parameters()
            clock.require_unset()
            if not losses:
                raise ValueError("on_train_batch_start returned -1 in every epoch, so no step was taken")
        finally:
            clock.training, self._in_step = False, False
            self._saved.put_back()
        return losses

    def transfer(self, batch: Batch) -> Batch:
        """Call the module's hooks of ``TRANSFER``, which may replace the batch, and return the batch."""
        batch = self.module.on_before_batch_transfer(batch, 0)
        batch = self.module.transfer_batch_to_device(batch, self.work.device, 0)
        return self.module.on_after_batch_transfer(batch, 0)

    def _step(
        self, loss: Loss, batches: Sequence[Batch], at: int, number: int, correct: AddToGrad | None, width: int
    ) -> Tensor | None:
        """Take a step and return its loss; None if ``on_train_batch_start`` returned -1, which ends the epoch.

        at: index of the first batch in the epoch. number: argument of ``loss`` for the first batch. width: number of a
        batch's columns that hooks see; later columns are for the method's loss function.
        """
        losses, n = list[Tensor](), sum(len(batch[1]) for batch in batches)
        self._in_step, self._is_clipped = True, False
        for j, batch in enumerate(batches):
            seen, place, is_last = self.transfer(batch[:width]), at + j, j + 1 == len(batches)
            if self.module.on_train_batch_start(seen, place) == -1:
                return None
            compute = partial(loss, (*seen, *batch[width:]) if batch[width:] else seen, number + j)
            closure = _Closure(self, compute, len(batch[1]) / n, place, j == 0, correct if is_last else None)
            if is_last:
                self.module.optimizer_step(self.clock.current_epoch, place, self.optimizer, closure)
            else:
                closure()
            if closure.value is None:
                raise ValueError("optimizer_step must call its closure, which computes the loss and the gradients")
            losses.append(closure.value)
            self._ended = {"loss": closure.value.clone()}, seen, place
            if not is_last:
                self.module.on_train_batch_end(*self._ended)
        return reduce(torch.add, losses)

    def correct(self, correct: AddToGrad | None) -> None:
        """Clip the gradients to ``client.clip_norm`` and apply the method's ``correct``; if None, do neither."""
        if correct is None:
            return
        clip_norm = self.work.loop.clip_norm
        if clip_norm is not None and not self.clips_itself:
            nn.utils.clip_grad_norm_(self.work.named.values(), clip_norm)
            self._is_clipped = True
        correct(self.work.named)

    def _step_in_hook(self, closure: Callable[[], Tensor] | None = None, **_: Any) -> Tensor | None:
        """Take a step as Lightning does. The module's hook ``optimizer_step`` calls this as ``optimizer.step``."""
        optimizer, value = self.work.optimizer, None

        def compute() -> Tensor | None:
            nonlocal value
            value = closure() if closure else None
            self.module.on_before_optimizer_step(optimizer)
            if not self._is_clipped:
                self.module.configure_gradient_clipping(
                    optimizer, gradient_clip_val=self.clock.gradient_clip_val, gradient_clip_algorithm=None
                )
            return value

        step: Any = optimizer.step
        if type(optimizer).__module__.startswith("torch.optim") or "closure" not in signature(step).parameters:
            compute()
            plain_step(optimizer)()
        else:  # the optimizer calls the closure itself; for example, SAM calls the closure twice
            step(closure=compute)
        return value

    def _after_transfer(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` with the transfer hooks before it, for calls outside of local training."""
        return lambda batch, *args: step(batch if self._in_step else self.transfer(batch), *args)

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.optimizer if use_pl_optimizer else self.work.optimizer


@dataclass
class _Closure:
    """The closure that ``optimizer_step`` gets: compute loss and gradients of a batch, and call the hooks for both."""

    hooks: Hooks
    compute: Callable[[], Tensor]  # returns the loss
    share: float  # the batch's fraction of the step's examples
    at: int  # index of the batch in the epoch
    is_first: bool
    correct: AddToGrad | None  # changes the gradients after the backward pass
    value: Tensor | None = None  # the loss after the call

    def __call__(self) -> Tensor:
        module, optimizer, epoch = self.hooks.module, self.hooks.work.optimizer, self.hooks.clock.current_epoch
        with torch.enable_grad():
            value = self.compute()
            if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
                raise ValueError("training_step must return the loss, one number with a gradient")
            value = value if self.share == 1 else value * self.share
            if self.is_first:
                module.on_before_zero_grad(optimizer)
                module.optimizer_zero_grad(epoch, self.at, optimizer)
            module.on_before_backward(value)
            module.backward(value)
            self.hooks.correct(self.correct)
            module.on_after_backward()
        self.value = value.detach()
        return value
