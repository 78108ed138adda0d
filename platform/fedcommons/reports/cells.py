"""Configurations of a table: sets of runs that differ only in the seed (``Cell``), and their means over seeds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcommons.config.dotted import common_fields, is_ignored
from fedcommons.core.communication import UntilTarget
from fedcommons.errors import UserError, quote, unknown
from fedcommons.reports.intervals import format_rounds

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

ENVIRONMENT = ("data.", "partition.", "straggler.", "federation.participation", "target", "evaluate.new_clients")
"""Prefixes of config fields that describe data and federation; results are only ranked if these fields are equal."""

IDENTIFYING = {
    "data.name": "data set", "partition.n_clients": "N", "federation.participation": "C", "partition.alpha": "alpha",
    "algorithm": "algorithm", "sharing.setting": "setting",
}  # fmt: skip
"""Config fields with a column in every table, each with its title. Their columns are left of other varying fields."""

ROUNDS = "rounds_to_target"
"""A column of ``load_runs``: the first round in which the run reached its target; missing if the run missed it."""


def plain(value: Any) -> Any:
    """Return the value, or None if it is nan, which marks a missing value in pandas and is not equal to itself."""
    return None if value is None or value != value else value


def values(runs: "pd.DataFrame", name: str) -> list[Any]:
    """Return each run's value in a column, None where it is missing; all None if there is no such column."""
    return [plain(value) for value in runs[name].tolist()] if name in runs else [None] * len(runs)


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
    names = [n for n in names if n != "seed" and not is_ignored(n)]
    return [*(n for n in IDENTIFYING if n in names), *(n for n in names if n not in IDENTIFYING)]


def varied(runs: "pd.DataFrame") -> list[str]:
    """Return the config fields in which runs differ, except a field that is a function of earlier returned fields."""
    varying: dict[str, list[Any]] = {}
    for name in fields(runs):
        column = values(runs, name)
        earlier = list(zip(*varying.values(), strict=True)) or [()] * len(runs)
        if len({*zip(earlier, column, strict=True)}) > len({*earlier}):
            varying[name] = column
    return [*varying]


def drop_duplicates(runs: "pd.DataFrame", say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Return the frame with only the first run of each experiment and seed; ``say`` is called for each dropped run."""
    first = runs.groupby(["seed", *fields(runs)], dropna=False, sort=False)["run"].transform("first")
    for run, original in zip(runs["run"], first, strict=True):
        if run != original:
            say(f"left out: {run} is the same experiment as {original}.")
    return runs.loc[runs["run"] == first, :]


def cells(runs: "pd.DataFrame") -> list[Cell]:
    """Return the configurations of these runs, in the order of their first runs; seeds are in rising order."""
    if not (names := varied(runs)):
        return [Cell({}, runs.sort_values("seed"))]
    groups = (group for _, group in runs.groupby(names, dropna=False, sort=False))
    return [Cell({n: group[n].iloc[0] for n in names}, group.sort_values("seed")) for group in groups]


def means(runs: "pd.DataFrame", columns: str | Iterable[str], say: Callable[[str], None] = print) -> "pd.DataFrame":
    """Return a frame of means over seeds, with one row per configuration (runs that differ only in the seed).

    A row has the varying fields, ``seeds`` (number of seeds), and for each of the ``columns`` the mean (``NAME``) and
    the sample standard deviation (``NAME_sd``). Only finished runs count, and duplicates are left out. In
    ``rounds_to_target`` a seed that missed the target counts with all its rounds. ``rounds_to_target_missed`` is the
    number of seeds that missed it. The text ``rounds_to_target_shown`` is the mean as in tables: ``>6 (missed by 1 of
    3)`` if a seed missed it.

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
    names: list[Any] = [*columns] if isinstance(columns, Iterable) and not isinstance(columns, str) else [columns]
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"means takes names of columns, got {quote(columns)}.")
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
                where = ", ".join(f"{field} {value}" for field, value in cell.fields.items()) or "the only cell"
                say(f"left out: {name} is missing in {seeds - len(counts)} of {seeds} seeds of {where}.")
            numbers = pd.Series(counts, dtype=float)
            row |= {name: numbers.mean(), f"{name}_sd": numbers.std()}
            if name == ROUNDS:
                row |= {f"{name}_missed": missed, f"{name}_shown": format_rounds(counts, missed)}
        rows.append(row)
    return pd.DataFrame(rows)


def counted(runs: "pd.DataFrame", metric: str) -> tuple[list[float], int]:
    """Return the runs' values of a metric (a column of ``load_runs``), and how many runs missed the target.

    If the metric is ``rounds_to_target``, a run that missed the target counts with all its rounds. For other metrics,
    missing values are left out, and the number of runs that missed the target is 0.
    """
    numbers = values(runs, metric)
    if metric == ROUNDS:
        rounds = runs["rounds"].tolist()
        return [float(r if v is None else v) for v, r in zip(numbers, rounds, strict=True)], numbers.count(None)
    return [float(v) for v in numbers if v is not None], 0


def reached(runs: "pd.DataFrame") -> list[float | None]:
    """Return for each run the first round in which it reached the target, or None if it missed the target."""
    return values(runs, ROUNDS)


def until_target(runs: "pd.DataFrame") -> list[UntilTarget]:
    """Return for each run the bytes sent until it reached the target, assuming equal bytes in all rounds."""
    per_round = (runs["bytes_down"] + runs["bytes_up"]) / runs["rounds"]
    facts = zip(runs["bytes_once"], per_round, counted(runs, ROUNDS)[0], reached(runs), strict=True)
    return [UntilTarget(once, each, rounds, at is None) for once, each, rounds, at in facts]
