"""What a report needs of run folders, read once: a frame of runs, and of each run what stands in no frame."""

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
"""Columns that tell who a run is; None where a run has no such thing, as p before its end."""

DIGEST = "data digest"
"""A column: the digest of the content of a run's data set; None in runs of earlier versions."""

_CURVES = {"accuracy": "test/accuracy", "loss": "test/loss", "bytes": "comm/total_bytes"}


@dataclass(frozen=True)
class Told:
    """What a run's folder tells besides its row. late: replies that came late or not at all, over all rounds.

    curve: by name one value for each evaluated round; ``round``, ``accuracy``, ``loss``, and ``bytes`` until then, in
    MB. words: the privacy statement. facts: of the environment.
    """

    folder: Path
    curve: Mapping[str, Sequence[float | None]]
    words: tuple[str, ...]
    late: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def gather(folders: Sequence[Path], say: Callable[[str], None]) -> "tuple[pd.DataFrame, list[Told]]":
    """The frame of ``load_runs`` with a column ``DIGEST``, and for each of its rows what else there is.

    ``say`` and errors: as in ``load_runs``.
    """
    import pandas as pd

    rows, told = [], []
    for run in read(folders, say):
        digest, fingerprint = _identity(run.folder)
        found = row(run)
        rows.append({"partition": fingerprint, **found, DIGEST: digest})
        told.append(_told(run))
    runs = pd.DataFrame(rows)
    return runs.reindex(columns=[*runs.columns, *(name for name in WHO if name not in runs)]), told


def _identity(folder: Path) -> tuple[str | None, str | None]:
    """The digest of the data and the fingerprint of the partition, with which a run's partition.json begins."""
    try:
        with safe_read.opened(folder / "partition.json", safe_read.LARGEST_JSON) as file:
            head = file.read(300).decode(errors="replace") if file else ""
    except (safe_read.UnreadableError, OSError):
        head = ""
    found = [re.search(rf'"{name}": "([0-9a-f]{{8,64}})"', head) for name in ("data", "fingerprint")]
    digest, fingerprint = (match[1] if match else None for match in found)
    return digest, fingerprint


def _told(run: Recorded) -> Told:
    said = run.summary.get("privacy", {}).get("in_words", ())
    words = tuple(text for text in said if isinstance(text, str)) if isinstance(said, list) else ()
    late = sum(len(line["late"]) for line in run.lines if isinstance(line.get("late"), list))
    return Told(run.folder, _curve(run.lines), words, late, _facts(run.folder))


def _curve(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The rounds that were evaluated."""
    kept = [line for line in lines if line.get("test/accuracy") is not None or line.get("test/loss") is not None]
    curve: dict[str, list[float | None]] = {"round": [line["round"] for line in kept]}
    for name, metric in _CURVES.items():
        curve[name] = [line.get(metric) for line in kept]
    curve["bytes"] = [None if found is None else found / 1e6 for found in curve["bytes"]]
    return curve


def _facts(folder: Path) -> Mapping[str, Any]:
    """What environment.json says, with texts that a page can show; nothing where it is damaged."""
    try:
        found = safe_read.cleaned(safe_read.json_of(folder / "environment.json"))
    except (safe_read.UnreadableError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
