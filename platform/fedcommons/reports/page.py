"""The report on run folders: a single HTML file that loads nothing from the network.

The file has a Content-Security-Policy, so a browser runs only the file's scripts, identified by their hashes, and loads
no other files. Names and texts of runs can come from other users, so Jinja2 escapes them, or they are encoded as JSON.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.errors import UserError, clean, quote
from fedcommons.reports import charts, columns, details
from fedcommons.reports.cell_tables import NUMBERS, ROWS, build_tables, first_columns, table_files
from fedcommons.reports.cells import ROUNDS, values
from fedcommons.reports.collect import WHO, RunFacts, gather, grouped
from fedcommons.reports.frames import folder_path, load_central
from fedcommons.reports.intervals import number, quantile
from fedcommons.reports.series import looks
from fedcommons.reports.tables import RUN, Column, verdict
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_text

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

POINTS, COMMANDS = 60_000, 200
"""Maximum number of points of all curves (with more, only every k-th round is drawn), and of commands on the page."""

_WORDS = {"dataset": "data set", "algorithm": "method"}
"""Titles of the columns ``WHO`` on the page; other columns keep their names."""

_ALWAYS = (Column("rounds", "rounds", digits=0), Column("validation_accuracy", "validation accuracy, %", 100, 1))

MARK = "<!doctype html><!-- fedcommons report -->"
"""Beginning of each report. An existing file with another beginning is never overwritten."""

HERE = Path(__file__).parent / "template"


def report(
    *folders: str | Path, out: str | Path = "report.html", title: str | None = None, say: Callable[[str], None] = print
) -> Path:
    """Write a report (tables, curves, privacy, partitions, commands) on the runs in these folders and return its path.

    Runs with different data, partitions, federations or targets are in different groups and are never averaged.

    Args:
        folders: run folders, or folders with run folders at any depth.
        out: path of the HTML file to write; an earlier report is replaced.
        title: title of the page; None: the names of the folders.
        say: called with a message on each run that cannot be read, with the reason. The report has these messages too.

    Raises:
        UserError: a folder does not exist or holds no run, no run can be read, ``out`` cannot be written, or ``out``
            is an existing file that is not a report.
    """
    path = folder_path(out)
    write(path, [folder_path(folder) for folder in folders], title, say)
    return path


def write(path: Path, folders: Sequence[Path], title: str | None, say: Callable[[str], None]) -> str:
    """Write the report to ``path`` and return its verdict; arguments and errors: see ``report``."""
    require_place(path)
    context = read(folders, title, say)
    try:
        write_text(path, _html(context))
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from None
    return context["verdict"]


def require_place(path: Path) -> None:
    """Raise a UserError, before a report is computed, if it cannot be written to ``path`` or would replace a file."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out names an HTML file such as report.html, got {quote(str(path))}.")
    try:
        if path.is_dir():
            raise UserError(f"--out: {path} is a folder; name a file in it, such as {path / 'report.html'}.")
        if not path.parent.is_dir():
            raise UserError(f"--out: there is no folder {path.parent}; create it first.")
        head = safe_read.content(path, safe_read.LARGEST_JSON, inner=0)
    except safe_read.UnreadableError as error:
        raise UserError(f"--out: {error}; name another file.") from None
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from None
    if head is not None and not head.startswith(MARK.encode()):
        raise UserError(f"--out: {path} is no report of fedcommons, so it is not overwritten; name another file.")


def page(folders: Sequence[Path], title: str | None, say: Callable[[str], None] = print, state: str = "") -> str:
    """Return the HTML of the report. state: hash of a live report's files; the page reloads when the hash changes."""
    return _html({**read(folders, title, say), "state": state})


