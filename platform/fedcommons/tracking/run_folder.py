"""The run folder: the files that record a run, from which tables are computed (listed in ``record_schema``).

Other files in the folder are never changed or removed.
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
from fedcommons.storage.paths import CHECKPOINT_FILE, LIST_FILE, MEMORY_FILE
from fedcommons.tracking import record_schema
from fedcommons.tracking.environment import environment
from fedcommons.tracking.tracker import Metric

FILES = (
    r"(config\.yaml|wandb-id\.txt|error\.txt|partition\.png|(rounds|timing|clients)\.jsonl"
    r"|(environment|partition|summary|audit|noise|tracked)\.json|(model|best|best-before-last)\.safetensors)"
)
"""Regular expression of the files that are first written under a temporary name."""

INNER = {"checkpoints": rf"{CHECKPOINT_FILE}(\.json)?", "memory": rf"{MEMORY_FILE}(\.json)?", "participants": LIST_FILE}
"""Subfolder -> regular expression of the files that a run writes there."""

STOPPED = "stopped-by-scheduler"
"""File that marks a run that the sweep's scheduler stopped early; a resumed sweep skips this run."""

_BEFORE_CONFIG = ("environment.json", "messages.log")  # files that a run may write before its config.yaml


@contextmanager
def open_run(
    path: Path,
    config: Experiment,
    resume: bool,
    say: Callable[[str], None] = print,
    patience: float = 0,
    data: str | None = None,
) -> Iterator["RunFolder"]:
    """Open and lock the run folder ``path`` during the ``with`` block; see ``RunFolder``.

    say: called with one sentence if the folder cannot be locked. patience: seconds to wait for another process's lock.
    A folder that another process has locked, or that contains foreign files, is a ``UserError``.
    """
    with file_lock.open_lock(path, stranger, "run folder", say, patience):
        yield RunFolder(path, config, resume, data)


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run folder: config.yaml and environment.json exist, whatever they contain."""
    return os.path.lexists(path / "config.yaml") and os.path.lexists(path / "environment.json")


def require_new(path: Path, resume: bool) -> None:
    """Refuse the folder of an existing run without ``resume``."""
    if is_run(path) and not resume:
        raise UserError(f"{path} holds a run already; add --resume to continue it or choose another --out.")


def stranger(path: Path) -> str | None:
    """Return the name of a foreign file in ``path``; None if there is none, or if ``path`` is a run folder already."""
    if is_run(path):
        return None
    names = (name for name in file_lock.strangers(path) if name not in _BEFORE_CONFIG)
    return next((name for name in names if not re.fullmatch(FILES, unfinished(name) or "")), None)


class RunFolder:
    """The record of a run in a folder: a new record or, with ``resume``, the record of an existing run.

    path: the folder. config: the experiment; its number of rounds replaces that of an existing run. resume: whether the
    folder may contain a run. data: hash of the data set's content; None skips the comparison with an existing run.

    Raises:
        UserError: the folder cannot be written, or it contains a run and ``resume`` is false. Or the existing run has
            another configuration, other data, more rounds or other environment variables that affect rounding.
    """

    def __init__(self, path: Path, config: Experiment, resume: bool, data: str | None = None) -> None:
        self.path, self.fields = path, config.flat
        self._hashes = defaultdict(hashlib.sha256)  # file -> hash of the written lines
        clients = ["clients.jsonl"] if config.measure.clients or config.evaluate.clients else []
        self._courses = ["rounds.jsonl", "timing.jsonl", *clients]
        try:
            path.mkdir(parents=True, exist_ok=True)
            require_plain(path)
            if is_run(path):
                require_new(path, resume)
                _require_same(path, config, data)
                require_same_rounding(path)
            remove_unfinished(path, FILES)
            for folder, files in INNER.items():
                remove_unfinished(path / folder, files)
            (path / "summary.json").unlink(missing_ok=True)  # it is outdated, as the run continues
            if is_run(path):
                self._forget_ends(config)
            gpus = config.federation.gpus_per_actor if config.federation.executor == "ray_actors" else None
            current = environment(gpus, _facts(path / "environment.json"))
            write_json(path / "environment.json", {**current, **_sources(config.chosen, config.source)})
            write_text(path / "config.yaml", yaml.safe_dump(dotted.to_dict(config), sort_keys=False))
        except OSError as error:
            raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def whole(self) -> int:
        """Return the number of rounds, from round 0 on, whose lines are undamaged in all .jsonl files."""
        return min(len(record_schema.lines(self.path / name)[0]) for name in self._courses)

    def rewind(self, after_round: int) -> None:
        """Remove the lines of rounds after ``after_round`` (-1: all lines), as a resumed run writes them again."""
        for name in self._courses:
            text = self._text(name, after_round)
            write_text(self.path / name, text)
            self._hashes[name] = hashlib.sha256(text.encode())

    def _forget_ends(self, config: Experiment) -> None:
        """Remove the lines of rounds that run again because the planned number of rounds has changed.

        The old and the new last round may have metrics that are due only at the end, or may lack such metrics.
        """
        has_end, intervals = config.evaluate.new_clients, (config.measure.every, config.evaluate.every)
        plans = {planned_rounds(self.path), config.federation.rounds}
        odd = [last for last in plans if has_end or any(last % (every or 1) for every in intervals)]
        if len(plans) > 1 and odd:
            self.rewind(min(odd) - 1)

    def _text(self, name: str, after_round: int) -> str:
        return "".join(json.dumps(line) + "\n" for line in record_schema.lines(self.path / name)[0][: after_round + 1])

    def digest(self, after_round: int | None = None) -> str:
        """Return the hash of the lines up to ``after_round`` (None: all) in all .jsonl files except timing.jsonl."""
        names, n = [name for name in self._courses if name != "timing.jsonl"], after_round
        each = [self._hashes[k].hexdigest() if n is None else sha256(self._text(k, n).encode()) for k in names]
        return sha256("".join(each).encode())

    def require_rounds(self, last: int) -> None:
        """Raise a ``ClientError`` unless rounds.jsonl contains exactly rounds 0 to ``last``, each once and in order."""
        lines, is_all = record_schema.lines(self.path / "rounds.jsonl")
        if len(lines) != last + 1 or not is_all:
            raise ClientError(
                f"{self.path / 'rounds.jsonl'} does not hold rounds 0 to {last}, each once and in order: another "
                "program wrote to it; --resume goes on from the last checkpoint that fits."
            )

    def log(self, round: int, metrics: Mapping[str, Metric | str]) -> None:
        """Write a round's metrics to rounds.jsonl; values that are not finite are written as null."""
        self._append("rounds.jsonl", line_of(round, metrics))

    def log_times(self, round: int, seconds: Mapping[str, float]) -> None:
        """Write the seconds of each step of a round to timing.jsonl, a separate file because times differ by run."""
        self._append("timing.jsonl", {"round": round, **{k: float(f"{v:.4f}") for k, v in seconds.items()}})

    def log_clients(self, round: int, clients: Mapping[str, Sequence[float]]) -> None:
        """Write metrics to clients.jsonl: metric -> one value per client; values that are not finite become null."""
        clean = {name: [record_schema.written(value) for value in values] for name, values in clients.items()}
        self._append("clients.jsonl", {"round": round, **clean})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            write_json(self.path / "summary.json", summary)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(text)
        self._hashes[name].update(text.encode())


