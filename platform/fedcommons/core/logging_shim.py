"""What a LightningModule logs without a Trainer: numbers, and torchmetrics objects."""

import gc
from collections.abc import Iterator, Mapping, Set
from copy import deepcopy
from inspect import Signature
from typing import Any, Self

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

MEANS = ("mean", "avg", torch.mean)
"""Values of ``reduce_fx`` that mean what is done here."""

LOADED = ("_parameters", "_buffers")
"""Attributes of a module whose tensors the engine loads."""

Number = float | Tensor


class Metrics:
    """The torchmetrics objects of a module, with the states that they have when this is made."""

    def __init__(self, module: nn.Module) -> None:
        every = {id(one): one for one in module.modules()}
        roots = [one for one in every.values() if isinstance(one, Metric | MetricCollection | MetricTracker)]
        inner = {id(one): one for root in roots for one in root.modules()}
        self._modules, self.objects = every, list(inner.values())
        self._states = self._copy(
            [{name: value for name, value in vars(one).items() if name not in LOADED} for one in self.objects]
        )

    def put_back(self) -> None:
        """Restore the states and all other attributes of each metric."""
        for one, state in zip(self.objects, self._copy(self._states), strict=True):
            loaded = {name: vars(one)[name] for name in LOADED}
            vars(one).clear()
            vars(one).update(state, **loaded)

    @property
    def updates(self) -> int:
        """The number of updates of all these objects since each was reset."""
        return sum(one.update_count for one in self.objects if isinstance(one, Metric))

    def others(self) -> dict[int, tuple[Metric, int]]:
        """Return all metrics in this process, wherever they stand, whose states are not put back.

        Returns:
            Metrics and how often each was updated, by id.
        """
        owned = {id(one) for one in self.objects}
        every = [one for one in gc.get_objects() if Metric in type(one).__mro__ and id(one) not in owned]
        return {id(one): (one, one.update_count) for one in every}

    def require_all(self, module: nn.Module, before: Mapping[int, tuple[Metric, int]]) -> None:
        """Refuse a module that updates objects whose states are not put back; before: what ``others`` gave.

        Raises:
            ValueError: it has updated one.
        """

        def updated() -> list[Metric]:
            return [one for key, (one, n) in self.others().items() if n > before.get(key, (one, 0))[1]]

        if not updated():
            return
        gc.collect()  # a metric that a step makes and forgets is a cycle
        for one in updated():
            name = type(one).__name__
            is_late = any(one is part for part in module.modules())
            why = "its steps have made" if is_late else "is not one of its attributes"
            raise ValueError(
                f"it updates a metric ({name}) that {why}: assign it in __init__ (use nn.ModuleList, not a list), else "
                "its state carries over to the next data set"
            )

    def _copy(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Copy states, but not the modules and signatures in them; a tensor with a graph is detached."""
        every = [*values_in([*states])]
        memo = {**self._modules, **{id(one): one for one in every if isinstance(one, Signature)}}
        tensors = (one for one in every if isinstance(one, Tensor) and not one.is_leaf)
        return deepcopy(states, {**memo, **{id(one): one.detach().clone() for one in tensors}})


def values_in(containers: list[Any]) -> Iterator[Any]:
    """Yield the values in these containers, and in the plain containers among them."""
    seen = set[int]()
    while containers:
        one = containers.pop()
        if type(one) not in (dict, list, tuple, set):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            containers += one.values() if isinstance(one, dict) else one


class Logged:
    """Collects what ``self.log`` and ``self.log_dict`` log within a context; outside of it everything is dropped.

    Numbers are averaged by name over their calls within the innermost context: its ``means`` are set when it ends.
    Torchmetrics objects cover all that they were updated with since the outermost context began: ``values``. Without
    a Trainer, Lightning itself would warn and drop everything. Tensors stay on their device: nothing waits for a GPU.
    """

    is_trial = False
    """Whether ``values`` leaves out what cannot be computed, as of a batch of two examples."""

    def __init__(self, module: LightningModule) -> None:
        """Replace the module's ``log`` and ``log_dict``.

        Raises:
            ValueError: the module's class overrides one of them.
        """
        for name in ("log", "log_dict"):
            if getattr(type(module), name) is not getattr(LightningModule, name):
                raise ValueError(f"it overrides {name}, which is replaced here: call self.{name} in another method")
        self.means: Mapping[str, Number] = {}
        self.metrics = Metrics(module)
        self._open: list[dict[str, tuple[Number, int]]] = []
        self._logged: dict[str, Metric | MetricCollection] = {}
        vars(module).update(log=self._log, log_dict=self._log_dict)  # instead of the class's methods

    @property
    def objects(self) -> Set[str]:
        """The names of the torchmetrics objects that were logged since the outermost context began."""
        return self._logged.keys()

    def put_back(self) -> None:
        """Forget all that was logged; the torchmetrics objects begin anew."""
        if self.metrics.objects:
            self.metrics.put_back()
        self._logged, self.means = {}, {}

    def __enter__(self) -> Self:
        if not self._open and self.metrics.objects:
            self.put_back()
        self._open.append({})
        return self

    def __exit__(self, *_: object) -> None:
        self.means = {name: total / n for name, (total, n) in self._open.pop().items()}

    def add(self, sums: Mapping[str, Tensor], n: int) -> None:
        """The sums over n examples of what each has logged, as if each had logged by itself."""
        for name, value in sums.items():
            self._add(name, value, n)

    def values(self) -> dict[str, Tensor]:
        """Compute the torchmetrics objects that were logged since the outermost context began.

        Returns:
            A number by name; of a collection or wrapper with several numbers they are called ``NAME_KEY``.

        Raises:
            ValueError: ``compute`` gives something else.
        """
        if not self._logged:
            return {}
        found: dict[str, Any] = {}
        for name, metric in self._logged.items():
            try:
                with torch.no_grad():
                    value = metric.compute()
            except Exception:  # of whatever kind
                if self.is_trial:
                    continue
                raise
            found |= {f"{name}_{key}": x for key, x in value.items()} if isinstance(value, Mapping) else {name: value}
        for name, value in found.items():
            if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
                kind = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"it logs {name}, whose compute gives {kind}, and a metric is one number")
        return {name: torch.as_tensor(value).detach().reshape(()) for name, value in found.items()}

    def _add(self, name: str, value: Number, n: int) -> None:
        total, count = self._open[-1].get(name, (0.0, 0))
        self._open[-1][name] = total + value, count + n

    def _log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None,
        on_step: bool | None = None, on_epoch: bool | None = None, reduce_fx: Any = "mean", **options: Any,
    ) -> None:  # fmt: skip
        if not self._open:
            return
        if isinstance(value, Metric | MetricCollection):
            if not any(value is one for one in self.metrics.objects):
                raise ValueError(
                    f"it logs {name}, a torchmetrics object that is not one of its attributes: assign it in __init__"
                )
            self._logged[name] = value
            return
        if reduce_fx not in MEANS:
            way = getattr(reduce_fx, "__name__", reduce_fx)
            raise ValueError(
                f"it logs {name} with reduce_fx {way}, and numbers are averaged: log a torchmetrics object (MaxMetric)"
            )
        try:
            number = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"it logs {name}, {kind}, and a metric is one number") from error
        self._add(name, number, 1)

    def _log_dict(self, values: Any, *args: Any, **options: Any) -> None:
        is_collection = isinstance(values, MetricCollection)
        items = values.items(keep_base=False, copy_state=False) if is_collection else values.items()
        for name, value in items:
            self._log(name, value, *args, **options)
