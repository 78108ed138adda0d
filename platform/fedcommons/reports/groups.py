"""Runs that may be averaged: in a group all have the same data, partition for a seed, federation and target.

In a group the runs that differ in their seeds only are a cell. Groups stand beside one another and are never averaged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.reports import columns
from fedcommons.reports.cells import ENVIRONMENT, Cell, cells, fields, once
from fedcommons.reports.collect import DIGEST

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd


@dataclass(frozen=True)
class Group:
    """title: what its runs share. cells: in the order of their first runs; the index of their frames is that of all."""

    title: str
    cells: tuple[Cell, ...]


def grouped(runs: "pd.DataFrame", say: Callable[[str], None]) -> list[Group]:
    """The groups of these runs, in the order of their first runs. ``say`` is told of experiments that are there twice.

    A run that is not finished belongs to its cell; who averages leaves it out.
    """
    names = [name for name in fields(runs) if name.startswith(ENVIRONMENT)]
    held = {name: [plain(value) for value in runs[name].tolist()] for name in [*names, DIGEST]}
    varied = [name for name in names if len(set(held[name])) > 1]
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*held.values(), strict=True)):
        places.setdefault(key, []).append(place)
    found = []
    for key, of in places.items():
        several = sum(other[:-1] == key[:-1] for other in places) > 1
        data = f", data {key[-1] or 'of no known digest'}" if several else ""
        for where, part in _of_one_partition(runs.iloc[of]):
            ordered = part.iloc[(part["status"] != "finished").to_numpy().argsort(kind="stable")]
            title = _title(ordered, varied) + data + where
            found.append(Group(title, tuple(cells(once(ordered, say)))))
    return found


def plain(value: Any) -> Any:
    """None for what a frame lacks."""
    return None if value is None or value != value else value


def _of_one_partition(runs: "pd.DataFrame") -> "list[tuple[str, pd.DataFrame]]":
    """Parts in which runs of one seed have one partition, with what tells them apart: their folder, or the partition.

    A run that does not tell its partition goes with the others.
    """
    if _agree(runs):
        return [("", runs)]
    parts = []
    parents = runs["run"].map(lambda run: str(Path(run).parent))
    for parent, part in runs.groupby(parents, sort=False):
        if _agree(part):
            parts.append((f", partitions of {parent}", part))
        else:
            each = part.groupby("partition", sort=False, dropna=False)
            parts += [(f", partition {fingerprint}", same) for fingerprint, same in each]
    return parts


def _agree(runs: "pd.DataFrame") -> bool:
    return bool((runs.groupby("seed")["partition"].nunique() <= 1).all())


def _title(runs: "pd.DataFrame", varied: list[str]) -> str:
    """``digits, N = 10, C = 1, alpha = 0.01, target test accuracy >= 0.8``, and what else tells groups apart."""
    shared = {name: runs[name].iloc[0] for name in varied if name != "target" and plain(runs[name].iloc[0]) is not None}
    place = columns.place(Cell(shared, runs)).replace(", alpha = -", "")
    return f"{place}, target {target.in_words(runs['target'].iloc[0])}"
