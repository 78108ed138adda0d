"""Numbers of CPU cores and GPUs that the system, Slurm or CUDA allows this process, if Ray would count wrongly."""

import os
import re
from itertools import takewhile

from fedcommons.errors import UserError


def cores() -> int | None:
    """Return the number of CPU cores that Slurm or the system allows this process; None: all cores of the machine.

    Raises:
        UserError: SLURM_CPUS_PER_TASK is not a number of cores.
    """
    limits = [len(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []
    if requested := os.environ.get("SLURM_CPUS_PER_TASK", ""):
        if not re.fullmatch("0*[1-9][0-9]{0,8}", requested):
            raise UserError(f"SLURM_CPUS_PER_TASK must be a number of cores, 1 or more, got {requested[:80]!r}.")
        limits.append(int(requested))
    fewest = min(limits, default=None)
    return fewest if fewest != os.cpu_count() else None


def gpus() -> int | None:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES, or None if Ray counts them correctly.

    Ray's number is wrong in two cases. A GPU has several MIG slices: Ray counts at most the physical GPUs. A name is no
    number, GPU or MIG slice (-1, none, void): Ray counts this name and the names after it, which CUDA ignores.
    """
    if not (text := os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        return None
    names = [name.strip() for name in text.split(",")]
    before = [*takewhile(lambda name: re.fullmatch(r"\d+|(GPU|MIG)-.+", name), names)]
    return len(before) if before != names or any(name.startswith("MIG-") for name in names) else None
