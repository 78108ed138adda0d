"""Simulated CUDA graphs without a GPU: recorded lists of torch operations with their input and output tensors.

    with pretend_graphs():
        ...

As in a CUDA graph, the recording fixes the branches of the Python code. A launch computes all recorded operations again
from the current values of the tensors, without the Python code of the step. A step that waits for the GPU raises an
error. Unlike in a CUDA graph, the recording also computes the operations, so its changes of tensors are undone. Use the
simulation together with ``PretendGPU``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedcommons.core import cuda_graphs
from fedcommons.testing.pretend_gpu import WAITS, tensors_in

CHANGES = {"native_batch_norm"}
"""Operations that change input tensors in place although torch's schema does not declare this."""


@contextmanager
def pretend_graphs() -> Iterator[list[int]]:
    """Let ``client.graphs`` work without a GPU in this context; yield a list of operation counts, one per recording."""
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
    """A CUDA stream that does nothing, because launched operations are computed immediately."""

    def wait_stream(self, other: "_Stream") -> None:
        """Do nothing; torch's method waits for another stream."""


class _Tape(TorchDispatchMode):
    """A torch dispatch mode that records all operations computed in its context."""

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
            for t in tensors_in([args, kwargs]):
                self.before.setdefault(t.data_ptr(), (t.detach(), t.detach().clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tensors_in([out])))
        return out

    def put_back(self) -> None:
        """Restore the values that tensors had before the recording changed them in place."""
        with torch.no_grad():
            for t, value in self.before.values():
                t.copy_(value)

    def launch(self) -> None:
        """Compute all recorded operations again and copy their results into the recorded output tensors."""
        with torch.no_grad(), torch._C.DisableTorchFunction():  # the operations must not reach function modes
            for func, args, kwargs, outs in self.calls:
                for place, value in zip(outs, tensors_in([func(*args, **kwargs)]), strict=True):
                    if place.data_ptr() != value.data_ptr():  # in-place operations and views need no copy
                        place.copy_(value)
