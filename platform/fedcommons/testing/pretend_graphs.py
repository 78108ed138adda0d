"""CUDA graphs without a GPU: a list of torch's operations with the tensors that they read and write.

    with pretend_graphs():
        ...

As of a graph, what Python decides while it is recorded stays so; launching it computes every operation anew from what
its tensors hold then, and nothing else. As there, a step that waits for the GPU is refused. Here recording computes,
too, so what it has changed is put back. Meant to be used with ``PretendGPU``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedcommons.core import cuda_graphs
from fedcommons.testing.pretend_gpu import WAITS

CHANGES = {"native_batch_norm"}
"""Operations that change tensors of which torch's schema does not tell it."""


@contextmanager
def pretend_graphs() -> Iterator[list[int]]:
    """While this context lasts, ``client.graphs`` needs no GPU; gives the number of operations of each recording."""
    sizes: list[int] = []

    def record(play: Callable[[], None]) -> Callable[[], None]:
        tape = _Tape()
        with tape:
            play()
        tape.put_back()
        sizes.append(len(tape.calls))
        return tape.launch

    with ExitStack() as stack:
        stack.enter_context(patch.object(cuda_graphs, "record", record))
        for name, pretended in (("Stream", _Stream), ("current_stream", _Stream), ("stream", nullcontext)):
            stack.enter_context(patch.object(torch.cuda, name, pretended))
        yield sizes


class _Stream:
    """All are one: what is launched is computed at once."""

    def wait_stream(self, other: "_Stream") -> None:
        """See ``torch.cuda.Stream``."""


class _Tape(TorchDispatchMode):
    """Records what is computed while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS:
            raise ValueError(f"client.graphs: this step cannot be recorded: {func} waits for the GPU")
        if func._schema.is_mutable or name in CHANGES:
            for t in _tensors([args, kwargs]):
                self.before.setdefault(t.data_ptr(), (t.detach(), t.detach().clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _tensors([out])))
        return out

    def put_back(self) -> None:
        """Undo what recording has changed in place."""
        with torch.no_grad():
            for t, value in self.before.values():
                t.copy_(value)

    def launch(self) -> None:
        """Compute all of it."""
        with torch.no_grad(), torch._C.DisableTorchFunction():  # as recorded, below what Python calls
            for func, args, kwargs, outs in self.calls:
                for place, value in zip(outs, _tensors([func(*args, **kwargs)]), strict=True):
                    if place.data_ptr() != value.data_ptr():  # else it was computed where it rests, or is a view
                        place.copy_(value)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [t for part in x for t in _tensors(part)] if isinstance(x, (list, tuple)) else []
