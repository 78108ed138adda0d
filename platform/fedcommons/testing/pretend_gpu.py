"""A simulated GPU: CPU tensors with a mark that says on which device they would be.

    with PretendGPU() as gpu:
        model.to(GPU)
        ...
    gpu.events.waits  # {"lab/my_method.py:31": 12}

Values and gradients have the same bits as on the CPU. Operations that fail on a GPU raise an error here too: operations
on tensors of two devices, ``numpy()`` on a GPU tensor, a generator of the wrong device. The simulation counts slow
events (kernel launches, waits, copies; ``Seen``) by calling line of code, and records the maximum memory.

The simulation uses two modes of torch. ``_Calls`` intercepts the program's calls of torch functions: it replaces the
device in the arguments by the CPU and marks the result. ``_Kernels`` intercepts the computed operations, including
those of the backward pass, and compares the marks of their inputs.

Not simulated: speed, precision, streams, pinned memory (every copy waits), pickling, sparse tensors, a second GPU.
torch's C++ code works on CPU tensors and chooses CPU algorithms. If torch's Python functions or the backward pass
create a tensor without inputs, as by ``torch.zeros``, the tensor's device stays undecided until an operation uses it.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self
from weakref import finalize

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_C: Any = torch._C
_TENSOR: Any = Tensor  # as Any, because torch declares no types of its properties

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

LIBRARIES = {"torch", "pytorch_lightning", "lightning_fabric", "diffusers", "contextlib", "functools"}
"""Packages to skip in the call stack: an event counts for the innermost calling line outside of these packages."""

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
         "allclose", "bincount", "repeat_interleave"}  # fmt: skip
"""Operations for which the program must wait: they return a value, or a shape that depends on values."""

WITH_A_NUMBER = {"masked_fill", "masked_fill_", "fill_", "index_put_", "_foreach_mul", "_foreach_mul_", "where"}
"""Operations that accept a CPU scalar together with GPU tensors. All elementwise operations accept a CPU scalar too."""

FROM_PYTHON = {"tensor", "as_tensor", "asarray", "new_tensor"}
"""Functions that copy Python numbers to the GPU."""

GETTERS: dict[Any, Callable[[torch.device | None], Any]] = {
    _TENSOR.device.__get__: lambda at: at or GPU,
    _TENSOR.is_cuda.__get__: lambda at: at == GPU,
    _TENSOR.is_cpu.__get__: lambda at: at == CPU,
}

SET_GRADIENT = _TENSOR.grad.__set__

GROUPS = "_group_tensors_by_device_and_dtype"


@dataclass
class Seen:
    """Numbers of slow GPU events (launches, waits, copies), by the calling code line, such as "folder/file.py:63"."""

    launches: Counter[str] = field(default_factory=Counter)  # operations that run on the GPU (views do not)
    waits: Counter[str] = field(default_factory=Counter)  # the program waits for the GPU: item(), a mask, a copy, ...
    copies: Counter[str] = field(default_factory=Counter)  # copies between CPU and GPU, in either direction

    def since(self, before: "Seen") -> "Seen":
        """Return the events that were counted after the earlier counts ``before``."""
        return Seen(self.launches - before.launches, self.waits - before.waits, self.copies - before.copies)


class PretendGPU:
    """A context in which tensors can be on the simulated ``GPU``.

    ``events``: numbers of all events. ``steps``: events of each optimizer step except the first step of a training; the
    caller calls ``begin`` before each training. ``live``, ``peak``: current and maximum bytes on the GPU.
    """

    def __init__(self) -> None:
        self.events, self.steps, self.live, self.peak = Seen(), list[Seen](), 0, 0
        self._before: Seen | None = None

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        for home, name, ours in ((torch, "Generator", _Generator), (_C, GROUPS, _grouped(getattr(_C, GROUPS)))):
            self._stack.callback(setattr, home, name, getattr(home, name))
            setattr(home, name, ours)
        self._stack.callback(register_optimizer_step_post_hook(lambda *_: self._end_of_step()).remove)
        self._stack.enter_context(_Kernels(self))
        self._stack.enter_context(_Calls(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Mark the start of a local training. Events up to the end of its first optimizer step are not in ``steps``."""
        self._before = None

    def _end_of_step(self) -> None:
        if self._before is not None:
            self.steps.append(self.events.since(self._before))
        self._before = self.events.since(Seen())

    def put(self, t: Tensor, device: torch.device | None) -> None:
        """Mark ``t`` and all tensors that share its memory as being on ``device``; None: not decided yet."""
        storage = _storage(t)
        if device == GPU and place(t) != GPU:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            finalize(storage, self._freed, storage.nbytes())
        storage.__dict__["place"] = device

    def _freed(self, n: int) -> None:
        self.live -= n

    def copied(self) -> None:
        """Count a copy between CPU and GPU, which is also a wait."""
        self.events.copies[_line()] += 1
        self.events.waits[_line()] += 1

    def moved(self, t: Tensor, device: torch.device) -> Tensor:
        """Return ``t`` if its device is ``device`` or undecided, otherwise a copy on ``device``, which is counted."""
        if place(t) == device:
            return t
        if place(t) is not None:
            self.copied()
            with _disable_current_modes():
                t = t.clone()
        self.put(t, device)
        return t


