"""Environment variables by which libraries decide how they round.

Each is read once in a process, often before any code of ours runs, so it can be recorded and compared, not set.
"""

import os
from collections.abc import Mapping

from fedcommons.errors import shown

ROUNDING = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DISABLE_FAST_MM",
    "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES", "NVIDIA_TF32_OVERRIDE", "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Of torch, oneDNN (under its old name too), MKL, OpenBLAS, numpy, the C library, and CUDA's libraries."""

OURS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""The variable that we set on a GPU, where nobody has: ``core.torch_settings.CUBLAS``."""


def variables() -> dict[str, str]:
    """Those that are set in this process, and not as we set it."""
    found = {name: os.environ[name] for name in ROUNDING if name in os.environ}
    return {name: value for name, value in found.items() if (name, value) != OURS}


def differing(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str | None:
    """The first that differs, in words: how it is there and how here; None if all are the same."""
    for name in ROUNDING:
        if theirs.get(name) != ours.get(name):
            there, here = (shown(of[name]) if name in of else "not set" for of in (theirs, ours))
            return f"{name} is {there} there and {here} here"
    return None
