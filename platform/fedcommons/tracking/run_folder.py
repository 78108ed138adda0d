"""The run folder: the record from which tables are made.

config.yaml (all fields), environment.json, partition.json, rounds.jsonl (one line per round), timing.jsonl,
clients.jsonl (with ``measure.clients``: one line per round, lists by client), audit.json (with ``sharing.audit``),
noise.json (with ``dp.noise`` secret: the names of its salts, not these),
summary.json (written last), messages.log (the run's messages), error.txt (what stopped it), checkpoints/ (the last one
is the final model), memory/ (clients' memory), .lock (held by the process that writes). Other files in the folder are
never changed or removed.
"""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from fedcommons import locks
from fedcommons.config import flat, parts
from fedcommons.config.experiment import Experiment
from fedcommons.errors import ClientError, UserError
from fedcommons.federation.variables import differing, variables
from fedcommons.files import remove_unfinished, unfinished, write_json, write_text
from fedcommons.tracking.tracker import Metric

PACKAGES = ("fedcommons", "torch", "torchvision", "pytorch-lightning", "ray", "diffusers", "opacus", "wandb", "numpy")

_FILES = (
    r"(config\.yaml|wandb-id\.txt|error\.txt|partition\.png|(rounds|timing|clients)\.jsonl"
    r"|(environment|partition|summary|audit|noise)\.json)"
)
"""Files that are first written under a temporary name."""

_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where it is installed: it takes a tenth of the time."""

STOPPED = "stopped-by-scheduler"
"""A file in the folder of a run that its sweep's scheduler stopped: resumption does not run it again."""

_NEEDED = {"rounds.jsonl": "comm/total_bytes", "timing.jsonl": "train", "clients.jsonl": "n"}
"""A key that each line must have, besides ``round``; its value is a number or a list of numbers."""

_BEFORE_CONFIG = ("environment.json", "messages.log")
"""Files that a run may write before its config.yaml."""


