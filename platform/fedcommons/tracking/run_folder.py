"""The run folder: the record from which tables are made.

config.yaml (all fields), environment.json, partition.json, rounds.jsonl (one line per round), timing.jsonl,
clients.jsonl (with ``evaluate.clients`` or ``measure.clients``: one line per round, lists by client), audit.json (with
``sharing.audit``), noise.json (with ``dp.noise`` secret: the names of its salts, not these),
model.safetensors and best.safetensors (the server model of the last round, and of the best on validation data; see
``runs/model_files.py``), summary.json (written last), messages.log (the run's messages), error.txt (what stopped it),
checkpoints/ (the last two), memory/ (clients' memory), .lock (held by the process that writes), .storage.json (with
``storage``: see ``run_mirror``). Other files in the folder are never changed or removed.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fedcommons.config import dotted, registry
from fedcommons.config.experiment import Experiment
from fedcommons.errors import ClientError, UserError
from fedcommons.runtime.rounding_env import differing, variables
from fedcommons.storage import file_lock, safe_read, safe_yaml
from fedcommons.storage.atomic_files import remove_unfinished, sha256, unfinished, write_json, write_text
from fedcommons.storage.paths import CHECKPOINT_FILE, MEMORY_FILE
from fedcommons.tracking import record_schema
from fedcommons.tracking.environment import environment
from fedcommons.tracking.tracker import Metric

FILES = (
    r"(config\.yaml|wandb-id\.txt|error\.txt|partition\.png|(rounds|timing|clients)\.jsonl"
    r"|(environment|partition|summary|audit|noise)\.json|(model|best|best-before-last)\.safetensors)"
)
"""Files that are first written under a temporary name."""

STOPPED = "stopped-by-scheduler"
"""A file in the folder of a run that its sweep's scheduler stopped: resumption does not run it again."""

_BEFORE_CONFIG = ("environment.json", "messages.log")
"""Files that a run may write before its config.yaml."""


