"""Means over seeds with 95 % Student t intervals, as texts of a report, as CSV and as LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fedcommons.reports.cells import counted

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

ROUNDS = "rounds_to_target"


@dataclass(frozen=True)
class Column:
    """A number column of a report's table.

    name: column of ``load_runs``. head: title. scale: factor by which values are multiplied for printing. digits:
    number of decimals; None: three significant digits.
    """

    name: str
    head: str
    scale: float = 1.0
    digits: int | None = None

    @property
    def most(self) -> float:
        """The largest possible printed value: 100 for shares, which are printed in percent, otherwise inf."""
        return 100.0 if self.scale == 100 else inf


@dataclass(frozen=True)
class Line:
    """A line of a table, for one configuration.

    cell: number of the configuration. runs: indices of the configuration's runs. first: texts of the first columns.
    texts, values: printed text of each number column, and the value by which the page sorts lines; None: no value.
    """

    cell: int
    runs: Sequence[int]
    first: Sequence[str]
    texts: Sequence[str]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Table:
    """A table of a report.

    note: text above the table. heads: titles of the first columns. groups: number, title and lines of each group.
    csv, latex: lines of the CSV and LaTeX code. tail: last lines of the LaTeX code. cut: a sentence with the number of
    lines that the page shows, empty if it shows all lines. The CSV always has all lines.
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
    """Return the 97.5 % quantile of Student's t distribution with n - 1 degrees of freedom. n: number of values."""
    from scipy.stats import t

    return float(t.ppf(0.975, n - 1))


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Return (low, high), the 95 % Student t interval of the values' mean, or None for fewer than two values."""
    if len(values) < 2:
        return None
    half = quantile(len(values)) * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def ends(values: Sequence[float], sign: str = "") -> str:
    """Format the interval of ``student`` as ``[low, high]``; ``-`` for one value. sign: ``+`` prints plus signs."""
    limits = student(values)
    return f"[{limits[0]:{sign}.1f}, {limits[1]:{sign}.1f}]" if limits else "-"


def interval(values: Sequence[float], most: float = inf) -> tuple[float, float]:
    """Return (low, high), the 95 % Student t interval of the mean of at least two values.

    The interval is cut off at ``most``, the largest possible value. It is also cut off at 0 if no value is negative.
    """
    low, high = student(values) or (-inf, inf)
    return max(low, -inf if min(values) < 0 else 0.0), min(high, most)


def number(value: float, digits: int | None) -> str:
    """Format a number as page.js formats it. digits: number of decimals; None: three significant digits."""
    if digits is not None:
        return f"{value:.{digits}f}"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):.15g}"
    return re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", f"{value:.2e}")


def text(values: Sequence[float], column: Column) -> str:
    """Format mean and 95 % interval as ``83.9 (80.7 to 87.1)``; one value: no interval; no value: ``-``."""
    if not values:
        return "-"
    scaled = [column.scale * value for value in values]
    mean = number(fmean(scaled), column.digits)
    if len(scaled) == 1:
        return mean
    low, high = (number(end, column.digits) for end in interval(scaled, column.most))
    return mean if low == high else f"{mean} ({low} to {high})"


def text_of_rounds(reached: Sequence[float], missed: int, column: Column) -> str:
    """Format rounds to the target as ``text`` does, or as ``missed by 1 of 3, else 11.0`` if seeds missed the target.

    reached: rounds of the seeds that reached the target; the printed mean is over these seeds.
    """
    if not missed:
        return text(reached, column)
    note = f"missed by {missed} of {missed + len(reached)}"
    return f"{note}, else {number(fmean(reached), column.digits)}" if reached else note


def of_runs(finished: "pd.DataFrame", column: Column) -> tuple[str, float | None]:
    """Return the text of a configuration's finished runs in a column, and the mean, by which the page sorts lines.

    In the mean of rounds to the target, a run that missed the target counts with all its rounds.
    """
    values, missed = counted(finished, column.name)
    if column.name != ROUNDS:
        return text(values, column), fmean(values) if values else None
    if "last_accuracy" in finished and finished["last_accuracy"].dropna().empty and missed == len(values):
        return "-", None  # without an accuracy no run can reach a target
    reached = [float(v) for v in finished[ROUNDS].dropna().tolist()]
    return text_of_rounds(reached, missed, column), fmean(values) if values else None


def frame(table: Table, finished: "Sequence[pd.DataFrame]") -> "pd.DataFrame":
    """Return the table as a frame: first columns, number of seeds, and mean and interval ends of each number column.

    After the rounds to the target, a column counts the seeds that missed the target. finished: the finished runs of
    each configuration.
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


def latex(heads: Sequence[str], rows: Sequence[Sequence[object]], n_left: int) -> tuple[list[str], list[str]]:
    """Return two lists of LaTeX lines: head and rows, and the last lines. n_left: number of left-aligned columns."""
    import pandas as pd

    style = pd.DataFrame(rows, columns=pd.Index(heads)).style.hide(axis="index")
    style.format(escape="latex")
    lines = style.to_latex(hrules=True, column_format="l" * n_left + "r" * (len(heads) - n_left)).splitlines()
    end = lines.index(r"\midrule") + 1 + len(rows)
    return lines[:end], lines[end:]