@contextmanager
def opened(
    path: Path,
    config: Experiment,
    resume: bool,
    say: Callable[[str], None] = print,
    patience: float = 0,
    data: str | None = None,
) -> Iterator["RunFolder"]:
    """The folder ``path`` for a run of ``config``, locked while it is open.

    patience: seconds to wait for another process to release it. data: see ``RunFolder``.

    Raises:
        UserError: another process holds it, it is neither empty nor a run folder, or see ``RunFolder``.
    """
    with locks.opened(path, _stranger, "run folder", say, patience):
        yield RunFolder(path, config, resume, data)


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run folder: it has the two files that every run writes first."""
    return (path / "config.yaml").is_file() and (path / "environment.json").is_file()


def _stranger(path: Path) -> str | None:
    """A file that shows that ``path`` is not ours: neither a run folder nor the beginning of one. None: it is ours."""
    if is_run(path):
        return None
    names = [n for n in locks.strangers(path) if n not in _BEFORE_CONFIG and not _is_half_written(n)]
    return names[0] if names else None


def _is_half_written(name: str) -> bool:
    return re.fullmatch(_FILES, unfinished(name) or "") is not None


class RunFolder:
    """The record of a run of ``config`` in ``path``: a new one, or with ``resume`` the one that is there.

    data: the digest of the run's data set, if that is to be compared.

    Raises:
        UserError: the folder cannot be written, holds a run already, or a run of another experiment, on other data, or
            that began where libraries round otherwise.
    """

    def __init__(self, path: Path, config: Experiment, resume: bool, data: str | None = None) -> None:
        from fedcommons.federation import checkpoint, memory  # torch takes seconds to import, and who reads needs none

        self.path = path
        self._courses = ["rounds.jsonl", "timing.jsonl", *(["clients.jsonl"] if config.measure.clients else [])]
        try:
            path.mkdir(parents=True, exist_ok=True)
            if is_run(path):
                if not resume:
                    raise UserError(f"{path} holds a run already; add --resume to continue it or choose another --out.")
                _require_same(path, config, data)
                _require_same_rounding(path)
            remove_unfinished(path, _FILES)
            remove_unfinished(self.checkpoints, rf"{checkpoint.FILE}(\.json)?")
            remove_unfinished(path / "memory", rf"{memory.FILE}(\.json)?")
            (path / "summary.json").unlink(missing_ok=True)  # of a finished run whose rounds.jsonl was damaged later
            write_json(path / "environment.json", {**environment(), **_sources(config)})
            write_text(path / "config.yaml", yaml.safe_dump(flat.to_dict(config), sort_keys=False))
        except OSError as error:
            raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rounds(self) -> list[dict[str, Any]]:
        """The whole lines of rounds.jsonl: rounds 0, 1, ..."""
        return read_rounds(self.path)

    def whole(self) -> int:
        """Number of rounds, from round 0 on, with whole lines in all files that have one line per round."""
        return min(len(_lines(self.path / name)[0]) for name in self._courses)

    def rewind(self, after_round: int) -> None:
        """Drop the lines after this round (-1: all lines); a resumed run writes them again."""
        for name in self._courses:
            kept = _lines(self.path / name)[0][: after_round + 1]
            write_text(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))

    def require_rounds(self, last: int) -> None:
        """Check that rounds.jsonl holds rounds 0 to ``last``, each once and in order, and nothing else.

        Raises:
            ClientError: it holds something else.
        """
        lines, is_all = _lines(self.path / "rounds.jsonl")
        if len(lines) != last + 1 or not is_all:
            raise ClientError(
                f"{self.path / 'rounds.jsonl'} does not hold rounds 0 to {last}, each once and in order: something "
                "else wrote there; --resume goes on from the last checkpoint that fits."
            )

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """See ``Tracker``; values that are not finite are written as null."""
        clean = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in metrics.items()}
        self._append("rounds.jsonl", {"round": round, **clean})

    def log_times(self, round: int, seconds: Mapping[str, float]) -> None:
        """Write how long the parts of a round took; in a file of its own, as times differ from run to run."""
        self._append("timing.jsonl", {"round": round, **{k: float(f"{v:.4f}") for k, v in seconds.items()}})

    def log_clients(self, round: int, clients: Mapping[str, Sequence[float]]) -> None:
        """Metrics of each client, lists by client; what is not finite is written as null."""
        clean = {name: [v if isfinite(v) else None for v in values] for name, values in clients.items()}
        self._append("clients.jsonl", {"round": round, **clean})

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
        UserError: its config.yaml cannot be read.
    """
    try:
        return flat.from_dict(yaml.load((path / "config.yaml").read_text(), _SAFE_LOADER))
    except UserError as error:
        raise UserError(f"{path / 'config.yaml'} is of another version: {error}") from None
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(
            f"{path / 'config.yaml'} is damaged ({error}); remove that run or choose another --out."
        ) from None


def _require_same(path: Path, config: Experiment, data: str | None) -> None:
    if differ := flat.same_results(read_config(path), config):
        found, now = (kept.get("sources") for kept in (_read_json(path / "environment.json"), _sources(config)))
        names = [name + _changed(found, now, name.removeprefix("source.")) for name in differ]
        raise UserError(f"{path} holds a run with another {', '.join(names)}; choose another --out.")
    if data is not None:
        require_same_data(path, config.data.name, data)


def require_same_data(path: Path, name: str, data: str) -> None:
    """Check that the run in ``path`` began with this data set: its name and the digest of its content.

    Raises:
        UserError: it began with other examples. A run of an earlier version has no digest, and any are taken.
    """
    held = _read_json(path / "partition.json").get("data")
    if isinstance(held, str) and held != data:
        drawn = " (one that draws numbers asks for `seed`)" if parts.is_own(name) else ""
        raise UserError(
            f"{path} holds a run on other data: the examples of data.name {name} are not those that it began with"
            f"{drawn}; bring them back or choose another --out."
        )


