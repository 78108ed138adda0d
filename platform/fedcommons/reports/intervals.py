"""Means over seeds with their 95 % Student t interval, as a report prints them, as CSV and as LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fedcommons.reports.cells import counted

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

ROUNDS = "rounds_to_target"


@dataclass(frozen=True)
class Column:
    """A number of each run. scale: what it is printed times. digits: after the point; None: three that count."""

    name: str
    head: str
    scale: float = 1.0
    digits: int | None = None

    @property
    def most(self) -> float:
        """The largest value that a run can have, as it is printed: shares are printed in percent."""
        return 100.0 if self.scale == 100 else inf


@dataclass(frozen=True)
class Line:
    """A row: the cell's number, its runs' numbers, texts of its first columns, a text and a number for each other."""

    cell: int
    runs: Sequence[int]
    first: Sequence[str]
    texts: Sequence[str]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Table:
    """heads: of the first columns. groups: titles and their lines. csv, latex: the table, a text a line.

    cut: how many of its lines are shown, where these are not all; the CSV has all.
    """

    name: str
    title: str
    note: str
    heads: Sequence[str]
    columns: Sequence[Column]
    groups: Sequence[tuple[int, str, Sequence[Line]]]
    csv: Sequence[str] = ()
    latex: Sequence[str] = ()
    tail: Sequence[str] = ()
    cut: str = ""


@cache
def quantile(n: int) -> float:
    """Of Student's t with n - 1 degrees of freedom: 97.5 %."""
    from scipy.stats import t

    return float(t.ppf(0.975, n - 1))


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % Student t interval of the mean of these, as of differences; None of fewer than two."""
    if len(values) < 2:
        return None
    half = quantile(len(values)) * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def ends(values: Sequence[float], sign: str = "") -> str:
    """``[low, high]`` of ``student``, a digit after the point; ``-`` of one value. sign: ``+``: of gains too."""
    found = student(values)
    return f"[{found[0]:{sign}.1f}, {found[1]:{sign}.1f}]" if found else "-"


def interval(values: Sequence[float], most: float = inf) -> tuple[float, float]:
    """The 95 % Student t interval of the mean of at least two values, cut off where no mean can lie.

    That is below 0, unless a value lies there, and above ``most``.
    """
    low, high = student(values) or (-inf, inf)
    return max(low, -inf if min(values) < 0 else 0.0), min(high, most)


def number(value: float, digits: int | None) -> str:
    """A number in short; page.js prints numbers alike."""
    if digits is not None:
        return f"{value:.{digits}f}"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):.15g}"
    return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].replace('+', '')}{found[2]}", f"{value:.2e}")


def text(values: Sequence[float], column: Column) -> str:
    """``83.9 (80.7 to 87.1)``: mean and interval; the value alone where there is one; ``-`` where there is none."""
    if not values:
        return "-"
    scaled = [column.scale * value for value in values]
    mean = number(fmean(scaled), column.digits)
    if len(scaled) == 1:
        return mean
    low, high = (number(end, column.digits) for end in interval(scaled, column.most))
    return mean if low == high else f"{mean} ({low} to {high})"


def text_of_rounds(reached: Sequence[float], missed: int, column: Column) -> str:
    """The same of rounds to the target; where a seed missed it there is no interval, and it is said."""
    if not missed:
        return text(reached, column)
    said = f"missed by {missed} of {missed + len(reached)}"
    return f"{said}, else {number(fmean(reached), column.digits)}" if reached else said


def of_runs(finished: "pd.DataFrame", column: Column) -> tuple[str, float | None]:
    """The text of a cell's finished runs, and the number that it is sorted by: missed targets count with all rounds."""
    values, missed = counted(finished, column.name)
    if column.name != ROUNDS:
        return text(values, column), fmean(values) if values else None
    if "last_accuracy" in finished and finished["last_accuracy"].dropna().empty and missed == len(values):
        return "-", None  # no model has an accuracy
    reached = [float(v) for v in finished[ROUNDS].dropna().tolist()]
    return text_of_rounds(reached, missed, column), fmean(values) if values else None


def frame(table: Table, finished: "Sequence[pd.DataFrame]") -> "pd.DataFrame":
    """The table's numbers: the columns that it has, seeds, and of each number mean, ends of its interval and missed.

    finished: by cell, its finished runs.
    """
    import pandas as pd

    rows = []
    for _, title, lines in table.groups:
        for line in lines:
            row: dict[str, object] = {"group": title, **dict(zip(table.heads, line.first, strict=True))}
            row["seeds"] = len(finished[line.cell])
            for column in table.columns:
                values, missed = counted(finished[line.cell], column.name)
                ends = interval(values, column.most / column.scale) if len(values) > 1 and not missed else (None, None)
                row[column.name] = fmean(values) if values else None
                row |= {f"{column.name}_low": ends[0], f"{column.name}_high": ends[1]}
                if column.name == ROUNDS:
                    row[f"{ROUNDS}_missed"] = missed
            rows.append(row)
    return pd.DataFrame(rows)


def latex(heads: Sequence[str], rows: Sequence[Sequence[object]], left: int) -> tuple[list[str], list[str]]:
    """A table in LaTeX, by pandas: its head and a line a row, and what ends it. left: columns that are no numbers."""
    import pandas as pd

    style = pd.DataFrame(rows, columns=pd.Index(heads)).style.hide(axis="index")
    style.format(escape="latex")
    lines = style.to_latex(hrules=True, column_format="l" * left + "r" * (len(heads) - left)).splitlines()
    end = lines.index(r"\midrule") + 1 + len(rows)
    return lines[:end], lines[end:]
