"""Read the run folders of a report: a frame of runs, further facts of each run, and groups of comparable runs.

All runs of a group have the same data, federation and target, and runs with the same seed have the same partition. Runs
of different groups are never averaged.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.reports import columns
from fedcommons.reports.cells import ENVIRONMENT, Cell, cells, drop_duplicates, fields, plain, values
from fedcommons.reports.frames import Recorded, read, row
from fedcommons.storage import safe_read

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

WHO = ("dataset", "algorithm", "setting", "alpha", "p", "seed")
"""Columns that identify a run. p is the share of received examples; it is missing before the end of a run."""

DIGEST = "data digest"
"""Name of a column: hash of the content of a run's data set; None in runs of earlier versions of fedcommons, and in
runs with ``data.split random``, whose seeds have different test sets."""

_CURVES = {
    "round": "round", "accuracy": "test/accuracy", "loss": "test/loss", "bytes": "comm/total_bytes",
    "time": "server/time",
}  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that are not in the run's row of the ``load_runs`` frame."""

    folder: Path
    curve: Mapping[str, Sequence[float | None]]  # by name of ``_CURVES``, a value per evaluated round; bytes in MB
    words: tuple[str, ...]  # sentences of the privacy statement
    n_late: int  # partial or missing replies of stragglers, over all rounds
    facts: Mapping[str, Any]  # content of environment.json


@dataclass(frozen=True)
class Group:
    """A group of comparable runs."""

    title: str  # data, federation and target
    cells: tuple[Cell, ...]  # in the order of their first runs; ``cell.runs`` keeps the index of the frame of all runs


def gather(folders: Sequence[Path], say: Callable[[str], None]) -> "tuple[pd.DataFrame, list[RunFacts]]":
    """Return the frame of ``load_runs`` with the column ``DIGEST``, and the further facts of each row's run."""
    import pandas as pd

    every = [(_identity(run.folder), row(run), _facts_of_run(run)) for run in read(folders, say)]
    rows = [{"partition": identity[1], **of_run, DIGEST: identity[0]} for identity, of_run, _ in every]
    runs = pd.DataFrame([line | {DIGEST: None} if line.get("data.split") == "random" else line for line in rows])
    return runs.reindex(columns=[*dict.fromkeys([*runs.columns, *WHO])]), [facts for *_, facts in every]


def _identity(folder: Path) -> tuple[str | None, str | None]:
    """Return the hashes of a run's data set and partition from its partition.json; None for a missing hash."""
    try:
        with safe_read.open_file(folder / "partition.json", safe_read.LARGEST_JSON) as file:
            head = file.read(300).decode(errors="replace") if file else ""
    except (safe_read.UnreadableError, OSError):
        head = ""
    data, partition = (re.search(rf'"{name}": "([0-9a-f]{{8,64}})"', head) for name in ("data", "fingerprint"))
    return data and data[1], partition and partition[1]


def _facts_of_run(run: Recorded) -> RunFacts:
    statement = run.summary.get("privacy", {}).get("in_words", ())
    words = tuple(text for text in statement if isinstance(text, str)) if isinstance(statement, list) else ()
    late = sum(len(line["late"]) for line in run.lines if isinstance(line.get("late"), list))
    evaluated = [line for line in run.lines if {line.get("test/accuracy"), line.get("test/loss")} != {None}]
    curve = {name: [line.get(metric) for line in evaluated] for name, metric in _CURVES.items()}
    curve["bytes"] = [None if nbytes is None else nbytes / 1e6 for nbytes in curve["bytes"]]
    try:
        facts = safe_read.cleaned(safe_read.json_of(run.folder / "environment.json"))
    except (safe_read.UnreadableError, ValueError):
        facts = {}
    return RunFacts(run.folder, curve, words, late, facts if isinstance(facts, dict) else {})


def grouped(runs: "pd.DataFrame", say: Callable[[str], None]) -> list[Group]:
    """Split the runs, also unfinished ones, into groups in the order of their first runs; ``say`` names duplicates."""
    names = [name for name in fields(runs) if name.startswith(ENVIRONMENT)]
    varied = [name for name in names if len(set(values(runs, name))) > 1]
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*(values(runs, name) for name in [*names, DIGEST]), strict=True)):
        places.setdefault(key, []).append(place)
    groups = []
    for key, rows in places.items():
        several = sum(other[:-1] == key[:-1] for other in places) > 1
        data = f", data {key[-1] or 'with unknown hash'}" if several else ""
        for where, part in _of_one_partition(runs.iloc[rows]):
            ordered = part.iloc[(part["status"] != "finished").to_numpy().argsort(kind="stable")]
            groups.append(Group(_title(ordered, varied) + data + where, tuple(cells(drop_duplicates(ordered, say)))))
    return groups


def _of_one_partition(runs: "pd.DataFrame") -> "list[tuple[str, pd.DataFrame]]":
    """Return (end of the group's title, runs) of subsets in which runs with the same seed have the same partition."""

    def agree(runs: "pd.DataFrame") -> bool:  # a run without a recorded partition agrees with every run
        return bool((runs.groupby("seed")["partition"].nunique() <= 1).all())

    if agree(runs):
        return [("", runs)]
    parts = []
    for parent, part in runs.groupby(runs["run"].map(lambda run: str(Path(run).parent)), sort=False):
        each = part.groupby("partition", sort=False, dropna=False)
        several = [(f", partition {fingerprint}", same) for fingerprint, same in each]
        parts += [(f", partitions of {parent}", part)] if agree(part) else several
    return parts


def _title(runs: "pd.DataFrame", varied: list[str]) -> str:
    """Return a group's title, such as ``digits, N = 10, C = 1, alpha = 0.01, target 80 %``. varied: fields to name."""
    first = {name: plain(runs[name].iloc[0]) for name in varied if name != "target"}
    place = columns.place(Cell({name: value for name, value in first.items() if value is not None}, runs))
    return f"{place.replace(', alpha = -', '')}, target {target.in_words(runs['target'].iloc[0])}"
