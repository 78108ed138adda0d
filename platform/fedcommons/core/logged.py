"""What a LightningModule logs where no Trainer listens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pytorch_lightning import LightningModule
from torch import Tensor


class Logged:
    """Collects the scalars of ``self.log`` and ``self.log_dict``, and means them over the calls of a name.

    Without a Trainer Lightning would warn and lose them. Tensors are not waited for: they stay where they are.
    """

    def __init__(self, module: LightningModule) -> None:
        self._sums: dict[str, tuple[float | Tensor, int]] | None = None
        setattr(module, "log", self._log)  # noqa: B010 (in the place of a method)
        setattr(module, "log_dict", self._log_dict)  # noqa: B010

    @contextmanager
    def collected(self) -> Iterator[dict[str, float | Tensor]]:
        """What is logged while this lasts stands in the dict at its end; at other times it is dropped."""
        found: dict[str, float | Tensor] = {}
        self._sums = {}
        try:
            yield found
            found |= {name: total / n for name, (total, n) in self._sums.items()}
        finally:
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
