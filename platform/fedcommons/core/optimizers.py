"""Optimizer and learning rate schedulers from a module's ``configure_optimizers``.

The accepted return values are Lightning's: an optimizer; a dict with ``optimizer`` and ``lr_scheduler``; or a pair of
lists, ``([optimizer], [schedulers])``. An ``lr_scheduler`` is a scheduler or a dict with ``scheduler``, ``interval``
(epoch, the default, or step) and ``frequency``. An epoch is a pass over the client's data; a step is a step of the
optimizer.

torch adds profiling and hooks to each call of ``optimizer.step``. For a small model, these additions take as long as
the step. ``plain_step`` omits both.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class Every(NamedTuple):
    """A learning rate scheduler that steps after every ``frequency`` steps or epochs (``interval``)."""

    scheduler: LRScheduler
    interval: str
    frequency: int


def read(returned: Any) -> tuple[Optimizer, list[Every]]:
    """Return the optimizer and the schedulers in the return value of ``configure_optimizers``.

    Raises:
        ValueError: the value has none of the forms in the module docstring, or a scheduler needs a metric to monitor.
    """
    optimizers, schedulers = returned, []
    if isinstance(returned, Mapping):
        optimizers, scheduler = returned.get("optimizer"), returned.get("lr_scheduler")
        schedulers = [scheduler] if scheduler else []
    elif isinstance(returned, Sequence) and len(returned) == 2 and all(isinstance(part, Sequence) for part in returned):
        optimizers, schedulers = returned
    elif isinstance(returned, Sequence) and len(returned) == 1:
        return read(returned[0])
    many = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    if len(many) > 1 and all(isinstance(item, Optimizer | Mapping) for item in many):
        raise ValueError(f"configure_optimizers gives {len(many)} optimizers, and a client trains with one")
    if len(many) != 1 or not isinstance(many[0], Optimizer):
        kind = type(many[0] if many else returned).__name__
        raise ValueError(f"configure_optimizers must return one torch optimizer, alone or with schedulers, got {kind}")
    return many[0], [_every(item, many[0]) for item in schedulers]


def _every(config: Any, optimizer: Optimizer) -> Every:
    options = config if isinstance(config, Mapping) else {"scheduler": config}
    scheduler, interval = options.get("scheduler"), options.get("interval", "epoch")
    frequency = options.get("frequency", 1)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau needs a metric to monitor, which clients lack: use another scheduler")
    if not isinstance(scheduler, LRScheduler):
        raise ValueError(f"an lr_scheduler must be one of torch.optim.lr_scheduler, got {type(scheduler).__name__}")
    if interval not in ("epoch", "step"):
        raise ValueError(f"the interval of an lr_scheduler must be epoch or step, got {interval!r}")
    if not (isinstance(frequency, int) and frequency >= 1):
        raise ValueError(f"the frequency of an lr_scheduler must be at least 1, got {frequency!r}")
    if scheduler.optimizer is not optimizer:
        raise ValueError("the lr_scheduler must belong to the optimizer that configure_optimizers returns")
    return Every(scheduler, interval, frequency)


class Schedulers:
    """The learning rate schedulers of a module, which are reset for every client.

    ``begin`` resets the values that schedulers set (learning rates, sometimes momentum) to those at the module's
    construction. factor: factor of the round's schedule, which multiplies the schedulers' learning rates. step: the
    module's hook ``lr_scheduler_step``.
    """

    def __init__(self, optimizer: Optimizer, each: Sequence[Every], step: Callable[[Any, None], None]) -> None:
        self.optimizer, self.each, self.step = optimizer, each, step
        self._groups = [deepcopy({n: v for n, v in g.items() if n != "params"}) for g in optimizer.param_groups]
        self._states = [deepcopy(entry.scheduler.state_dict()) for entry in each]
        self._rates: list[Any] = []
        self.factor = 1.0
        vars(optimizer)["_opt_called"] = True  # otherwise torch may warn that a scheduler steps before the optimizer

    def begin(self, factor: float) -> None:
        """Reset the schedulers for a new client. factor: factor of the learning rates in this round."""
        self.factor = factor
        for group, built in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(deepcopy(built))
        for entry, state in zip(self.each, self._states, strict=True):
            entry.scheduler.load_state_dict(deepcopy(state))
        self._multiply()

    def after(self, interval: str, number: int) -> None:
        """Step the schedulers that are due after the client's ``number``-th step or epoch (``interval``)."""
        due = [entry for entry in self.each if entry.interval == interval and number % entry.frequency == 0]
        if due:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            for entry in due:
                self.step(entry.scheduler, None)
            self._multiply()

    def _multiply(self) -> None:
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.factor != 1:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self.factor


def plain_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return ``optimizer.step`` without torch's profiling, which takes time in every step.

    If step hooks exist, or other code wraps the method, ``optimizer.step`` is returned unchanged.
    """
    step = type(optimizer).step
    plain = getattr(step, "__wrapped__", step)
    by_torch_alone = getattr(step, "hooked", False) and not getattr(plain, "hooked", False)
    if not by_torch_alone or "step" in vars(optimizer) or _has_hooks(optimizer):
        return optimizer.step
    return partial(plain, optimizer)


def _has_hooks(optimizer: Optimizer) -> bool:
    instance_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(instance_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