@contextmanager
def open_run(
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
    with file_lock.open_lock(path, stranger, "run folder", say, patience):
        yield RunFolder(path, config, resume, data)


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run folder: it has the two names that every run writes first, whatever stands there."""
    return os.path.lexists(path / "config.yaml") and os.path.lexists(path / "environment.json")


def stranger(path: Path) -> str | None:
    """A file that shows that ``path`` is not ours: neither a run folder nor the beginning of one. None: it is ours."""
    if is_run(path):
        return None
    names = [n for n in file_lock.strangers(path) if n not in _BEFORE_CONFIG and not _is_half_written(n)]
    return names[0] if names else None


def _is_half_written(name: str) -> bool:
    return re.fullmatch(FILES, unfinished(name) or "") is not None


class RunFolder:
    """The record of a run of ``config`` in ``path``: a new one, or with ``resume`` the one that is there.

    The run that is there may have been planned with another number of rounds; it has this one from now on.
    data: the digest of the run's data set, if that is to be compared.

    Raises:
        UserError: the folder cannot be written, holds a run already, or a run of another experiment, on other data, or
            that began where libraries round otherwise, or has more rounds already.
    """

    def __init__(self, path: Path, config: Experiment, resume: bool, data: str | None = None) -> None:
        self.path = path
        self._told = defaultdict(hashlib.sha256)  # by file, of the lines that are in it
        clients = ["clients.jsonl"] if config.measure.clients or config.evaluate.clients else []
        self._courses = ["rounds.jsonl", "timing.jsonl", *clients]
        try:
            path.mkdir(parents=True, exist_ok=True)
            require_plain(path)
            if is_run(path):
                if not resume:
                    raise UserError(f"{path} holds a run already; add --resume to continue it or choose another --out.")
                _require_same(path, config, data)
                require_same_rounding(path)
            remove_unfinished(path, FILES)
            remove_unfinished(self.checkpoints, rf"{CHECKPOINT_FILE}(\.json)?")
            remove_unfinished(path / "memory", rf"{MEMORY_FILE}(\.json)?")
            (path / "summary.json").unlink(missing_ok=True)  # of a run that goes on, or whose rounds.jsonl was damaged
            if is_run(path):
                self._forget_ends(config)
            gpus = config.federation.gpus_per_actor if config.federation.executor == "ray_actors" else None
            here = environment(gpus, _facts(path / "environment.json"))
            write_json(path / "environment.json", {**here, **_sources(config)})
            write_text(path / "config.yaml", yaml.safe_dump(dotted.to_dict(config), sort_keys=False))
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
        return min(len(record_schema.lines(self.path / name)[0]) for name in self._courses)

    def rewind(self, after_round: int) -> None:
        """Drop the lines after this round (-1: all lines); a resumed run writes them again."""
        for name in self._courses:
            kept = self._text(name, after_round)
            write_text(self.path / name, kept)
            self._told[name] = hashlib.sha256(kept.encode())

    def _forget_ends(self, config: Experiment) -> None:
        """Drop the round that is the last one in one plan only, old or new: more is observed in a last round.

        It is played again. Before config.yaml changes, so that a run that is killed here has the rounds of its plan.
        """
        observed = [config.flat.get(name, 0) for name in ("measure.every", "evaluate.every")]
        plans = {read_config(self.path).federation.rounds, config.federation.rounds}
        odd = [last for last in plans if any(last % (every or 1) for every in observed)]
        if len(plans) > 1 and odd:
            self.rewind(min(odd) - 1)

    def _text(self, name: str, after_round: int) -> str:
        kept = record_schema.lines(self.path / name)[0][: after_round + 1]
        return "".join(json.dumps(line) + "\n" for line in kept)

    def digest(self, after_round: int | None = None) -> str:
        """Of all lines that are written, or of those up to a round; not of times, which differ from run to run."""
        names = [name for name in self._courses if name != "timing.jsonl"]
        if after_round is None:
            each = [self._told[name].hexdigest() for name in names]
        else:
            each = [sha256(self._text(name, after_round).encode()) for name in names]
        return sha256("".join(each).encode())

    def require_rounds(self, last: int) -> None:
        """Check that rounds.jsonl holds rounds 0 to ``last``, each once and in order, and nothing else.

        Raises:
            ClientError: it holds something else.
        """
        lines, is_all = record_schema.lines(self.path / "rounds.jsonl")
        if len(lines) != last + 1 or not is_all:
            raise ClientError(
                f"{self.path / 'rounds.jsonl'} does not hold rounds 0 to {last}, each once and in order: something "
                "else wrote there; --resume goes on from the last checkpoint that fits."
            )

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """See ``Tracker``; values that are not finite are written as null."""
        self._append("rounds.jsonl", line_of(round, metrics))

    def log_times(self, round: int, seconds: Mapping[str, float]) -> None:
        """Write how long the parts of a round took; in a file of its own, as times differ from run to run."""
        self._append("timing.jsonl", {"round": round, **{k: float(f"{v:.4f}") for k, v in seconds.items()}})

    def log_clients(self, round: int, clients: Mapping[str, Sequence[float]]) -> None:
        """Metrics of each client, lists by client; what is not finite is written as null."""
        clean = {name: [record_schema.written(value) for value in values] for name, values in clients.items()}
        self._append("clients.jsonl", {"round": round, **clean})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See ``Tracker``."""
        if summary is not None:
            write_json(self.path / "summary.json", summary)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(text)
        self._told[name].update(text.encode())


def line_of(round: int, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """A round's line of rounds.jsonl; what is not finite is null."""
    return {"round": round, **{name: record_schema.written(value) for name, value in metrics.items()}}


def read_config(path: Path) -> Experiment:
    """The experiment of a run folder.

    Raises:
        UserError: its config.yaml cannot be read.
    """
    file = path / "config.yaml"
    try:
        if (found := safe_read.content(file, safe_yaml.LARGEST_FILE)) is None:
            raise ValueError("it is not there")
        return dotted.from_dict(safe_yaml.yaml_of(found.decode()))
    except UserError as error:
        raise UserError(f"{file} is of another version: {error}") from None
    except safe_read.UnreadableError as error:
        raise UserError(f"{error}; remove that run or choose another --out.") from None
    except (ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{file} is damaged ({why}); remove that run or choose another --out.") from None


def require_plain(path: Path) -> None:
    """Check that what a run writes to is no link to elsewhere, no pipe, and no folder in the place of a file.

    Raises:
        UserError: something is.
    """
    ours = rf"{FILES}|messages\.log|{re.escape(STOPPED)}|\{file_lock.NAME}"
    flaws = (
        safe_read.flaw(path, ours, ("checkpoints", "memory", "wandb")),
        safe_read.flaw(path / "checkpoints", rf"{CHECKPOINT_FILE}(\.json)?"),
        safe_read.flaw(path / "memory", rf"{MEMORY_FILE}(\.json)?"),
    )
    if flaw := next(filter(None, flaws), None):
        raise UserError(f"{flaw}; put the file or folder itself there, or choose another --out.")


def _require_same(path: Path, config: Experiment, data: str | None) -> None:
    held = read_config(path)
    differ = dotted.same_results(held, config)
    if differ == ["federation.rounds"] and (done := len(read_rounds(path)) - 1) > config.federation.rounds:
        raise UserError(
            f"{path} has {done} rounds already, so federation.rounds cannot be {config.federation.rounds}; choose "
            "another --out."
        )
    if differ := [name for name in differ if name != "federation.rounds"]:
        found, now = (kept.get("sources") for kept in (_facts(path / "environment.json"), _sources(config)))
        names = [name + _changed(found, now, name.removeprefix("source.")) for name in differ]
        raise UserError(f"{path} holds a run with another {', '.join(names)}; choose another --out.")
    if data is not None:
        require_same_data(path, config.data.name, data)


def require_same_data(path: Path, name: str, data: str) -> None:
    """Check that the run in ``path`` began with this data set: its name and the digest of its content.

    Raises:
        UserError: it began with other examples. A run of an earlier version has no digest, and any are taken.
    """
    held = _facts(path / "partition.json").get("data")
    if isinstance(held, str) and held != data:
        drawn = " (one that draws numbers asks for `seed`)" if registry.is_own(name) else ""
        raise UserError(
            f"{path} holds a run on other data: the examples of data.name {name} are not those that it began with"
            f"{drawn}; bring them back or choose another --out."
        )


def require_same_rounding(path: Path) -> None:
    """Check that libraries round as they did where the run in ``path`` began.

    Raises:
        UserError: they do not. A run of an earlier version does not say how they did, and any way is taken.
    """
    began = _facts(path / "environment.json").get("variables")
    if isinstance(began, dict) and (what := differing(began, variables())):
        raise UserError(f"{path} holds a run that began where libraries round otherwise ({what}); set it as it was.")


def _sources(config: Experiment) -> dict[str, Any]:
    """The files of the chosen parts of somebody's own, by kind of part, with their digests."""
    names = config.chosen
    files = {kind: dict(registry.files(names[kind])) for kind in config.source if kind in names}
    return {"sources": files} if files else {}


def _changed(found: Any, now: Any, kind: str) -> str:
    """Which files of this kind of part differ, in words; nothing where that is not known."""
    old, new = (of.get(kind) if isinstance(of, dict) else None for of in (found, now))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return f" ({', '.join(names)} changed)" if names else ""


def _read_json(path: Path) -> Any:
    """What the file holds; None if it is not there or damaged.

    Raises:
        UserError: it is no regular file, or too large.
    """
    try:
        return safe_read.json_of(path)
    except safe_read.UnreadableError as error:
        raise UserError(f"{error}.") from None
    except ValueError:
        return None


def _facts(path: Path) -> Mapping[str, Any]:
    """The same of a file that holds names and values; none if it holds anything else."""
    return found if isinstance(found := _read_json(path), dict) else {}


def read_class_counts(path: Path) -> list[list[int]]:
    """How many training images of each class each client of a run holds; empty where labels are no classes.

    Raises:
        UserError: its partition.json does not say it.
    """
    file = path / "partition.json"
    facts = _facts(file)
    if "sizes" in facts and "class_counts" not in facts:
        return []
    counts = facts.get("class_counts")
    rows = counts if isinstance(counts, list) else []
    if not rows or not all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows):
        raise UserError(f"{file} is damaged: it has no counts of classes.")
    if not all(type(n) is int and 0 <= n < 2**53 for row in rows for n in row):
        raise UserError(f"{file} is damaged: its counts of classes are no numbers of images.")
    return rows


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The lines of rounds 0, 1, ... of a run folder, up to the first line that is damaged or out of order."""
    return record_schema.lines(path / "rounds.jsonl")[0]


def read_clients(path: Path) -> list[dict[str, Any]]:
    """The lines of clients.jsonl, as ``read_rounds``; none where nobody asked for them."""
    return record_schema.lines(path / "clients.jsonl")[0]


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run or central training; None if there is none or it is damaged.

    A run counts as finished only if rounds.jsonl holds exactly the rounds of its summary.
    """
    summary = read_run(path)[0]
    return None if summary is None or record_schema.flaw_of_summary(summary) else summary


def read_run(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Summary and rounds of a run folder; see ``read_summary`` and ``read_rounds``. Texts of the summary are ``clean``.

    Raises:
        UserError: one of the two is no regular file, or too large.
    """
    lines, is_all = record_schema.lines(path / "rounds.jsonl")
    try:
        summary = safe_read.cleaned(_read_json(path / "summary.json"))
    except ValueError:
        return None, lines
    if not isinstance(summary, dict):
        return None, lines
    is_damaged = is_run(path) and not (is_all and summary.get("rounds") == len(lines) - 1)
    return None if is_damaged else summary, lines


def accuracies(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(round, test accuracy) of the rounds from 1 on; empty where the model is judged by other metrics."""
    played = [line for line in lines if line["round"] >= 1]
    return [(line["round"], line["test/accuracy"]) for line in played if line.get("test/accuracy") is not None]


def last_of(lines: Sequence[Mapping[str, Any]], name: str) -> Any:
    """A metric in the last round that has it, as ``evaluate.every`` may leave rounds out; None if none has."""
    return next((line[name] for line in reversed(lines) if name in line), None)


def read_finished(path: Path, config: Experiment, data: str | None = None) -> dict[str, Any] | None:
    """The summary of the run if it is finished, else None; with other rounds it is not. ``data``: see ``RunFolder``.

    Raises:
        UserError: the run is of another experiment, or on other data, or its config.yaml is damaged.
    """
    if not is_run(path) or (summary := read_summary(path)) is None:
        return None
    _require_same(path, config, data)
    return summary if read_config(path).federation.rounds == config.federation.rounds else None