def _require_same_rounding(path: Path) -> None:
    """A run of an earlier version has no variables, and any are taken."""
    began = _read_json(path / "environment.json").get("variables")
    if isinstance(began, dict) and (what := differing(began, variables())):
        raise UserError(f"{path} holds a run that began where libraries round otherwise ({what}); set it as it was.")


def _sources(config: Experiment) -> dict[str, Any]:
    """The files of the chosen parts of somebody's own, by kind of part, with their digests."""
    names = config.chosen
    return {"sources": {kind: dict(parts.files(names[kind])) for kind in config.source}} if config.source else {}


def _changed(found: Any, now: Any, kind: str) -> str:
    """Which files of this kind of part differ, in words; nothing where that is not known."""
    old, new = (of.get(kind) if isinstance(of, dict) else None for of in (found, now))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return f" ({', '.join(names)} changed)" if names else ""


def _read_json(path: Path) -> Mapping[str, Any]:
    """What the file holds; nothing if it is not there or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # not JSON, not UTF-8, or JSON of very many brackets
        return {}
    return found if isinstance(found, dict) else {}


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The lines of rounds 0, 1, ... of a run folder, up to the first line that is damaged or out of order."""
    return _lines(path / "rounds.jsonl")[0]


def read_clients(path: Path) -> list[dict[str, Any]]:
    """The lines of clients.jsonl, as ``read_rounds``; none where nobody asked for them."""
    return _lines(path / "clients.jsonl")[0]


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run or central training; None if there is none or it is damaged.

    A run counts as finished only if rounds.jsonl holds exactly the rounds of its summary.
    """
    return read_run(path)[0]


def read_run(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Summary and rounds of a run folder; see ``read_summary`` and ``read_rounds``."""
    lines, is_all = _lines(path / "rounds.jsonl")
    file = path / "summary.json"
    try:
        summary = json.loads(file.read_text()) if file.exists() else None
    except (ValueError, RecursionError):  # not JSON, or JSON of very many brackets
        summary = None
    if not isinstance(summary, dict):
        return None, lines
    is_damaged = is_run(path) and not (is_all and summary.get("rounds") == len(lines) - 1)
    return None if is_damaged else summary, lines


def accuracies(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(round, test accuracy) of the rounds from 1 on; empty where the model is judged by other metrics."""
    played = [line for line in lines if line["round"] >= 1]
    return [(line["round"], line["test/accuracy"]) for line in played if line.get("test/accuracy") is not None]


def read_finished(path: Path, config: Experiment, data: str | None = None) -> dict[str, Any] | None:
    """The summary of the run if it is finished, else None; ``data``: see ``RunFolder``.

    Raises:
        UserError: the run is of another experiment, or on other data, or its config.yaml is damaged.
    """
    if not is_run(path) or (summary := read_summary(path)) is None:
        return None
    _require_same(path, config, data)
    return summary


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines of rounds 0, 1, ... up to the first that is not whole, and whether these are all lines."""
    if not path.exists():
        return [], True
    *parts, rest = path.read_bytes().split(b"\n")  # a killed run may leave half a line
    lines = []
    for part in parts:
        line = _line(part, _NEEDED[path.name])
        if line is None or line["round"] != len(lines):
            return lines, False
        lines.append(line)
    return lines, not rest


def _line(part: bytes, needed: str) -> dict[str, Any] | None:
    """A line of numbers and nulls with ``round`` and a number under ``needed``; None if it is anything else."""
    try:
        line = json.loads(part.decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or JSON of very many brackets
        return None
    if not isinstance(line, dict) or type(line.get("round")) is not int or line.get(needed) is None:
        return None
    values = [v for value in line.values() for v in (value if isinstance(value, list) else (value,))]
    return line if all(value is None or _is_finite(value) for value in values) else None


def _is_finite(value: object) -> bool:
    most = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most


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
