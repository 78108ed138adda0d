"""Snapshots of a module and its optimizer, by which both are restored after the local training of a client."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fedcommons.core.logging_shim import values_in
from fedcommons.core.training_process import TrainingProcess

OF_OPTIMIZER = ("state", "param_groups")
"""Attributes of an optimizer that are not copied, because the engine resets them for each client."""

OF_GRADIENT = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a parameter in which torch stores the hooks on the parameter's gradient."""


def gradient_hooks(module: nn.Module) -> list[str]:
    """Return the names of the parameters that have a hook on the gradient."""
    return [name for name, p in module.named_parameters() if any(_hooks_of(p).values())]


def _hooks_of(parameter: Tensor) -> dict[str, list[tuple[int, Any]]]:
    return {name: list((getattr(parameter, name, None) or {}).items()) for name in OF_GRADIENT}


class Saved:
    """A snapshot of a worker's module and optimizer, without weights and BatchNorm statistics, which clients send.

    others: objects that are not copied if an attribute of the module refers to such an object.

    Raises:
        ValueError: an attribute of the module cannot be copied.
    """

    def __init__(self, work: TrainingProcess, others: Sequence[object]) -> None:
        module, self.optimizer = work.module, work.optimizer
        self.parts = dict(module.named_modules())
        named = dict(module.named_parameters())
        # Objects in ``shared`` are not copied: a copied attribute refers to the same object as the original.
        schedulers = [entry.scheduler for entry in work.schedulers.each] if work.schedulers else []
        self.shared = [
            *self.parts.values(), *named.values(), *module.buffers(), work, work.clock, work.logged, work.optimizer,
            *schedulers, *others,
        ]  # fmt: skip
        self.namespaces = {path: vars(part) for path, part in self.parts.items()}
        self.namespaces |= {f"{name} (parameter)": vars(p) for name, p in named.items()}
        self.namespaces["optimizer"] = vars(work.optimizer)
        self.attributes = self._copied(self.namespaces)
        self.groups = [(group, list(group["params"]), self._settings(group)) for group in work.optimizer.param_groups]
        self.flags = {name: (p, p.requires_grad, _hooks_of(p)) for name, p in named.items()}
        sent = {buffer.untyped_storage().data_ptr() for buffer in (work.params.buffer, work.buffers.buffer)}
        unsent = [t for t in (*named.values(), *module.buffers()) if t.untyped_storage().data_ptr() not in sent]
        self.values = [(t, t.detach().clone()) for t in unsent]

    def put_attributes_back(self) -> None:
        """Restore the attributes of the module, the parameters and the optimizer, except the optimizer's groups."""
        for path, values in self._copied(self.attributes).items():
            values |= {name: self.namespaces[path][name] for name in OF_OPTIMIZER if path == "optimizer"}
            self.namespaces[path].clear()
            self.namespaces[path].update(values)

    def put_back(self) -> None:
        """Restore the whole snapshot: attributes, parameter groups, ``requires_grad``, hooks and unsent tensors."""
        self.put_attributes_back()
        del self.optimizer.param_groups[:]
        for group, params, settings in self.groups:
            group.clear()
            group.update(deepcopy(settings), params=list(params))
            self.optimizer.param_groups.append(group)
        for p, requires_grad, hooks in self.flags.values():
            p.requires_grad_(requires_grad)
            p.grad = None
            for name, each in hooks.items():
                setattr(p, name, OrderedDict(each) if each else None)
        with torch.no_grad():
            for t, value in self.values:
                t.copy_(value)

    def require_same_parameters(self) -> None:
        """Check that the module has the parameters of the snapshot, and that no frozen parameter has become trainable.

        Raises:
            ValueError: a hook has replaced a parameter, or has made a frozen parameter trainable.
        """
        now = {name: id(p) for part in self.parts for name, p in self._parameters_of(part)}
        if names := [name for name, (p, *_) in self.flags.items() if now.get(name) != id(p)]:
            raise ValueError(f"a hook replaces the parameter {names[0]}: copy the new values into it instead")
        if names := [
            name for name, (p, was_trainable, _) in self.flags.items() if p.requires_grad and not was_trainable
        ]:
            raise ValueError(
                f"a hook unfreezes {names[0]}, which is not sent: build it trainable and freeze it in on_fit_start"
            )

    @staticmethod
    def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return deepcopy({name: value for name, value in group.items() if name != "params"})

    def _parameters_of(self, path: str) -> Iterator[tuple[str, Any]]:
        parameters = self.parts[path].named_parameters(recurse=False, remove_duplicate=False)
        return ((f"{path}{'.' * bool(path)}{name}", p) for name, p in parameters)

    def _copied(self, attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        memo: dict[int, Any] = {id(x): x for x in self.shared}
        every = values_in([{**values} for values in attributes.values()])
        graphs = [x for x in every if isinstance(x, Tensor) and not x.is_leaf and id(x) not in memo]
        memo |= {id(x): x.detach().clone() for x in graphs}  # deepcopy fails for a tensor with an autograd graph
        copied: dict[str, dict[str, Any]] = {path: {} for path in attributes}
        for path, values in attributes.items():
            for name, value in values.items():
                if path == "optimizer" and name in OF_OPTIMIZER:
                    continue
                try:
                    copied[path][name] = deepcopy(value, memo)
                except Exception as error:  # copying a user's object may raise any exception
                    raise ValueError(
                        f"its attribute {path}{'.' * bool(path)}{name} ({type(value).__name__}) cannot be copied, so "
                        "a hook's change of it could not be undone"
                    ) from error
        return copied