def line_of(round: int, metrics: Mapping[str, Metric | str]) -> dict[str, Any]:
    """Return the line of rounds.jsonl for a round; values that are not finite become None."""
    return {"round": round, **{name: record_schema.written(value) for name, value in metrics.items()}}


def read_config(path: Path) -> Experiment:
    """Return the experiment of a run folder; a config.yaml that cannot be read is a ``UserError``."""
    file = path / "config.yaml"
    try:
        if (content := safe_read.content(file, safe_yaml.LARGEST_FILE)) is None:
            raise ValueError("it is missing")
        return dotted.from_dict(safe_yaml.yaml_of(content.decode()))
    except UserError as error:
        raise UserError(f"{file} is of another version: {error}") from None
    except safe_read.UnreadableError as error:
        raise UserError(f"{error}; remove that run or choose another --out.") from None
    except (ValueError, AttributeError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file} is damaged ({reason}); remove that run or choose another --out.") from None


def require_plain(path: Path) -> None:
    """Raise a ``UserError`` if a file or subfolder of the run in ``path`` is a link or not a regular file or folder."""
    ours = rf"{FILES}|messages\.log|{re.escape(STOPPED)}|\{file_lock.NAME}"
    flaws = [safe_read.flaw(path, ours, (*INNER, "wandb"))]
    flaws += [safe_read.flaw(path / folder, files) for folder, files in INNER.items()]
    if flaw := next(filter(None, flaws), None):
        raise UserError(f"{flaw}; replace it by the file or folder itself, or choose another --out.")


def planned_rounds(path: Path) -> int:
    return read_config(path).federation.rounds


def other_rounds(path: Path, config: Experiment) -> int | None:
    """Return the planned number of rounds of the run in the folder, if only this number differs from ``config``."""
    planned = read_config(path)
    return planned.federation.rounds if dotted.same_results(planned, config) == ["federation.rounds"] else None


