"""Configurations of a table: sets of runs that differ only in the seed (``Cell``), and their means over seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcommons.config.dotted import common_fields, is_ignored
from fedcommons.core.communication import UntilTarget
from fedcommons.errors import UserError, quote, unknown

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

ENVIRONMENT = ("data.", "partition.", "straggler.", "federation.participation", "target")
"""Prefixes of config fields that describe data and federation; results are only ranked if these fields are equal."""

IDENTIFYING = {
    "data.name": "data set", "partition.n_clients": "N", "federation.participation": "C", "partition.alpha": "alpha",
    "algorithm": "algorithm", "sharing.setting": "setting",
}  # fmt: skip
"""Config fields with a column in every table, each with its title. Their columns are left of other varying fields."""

_FIRST = tuple(IDENTIFYING)


@dataclass(frozen=True)
class Cell:
    """A configuration in a table: its runs, one per seed, and its values of the fields that vary in the table."""

    fields: Mapping[str, Any]
    runs: "pd.DataFrame"

    def values(self, column: str) -> list[float]:
        """Return the runs' values in a column of ``load_runs``, in the order of the seeds, without missing values."""
        return [] if column not in self.runs else self.runs[column].dropna().tolist()


def fields(runs: "pd.DataFrame") -> list[str]:
    """Return the columns of a ``load_runs`` frame that are config fields, except the seed and fields without effect."""
    names = [n for n in runs.columns if n in common_fields() or ("." in n and "/" not in n)]
    return sorted((n for n in names if n != "seed" and not is_ignored(n)), key=_place)


def _place(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def varied(runs: "pd.DataFrame") -> list[str]:
    """Return the config fields in which runs differ, except fields whose value follows from earlier fields."""
    varying: list[str] = []
    for name in fields(runs):
        if len(set(_column(runs, name))) > 1 and not _follows(runs, name, varying):
            varying.append(name)
    return varying


def _follows(runs: "pd.DataFrame", name: str, others: Sequence[str]) -> bool:
    """Return whether all runs with equal values in the fields ``others`` have equal values in the field ``name``."""
    values_by_key: dict[tuple[Any, ...], set[Any]] = {}
    for value, *key in zip(*(_column(runs, n) for n in (name, *others)), strict=True):
        values_by_key.setdefault(tuple(key), set()).add(value)
    return bool(others) and all(len(values) == 1 for values in values_by_key.values())


def _column(runs: "pd.DataFrame", name: str) -> list[Any]:
    """Return the values of a column, with None in place of nan, because nan is not equal to itself."""
    return [None if value is None or value != value else value for value in runs[name].tolist()]


def drop_duplicates(runs: "pd.DataFrame", say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Return the frame with only the first run of each experiment and seed; ``say`` is called for each dropped run."""
    seen: dict[tuple[Any, ...], str] = {}
    is_first = []
    columns = (_column(runs, name) for name in ("run", "seed", *fields(runs)))
    for run, *experiment in zip(*columns, strict=True):
        first = seen.setdefault(tuple(experiment), run)
        is_first.append(first == run)
        if first != run:
            say(f"left out: {run} is the same experiment as {first}.")
    return runs.loc[is_first, :]


def cells(runs: "pd.DataFrame") -> list[Cell]:
    """Return the configurations of these runs, in the order of their first runs; their runs are sorted by seed."""
    names = varied(runs)
    if not names:
        return [Cell({}, runs.sort_values("seed"))]
    return [
        Cell({n: group[n].iloc[0] for n in names}, group.sort_values("seed"))
        for _, group in runs.groupby(names, dropna=False, sort=False)
    ]


def means(runs: "pd.DataFrame", columns: str | Iterable[str], say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Return a frame of means over seeds, with one row per configuration (runs that differ only in the seed).

    A row has the varying fields, ``seeds`` (number of seeds), and for each of the ``columns`` the mean (``NAME``) and
    the sample standard deviation (``NAME_sd``). Only finished runs count, and duplicates are left out. In
    ``rounds_to_target`` a seed that missed the target counts with all its rounds. ``rounds_to_target_missed`` is the
    number of seeds that missed it. The text ``rounds_to_target_shown`` is the mean, with ``>`` if a seed missed it.

    Args:
        runs: a frame of ``load_runs``.
        columns: one or several names of number columns.
        say: called with a message on each run or value that is left out.

    Raises:
        UserError: ``runs`` is not a frame, or has no such column.
    """
    import pandas as pd

    if not isinstance(runs, pd.DataFrame):
        raise UserError(f"means takes a frame of load_runs, got {quote(runs)}.")
    several = [columns] if isinstance(columns, str) else list(columns) if isinstance(columns, Iterable) else []
    names = [str(name) for name in several if isinstance(name, str)]
    if not isinstance(columns, Iterable) or len(names) < len(several):
        raise UserError(f"means takes names of columns, got {quote(columns)}.")
    for name in names:
        if name not in runs:
            raise unknown("column", name, runs.columns)
    for run in runs.loc[runs["status"] != "finished", :].to_dict("records"):
        say(f"left out: {run['run']} is {run['status']}.")
    rows, finished = [], drop_duplicates(runs.loc[runs["status"] == "finished", :], say)
    for cell in cells(finished) if len(finished) else ():
        row, seeds = {**cell.fields, "seeds": len(cell.runs)}, len(cell.runs)
        for name in names:
            counts, missed = counted(cell.runs, name)
            if len(counts) < seeds:
                say(f"left out: {name} is missing in {seeds - len(counts)} of {seeds} seeds of {_words(cell)}.")
            values = pd.Series(counts, dtype=float)
            row |= {name: values.mean(), f"{name}_sd": values.std()}
            if name == "rounds_to_target":
                row |= {f"{name}_missed": missed, f"{name}_shown": f"{'>' * (missed > 0)}{values.mean():.4g}"}
        rows.append(row)
    return pd.DataFrame(rows)


def _words(cell: Cell) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.fields.items()) or "the only cell"


def counted(runs: "pd.DataFrame", metric: str) -> tuple[list[float], int]:
    """Return the runs' values of a metric (a column of ``load_runs``), and how many runs missed the target.

    If the metric is ``rounds_to_target``, a run that missed the target counts with all its rounds. For other metrics,
    missing values are left out, and the number of runs that missed the target is 0.
    """
    values = [None if v is None or v != v else float(v) for v in runs[metric].tolist()] if metric in runs else []
    if metric == "rounds_to_target":
        most = runs["rounds"].tolist()
        return [float(m) if v is None else v for v, m in zip(values, most, strict=True)], values.count(None)
    return [v for v in values if v is not None], 0


def reached(runs: "pd.DataFrame") -> list[float | None]:
    """Return for each run the first round in which it reached the target, or None if it missed the target."""
    return [None if round is None or round != round else round for round in runs["rounds_to_target"].tolist()]


def until_target(runs: "pd.DataFrame") -> list[UntilTarget]:
    """Return for each run the bytes sent until it reached the target, assuming equal bytes in all rounds."""
    per_round = (runs["bytes_down"] + runs["bytes_up"]) / runs["rounds"]
    facts = zip(runs["bytes_once"], per_round, reached(runs), runs["rounds"], strict=True)
    return [
        UntilTarget(once, each, most if needed is None else needed, needed is None)
        for once, each, needed, most in facts
    ]
