"""Where a run is played: what is written into its environment.json."""

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcommons.federation import cluster, kinds
from fedcommons.federation.variables import variables

PACKAGES = ("fedcommons", "torch", "torchvision", "pytorch-lightning", "ray", "diffusers", "opacus", "wandb", "numpy")


def environment(gpus_per_actor: float | str | None, before: Mapping[str, Any]) -> dict[str, Any]:
    """What results depend on besides the config: versions, machine, variables by which libraries round, commit.

    cpu_kinds: of all nodes where the run was played so far, those of its actors too where nodes have labels. gpu_kinds:
    name, memory, driver and compute capability of those in this machine. cuda, cudnn: torch's; None where it has none.
    gpus_per_actor: None where it has no actors. before: the environment of the run that goes on, or nothing.
    """
    import torch

    def git(*arguments: str) -> str | None:
        return said("git", "-C", str(Path(__file__).parent), *arguments)

    found = before.get("cpu_kinds")  # anybody may have written it
    played = [kind for kind in found if isinstance(kind, str)] if isinstance(found, list) else []
    actors = [] if gpus_per_actor is None else cluster.cpu_of_actors(gpus_per_actor)
    here = said("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader")
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_kinds": list(dict.fromkeys([*played, kinds.cpu(), *actors])),
        "variables": variables(),
        "gpus": torch.cuda.device_count(),
        "gpu_kinds": list(dict.fromkeys(here.splitlines())) if here else [],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "packages": {name: version(name) for name in PACKAGES},
    }


def said(*command: str) -> str | None:
    """What a command prints; None if it is not there, fails or does not end in ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
