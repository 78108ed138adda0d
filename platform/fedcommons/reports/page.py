"""The report: one HTML file of run folders that carries all it needs, and asks no network for anything.

The file has a policy (Content-Security-Policy): a browser runs its own scripts only, known by their digests, and loads
nothing. Names and texts of runs, which somebody else may have written, are escaped by Jinja2 or stand in JSON.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.errors import UserError, shown
from fedcommons.files import stored, write_text
from fedcommons.reports import cell_tables, charts, columns, details, intervals, tables
from fedcommons.reports.frames import folder_path
from fedcommons.reports.gathered import WHO, Told, gather
from fedcommons.reports.groups import grouped
from fedcommons.reports.intervals import Column

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

MARK = "<!doctype html><!-- fedcommons report -->"
"""How a report begins: another file is never replaced by one."""

POINTS = 60_000
"""The most points of all curves: of more, every k-th round is drawn."""

COMMANDS = 200
"""The most runs whose commands are printed."""

HERE = Path(__file__).parent / "template"

_WORDS = {
    "dataset": "data set",
    "algorithm": "method",
    "setting": "setting",
    "alpha": "alpha",
    "p": "p",
    "seed": "seed",
}
_ALWAYS = (Column("rounds", "rounds", digits=0), Column("validation_accuracy", "validation accuracy, %", 100, 1))


def report(
    *folders: str | Path,
    out: str | Path = "report.html",
    title: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Write a report on the runs in these folders, and give its path: tables, curves, privacy, partitions, commands.

    Each folder is a run folder, or one with run folders at any depth. A run that cannot be read is left out; ``say`` is
    told which, and the report says it, too. Runs of other data, partitions, federations or targets stand in groups of
    their own and are never averaged. title: of the page.

    Raises:
        UserError: a folder does not exist or holds no run, no run can be read, or ``out`` cannot be written or is a
            file that is no report.
    """
    path = folder_path(out)
    require_place(path)
    html = page([folder_path(folder) for folder in folders], title, say)
    try:
        write_text(path, html)
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from None
    return path