def read(folders: Sequence[Path], title: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the values of the template's variables for the runs in these folders."""
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        say(text)

    if not folders:
        raise UserError("name at least one folder with runs.")
    runs, facts_of_runs = gather(folders, tell)
    if runs.empty:
        raise UserError(f"none of the runs in {', '.join(map(str, folders))} can be read.")
    for folder in folders:
        if central := len(load_central(*sorted(folder.glob("central_*")))):
            tell(f"left out: {central} central models in {folder}, which no federation trained; see the tables there.")
    context = contents(runs, facts_of_runs, tell)
    name = title or f"fedcommons report: {', '.join(folder.name or str(folder) for folder in folders)}"
    return {**context, "title": clean(name), "notes": notes, "state": ""}


def _html(context: Mapping[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    scripts = [charts.vega(), (HERE / "page.js").read_text(encoding="utf-8")]
    if any("</script" in script.lower() for script in scripts):
        raise RuntimeError("a script of the page would end where it says </script")
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    policy = (
        f"default-src 'none'; script-src {' '.join(digests)}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src '{'self' if context['state'] else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return MARK + environment.get_template("page.html").render(
        context,
        json=Markup(json.dumps(context["data"], allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
        scripts=[Markup(script) for script in scripts],
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        policy=Markup(policy),
        when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=version("fedcommons"),
    )


def contents(runs: "pd.DataFrame", run_facts: Sequence[RunFacts], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the values of the template's variables for these runs; ``data`` is the content for page.js."""
    import pandas as pd

    names = [name for name in map(str, runs) if name in NUMBERS or name.startswith(("clients/", "personal/", "new/"))]
    # A summary can be edited by hand, so a text can stand in a column of numbers.
    runs = runs.assign(**{name: pd.to_numeric(runs[name], errors="coerce") for name in names})
    groups = grouped(runs, say)
    cells = [(number, cell) for number, group in enumerate(groups) for cell in group.cells]
    numbers = [[int(n) for n in cell.runs.index] for _, cell in cells]
    first = first_columns([cell for _, cell in cells])
    tables = build_tables(groups, first)
    every_column = dict.fromkeys([*_ALWAYS, *(column for table in tables for column in table.columns)])
    run_columns = [column for column in every_column if column.name in runs]
    rows, dims = _rows(runs, run_columns), _dims(runs)
    partitions, n_partitions = details.partitions(runs, say)
    pools, n_pools = details.pools(runs)
    privacy, trouble = details.privacy(groups, run_facts)[:ROWS], details.trouble(runs, run_facts)
    files = {table.name: table.files for table in tables}
    texts = {name: [columns.text(value, name) for value in values(runs, name)] for name in RUN if name in runs}
    files["runs"] = table_files(runs, pd.DataFrame(texts))
    if privacy:
        frame = pd.DataFrame(privacy).assign(words=[" / ".join(map(" ".join, item["words"])) for item in privacy])
        titles = {"group": "group", "cell": "runs", "epsilon": "epsilon of the commons", "words": "statement"}
        files["privacy"] = table_files(frame.loc[:, [*titles]].rename(columns=titles))
    if trouble:
        frame = pd.DataFrame(trouble).astype(str).assign(run=[rows[item["run"]]["name"] for item in trouble])
        titles = {"run": "run", "late": "replies late", "lost": "MB for nothing", "rejected": "rejected"}
        files["late"] = table_files(frame.loc[:, [*titles]].rename(columns=titles))
    timed = {n for n, item in enumerate(run_facts) if {*item.curve["time"]} - {None}}
    thinned, every = thin([item.curve for item in run_facts])
    data = {
        "runs": [
            {"f": [dim["of"][n] for dim in dims], "s": status, "n": rows[n]["name"], "seed": str(seed)}
            for n, (status, seed) in enumerate(zip(runs["status"], runs["seed"], strict=True))
        ],
        "cells": [
            {"g": group, "name": details.name(cell), "colour": columns.method(cell), "dash": columns.setting(cell)}
            for group, cell in cells
        ],
        "looks": {
            field: {name: look[0] for name, look in looks((label(cell) for _, cell in cells), by_colour=True).items()}
            for field, label in (("colour", columns.method), ("dash", columns.setting))
        },
        "ofCell": numbers,
        "columns": [{"name": c.name, "scale": c.scale, "digits": c.digits} for c in run_columns],
        "quantiles": [quantile(n) for n in range(2, 1 + max(map(len, numbers), default=1))],
        "curves": thinned,
        "specs": charts.specifications(),
        "files": files,
    }
    return {
        "data": data, "timed": {group for group, cell in cells if timed & {*cell.runs.index}},
        "verdict": verdict(group.cells for group in groups),
        "tables": {table.name: table for table in tables}, "groups": groups,
        "heads": [*first], "first": first.to_numpy().tolist(), "max_rows": ROWS, "n_cells": len(cells),
        "sweeps": details.sweeps(runs), "dims": dims, "rows": rows, "columns": run_columns, "every": every,
        "privacy": privacy, "trouble": trouble, "pools": pools,
        "n_pools": n_pools, "partitions": partitions, "n_partitions": n_partitions,
        "environments": details.environments(run_facts), "who": [_WORDS.get(name, name) for name in WHO],
        "finished": {n for n, status in enumerate(runs["status"]) if status == "finished"},
        "commands": [details.command(item.folder) for item in run_facts[:COMMANDS]],
    }  # fmt: skip


def thin(curves: Sequence[Mapping[str, Sequence[float | None]]]) -> tuple[list[list[list[float | None]]], int]:
    """Return shortened curves (every k-th round, and the last round) with about ``POINTS`` points in all, and k."""
    every = -(-sum(len(curve["round"]) for curve in curves) // POINTS) or 1
    thinned = []
    for curve in curves:
        *_, last = curve["round"] or [None]
        is_kept = [r == last or (r is not None and r % every == 0) for r in curve["round"]]
        lists = (compress(curve[name], is_kept) for name in ("round", "accuracy", "loss", "bytes", "time"))
        thinned.append([[None if v is None else float(f"{v:.5g}") for v in numbers] for numbers in lists])
    return thinned, every


def _rows(runs: "pd.DataFrame", run_columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the rows of the page's table of runs. Each number is a pair of texts: all digits, and rounded."""
    who = [[columns.text(value, name) for value in values(runs, name)] for name in WHO]
    who[WHO.index("p")] = [f"{p:.3g}" if p else "-" for p in values(runs, "p")]
    numbers = [
        [("", "") if v is None else (repr(v), number(c.scale * v, 0 if c.name == ROUNDS else c.digits)) for v in column]
        for c, column in ((c, values(runs, c.name)) for c in run_columns)
    ]
    facts = zip(runs["run"], runs["status"], zip(*who, strict=True), zip(*numbers, strict=True), strict=True)
    return [
        {"name": Path(run).name, "folder": run, "status": status, "who": texts, "numbers": pairs}
        for run, status, texts, pairs in facts
    ]


def _dims(runs: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return a filter per column of ``WHO`` that varies: title, texts of its values, each run's position among them."""

    def order(value: Any) -> tuple[int, Any]:  # numbers, then texts, then None (alpha can be any of these)
        is_number = isinstance(value, int | float)
        return (0, value) if is_number else (2, "") if value is None else (1, str(value))

    filters = []
    for name in WHO:
        of_runs = values(runs, name)
        if name == "p":  # the resulting share differs slightly between seeds, so it is rounded
            of_runs = [value if value is None else round(value, 2) for value in of_runs]
        several = sorted(dict.fromkeys(of_runs), key=order)
        if len(several) > 1:
            texts, indices = [columns.text(v, name) for v in several], [several.index(v) for v in of_runs]
            filters.append({"name": _WORDS.get(name, name), "values": texts, "of": indices})
    return filters
