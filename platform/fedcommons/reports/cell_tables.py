"""Tables of a report on accuracy, bytes and convergence parameters, with one line per configuration (``Cell``)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedcommons.reports import columns, intervals
from fedcommons.reports.cells import ENVIRONMENT, Cell
from fedcommons.reports.groups import Group
from fedcommons.reports.intervals import Column, Line, Table
from fedcommons.reports.series import value

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

RESULTS = (
    Column(intervals.ROUNDS, "rounds to target", digits=1),
    Column("last_accuracy", "last accuracy, %", 100, 1),
    Column("best_accuracy", "best accuracy, %", 100, 1),
    Column("MB", "MB exchanged"),
    Column("bytes_once", "MB exchanged once (shared data)", 1e-6),
    Column("disclosed", "disclosed, % of examples", 100, 1),
    Column("test/loss", "last test loss"),
)
BYTES = (
    Column("bytes_down", "MB to clients", 1e-6),
    Column("bytes_up", "MB from clients", 1e-6),
    Column("bytes_once", "MB of shared data, once", 1e-6),
    Column("bytes_lost", "MB to stragglers without a reply", 1e-6),
)
CONVERGENCE = (
    Column("zeta_sq", "ζ², own data"),
    Column("zeta_hat_sq", "ζ̂², training data"),
    Column("zeta_mix_sq", "ζ², exact mixtures"),
    Column("zeta_lemma1_sq", "ζ² by Lemma 1"),
    Column("sigma_sq", "σ², own data"),
    Column("sigma_hat_sq", "σ̂², training data"),
    Column("sigma_mix_sq", "σ², exact mixtures"),
    Column("sigma_lemma1_sq", "σ² by Lemma 1"),
    Column("delta_sq", "δ², shift of the pool"),
    Column("L_max", "L, own data, largest"),
    Column("L_p", "L, training data"),
    Column("L_lemma1", "L, bound of Lemma 1"),
)
NUMBERS = {column.name for column in (*RESULTS, *BYTES, *CONVERGENCE)}

_LATEX = {"ζ̂²": r"$\hat\zeta^2$", "ζ²": r"$\zeta^2$", "σ̂²": r"$\hat\sigma^2$", "σ²": r"$\sigma^2$", "δ²": r"$\delta^2$"}

SHOWN, LATEX = 1000, 500
"""Maximum number of lines of a table on the page (``SHOWN``), and of a table that has LaTeX code (``LATEX``)."""

INTERVALS = (
    "Numbers are means over the seeds of finished runs, with the 95 % Student t interval of the mean in brackets, cut "
    "off at 0 and 100 %. If seeds missed the target, the rounds to the target are the mean over the seeds that "
    "reached it, without an interval. A number without brackets comes from one seed, or is equal for all seeds."
)


def build_tables(groups: Sequence[Group], numbers: Sequence[Sequence[int]]) -> list[Table]:
    """Return the tables in which a configuration has a value. numbers: indices of the runs of each configuration."""
    all_cells = [cell for group in groups for cell in group.cells]
    finished = [cell.runs.loc[cell.runs["status"] == "finished", :] for cell in all_cells]
    more = tuple(Column(name, head, 100, 1) for name, head in columns.of_clients(all_cells))
    texts = {
        "results": ("Results", INTERVALS, (*RESULTS, *more)),
        "bytes": ("Bytes", "Bytes of all messages of all clients and rounds; an MB has 10⁶ bytes.", BYTES),
        "convergence": (
            "Convergence parameters and their bounds",
            "Measured at the server model, in the last round with a measurement. Lemma 1 of Fedssyn gives ζ² and σ² of "
            "exact mixtures of own data and the whole pool, and an upper bound of L. For the data on which clients "
            "train, ζ̂² and σ̂² are only roughly equal to these values.",
            CONVERGENCE,
        ),
    }
    tables = []
    for name, (title, note, candidates) in texts.items():
        with_values = [column for column in candidates if any(cell.values(column.name) for cell in all_cells)]
        if name == "results" and intervals.ROUNDS not in [column.name for column in with_values]:
            with_values = [RESULTS[0], *with_values]  # all runs missed the target, which the table must show
        if with_values:
            whole = _filled(Table(name, title, note, [], with_values, []), groups, numbers, finished)
            tables.append(_cut(_with_files(whole, finished)))
    return tables


def _filled(
    empty: Table, groups: Sequence[Group], numbers: Sequence[Sequence[int]], finished: "Sequence[pd.DataFrame]"
) -> Table:
    """Return the table with one line per configuration; only the first ``SHOWN`` lines have numbers in columns."""
    heads, firsts = first_columns([cell for group in groups for cell in group.cells])
    place, filled = 0, []
    for number, group in enumerate(groups):
        lines = []
        for _ in group.cells:
            pairs = [intervals.of_runs(finished[place], column) for column in empty.columns] if place < SHOWN else []
            lines.append(Line(place, numbers[place], firsts[place], [t for t, _ in pairs], [v for _, v in pairs]))
            place += 1
        filled.append((number, group.title, lines))
    return replace(empty, heads=heads, groups=filled)


def _cut(table: Table) -> Table:
    """Return the table with only the first ``SHOWN`` lines, which the page shows."""
    shown_groups = [(n, title, [line for line in lines if line.cell < SHOWN]) for n, title, lines in table.groups]
    count = sum(len(lines) for _, _, lines in table.groups)
    cut = f"Shown: the first {SHOWN:,} of {count:,} lines. The CSV has all." if count > SHOWN else ""
    return replace(table, groups=[group for group in shown_groups if group[2]], cut=cut)


def first_columns(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return titles and texts of the first columns, which distinguish the configurations of a group.

    The columns are the algorithm, the sharing strategy, the varying fields, and p (share of received examples). Fields
    of ``ENVIRONMENT`` are left out, because the group's title has these fields.
    """
    varied = dict.fromkeys(name for cell in cells for name in columns.others(cell) if not name.startswith(ENVIRONMENT))
    names = ["algorithm", "sharing.setting", *varied, *([] if "sharing.p" in varied else ["p"])]
    heads = ["method", *map(columns.head, names[1:])]
    return heads, [[_first(cell, name) for name in names] for cell in cells]


def _first(cell: Cell, name: str) -> str:
    field_value = value(cell, name)
    if name == "p":  # the share of received examples in the clients' training data
        return f"{field_value:.2f}" if field_value else "-"
    return columns.text(field_value, name)


def _with_files(table: Table, finished: "Sequence[pd.DataFrame]") -> Table:
    """Return the table with CSV and LaTeX code, as lists of lines: first the head, then one line per table line."""
    csv = intervals.frame(table, finished).to_csv(index=False, lineterminator="\n").splitlines()
    every = [(title, line) for _, title, lines in table.groups for line in lines]
    if len(every) > LATEX:
        return replace(table, csv=csv)
    many = len(table.groups) > 1  # with several groups, the first column is the group's title
    first = [*(["group"] if many else []), *table.heads]
    heads = [*first, "seeds", *(column.head for column in table.columns)]
    rows = [
        [*([title] if many else []), *line.first, str(len(finished[line.cell])), *line.texts] for title, line in every
    ]
    latex, tail = intervals.latex([_latex(head) for head in heads], rows, len(first))
    return replace(table, csv=csv, latex=latex, tail=tail)


def _latex(head: str) -> str:
    for symbol, formula in _LATEX.items():
        head = head.replace(symbol, formula)
    return head.replace("%", r"\%").replace("_", r"\_")
