"""Environment variables that change how numerical libraries round.

A library reads its variables once per process, often before this package is imported. So this package can record and
compare the variables, but cannot set them.
"""

import os
from collections.abc import Mapping

from fedcommons.errors import quote

ROUNDING = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DISABLE_FAST_MM",
    "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES", "NVIDIA_TF32_OVERRIDE", "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Variables of torch, oneDNN (also under its old name), MKL, OpenBLAS, numpy, the C library and CUDA's libraries."""

OURS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable and value that this package sets if a GPU is used and the variable is unset, for deterministic cuBLAS.

cuBLAS reads the variable at the first matrix product of a process.
"""


def variables() -> dict[str, str]:
    """Return name -> value of the variables in ``ROUNDING`` that are set, except if name and value are ``OURS``."""
    values = {name: os.environ[name] for name in ROUNDING if name in os.environ}
    return {name: value for name, value in values.items() if (name, value) != OURS}


def differing(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str | None:
    """Return a text with the first variable that differs and with both values; None if all variables are equal.

    theirs: variables of another host or run. ours: variables of this process.
    """
    for name in ROUNDING:
        if theirs.get(name) != ours.get(name):
            their_value, our_value = (quote(values[name]) if name in values else "not set" for values in (theirs, ours))
            return f"{name} is {their_value} there and {our_value} here"
    return None