def place(t: Tensor) -> torch.device | None:
    """Return the device that ``t`` is marked with: the CPU if ``t`` has no mark, None if its device is undecided."""
    return _storage(t).__dict__.get("place", CPU)


def _storage(t: Tensor) -> torch.UntypedStorage:
    while _C._functorch.is_functorch_wrapped_tensor(t):  # the mark is at the tensor inside of vmap's wrappers
        t = _C._functorch.get_unwrapped(t)
    return t.untyped_storage()


def tensors_in(x: object) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts."""
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]


def _device(device: Any) -> torch.device:
    return GPU if torch.device(device).type == "cuda" else CPU


def _line() -> str:
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__", "")) == __name__ or name.partition(".")[0] in LIBRARIES:
        if frame.f_back is None:
            return "?"
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@cache
def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


class _Kernels(TorchDispatchMode):
    """A torch dispatch mode that intercepts the computed operations, compares devices and counts events."""

    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        tensors = tensors_in((args, kwargs))
        places = [place(t) for t in tensors]
        on = GPU in places
        if on and CPU in places:
            self._compare(func, name, args, kwargs)
        if on:
            masked = name in ("index", "index_put_") and any(t.dtype == torch.bool for t in tensors[1:])
            # ``x[mask] = 1.0`` with one CPU number needs no wait, because no shape depends on the mask.
            fills = name == "index_put_" and place(args[2]) != GPU and args[2].numel() == 1
            if (masked and not fills) or name in WAITS:
                self.gpu.events.waits[_line()] += 1
        out = func(*args, **kwargs)
        old = {_storage(t)._cdata for t in tensors}
        new = [t for t in tensors_in(out) if _storage(t)._cdata not in old]  # results that are no views of inputs
        if on and (new or name.endswith("_")) and not name.startswith(("empty", "new_empty")):
            self.gpu.events.launches[_line()] += 1
        decided = any(p == CPU and (t.dim() or None not in places) for t, p in zip(tensors, places, strict=True))
        for t in new:
            self.gpu.put(t, GPU if on else CPU if decided else None)
        return out

    def _compare(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        """Handle an operation on tensors of both devices: raise torch's error, or count the copies that torch makes."""
        if name in ("copy_", "_foreach_copy_"):
            for pair in [args[:2]] if name == "copy_" else zip(*args[:2], strict=True):
                if {place(t) for t in pair} == {CPU, GPU}:
                    self.gpu.copied()
            return
        if name in ("index", "index_put_"):
            if place(args[0]) == CPU:
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            for _ in (t for t in tensors_in(args[1]) if place(t) == CPU):
                self.gpu.copied()
            args = (args[0], *args[2:])
        with_a_number = torch.Tag.pointwise in func.tags or name in WITH_A_NUMBER
        strict = [t for x in args if isinstance(x, (list, tuple)) for t in tensors_in(x)]
        # Tensors in lists, overwritten tensors, and all other tensors except allowed CPU scalars must be on the GPU.
        strict += tensors_in(kwargs.get("out")) + (tensors_in(args[0]) if name.endswith("_") else [])
        strict += [t for t in tensors_in((args, kwargs)) if t.dim() or not with_a_number]
        if wrong := [t for t in strict if place(t) == CPU]:
            shapes = ", ".join(str(tuple(t.shape)) for t in wrong)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu: "
                f"{name} gets {shapes} on cpu at {_line()}"
            )


