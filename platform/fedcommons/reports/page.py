"""The report on run folders: a single HTML file that loads nothing from the network.

The file has a Content-Security-Policy, so a browser runs only the scripts in this file, identified by their hashes, and
loads no other files. Names and texts of runs can come from other users, so they are escaped by Jinja2 or encoded as
JSON.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcommons.errors import UserError, clean, quote
from fedcommons.reports import charts
from fedcommons.reports.collect import gather
from fedcommons.reports.frames import folder_path, load_central
from fedcommons.reports.page_data import contents
from fedcommons.storage import safe_read
from fedcommons.storage.atomic_files import write_text

MARK = "<!doctype html><!-- fedcommons report -->"
"""Beginning of each report. An existing file with another beginning is never overwritten."""

HERE = Path(__file__).parent / "template"


def report(
    *folders: str | Path,
    out: str | Path = "report.html",
    title: str | None = None,
    say: Callable[[str], None] = print,
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
    require_place(path)
    html = page([folder_path(folder) for folder in folders], title, say)
    try:
        write_text(path, html)
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror}).") from None
    return path


def require_place(path: Path) -> None:
    """Check, before a report is computed, that it can be written to ``path``.

    Raises:
        UserError: the path cannot be written, or an existing file there is not a report.
    """
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
    """Return the HTML text of the report on the runs in ``folders``.

    title: the title of the page; None: the names of the folders. say: called for each run that is left out. state: hash
    of the files of a live report, whose page reloads when the hash changes; empty: the page never reloads.

    Raises:
        UserError: a folder does not exist or holds no run, or no run can be read.
    """
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
    return _html({**context, "title": clean(name), "notes": notes, "state": state})


def _html(context: Mapping[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    scripts = [charts.vega(), (HERE / "page.js").read_text(encoding="utf-8")]
    if any("</script" in script.lower() for script in scripts):
        raise RuntimeError("a script of the page would end where it says </script")
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    policy = (
        f"default-src 'none'; script-src {' '.join(digests)}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src '{'self' if context['state'] else 'none'}'; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(context["data"], allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.get_template("page.html")
    now = datetime.now(UTC)
    return MARK + template.render(
        context,
        json=Markup(text),
        scripts=[Markup(script) for script in scripts],
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        policy=Markup(policy),
        when=f"{now:%Y-%m-%d %H:%M} UTC",
        version=version("fedcommons"),
    )
