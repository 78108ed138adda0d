"""Read the run folders of a report once: a frame of runs, and for each run the facts that the frame does not have."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.reports.frames import Recorded, read, row
from fedcommons.storage import safe_read

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

WHO = ("dataset", "algorithm", "setting", "alpha", "p", "seed")
"""Columns that identify a run; None if a run has no such value, as p before the run's end."""

DIGEST = "data digest"
"""A column: hash of the content of a run's data set; None in runs of earlier versions."""

_CURVES = {"accuracy": "test/accuracy", "loss": "test/loss", "bytes": "comm/total_bytes"}


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that its row does not have. late: number of late or missing replies, over all rounds.

    curve: by name, one value per evaluated round: ``round``, ``accuracy``, ``loss``, and cumulative ``bytes`` in MB.
    words: sentences of the privacy statement. facts: content of environment.json.
    """

    folder: Path
    curve: Mapping[str, Sequence[float | None]]
    words: tuple[str, ...]
    n_late: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def gather(folders: Sequence[Path], say: Callable[[str], None]) -> "tuple[pd.DataFrame, list[RunFacts]]":
    """Return the frame of ``load_runs`` with a column ``DIGEST``, and for each row the run's further facts.

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
    """Return the hashes of the data and of the partition from the beginning of a run's partition.json, or None."""
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
    """Return the curve of the evaluated rounds."""
    evaluated = [line for line in lines if line.get("test/accuracy") is not None or line.get("test/loss") is not None]
    curve: dict[str, list[float | None]] = {"round": [line["round"] for line in evaluated]}
    for name, metric in _CURVES.items():
        curve[name] = [line.get(metric) for line in evaluated]
    curve["bytes"] = [None if nbytes is None else nbytes / 1e6 for nbytes in curve["bytes"]]
    return curve


def _facts(folder: Path) -> Mapping[str, Any]:
    """Return environment.json with texts that a page can show, or an empty mapping if the file is damaged."""
    try:
        environment = safe_read.cleaned(safe_read.json_of(folder / "environment.json"))
    except (safe_read.UnreadableError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}