class _Calls(TorchFunctionMode):
    """A torch function mode that intercepts the program's calls of torch functions and marks their results."""

    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            return GETTERS[func](place(args[0])) if func in GETTERS else func(*args)
        if name in ("to", "cpu", "cuda"):
            return self._to(name, *args, **kwargs)
        tensors = tensors_in((args, kwargs))
        places = {place(t) for t in tensors}
        if func == SET_GRADIENT and places == {CPU, GPU}:
            raise RuntimeError("assigned grad has data located on a different device")
        on = GPU in places
        if on and name in ("numpy", "__array__") and not kwargs.get("force"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if on and name in ("numpy", "tolist"):
            self.gpu.copied()
        device = kwargs.get("device")
        if device is not None:
            device, kwargs["device"] = _device(device), CPU
        elif on and name in ("new_tensor", "__deepcopy__"):
            device = GPU
        out = func(*args, **kwargs)
        if device is not None and isinstance(out, Tensor):
            out = self._mark_result(name, out, device, tensors)
        for t in tensors_in(out):
            if place(t) is None:
                self.gpu.put(t, GPU if on else CPU)
            draws = kwargs.get("generator")
            if draws is not None and draws.device != place(t):
                raise RuntimeError(f"Expected a '{place(t)}' device type for generator but found '{draws.device}'")
        return out

    def _mark_result(self, name: str, out: Tensor, device: torch.device, tensors: list[Tensor]) -> Tensor:
        """Mark ``out`` as on ``device``. Count a copy to this device, or a launch if the GPU creates a new tensor."""
        if any(_storage(out)._cdata == _storage(t)._cdata for t in tensors):
            return self.gpu.moved(out, device)
        if device == GPU and name in FROM_PYTHON:
            self.gpu.copied()
        elif device == GPU and not tensors and not name.startswith("empty"):
            self.gpu.events.launches[_line()] += 1
        self.gpu.put(out, device)
        return out

    def _to(self, name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, layout = CPU if name == "cpu" else GPU, None, kwargs.get("memory_format")
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            device, dtype = place(args[0]), args[0].dtype
        elif name == "to":
            device, dtype, _, layout = _C._nn._parse_to(*args, **kwargs)
        out = _C.TensorBase.to(x, dtype=dtype or x.dtype, copy=copy, memory_format=layout)
        return out if device is None else self.gpu.moved(out, _device(device))


class _Generator(torch.Generator):
    """A CPU generator that reports the requested device, which can be the simulated GPU, as its device."""

    def __new__(cls, device: Any = "cpu") -> Self:
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]

    def __init__(self, device: Any = "cpu") -> None:
        self.requested = _device(device)

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.requested


def _grouped(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function ``real``, which groups tensors by device, to group them by the simulated device."""

    def grouped(lists: list[list[Tensor]], with_indices: bool = False) -> dict[Any, Any]:
        groups = real(lists, with_indices)
        return {(place(group[0][0][0]) or GPU, dtype): group for (_, dtype), group in groups.items()}

    return grouped
