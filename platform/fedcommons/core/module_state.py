"""What a module and its optimizer hold, to put it back after a client whose training may have changed any of it."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fedcommons.core.work import Work


class Saved:
    """What a worker's module and optimizer hold, but for the weights and statistics that are sent.

    others: objects to which the module's attributes may refer, and which are not copied.

    Raises:
        ValueError: an attribute of the module cannot be copied.
    """

    def __init__(self, work: "Work", others: Sequence[object]) -> None:
        module, self.optimizer = work.module, work.optimizer
        self.parts = dict(module.named_modules())
        named = dict(module.named_parameters())
        # copies refer to these objects themselves
        self.shared = [
            *self.parts.values(), *named.values(), *module.buffers(), work, work.clock, work.logged, work.optimizer,
            *others,
        ]  # fmt: skip
        self.attributes = self._copied({path: vars(part) for path, part in self.parts.items()})
        self.groups = [(group, list(group["params"]), self._settings(group)) for group in work.optimizer.param_groups]
        self.flags = {name: (p, p.requires_grad, list((p._backward_hooks or {}).items())) for name, p in named.items()}
        sent = {buffer.untyped_storage().data_ptr() for buffer in (work.params.buffer, work.buffers.buffer)}
        unsent = [t for t in (*named.values(), *module.buffers()) if t.untyped_storage().data_ptr() not in sent]
        self.values = [(t, t.detach().clone()) for t in unsent]

    def put_back(self) -> None:
        """Make all of it as it was."""
        for path, values in self._copied(self.attributes).items():
            own = vars(self.parts[path])
            own.clear()
            own.update(values)
        del self.optimizer.param_groups[:]
        for group, params, settings in self.groups:
            group.clear()
            group.update(deepcopy(settings), params=list(params))
            self.optimizer.param_groups.append(group)
        for p, requires_grad, hooks in self.flags.values():
            p.requires_grad_(requires_grad)
            p.grad, p._backward_hooks = None, OrderedDict(hooks) if hooks else None
        with torch.no_grad():
            for t, value in self.values:
                t.copy_(value)

    def require_frozen(self) -> None:
        """See that the parameters that were frozen still are.

        Raises:
            ValueError: a hook has unfrozen one, which is not sent.
        """
        if names := [name for name, (p, was, _) in self.flags.items() if p.requires_grad and not was]:
            raise ValueError(
                f"a hook unfreezes {names[0]}, which had requires_grad = False when the module was built and is "
                "therefore not sent: build it trainable and freeze it in on_fit_start"
            )

    @staticmethod
    def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return deepcopy({name: value for name, value in group.items() if name != "params"})

    def _copied(self, attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        memo = {id(x): x for x in self.shared}
        copied: dict[str, dict[str, Any]] = {path: {} for path in attributes}
        for path, values in attributes.items():
            for name, value in values.items():
                try:
                    copied[path][name] = deepcopy(value, memo)
                except Exception as error:  # whatever the copying of a user's object raises
                    raise ValueError(
                        f"its attribute {path}{'.' * bool(path)}{name} ({type(value).__name__}) cannot be copied, so "
                        "what a hook changes of it could not be put back for the next client"
                    ) from error
        return copied
