"""Collection of the numbers and torchmetrics objects that a LightningModule logs, in place of Lightning's Trainer."""

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
"""Values of the argument ``reduce_fx`` of ``self.log`` that mean an average, the only supported reduction."""

LOADED = ("_parameters", "_buffers")
"""Attributes of a module with its parameters and buffers, which the engine loads for each client."""

Number = float | Tensor


class Metrics:
    """The torchmetrics objects in a module, with a copy of the objects' states when this instance was created."""

    def __init__(self, module: nn.Module) -> None:
        every = {id(part): part for part in module.modules()}
        roots = [part for part in every.values() if isinstance(part, Metric | MetricCollection | MetricTracker)]
        inner = {id(part): part for root in roots for part in root.modules()}
        self._modules, self.objects = every, list(inner.values())
        self._states = self._copy(
            [{name: value for name, value in vars(part).items() if name not in LOADED} for part in self.objects]
        )

    def put_back(self) -> None:
        """Restore the copied states, and all other attributes, of each torchmetrics object."""
        for metric, state in zip(self.objects, self._copy(self._states), strict=True):
            loaded = {name: vars(metric)[name] for name in LOADED}
            vars(metric).clear()
            vars(metric).update(state, **loaded)

    @property
    def updates(self) -> int:
        """Total number of updates of the module's torchmetrics objects, each counted since the object's last reset."""
        return sum(metric.update_count for metric in self.objects if isinstance(metric, Metric))

    def others(self) -> dict[int, tuple[Metric, int]]:
        """Return all torchmetrics objects in this process that ``put_back`` does not restore.

        Returns:
            id of an object -> (object, number of its updates).
        """
        owned = {id(metric) for metric in self.objects}
        metrics = [metric for metric in gc.get_objects() if Metric in type(metric).__mro__ and id(metric) not in owned]
        return {id(metric): (metric, metric.update_count) for metric in metrics}

    def require_all(self, module: nn.Module, before: Mapping[int, tuple[Metric, int]]) -> None:
        """Check that the module's step has updated only torchmetrics objects that ``put_back`` restores.

        before: result of ``others`` before the step.

        Raises:
            ValueError: the step has updated another torchmetrics object.
        """

        def updated() -> list[Metric]:
            return [metric for key, (metric, n) in self.others().items() if n > before.get(key, (metric, 0))[1]]

        if not updated():
            return
        # Delete metrics that the step created and no longer uses. A reference cycle may keep such a metric alive.
        gc.collect()
        for metric in updated():
            name = type(metric).__name__
            is_late = any(metric is part for part in module.modules())
            why = "its steps have made" if is_late else "is not one of its attributes"
            raise ValueError(
                f"it updates a metric ({name}) that {why}: assign it in __init__ (use nn.ModuleList, not a list), else "
                "its state carries over to the next data set"
            )

    def _copy(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the states. Modules and signatures are not copied; copied tensors have no autograd graph."""
        values = [*values_in([*states])]
        memo = {**self._modules, **{id(value): value for value in values if isinstance(value, Signature)}}
        tensors = (value for value in values if isinstance(value, Tensor) and not value.is_leaf)
        return deepcopy(states, {**memo, **{id(value): value.detach().clone() for value in tensors}})


def values_in(containers: list[Any]) -> Iterator[Any]:
    """Yield all values in ``containers`` and in nested plain containers (dict, list, tuple, set)."""
    seen = set[int]()
    while containers:
        value = containers.pop()
        if type(value) not in (dict, list, tuple, set):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            containers += value.values() if isinstance(value, dict) else value


class Logged:
    """Context that collects the module's calls of ``self.log`` and ``self.log_dict``; calls outside have no effect.

    Contexts may be nested. Numbers are averaged by name over the calls in the innermost context. When this context has
    ended, ``means`` contains the averages. Torchmetrics objects cover all updates since the outermost context began
    (see ``values``). Without a Trainer, Lightning itself would ignore every call and warn. Logged tensors stay on their
    device, so logging never waits for a GPU.
    """

    is_trial = False
    """Whether ``values`` omits metrics whose ``compute`` fails, as it may on a trial batch of two examples."""

    def __init__(self, module: LightningModule) -> None:
        """Replace the module's methods ``log`` and ``log_dict``.

        Raises:
            ValueError: the module's class overrides ``log`` or ``log_dict``.
        """
        for name in ("log", "log_dict"):
            if getattr(type(module), name) is not getattr(LightningModule, name):
                raise ValueError(f"it overrides {name}, which is replaced here: call self.{name} in another method")
        self.means: Mapping[str, Number] = {}
        self.metrics = Metrics(module)
        self._open: list[dict[str, tuple[Number, int]]] = []
        self._logged: dict[str, Metric | MetricCollection] = {}
        vars(module).update(log=self._log, log_dict=self._log_dict)  # hides the methods of the class

    @property
    def objects(self) -> Set[str]:
        """Names of the torchmetrics objects that were logged since the outermost ``Logged`` context began."""
        return self._logged.keys()

    def put_back(self) -> None:
        """Forget all logged values and restore the initial states of the torchmetrics objects."""
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
        """Add sums of logged values over n examples, as if the module had logged the values of each example."""
        for name, value in sums.items():
            self._add(name, value, n)

    def values(self) -> dict[str, Tensor]:
        """Compute the torchmetrics objects that were logged since the outermost context began.

        Returns:
            Name -> number. If ``compute`` of the object NAME returns a dict, each key KEY gives a number ``NAME_KEY``.

        Raises:
            ValueError: ``compute`` returns anything other than numbers.
        """
        if not self._logged:
            return {}
        results: dict[str, Any] = {}
        for name, metric in self._logged.items():
            try:
                with torch.no_grad():
                    value = metric.compute()
            except Exception:  # a metric of the user may raise any exception
                if self.is_trial:
                    continue
                raise
            results |= {f"{name}_{key}": x for key, x in value.items()} if isinstance(value, Mapping) else {name: value}
        for name, value in results.items():
            if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
                kind = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"it logs {name}, whose compute returns {kind}, and a metric is one number")
        return {name: torch.as_tensor(value).detach().reshape(()) for name, value in results.items()}

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
            if not any(value is metric for metric in self.metrics.objects):
                raise ValueError(f"it logs {name}, a torchmetrics object that is no attribute: assign it in __init__")
            self._logged[name] = value
            return
        if reduce_fx not in MEANS:
            way = getattr(reduce_fx, "__name__", reduce_fx)
            raise ValueError(f"it logs {name} with reduce_fx {way}; numbers are averaged: log a torchmetrics object")
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
