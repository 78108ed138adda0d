"""Read the run folders of a report: a frame of runs, and for each run further facts such as its accuracy curve."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.reports.frames import Recorded, read, row
from fedcommons.storage import safe_read

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

WHO = ("dataset", "algorithm", "setting", "alpha", "p", "seed")
"""Columns that identify a run; a value can be missing, as p (share of received examples) before the end of a run."""

DIGEST = "data digest"
"""Name of a column: hash of the content of a run's data set; None in runs of earlier versions of fedcommons."""

_CURVES = {"accuracy": "test/accuracy", "loss": "test/loss", "bytes": "comm/total_bytes"}


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that are not in the run's row of the ``load_runs`` frame.

    curve: lists ``round``, ``accuracy``, ``loss`` and ``bytes`` (MB exchanged so far), with one value per evaluated
    round. words: sentences of the privacy statement. n_late: number of partial or missing replies of stragglers, over
    all rounds. facts: content of environment.json.
    """

    folder: Path
    curve: Mapping[str, Sequence[float | None]]
    words: tuple[str, ...]
    n_late: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def gather(folders: Sequence[Path], say: Callable[[str], None]) -> "tuple[pd.DataFrame, list[RunFacts]]":
    """Return the frame of ``load_runs`` with the further column ``DIGEST``, and for each row the run's further facts.

    ``say`` and errors are as in ``load_runs``.
    """
    import pandas as pd

    rows, facts_of_runs = [], []
    for run in read(folders, say):
        digest, fingerprint = _identity(run.folder)
        columns = row(run)
        rows.append({"partition": fingerprint, **columns, DIGEST: digest})
        facts_of_runs.append(_facts_of_run(run))
    runs = pd.DataFrame(rows)
    return runs.reindex(columns=[*runs.columns, *(name for name in WHO if name not in runs)]), facts_of_runs


def _identity(folder: Path) -> tuple[str | None, str | None]:
    """Return the hashes of a run's data set and partition from its partition.json; None for a missing hash."""
    try:
        with safe_read.open_file(folder / "partition.json", safe_read.LARGEST_JSON) as file:
            head = file.read(300).decode(errors="replace") if file else ""
    except (safe_read.UnreadableError, OSError):
        head = ""
    matches = [re.search(rf'"{name}": "([0-9a-f]{{8,64}})"', head) for name in ("data", "fingerprint")]
    digest, fingerprint = (match[1] if match else None for match in matches)
    return digest, fingerprint


def _facts_of_run(run: Recorded) -> RunFacts:
    statement = run.summary.get("privacy", {}).get("in_words", ())
    words = tuple(text for text in statement if isinstance(text, str)) if isinstance(statement, list) else ()
    late = sum(len(line["late"]) for line in run.lines if isinstance(line.get("late"), list))
    return RunFacts(run.folder, _curve(run.lines), words, late, _facts(run.folder))


def _curve(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return ``RunFacts.curve`` from the lines of rounds.jsonl, for rounds with a test accuracy or test loss."""
    evaluated = [line for line in lines if line.get("test/accuracy") is not None or line.get("test/loss") is not None]
    curve: dict[str, list[float | None]] = {"round": [line["round"] for line in evaluated]}
    for name, metric in _CURVES.items():
        curve[name] = [line.get(metric) for line in evaluated]
    curve["bytes"] = [None if nbytes is None else nbytes / 1e6 for nbytes in curve["bytes"]]
    return curve


def _facts(folder: Path) -> Mapping[str, Any]:
    """Return environment.json without control characters in its texts; empty if the file is missing or damaged."""
    try:
        environment = safe_read.cleaned(safe_read.json_of(folder / "environment.json"))
    except (safe_read.UnreadableError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}
