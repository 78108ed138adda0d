"""How far a federation is, as its module is told in the place of Lightning's Trainer.

r: the round;  E, K: epochs and steps of a client's round;  e, k: those of this round that are done.

In a client's round   current_epoch = (r - 1) E + e,  global_step = (r - 1) K + k:  as if the client had trained in all
rounds before. After round r, when the server model is evaluated or measured,  r E  and  r K, K that of a client of mean
size. In any other job all are 0. So a schedule (a weight that grows, say) moves, and no bit depends on the worker.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.precision import Precision


@dataclass
class Clock:
    """What ``self.current_epoch``, ``self.global_step`` and ``self.trainer.round`` say in a module.

    training: whether the module is in a client's local training. gradient_clip_val: ``client.clip_norm``.
    """

    round: int = 0
    current_epoch: int = 0
    global_step: int = 0
    training: bool = False
    gradient_clip_val: float | None = None

    # what a LightningModule asks its Trainer for by itself
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
            f"self.trainer.{name}: clients have no Trainer here; self.trainer has round, current_epoch and global_step"
        )

    def attach(self, module: LightningModule) -> None:
        """Let the module, and the LightningModules in it, read this clock."""
        module.trainer = self  # pyright: ignore[reportAttributeAccessIssue]  (it has what is asked for)

    def require_unset(self) -> None:
        """See that the module has set no attribute of the Trainer, such as ``should_stop``.

        Raises:
            ValueError: it has set one, which would change nothing.
        """
        for name in vars(self).keys() - {field.name for field in fields(Clock)}:
            raise ValueError(f"it sets self.trainer.{name}, which changes nothing: clients have no Trainer here")

    def set(self, round: int, epoch: int, step: int) -> None:
        """Say how far the federation is."""
        self.round, self.current_epoch, self.global_step = round, epoch, step


class NoClock(Clock):
    """Tells a module that asks how far its client is why it cannot know that."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def __getattribute__(self, name: str) -> Any:
        if name in ("current_epoch", "global_step"):
            raise ValueError(f"it reads self.{name}, {object.__getattribute__(self, 'why')}")
        return super().__getattribute__(name)


class _NoNumber:
    """Stands for the place of a batch where one call of a module serves many batches; whoever reads it is refused."""

    def _refuse(self, *_: object) -> Any:
        raise ValueError("it reads its step's number (batch_idx)")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = __rpow__ = __neg__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __hash__ = __str__ = _refuse


NO_NUMBER: Any = _NoNumber()
