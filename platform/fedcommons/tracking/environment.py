"""Where a run is played: what is written into its environment.json."""

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
    """What results depend on besides the config: versions, machine, variables by which libraries round, code.

    cpu_kinds: of all nodes where the run was played so far, those of its actors too where nodes have labels. gpu_kinds:
    name, memory, driver and compute capability of those in this machine. cuda, cudnn: torch's; None where it has none.
    code_hashes: of the source files (``source_files``) by which the run was played so far. commit, uncommitted_changes:
    of the git repository of these files; None if they are in none. gpus_per_actor: None where it has no actors. before:
    the environment of the run that goes on, or nothing.
    """
    import torch

    commit, is_changed = _commit()
    actors = [] if gpus_per_actor is None else ray_cluster.cpu_of_actors(gpus_per_actor)
    here = said("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader")
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_kinds": _with(before.get("cpu_kinds"), cpu_kind.cpu(), *actors),
        "variables": variables(),
        "gpus": torch.cuda.device_count(),
        "gpu_kinds": list(dict.fromkeys(here.splitlines())) if here else [],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "code_hashes": _with(before.get("code_hashes"), source_files.combined_hash()),
        "commit": commit,
        "uncommitted_changes": is_changed,
        "packages": {name: version(name) for name in ("fedcommons", *PACKAGES)},
    }


def _with(before: object, *new: str) -> list[str]:
    """Return the texts of a list in a file, which anybody may have written, and these, each once."""
    texts = [one for one in before if isinstance(one, str)] if isinstance(before, list) else []
    return list(dict.fromkeys([*texts, *new]))


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the repository that holds this file, and whether the repository has other changes."""
    here = Path(__file__).resolve()
    git = ("git", "-C", str(here.parent))
    if not said(*git, "ls-files", "--error-unmatch", here.name):  # there may be another one around what is installed
        return None, None
    status = said(*git, "status", "--porcelain")
    return said(*git, "rev-parse", "HEAD"), None if status is None else bool(status)


def has_other_code(folder: Path) -> bool:
    """Return whether another version of the source code produced the run in the folder, by its environment.json."""
    try:
        hashes = safe_read.json_of(folder / "environment.json")["code_hashes"]
    except (ValueError, TypeError, KeyError):  # none, damaged, or of an earlier version
        return False
    return isinstance(hashes, list) and any(one != source_files.combined_hash() for one in hashes)


def said(*command: str) -> str | None:
    """What a command prints; None if it is not there, fails or does not end in ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
