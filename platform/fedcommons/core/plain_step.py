"""An optimizer's step without what torch puts around it.

Around every step torch enters a region that its profiler can show, and calls hooks. With no hook to call, that takes as
long as the step of a small model.
"""

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def plain_step(optimizer: Optimizer) -> Callable[[], object]:
    """``optimizer.step`` without the profiler's region; as it is if it has a hook or others than torch wrap it."""
    step = type(optimizer).step
    plain = getattr(step, "__wrapped__", step)
    by_torch_alone = getattr(step, "hooked", False) and not getattr(plain, "hooked", False)
    if not by_torch_alone or "step" in vars(optimizer) or _has_hooks(optimizer):
        return optimizer.step
    return partial(plain, optimizer)


def _has_hooks(optimizer: Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
