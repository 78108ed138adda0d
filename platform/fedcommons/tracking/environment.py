"""Where a run is played: what is written into its environment.json."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcommons.federation.variables import variables

PACKAGES = ("fedcommons", "torch", "torchvision", "pytorch-lightning", "ray", "diffusers", "opacus", "wandb", "numpy")


def environment() -> dict[str, Any]:
    """What results depend on besides the config: versions, machine, variables by which libraries round, commit."""
    import torch

    root = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "variables": variables(),
        "gpus": torch.cuda.device_count(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "packages": {name: version(name) for name in PACKAGES},
    }
