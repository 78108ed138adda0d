"""The content of a report page: values for the HTML template, and data for the page's script, page.js."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.reports import cell_tables, charts, columns, details, intervals, tables
from fedcommons.reports.collect import WHO, RunFacts
from fedcommons.reports.groups import grouped, plain
from fedcommons.reports.intervals import Column

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

POINTS = 60_000
"""Maximum number of points of all curves together. If there are more points, only every k-th round is drawn."""

COMMANDS = 200
"""Maximum number of runs whose commands the page shows."""

_WORDS = {
    "dataset": "data set",
    "algorithm": "method",
    "setting": "setting",
    "alpha": "alpha",
    "p": "p",
    "seed": "seed",
}
_ALWAYS = (Column("rounds", "rounds", digits=0), Column("validation_accuracy", "validation accuracy, %", 100, 1))


def contents(runs: "pd.DataFrame", run_facts: Sequence[RunFacts], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the values of the template's variables for these runs; ``data`` is the content for page.js."""
    runs = _with_numbers(runs)
    groups = grouped(runs, say)
    all_cells = [cell for group in groups for cell in group.cells]
    numbers = [[int(n) for n in cell.runs.index] for cell in all_cells]
    number_tables = cell_tables.build_tables(groups, numbers)
    all_columns = dict.fromkeys([*_ALWAYS, *(column for table in number_tables for column in table.columns)])
    shown_columns = [column for column in all_columns if column.name in runs]
    rows = _rows(runs, shown_columns)
    dims = _dims(runs)
    partitions, n_partitions = details.partitions(runs, say)
    pools, n_pools = details.pools(runs)
    privacy, trouble = details.privacy(groups, run_facts)[: cell_tables.SHOWN], details.trouble(runs, run_facts)
    files = {"runs": _files(runs)}
    if privacy:
        statements = [
            [item["group"], item["cell"], item["epsilon"], details.join_statements(item["words"])] for item in privacy
        ]
        files["privacy"] = _files_of_texts(("group", "runs", "epsilon of the commons", "statement"), statements)
    if trouble:
        late = [[rows[item["run"]]["name"], item["late"], item["lost"], item["rejected"]] for item in trouble]
        files["late"] = _files_of_texts(("run", "replies late", "MB for nothing", "rejected"), late)
    thinned, every = thin([item.curve for item in run_facts])
    data = {
        "runs": [
            {"f": [dim["of"][n] for dim in dims], "s": runs["status"].iloc[n], "n": Path(runs["run"].iloc[n]).name,
             "seed": str(runs["seed"].iloc[n])} for n in range(len(runs))
        ],
        "cells": [
            {"g": g, "name": details.name(cell), "colour": columns.method(cell), "dash": columns.setting(cell)}
            for g, group in enumerate(groups) for cell in group.cells
        ],
        "ofCell": numbers,
        "columns": [{"name": c.name, "scale": c.scale, "digits": c.digits} for c in shown_columns],
        "quantiles": [intervals.quantile(n) for n in range(2, 1 + max(map(len, numbers), default=1))],
        "curves": thinned,
        "specs": charts.specifications(),
        "files": {t.name: {"csv": t.csv, "latex": t.latex, "tail": t.tail} for t in number_tables} | files,
    }  # fmt: skip
    return {
        "data": data, "tables": {table.name: table for table in number_tables}, "groups": groups,
        "sweeps": details.sweeps(runs), "dims": dims, "rows": rows, "columns": shown_columns, "every": every,
        "privacy": privacy, "trouble": trouble, "pools": pools,
        "n_pools": n_pools, "partitions": partitions, "n_partitions": n_partitions,
        "environments": details.environments(run_facts), "who": [_WORDS[name] for name in WHO],
        "finished": {n for n, status in enumerate(runs["status"]) if status == "finished"},
        "commands": [details.command(item.folder) for item in run_facts[:COMMANDS]],
    }  # fmt: skip