def require_place(path: Path) -> None:
    """See that a report can be written there, before any work.

    Raises:
        UserError: it cannot, or what stands there is no report.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out names an HTML file such as report.html, got {shown(str(path))}.")
    try:
        if path.is_dir():
            raise UserError(f"--out: {path} is a folder; name a file in it, such as {path / 'report.html'}.")
        if not path.parent.is_dir():
            raise UserError(f"--out: there is no folder {path.parent}; make it first.")
        head = stored.content(path, stored.LARGEST_JSON, inner=0)
    except stored.UnreadableError as error:
        raise UserError(f"--out: {error}; name another file.") from None
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from None
    if head is not None and not head.startswith(MARK.encode()):
        raise UserError(f"--out: {path} is no report of fedcommons and stays as it is; name another file.")


def page(folders: Sequence[Path], title: str | None, say: Callable[[str], None] = print, state: str = "") -> str:
    """The HTML. state: of folders that are watched; the page asks its server for it, and loads itself anew.

    Raises:
        UserError: a folder does not exist or holds no run, or no run can be read.
    """
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        say(text)

    if not folders:
        raise UserError("name at least one folder with runs.")
    runs, told = gather(folders, tell)
    if runs.empty:
        raise UserError(f"none of the runs in {', '.join(map(str, folders))} can be read.")
    context = contents(runs, told, tell)
    name = title or f"fedcommons report: {', '.join(folder.name or str(folder) for folder in folders)}"
    return _html({**context, "title": stored.clean(name), "notes": notes, "state": state})


def contents(runs: "pd.DataFrame", told: Sequence[Told], say: Callable[[str], None]) -> dict[str, Any]:
    """All that the template prints of these runs, and their data for page.js."""
    groups = grouped(runs, say)
    of = [cell for group in groups for cell in group.cells]
    numbers = [[int(n) for n in cell.runs.index] for cell in of]
    made = cell_tables.made(groups, numbers)
    known = dict.fromkeys([*_ALWAYS, *(column for table in made for column in table.columns)])
    shown_columns = [column for column in known if column.name in runs]
    rows = _rows(runs, shown_columns)
    dims = _dims(runs)
    partitions, n_partitions = details.partitions(runs, say)
    pools, n_pools = details.pools(runs)
    privacy, trouble = details.privacy(groups, told)[: cell_tables.SHOWN], details.trouble(runs, told)
    files = {"runs": _files(runs)}
    if privacy:
        said = [[one["group"], one["cell"], one["epsilon"], details.said(one["words"])] for one in privacy]
        files["privacy"] = _files_of_texts(("group", "runs", "epsilon of the commons", "statement"), said)
    if trouble:
        late = [[rows[one["run"]]["name"], one["late"], one["lost"], one["rejected"]] for one in trouble]
        files["late"] = _files_of_texts(("run", "replies late", "MB for nothing", "rejected"), late)
    thinned, every = thin([one.curve for one in told])
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
        "files": {t.name: {"csv": t.csv, "latex": t.latex, "tail": t.tail} for t in made} | files,
    }  # fmt: skip
    return {
        "data": data, "tables": {table.name: table for table in made}, "groups": groups,
        "sweeps": details.sweeps(runs), "dims": dims, "rows": rows, "columns": shown_columns, "every": every,
        "privacy": privacy, "trouble": trouble, "pools": pools,
        "n_pools": n_pools, "partitions": partitions, "n_partitions": n_partitions,
        "environments": details.environments(told),
        "finished": {n for n, status in enumerate(runs["status"]) if status == "finished"}, 
        "commands": [details.command(one.folder) for one in told[:COMMANDS]],
    }  # fmt: skip


def thin(curves: Sequence[Mapping[str, Sequence[float | None]]]) -> tuple[list[list[list[float | None]]], int]:
    """Curves of at most about ``POINTS`` points in all, numbers of five digits; and k: every k-th round is kept.

    A run's last round always is. Each is four lists: rounds, accuracies, losses and MB.
    """
    every = -(-sum(len(curve["round"]) for curve in curves) // POINTS) or 1
    found = []
    for curve in curves:
        rounds = curve["round"]
        kept = [i for i, r in enumerate(rounds) if i == len(rounds) - 1 or (r is not None and r % every == 0)]
        lists = [[curve[name][i] for i in kept] for name in ("round", "accuracy", "loss", "bytes")]
        found.append([[None if v is None else float(f"{v:.5g}") for v in one] for one in lists])
    return found, every


def _rows(runs: "pd.DataFrame", known: Sequence[Column]) -> list[dict[str, Any]]:
    """Of each run who it is, and its numbers as they are and as they are printed."""
    values = [runs[column.name].tolist() for column in known]
    who = [[columns.text(_plain(v)) for v in runs[name].tolist()] for name in WHO]
    who[WHO.index("p")] = [f"{p:.3g}" if p else "-" for p in map(_plain, runs["p"].tolist())]
    found = []
    for n, (run, status) in enumerate(zip(runs["run"], runs["status"], strict=True)):
        numbers = []
        for column, of in zip(known, values, strict=True):
            value = _plain(of[n])
            digits = 0 if column.name == intervals.ROUNDS else column.digits
            text = "" if value is None else intervals.number(column.scale * value, digits)
            numbers.append(("" if value is None else repr(value), text))
        name = Path(run).name
        found.append({"name": name, "folder": run, "status": status, "who": [w[n] for w in who], "numbers": numbers})
    return found


def _dims(runs: "pd.DataFrame") -> list[dict[str, Any]]:
    """What can be filtered by: the fields that have several values, these, and of each run the number of its own."""
    found = []
    for name in WHO:
        plain = [_plain(value) for value in runs[name].tolist()]
        if name == "p":  # what clients got of one share that was asked for differs a little
            plain = [value if value is None else round(value, 2) for value in plain]
        values = sorted(dict.fromkeys(plain), key=lambda v: (v is None, isinstance(v, str), v if v is not None else 0))
        if len(values) > 1:
            place = {value: i for i, value in enumerate(values)}
            found.append(
                {"name": _WORDS[name], "values": [*map(columns.text, values)], "of": [place[v] for v in plain]}
            )
    return found


def _plain(value: Any) -> Any:
    """None for what a frame lacks."""
    return None if value is None or value != value else value


def _files(runs: "pd.DataFrame") -> dict[str, Sequence[str]]:
    """The frame of ``load_runs`` as CSV, and the columns of the papers' CSVs as LaTeX, a text a line."""
    csv = _csv(runs)
    if len(runs) > cell_tables.LATEX:
        return {"csv": csv, "latex": (), "tail": ()}
    part = runs[[name for name in tables.RUN if name in runs]]
    rows = [[columns.text(_plain(value)) for value in row] for row in part.itertuples(index=False)]
    lines, tail = intervals.latex([name.replace("_", r"\_") for name in part], rows, len(part.columns))
    return {"csv": csv, "latex": lines, "tail": tail}


def _files_of_texts(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, Sequence[str]]:
    """A table of texts as CSV and LaTeX."""
    import pandas as pd

    lines, tail = intervals.latex(heads, [[str(value) for value in row] for row in rows], len(heads))
    return {"csv": _csv(pd.DataFrame(rows, columns=pd.Index(heads))), "latex": lines, "tail": tail}


def _csv(frame: "pd.DataFrame") -> list[str]:
    lines = frame.to_csv(index=False, lineterminator="\n").splitlines()
    if len(lines) != 1 + len(
        frame
    ):  # a text with a line break, which only a tracker of somebody's own may have written
        lines = frame.replace(r"[\r\n]+", " ", regex=True).to_csv(index=False, lineterminator="\n").splitlines()
    return lines


def _html(context: Mapping[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    scripts = [charts.vega(), (HERE / "page.js").read_text()]
    if any("</script" in script.lower() for script in scripts):
        raise RuntimeError("a script of the page would end where it says </script")
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    policy = (
        f"default-src 'none'; script-src {' '.join(digests)}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {chr(39) + 'self' + chr(39) if context['state'] else chr(39) + 'none' + chr(39)}; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(context["data"], allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    made = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = made.get_template("page.html")
    now = datetime.now(UTC)
    return MARK + template.render(
        context,
        json=Markup(text),
        scripts=[Markup(script) for script in scripts],
        style=Markup((HERE / "page.css").read_text()),
        policy=Markup(policy),
        when=f"{now:%Y-%m-%d %H:%M} UTC",
        version=version("fedcommons"),
        who=[_WORDS[name] for name in WHO],
    )