def _require_same(path: Path, config: Experiment, data: str | None) -> None:
    existing = read_config(path)
    differ = dotted.same_results(existing, config)
    if differ == ["federation.rounds"] and (done := len(read_rounds(path)) - 1) > config.federation.rounds:
        raise UserError(
            f"{path} has {done} rounds already, so federation.rounds cannot be {config.federation.rounds}; choose "
            "another --out."
        )
    if differ := [name for name in differ if name != "federation.rounds"]:
        began, now = _facts(path / "environment.json"), _sources(config.chosen, config.source)
        names = [name + _changed(began, now, name.removeprefix("source.")) for name in differ]
        raise UserError(f"{path} holds a run with another {', '.join(names)}; choose another --out.")
    if data is not None:
        require_same_data(path, config.data.name, data)


def require_same_data(path: Path, name: str, data: str) -> None:
    """Raise a ``UserError`` if the run in ``path`` began with other data. A run without a recorded hash passes."""
    old_hash = _facts(path / "partition.json").get("data")
    if isinstance(old_hash, str) and old_hash != data:
        advice = " (random draws in a data set need `seed`)" if registry.is_user_defined(name) else ""
        raise UserError(
            f"{path} holds a run on other data: the examples of data.name {name} have changed since it began"
            f"{advice}; restore the examples or choose another --out."
        )


def require_same_rounding(path: Path) -> None:
    """Raise a ``UserError`` if a variable that affects rounding changed. A run without recorded variables passes."""
    began = _facts(path / "environment.json").get("variables")
    if isinstance(began, dict) and (what := differing(began, variables())):
        raise UserError(f"{path} holds a run that began where libraries round otherwise ({what}); reset the variable.")


def _sources(names: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return {"sources": kind -> file -> hash of the file} of user-defined components; empty if there are none."""
    files = {kind: dict(registry.files(names[kind])) for kind in digests if kind in names}
    return {"sources": files} if files else {}


def _changed(began: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> str:
    old, new = (s.get(kind) if isinstance(s := facts.get("sources"), dict) else None for facts in (began, now))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return f" ({', '.join(names)} changed)" if names else ""


def _facts(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a JSON file; empty if the file is missing, damaged or has no mapping."""
    try:
        content = safe_read.json_of(path)
    except safe_read.UnreadableError as error:
        raise UserError(f"{error}.") from None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def read_class_counts(path: Path) -> list[list[int]]:
    """Return the numbers of training images by class, a list per client; empty if the labels are not classes."""
    facts = _facts(file := path / "partition.json")
    if "sizes" in facts and "class_counts" not in facts:
        return []
    rows = counts if isinstance(counts := facts.get("class_counts"), list) else []
    is_table = rows and all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows)
    if not (is_table and all(type(n) is int and 0 <= n < 2**53 for row in rows for n in row)):
        raise UserError(f"{file} is damaged: it has no class counts, or counts that are not whole numbers from 0.")
    return rows


def read_heterogeneity(path: Path) -> dict[str, float]:
    """Return the metrics of ``data.heterogeneity`` by name; empty if an earlier version wrote the run."""
    metrics = _facts(path / "partition.json").get("heterogeneity")
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): float(value) for name, value in numbers if isinstance(value, int | float)}


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's rounds.jsonl for rounds 0, 1, ..., before the first damaged line."""
    return record_schema.lines(path / "rounds.jsonl")[0]


def read_clients(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's clients.jsonl (see ``read_rounds``); empty if the run has no such file."""
    return record_schema.lines(path / "clients.jsonl")[0]


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run or central training; None if the summary is missing or damaged.

    A run counts as finished only if rounds.jsonl contains exactly the rounds of the summary.
    """
    summary = read_run(path)[0]
    return None if summary is None or record_schema.flaw_of_summary(summary) else summary


def read_run(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return (summary, lines of rounds.jsonl) of a run folder; the summary is None if it is missing or damaged.

    Control characters in the summary's texts are escaped. A file that is too large or not regular is a ``UserError``.
    """
    lines, is_all = record_schema.lines(path / "rounds.jsonl")
    try:
        summary = safe_read.cleaned(_facts(path / "summary.json"))
    except ValueError:
        return None, lines
    fits = is_all and summary.get("rounds") == len(lines) - 1 if is_run(path) else summary
    return summary if fits else None, lines


def accuracies(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (round, test accuracy) of rounds 1, 2, ..., from lines of rounds.jsonl; empty without an accuracy."""
    rounds = [line for line in lines if line["round"] >= 1]
    return [(line["round"], line["test/accuracy"]) for line in rounds if line.get("test/accuracy") is not None]


def read_finished(path: Path, config: Experiment, data: str | None = None) -> dict[str, Any] | None:
    """Return the summary of a finished run of ``config`` with the same number of rounds as ``config``; else None.

    A run with another configuration or other data (see ``RunFolder``) is a ``UserError``.
    """
    if not is_run(path) or (summary := read_summary(path)) is None:
        return None
    _require_same(path, config, data)
    return summary if planned_rounds(path) == config.federation.rounds else None