def _with_numbers(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Return the frame with nan in place of texts in number columns, because a summary can be edited by hand."""
    import pandas as pd

    names = [name for name in runs if name in cell_tables.NUMBERS or str(name).startswith(("clients/", "personal/"))]
    return runs.assign(**{str(name): pd.to_numeric(runs[name], errors="coerce") for name in names})


def thin(curves: Sequence[Mapping[str, Sequence[float | None]]]) -> tuple[list[list[list[float | None]]], int]:
    """Return the curves with only every k-th round and the last round of each run, and k.

    k is the smallest number with which all curves together have at most about ``POINTS`` points. A returned curve
    consists of four lists: rounds, accuracies, losses and MB, rounded to five significant digits.
    """
    every = -(-sum(len(curve["round"]) for curve in curves) // POINTS) or 1
    thinned = []
    for curve in curves:
        rounds = curve["round"]
        indices = [i for i, r in enumerate(rounds) if i == len(rounds) - 1 or (r is not None and r % every == 0)]
        lists = [[curve[name][i] for i in indices] for name in ("round", "accuracy", "loss", "bytes")]
        thinned.append([[None if v is None else float(f"{v:.5g}") for v in numbers] for numbers in lists])
    return thinned, every


def _rows(runs: "pd.DataFrame", shown_columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return one row per run of the page's table of runs; a number is two texts: all digits, and rounded."""
    values = [runs[column.name].tolist() for column in shown_columns]
    who = [[columns.text(plain(v), name) for v in runs[name].tolist()] for name in WHO]
    who[WHO.index("p")] = [f"{p:.3g}" if p else "-" for p in map(plain, runs["p"].tolist())]
    rows = []
    for n, (run, status) in enumerate(zip(runs["run"], runs["status"], strict=True)):
        numbers = []
        for column, column_values in zip(shown_columns, values, strict=True):
            value = plain(column_values[n])
            digits = 0 if column.name == intervals.ROUNDS else column.digits
            text = "" if value is None else intervals.number(column.scale * value, digits)
            numbers.append(("" if value is None else repr(value), text))
        name = Path(run).name
        rows.append({"name": name, "folder": run, "status": status, "who": [w[n] for w in who], "numbers": numbers})
    return rows


def _dims(runs: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the page's filters, one for each column of ``WHO`` that has several values.

    ``values``: the texts of the values. ``of``: for each run, the index of its value in ``values``.
    """
    filters = []
    for name in WHO:
        values_of = [plain(value) for value in runs[name].tolist()]
        if name == "p":  # the resulting share differs slightly between seeds, so it is rounded
            values_of = [value if value is None else round(value, 2) for value in values_of]
        values = sorted(dict.fromkeys(values_of), key=_order)
        if len(values) > 1:
            place = {value: i for i, value in enumerate(values)}
            filters.append(
                {
                    "name": _WORDS[name],
                    "values": [columns.text(v, name) for v in values],
                    "of": [place[v] for v in values_of],
                }
            )
    return filters


def _order(value: Any) -> tuple[int, Any]:
    """Return a sort key: numbers first, then texts, None last; the alpha of a user-defined partition can be a text."""
    is_number = isinstance(value, int | float)
    return (0, value) if is_number else (2, "") if value is None else (1, str(value))


def _files(runs: "pd.DataFrame") -> dict[str, Sequence[str]]:
    """Return the runs as lines of CSV with all columns, and as lines of LaTeX with the columns ``tables.RUN``."""
    csv = _csv(runs)
    if len(runs) > cell_tables.LATEX:
        return {"csv": csv, "latex": (), "tail": ()}
    part = runs[[name for name in tables.RUN if name in runs]]
    rows = [
        [columns.text(plain(v), name) for v, name in zip(row, part, strict=True)]
        for row in part.itertuples(index=False)
    ]
    lines, tail = intervals.latex([name.replace("_", r"\_") for name in part], rows, len(part.columns))
    return {"csv": csv, "latex": lines, "tail": tail}


def _files_of_texts(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, Sequence[str]]:
    """Return a table of texts as lines of CSV and of LaTeX, for the page's download buttons. heads: titles."""
    import pandas as pd

    lines, tail = intervals.latex(heads, [[str(value) for value in row] for row in rows], len(heads))
    return {"csv": _csv(pd.DataFrame(rows, columns=pd.Index(heads))), "latex": lines, "tail": tail}


def _csv(frame: "pd.DataFrame") -> list[str]:
    lines = frame.to_csv(index=False, lineterminator="\n").splitlines()
    if len(lines) != 1 + len(frame):  # a text has a line break, which user-defined trackers can write into a summary
        lines = frame.replace(r"[\r\n]+", " ", regex=True).to_csv(index=False, lineterminator="\n").splitlines()
    return lines
