"""Settings of torch that change numerical results, and the value of each setting in a run."""

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

from fedcommons.runtime.rounding_env import OURS


@dataclass(frozen=True)
class Setting:
    """A torch setting of the process or of the current thread.

    read: returns the current value; None means that the setting must not be changed. write: sets the value. usual: the
    value in a run, or a function that returns this value.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    usual: Any
    alike: Any = None  # another value that is accepted as equal to ``usual``


def _attribute(owner: Any, name: str, usual: Any) -> Setting:
    return Setting(partial(getattr, owner, name), partial(setattr, owner, name), usual)


def _old(read: Callable[[], Any], write: Callable[[Any], object], usual: Any) -> Setting:
    """Return a deprecated setting. ``read`` returns None if torch refuses to read it, as a newer setting is in use."""

    def value() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return Setting(value, write, usual)


def _precision(owner: Any) -> Setting:
    """Return the float32 precision setting of a torch backend; the value in a run is "ieee" (no TF32).

    owner: the backend. With "none", a backend inherits the value one level above. At the top level, "none" is "ieee".
    """

    def write(value: str) -> None:
        owner.fp32_precision = "none"
        if owner.fp32_precision != value:
            owner.fp32_precision = value

    return Setting(partial(getattr, owner, "fp32_precision"), write, "ieee", alike="none")


@cache
def has_gpu() -> bool:
    """Return whether torch can use a GPU; the result is cached, because torch searches for a driver at each call."""
    return torch.cuda.is_available()


_FILLS = _attribute(torch.utils.deterministic, "fill_uninitialized_memory", lambda: not has_gpu())
"""Setting that fills uninitialised memory in deterministic mode. It takes time, so a run with a GPU turns it off."""


def prepare_gpu() -> None:
    """Make GPU computations of this process deterministic, by slower kernels and without TF32.

    If torch has no deterministic kernel for an operation, torch warns at the first call of the operation.
    """
    os.environ.setdefault(*OURS)
    backends.cudnn.deterministic, backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    _FILLS.write(False)
    _write((setting, "ieee") for setting in _OF_GPUS)


def _flushes_denormals() -> bool:
    return sys.float_info.min / 2 == 0  # torch cannot read this CPU flag, but the flag changes Python's floats too


@contextmanager
def without_denormals() -> Iterator[None]:
    """Treat denormal numbers (below the smallest normal number) as 0 in this thread; restore the setting afterwards.

    On Intel's CPUs a product with many denormals, such as the tails of a saturated softmax, takes ten times as long.
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
    """In this context, let GPUs round float32 factors of products to 10 bits of mantissa (TF32), which is faster.

    Sums are still computed in float32. On a CPU the context has no effect.
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
    _precision(backends),  # upper levels first, because lower levels may inherit their values
    *map(_precision, attrgetter("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")(backends)),
    *_OF_GPUS,
    _attribute(backends.mkldnn, "enabled", True),
    _attribute(backends.mkldnn, "deterministic", False),
    Setting(torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, True),
    _attribute(backends.cudnn, "enabled", True),
    _attribute(backends.cudnn, "deterministic", True),
    _attribute(backends.cudnn, "benchmark", False),
    _attribute(backends.opt_einsum, "enabled", backends.opt_einsum.is_available()),
    Setting(backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, True),
    Setting(backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp, True),
    Setting(backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp, True),
    Setting(backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp, True),
    Setting(backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp, True),
)


@contextmanager
def usual() -> Iterator[None]:
    """In this context, set all ``SETTINGS`` to the values that they have in a run; then restore the previous values."""
    previous = [(setting, setting.read()) for setting in SETTINGS]
    wanted = [setting.usual() if callable(setting.usual) else setting.usual for setting in SETTINGS]
    try:
        if any(value not in (want, setting.alike) for (setting, value), want in zip(previous, wanted, strict=True)):
            _write((s, want) for (s, value), want in zip(previous, wanted, strict=True) if value is not None)
        yield
    finally:
        _write((setting, value) for setting, value in previous if value is not None)


def _write(values: Iterable[tuple[Setting, Any]]) -> None:
    for setting, value in values:
        if setting.read() != value:  # the value is read again, because writing one setting may change other settings
            setting.write(value)
