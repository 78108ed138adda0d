"""The environment of a run, which environment.json records: versions of packages, machine and source code."""

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcommons.federation import source_files
from fedcommons.runtime import cpu_kind, ray_cluster
from fedcommons.runtime.rounding_env import variables
from fedcommons.storage import safe_read

PACKAGES = ("torch", "torchvision", "pytorch-lightning", "ray", "diffusers", "opacus", "wandb", "numpy")


def environment(gpus_per_actor: float | str | None, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment on which results depend in addition to the configuration, as written to environment.json.

    Args:
        gpus_per_actor: share of a GPU for each Ray process that trains clients; None without such processes.
        before: the environment that a resumed run recorded earlier, or an empty mapping. The CPUs and the hashes of
            the package's source code in ``before`` are kept in the result.
    """
    import torch

    commit, is_changed = _commit()
    actors = [] if gpus_per_actor is None else ray_cluster.cpu_of_actors(gpus_per_actor)
    gpu_lines = command_output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"
    )
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_kinds": _with(before.get("cpu_kinds"), cpu_kind.cpu(), *actors),
        "variables": variables(),
        "gpus": torch.cuda.device_count(),
        "gpu_kinds": list(dict.fromkeys(gpu_lines.splitlines())) if gpu_lines else [],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "code_hashes": _with(before.get("code_hashes"), source_files.combined_hash()),
        "commit": commit,
        "uncommitted_changes": is_changed,
        "packages": {name: version(name) for name in ("fedcommons", *PACKAGES)},
    }


def _with(before: object, *new: str) -> list[str]:
    texts = [text for text in before if isinstance(text, str)] if isinstance(before, list) else []
    return list(dict.fromkeys([*texts, *new]))


def _commit() -> tuple[str | None, bool | None]:
    source_file = Path(__file__).resolve()
    git = ("git", "-C", str(source_file.parent))
    # An installed package may lie inside an unrelated repository, which does not track this file.
    if not command_output(*git, "ls-files", "--error-unmatch", source_file.name):
        return None, None
    status = command_output(*git, "status", "--porcelain")
    return command_output(*git, "rev-parse", "HEAD"), None if status is None else bool(status)


def has_other_code(folder: Path) -> bool:
    """Return whether a run used another version of the package's source code, according to environment.json."""
    try:
        hashes = safe_read.json_of(folder / "environment.json")["code_hashes"]
    except (ValueError, TypeError, KeyError):  # the file is missing, damaged, or from an earlier version
        return False
    return isinstance(hashes, list) and any(code_hash != source_files.combined_hash() for code_hash in hashes)


def command_output(*command: str) -> str | None:
    """Return the output of a command; None if the command is missing, fails or runs longer than ten seconds."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
