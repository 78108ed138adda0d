"""Replacement for Lightning's Trainer, from which a module reads the progress of the federation.

r: number of the round;  E, K: numbers of epochs and steps of a client per round;  e, k: epochs and steps that the
client has finished in this round.

In local training,  current_epoch = (r - 1) E + e  and  global_step = (r - 1) K + k,  as if the client had trained in
all earlier rounds. When the server model is evaluated or measured after round r, the values are  r E  and  r K,  where
K belongs to a client with the mean number of examples. In any other job the values are 0. So a schedule in the module
(such as a growing weight) advances from round to round, and no result depends on the worker.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.precision import Precision


@dataclass
class Clock:
    """Object that a module sees as ``self.trainer``: round, ``self.current_epoch`` and ``self.global_step``.

    training: whether a client is in local training. gradient_clip_val: maximum gradient norm, ``client.clip_norm``.
    """

    round: int = 0
    current_epoch: int = 0
    global_step: int = 0
    training: bool = False
    gradient_clip_val: float | None = None

    # Lightning's code in LightningModule reads these attributes from the Trainer.
    global_rank: ClassVar[int] = 0
    local_rank: ClassVar[int] = 0
    is_global_zero: ClassVar[bool] = True
    logger: ClassVar[None] = None
    loggers: ClassVar[tuple[()]] = ()
    progress_bar_callback: ClassVar[None] = None
    lr_scheduler_configs: ClassVar[tuple[()]] = ()
    gradient_clip_algorithm: ClassVar[None] = None
    precision_plugin: ClassVar[Precision] = Precision()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name}: clients have no Trainer; it has round, current_epoch and global_step"
        )

    def attach(self, module: LightningModule) -> None:
        """Make this object the ``trainer`` of the module and of all LightningModules in the module."""
        module.trainer = self  # pyright: ignore[reportAttributeAccessIssue]  (it has every attribute that is read)

    def require_unset(self) -> None:
        """Check that the module has set no attribute of the Trainer, such as ``should_stop``.

        Raises:
            ValueError: the module has set an attribute, which would have no effect.
        """
        for name in vars(self).keys() - {field.name for field in fields(Clock)}:
            raise ValueError(f"it sets self.trainer.{name}, which changes nothing: clients have no Trainer here")

    def set(self, round: int, epoch: int, step: int) -> None:
        """Set the number of the round, and the values of ``current_epoch`` and ``global_step``."""
        self.round, self.current_epoch, self.global_step = round, epoch, step


class NoClock(Clock):
    """A ``Clock`` that raises an error if a module reads epoch or step. why: the reason, at the end of the message."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def __getattribute__(self, name: str) -> Any:
        if name in ("current_epoch", "global_step"):
            raise ValueError(f"it reads self.{name}, {object.__getattribute__(self, 'why')}")
        return super().__getattribute__(name)


class _NoNumber:
    """Placeholder for the batch index if one call computes many batches. Any use of the placeholder raises an error."""

    def _refuse(self, *_: object) -> Any:
        raise ValueError("it reads the index of the batch (batch_idx)")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __rpow__ = __neg__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = __str__ = _refuse


NO_NUMBER: Any = _NoNumber()
