"""Groups of comparable runs: all runs of a group have the same data, federation and target.

The runs of a group with the same seed also have the same partition. Within a group, the runs that differ only in the
seed form a configuration (``Cell``), and a report averages over them. Runs of different groups are never averaged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.reports import columns
from fedcommons.reports.cells import ENVIRONMENT, Cell, cells, drop_duplicates, fields
from fedcommons.reports.collect import DIGEST

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd


@dataclass(frozen=True)
class Group:
    """A group of comparable runs.

    title: the data, federation and target of the runs. cells: the configurations, in the order of their first runs;
    the index of a configuration's frame contains the runs' row numbers in the frame of all runs.
    """

    title: str
    cells: tuple[Cell, ...]


def grouped(runs: "pd.DataFrame", say: Callable[[str], None]) -> list[Group]:
    """Split the runs into groups with equal data, federation and target, in the order of the groups' first runs.

    Unfinished runs are included, so the caller must leave them out of averages. say: called with a message on each
    duplicate run that is left out.
    """
    names = [name for name in fields(runs) if name.startswith(ENVIRONMENT)]
    columns_by_name = {name: [plain(value) for value in runs[name].tolist()] for name in [*names, DIGEST]}
    varied = [name for name in names if len(set(columns_by_name[name])) > 1]
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*columns_by_name.values(), strict=True)):
        places.setdefault(key, []).append(place)
    groups = []
    for key, rows in places.items():
        several = sum(other[:-1] == key[:-1] for other in places) > 1
        data = f", data {key[-1] or 'with unknown hash'}" if several else ""
        for where, part in _of_one_partition(runs.iloc[rows]):
            ordered = part.iloc[(part["status"] != "finished").to_numpy().argsort(kind="stable")]
            title = _title(ordered, varied) + data + where
            groups.append(Group(title, tuple(cells(drop_duplicates(ordered, say)))))
    return groups


def plain(value: Any) -> Any:
    """Return the value, or None if it is nan, which marks a missing value in pandas."""
    return None if value is None or value != value else value


def _of_one_partition(runs: "pd.DataFrame") -> "list[tuple[str, pd.DataFrame]]":
    """Split runs into subsets in which all runs with the same seed have the same partition.

    Return (end of the group's title, runs) of each subset. The end of the title names the folder or the partition of
    the runs, or is empty if one subset has all runs. Runs without a recorded partition cause no split.
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
    """Return a group's title, such as ``digits, N = 10, C = 1, alpha = 0.01, target 80 %``. varied: fields to name."""
    shared = {name: runs[name].iloc[0] for name in varied if name != "target" and plain(runs[name].iloc[0]) is not None}
    place = columns.place(Cell(shared, runs)).replace(", alpha = -", "")
    return f"{place}, target {target.in_words(runs['target'].iloc[0])}"
