"""What a caller can set in torch that changes a run's numbers, and what each is in a run."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import backends


@dataclass(frozen=True)
class Setting:
    """A setting of the process, or of the thread that asks. usual: what it is in a run, or a function that tells; None
    is read where it is left alone."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    usual: Any
    alike: Any = None  # another value that means the same


def _of(owner: Any, name: str, usual: Any) -> Setting:
    return Setting(partial(getattr, owner, name), partial(setattr, owner, name), usual)


def _old(read: Callable[[], Any], write: Callable[[Any], object], usual: Any) -> Setting:
    """A setting that torch refuses to read after the new one in its place, which is here as well, was set otherwise."""

    def value() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return Setting(value, write, usual)


def _precision(owner: Any) -> Setting:
    """The precision of float32 where ``owner`` computes; "none" is that of what is above it, and at the top "ieee"."""

    def read() -> str:
        return owner.fp32_precision

    def write(value: str) -> None:
        owner.fp32_precision = "none"
        if read() != value:
            owner.fp32_precision = value

    return Setting(read, write, "ieee", alike="none")


CUBLAS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""A variable and its value with which cuBLAS gives the same bits each time. It is read at a process's first product."""


@cache
def has_gpu() -> bool:
    """Whether torch has a GPU in this process; asked once, as it looks for a driver each time."""
    return torch.cuda.is_available()


_FILLS = _of(torch.utils.deterministic, "fill_uninitialized_memory", lambda: not has_gpu())
"""Whether deterministic algorithms fill memory that nobody reads, which takes time."""


def prepare_gpu() -> None:
    """Let this process's GPU give the same bits each time: by slower kernels, where torch has them, and no TF32.

    Where torch has none, it warns at the first call.
    """
    os.environ.setdefault(*CUBLAS)
    backends.cudnn.deterministic, backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    _FILLS.write(False)
    _write((setting, "ieee") for setting in _OF_GPUS)


def _flushes_denormals() -> bool:
    return sys.float_info.min / 2 == 0  # torch has no way to ask; Python computes in the same registers


@contextmanager
def without_denormals() -> Iterator[None]:
    """Take numbers below the smallest normal one as 0 in this thread; afterwards as before.

    On Intel's CPUs a product with many of them, as of the tails of a saturated softmax, takes ten times as long.
    """
    before = _flushes_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


_OF_GPUS = tuple(map(_precision, attrgetter("cuda.matmul", "cudnn.conv", "cudnn.rnn")(backends)))


@contextmanager
def tf32() -> Iterator[None]:
    """Let GPUs multiply float32 numbers that are rounded to 10 bits of mantissa (TF32); afterwards as before.

    Sums stay in float32. On a CPU nothing changes.
    """
    before = [setting.read() for setting in _OF_GPUS]
    _write((setting, "tf32") for setting in _OF_GPUS)
    try:
        yield
    finally:
        _write(zip(_OF_GPUS, before, strict=True))


SETTINGS = (
    Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    *(
        Setting(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind), False)
        for kind in ("cpu", "cuda")
    ),
    Setting(_flushes_denormals, torch.set_flush_denormal, False),
    Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, lambda: int(has_gpu())),
    _FILLS,
    Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        (False, True),
    ),
    _old(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    _old(lambda: backends.cudnn.allow_tf32, partial(setattr, backends.cudnn, "allow_tf32"), False),
    _precision(backends),  # what is above stands before what is below
    *map(_precision, attrgetter("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")(backends)),
    *_OF_GPUS,
    _of(backends.mkldnn, "enabled", True),
    _of(backends.mkldnn, "deterministic", False),
    Setting(torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, True),
    _of(backends.cudnn, "enabled", True),
    _of(backends.cudnn, "deterministic", True),
    _of(backends.cudnn, "benchmark", False),
    _of(backends.opt_einsum, "enabled", backends.opt_einsum.is_available()),
    Setting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, True),
    Setting(backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp, True),
    Setting(backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp, True),
    Setting(backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp, True),
    Setting(backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp, True),
)


@contextmanager
def usual() -> Iterator[None]:
    """All ``SETTINGS`` as they are in a run; afterwards as they were, whatever was set in between."""
    found = [(setting, setting.read()) for setting in SETTINGS]
    wanted = [setting.usual() if callable(setting.usual) else setting.usual for setting in SETTINGS]
    try:
        if any(value not in (want, setting.alike) for (setting, value), want in zip(found, wanted, strict=True)):
            _write((s, want) for (s, value), want in zip(found, wanted, strict=True) if value is not None)
        yield
    finally:
        _write((setting, value) for setting, value in found if value is not None)


def _write(values: Iterable[tuple[Setting, Any]]) -> None:
    for setting, value in values:
        if setting.read() != value:  # read now, as one changes others
            setting.write(value)
