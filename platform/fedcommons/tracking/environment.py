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


def environment(gpus_per_actor: float | None, before: Mapping[str, Any]) -> dict[str, Any]:
    """What results depend on besides the config: versions, machine, variables by which libraries round, commit.

    cpu_kinds: of all nodes where the run was played so far, those of its actors too where nodes have labels.
    gpus_per_actor: None where it has no actors. before: the environment of the run that goes on, or nothing.
    """
    import torch

    root = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    found = before.get("cpu_kinds")  # anybody may have written it
    played = [kind for kind in found if isinstance(kind, str)] if isinstance(found, list) else []
    actors = [] if gpus_per_actor is None else cluster.cpu_of_actors(gpus_per_actor)
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_kinds": list(dict.fromkeys([*played, kinds.cpu(), *actors])),
        "variables": variables(),
        "gpus": torch.cuda.device_count(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "packages": {name: version(name) for name in PACKAGES},
    }
