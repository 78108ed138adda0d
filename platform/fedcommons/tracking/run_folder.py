"""The run folder: the record that tables are made from.

config.yaml (resolved), environment.json, partition.json and .png, rounds.jsonl (a line a round), timing.jsonl,
summary.json (written last), messages.log (what the run had to say), error.txt (what stopped it), checkpoints/ (the
last is the final model), memory/ (of clients), .lock (who writes here). Nothing else in it is ever changed or removed.
"""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from fedcommons import locks
from fedcommons.config import flat
from fedcommons.config.experiment import Experiment
from fedcommons.errors import ClientError, UserError
from fedcommons.files import remove_unfinished, unfinished, write_json, write_text

PACKAGES = ("fedcommons", "torch", "torchvision", "pytorch-lightning", "ray", "diffusers", "opacus", "wandb", "numpy")

_FILES = (
    r"(config\.yaml|wandb-id\.txt|error\.txt|partition\.png|(rounds|timing)\.jsonl"
    r"|(environment|partition|summary)\.json)"
)
"""Names of files that are written to a temporary name first."""

_NEEDED = {"rounds.jsonl": "test/accuracy", "timing.jsonl": "train"}
"""What each line has a number for, besides its round."""

_BEFORE_CONFIG = ("environment.json", "messages.log")
"""What a run may have written when it is killed before its config.yaml is there."""


@contextmanager
def opened(
    path: Path, config: Experiment, resume: bool, say: Callable[[str], None] = print, patience: float = 0
) -> Iterator["RunFolder"]:
    """The folder ``path`` for a run of ``config``, which nobody else may write meanwhile.

    patience: seconds to wait for a process that holds it.

    Raises:
        UserError: somebody holds it, it is neither empty nor a run folder, or see ``RunFolder``.
    """
    with locks.opened(path, _stranger, "run folder", say, patience):
        yield RunFolder(path, config, resume)


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run folder: one with the two files that every run begins with."""
    return (path / "config.yaml").is_file() and (path / "environment.json").is_file()


def _stranger(path: Path) -> str | None:
    """What shows that ``path`` is neither a run folder nor one that was left before it was one."""
    if is_run(path):
        return None
    names = [n for n in locks.strangers(path) if n not in _BEFORE_CONFIG and not _is_half_written(n)]
    return names[0] if names else None


def _is_half_written(name: str) -> bool:
    return re.fullmatch(_FILES, unfinished(name) or "") is not None


class RunFolder:
    """Makes ``path`` that of a run of ``config``: new, or with ``resume`` as it was left.

    Raises:
        UserError: the folder cannot be written, holds a run already, or one of another experiment.
    """

    def __init__(self, path: Path, config: Experiment, resume: bool) -> None:
        from fedcommons.federation import checkpoint, memory  # torch takes seconds to import, and who reads needs none

        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if is_run(path):
                if not resume:
                    raise UserError(f"{path} holds a run already; add --resume to continue it or choose another --out.")
                _require_same(path, config)
            remove_unfinished(path, _FILES)
            remove_unfinished(self.checkpoints, rf"{checkpoint.FILE}(\.json)?")
            remove_unfinished(path / "memory", rf"{memory.FILE}(\.json)?")
            (path / "summary.json").unlink(missing_ok=True)  # of a finished run, whose rounds were damaged since
            write_json(path / "environment.json", environment())
            write_text(path / "config.yaml", yaml.safe_dump(flat.to_dict(config), sort_keys=False))
        except OSError as error:
            raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl that are whole: rounds 0, 1, ..."""
        return read_rounds(self.path)

    def whole(self) -> int:
        """How many rounds, from 0 on, have whole lines both in rounds.jsonl and in timing.jsonl."""
        return min(len(_lines(self.path / name)[0]) for name in ("rounds.jsonl", "timing.jsonl"))

    def rewind(self, after_round: int) -> None:
        """Drop the lines after this round (-1: all of them), as a resumed run writes them again."""
        for name in ("rounds.jsonl", "timing.jsonl"):
            kept = _lines(self.path / name)[0][: after_round + 1]
            write_text(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))

    def require_rounds(self, last: int) -> None:
        """See that rounds.jsonl holds rounds 0 to ``last``, each once and in order, and nothing else.

        Raises:
            ClientError: it does not.
        """
        lines, is_all = _lines(self.path / "rounds.jsonl")
        if len(lines) != last + 1 or not is_all:
            raise ClientError(
                f"{self.path / 'rounds.jsonl'} does not hold rounds 0 to {last}, each once and in order: something "
                "else wrote there; --resume goes on from the last checkpoint that fits."
            )

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
        return flat.from_dict(yaml.safe_load((path / "config.yaml").read_text()))
    except UserError as error:
        raise UserError(f"{path / 'config.yaml'} is of another version: {error}") from None
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(
            f"{path / 'config.yaml'} is damaged ({error}); remove that run or choose another --out."
        ) from None


def _require_same(path: Path, config: Experiment) -> None:
    if differ := flat.same_results(read_config(path), config):
        raise UserError(f"{path} holds a run with another {', '.join(differ)}; choose another --out.")


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run folder: 0, 1, ..., up to the first line that is damaged or out of order."""
    return _lines(path / "rounds.jsonl")[0]


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run or central training; None where there is none, or one that is damaged.

    A run whose rounds.jsonl is not exactly the rounds of its summary counts as not finished.
    """
    file = path / "summary.json"
    try:
        summary = json.loads(file.read_text()) if file.exists() else None
    except (ValueError, RecursionError):  # not JSON, or JSON of very many brackets
        return None
    if not isinstance(summary, dict):
        return None
    lines, is_all = _lines(path / "rounds.jsonl")
    return None if is_run(path) and not (is_all and summary.get("rounds") == len(lines) - 1) else summary


def read_finished(path: Path, config: Experiment) -> dict[str, Any] | None:
    """The summary of a finished run of this experiment, or None.

    Raises:
        UserError: the folder holds a run of another experiment, or a damaged config.yaml.
    """
    if not is_run(path) or (summary := read_summary(path)) is None:
        return None
    _require_same(path, config)
    return summary


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines of rounds 0, 1, ... up to the first that is not whole, and whether that is all there is."""
    if not path.exists():
        return [], True
    *parts, rest = path.read_bytes().split(b"\n")  # a killed run leaves a part of a line
    lines = []
    for part in parts:
        line = _line(part, _NEEDED[path.name])
        if line is None or line["round"] != len(lines):
            return lines, False
        lines.append(line)
    return lines, not rest


def _line(part: bytes, needed: str) -> dict[str, Any] | None:
    """A line of numbers and nulls, with the number of its round and the one that is needed; None for anything else."""
    try:
        line = json.loads(part.decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or JSON of very many brackets
        return None
    if not isinstance(line, dict) or type(line.get("round")) is not int or line.get(needed) is None:
        return None
    return line if all(value is None or _is_finite(value) for value in line.values()) else None


def _is_finite(value: object) -> bool:
    most = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most


def environment() -> dict[str, Any]:
    """What a result may depend on besides its config: versions, machine, commit."""
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
        "gpus": torch.cuda.device_count(),
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "packages": {name: version(name) for name in PACKAGES},
    }
