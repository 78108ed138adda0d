"""What a LightningModule logs without a Trainer."""

from collections.abc import Mapping
from typing import Any, Self

from pytorch_lightning import LightningModule
from torch import Tensor


class Logged:
    """Collects the scalars of ``self.log`` and ``self.log_dict`` and averages them by name.

    Use as a context: its ``means`` are set when it ends; what is logged outside of it is dropped. Without a Trainer,
    Lightning itself would warn and drop everything. Tensors stay on their device, so nothing waits for a GPU.
    """

    def __init__(self, module: LightningModule) -> None:
        self.means: Mapping[str, float | Tensor] = {}
        self._sums: dict[str, tuple[float | Tensor, int]] | None = None
        vars(module).update(log=self._log, log_dict=self._log_dict)  # instead of the class's methods

    def __enter__(self) -> Self:
        self._sums = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.means = {name: total / n for name, (total, n) in (self._sums or {}).items()}
        self._sums = None

    def add(self, sums: Mapping[str, Tensor], n: int) -> None:
        """The sums over n examples of what each has logged, as if each had logged by itself."""
        assert self._sums is not None
        for name, value in sums.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + n

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._sums is None:
            return
        scalar = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        total, n = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + scalar, n + 1

    def _log_dict(self, values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in values.items():
            self._log(name, value)
