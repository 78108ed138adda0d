"""The run folder: the record that tables are made from.

config.yaml (resolved), environment.json, partition.json and .png, rounds.jsonl (a line a round), timing.jsonl,
summary.json (written last), messages.log (what the run had to say), error.txt (what stopped it), checkpoints/ (the
last is the final model).
"""

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import yaml

from fedcommons import config as configs
from fedcommons.config import Experiment
from fedcommons.errors import UserError
from fedcommons.files import remove_leftovers, write_json, write_text

PACKAGES = ("fedcommons", "torch", "torchvision", "pytorch-lightning", "ray", "diffusers", "opacus", "wandb", "numpy")


class RunFolder:
    """Opens ``path`` for a run of ``config``: new, or with ``resume`` as it was left.

    Raises:
        UserError: the folder cannot be written, holds a run already, or one of another experiment.
    """

    def __init__(self, path: Path, config: Experiment, resume: bool) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            stored = path / "config.yaml"
            taken = [n for n in ("config.yaml", "rounds.jsonl", "summary.json") if (path / n).exists()]
            if taken and not resume:
                raise UserError(f"{path} holds a run already; add --resume to continue it or choose another --out.")
            if taken and not stored.exists():
                raise UserError(
                    f"{path} is no run folder (it has {taken[0]} but no config.yaml); choose another --out."
                )
            if stored.exists() and (differ := configs.same_results(read_config(path), config)):
                raise UserError(f"{path} holds a run with another {', '.join(differ)}; choose another --out.")
            remove_leftovers(path)
            write_text(stored, yaml.safe_dump(configs.to_dict(config), sort_keys=False))
            write_json(path / "environment.json", environment())
        except OSError as error:
            raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl that are whole."""
        return read_rounds(self.path)

    def rewind(self, after_round: int) -> list[dict[str, Any]]:
        """Drop the lines after this round (-1: all of them), as a resumed run writes them again; the lines kept."""
        for name in ("rounds.jsonl", "timing.jsonl"):
            kept = [line for line in _lines(self.path / name) if line["round"] <= after_round]
            write_text(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))
        return self.rounds()

    def log(self, round: int, metrics: Mapping[str, float | None]) -> None:
        """See ``Tracker``; what is not finite is written as null."""
        clean = {k: v if v is None or isfinite(v) else None for k, v in metrics.items()}
        self._append("rounds.jsonl", {"round": round, **clean})

    def log_times(self, round: int, seconds: Mapping[str, float]) -> None:
        """How long the parts of a round took; kept apart because times never compare equal."""
        self._append("timing.jsonl", {"round": round, **{k: float(f"{v:.4f}") for k, v in seconds.items()}})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See ``Tracker``."""
        if summary is not None:
            write_json(self.path / "summary.json", summary)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with open(self.path / name, "a") as file:
            file.write(json.dumps(line) + "\n")


def read_config(path: Path) -> Experiment:
    """The experiment of a run folder.

    Raises:
        UserError: its config.yaml is not readable.
    """
    try:
        return configs.from_dict(yaml.safe_load((path / "config.yaml").read_text()))
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path / 'config.yaml'} is damaged ({error}); remove that run or choose another --out."
        ) from None


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run folder."""
    return _lines(path / "rounds.jsonl")


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run, or None.

    Raises:
        UserError: it is not readable.
    """
    file = path / "summary.json"
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); remove that run or choose another --out.") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().split("\n")[:-1] if line]  # a killed run leaves a part of a line
    return [json.loads(line) for line in whole]


def environment() -> dict[str, Any]:
    """What a result may depend on besides its config: versions, machine, commit."""
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
        "gpus": torch.cuda.device_count(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "packages": {name: version(name) for name in PACKAGES},
    }
