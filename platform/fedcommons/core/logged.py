"""What a LightningModule logs where no Trainer listens."""

from collections.abc import Mapping
from typing import Any, Self

from pytorch_lightning import LightningModule
from torch import Tensor


class Logged:
    """Collects the scalars of ``self.log`` and ``self.log_dict``, and means them over the calls of a name.

    Use as a context: what is logged while it lasts stands in ``means`` at its end; at other times it is dropped.
    Without a Trainer Lightning would warn and lose it. Tensors are not waited for: they stay where they are.
    """

    means: Mapping[str, float | Tensor]

    def __init__(self, module: LightningModule) -> None:
        self._sums: dict[str, tuple[float | Tensor, int]] | None = None
        vars(module).update(log=self._log, log_dict=self._log_dict)  # in the place of the class's methods

    def __enter__(self) -> Self:
        self._sums = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.means = {name: total / n for name, (total, n) in (self._sums or {}).items()}
        self._sums = None

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._sums is None:
            return
        scalar = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        total, n = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + scalar, n + 1

    def _log_dict(self, values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in values.items():
            self._log(name, value)
