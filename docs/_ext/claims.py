"""The tables of docs/claims.md and of result pages, from docs/claims.csv, which also has the details and the commands.

<!-- verdicts -->        how many claims have which verdict, by paper and data set
<!-- claims PAPER -->    the claims of a paper
<!-- commands PAPER -->  the commands of a paper's claims that no result page has
<!-- claims -->          on a page of docs/results: the claims that the page judges
<!-- papers PAPER -->    on docs/results/papers.md: the tables, figures and theorems of a paper, from docs/papers.csv

A row of docs/papers.csv names claims by ``claims`` (values of ``in_the_paper``) and ``data`` (their data sets; empty:
all), both separated by semicolons. Only a row without claims has a ``verdict`` (``OTHERS``). ``page``: further pages.
``missing``: what was not run, and why. ``command``: runs what is missing, or the tests of the verdict "in tests".
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import comparisons
from comparisons import DOCS, VERDICTS
from sphinx.application import Sphinx

LARGER = ("MNIST", "Fashion-MNIST", "CIFAR-10")
"""Data sets that the table of verdicts counts separately."""

OTHERS = ("in tests", "shown", "text", "not tried")
"""Verdicts of tables, figures and theorems without a claim; text: the paper's item has no numbers."""

Row = dict[str, str]


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    titles = list(titles)
    cells = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def verdicts(rows: list[Row], paper: str = "") -> str:
    lines: list[list[object]] = []
    for name in dict.fromkeys(row["paper"] for row in rows):
        entries = [row for row in rows if row["paper"] == name]
        parts = {data: [row for row in entries if row["data"].split(",")[0] == data] for data in LARGER}
        lines.append([f"[{name}](#{name.lower().replace(' ', '-')})", *count(entries)])
        lines += [[f"{name}, on {data}", *count(part)] for data, part in parts.items() if sum(count(part)[:-1])]
    return table(["paper", *VERDICTS], lines)


def count(rows: list[Row]) -> list[int]:
    return [sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS]


def claims(rows: list[Row], paper: str) -> str:
    lines = [
        [row["claim"], row["in_the_paper"], row["verdict"], row["effect"] or "-", row["runs"] or "-", linked(row)]
        for row in rows
        if row["paper"] == paper
    ]
    assert lines, f"docs/claims.csv has no claim of {paper}"
    text = table(["claim", "in the paper", "verdict", "effect here", "runs", "data"], lines)
    return f"```{{table}}\n:class: sortable\n\n{text}\n```"


def claims_of(rows: list[Row], page: str) -> str:
    lines = [
        [row["claim"], row["in_the_paper"], row["verdict"], "; ".join(filter(None, [row["effect"], row["more"]]))]
        for row in rows
        if row["page"] == page
    ]
    return table(["claim", "in the paper", "verdict", "effect here"], lines)


def linked(row: Row) -> str:
    assert row["verdict"] in VERDICTS, row
    assert (DOCS / row["page"]).exists(), row
    assert row["page"] or row["command"], row
    return f"[{row['data']}]({row['page']})" if row["page"] else row["data"]


def commands(rows: list[Row], paper: str) -> str:
    by_command: dict[str, list[str]] = {}
    for row in rows:
        if row["command"] and row["paper"] == paper:
            by_command.setdefault(row["command"], []).append(f"{row['claim']} ({row['data']})")
    return table(["claim", "command"], ([";<br>".join(names), f"`{command}`"] for command, names in by_command.items()))


def claims_on(rows: list[Row], item: Row) -> list[Row]:
    """Return the claims that a row of docs/papers.csv names."""
    places, data = item["claims"].split(";"), item["data"].split(";")
    entries = [row for row in rows if row["paper"] == item["paper"] and row["in_the_paper"] in places]
    return [row for row in entries if data == [""] or row["data"] in data]


def papers(rows: list[Row], paper: str) -> str:
    lines = [item_cells(rows, item) for item in comparisons.rows(DOCS / "papers.csv") if item["paper"] == paper]
    text = table(["row", "table, figure or theorem", "verdict, data, runs", "command", "not run, and why"], lines)
    return f"```{{table}}\n:class: sortable\n\n{text}\n```"


def item_cells(rows: list[Row], item: Row) -> list[str]:
    """Return the cells of a table, figure or theorem; rows: all claims, item: a row of docs/papers.csv."""
    entries, is_tested, judged = claims_on(rows, item), item["verdict"] == "in tests", dict[str, list[Row]]()
    for row in entries:
        judged.setdefault(linked(row).replace("](", "](../"), []).append(row)
    verdicts = [f"{counted(some)}: {', '.join([data, *runs_of(some)])}" for data, some in judged.items()]
    links = ", ".join(f"[{Path(page).stem}](../{page})" for page in item["page"].split())
    verdicts += [": ".join(filter(None, [item["verdict"], links]))] * bool(item["verdict"] or links)
    commands = [made_by(row) for row in entries if row["verdict"] != "not tried"]
    commands += [made_by({"command": item["command"] * is_tested, "page": page}) for page in item["page"].split()]
    missing = [row["command"] for row in entries if row["verdict"] == "not tried"] + [item["command"]] * (not is_tested)
    cells = verdicts, code(commands), [item["missing"], *code(missing)]
    return [item["number"], item["item"], *("<br>".join(filter(None, cell)) for cell in cells)]


def made_by(row: Row) -> str:
    """Return the command of a claim, or the first one of its page; without options, which the page states."""
    command = row["command"] or comparisons.pages().get(Path(row["page"]).stem, {}).get("command", "")
    return command.split(" --")[0].replace("python sweeps/", "sweeps/") if row["page"] else command


def counted(rows: list[Row]) -> str:
    """Return how many claims have which verdict, such as "2 holds, 1 in part"; only the verdict if all have one."""
    verdicts = [row["verdict"] for row in rows]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return verdicts[0] if len(rows) == 1 else ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def runs_of(rows: list[Row]) -> list[str]:
    return [*dict.fromkeys(row["runs"].split(", p = ")[0] for row in rows if row["runs"])]


def code(commands: Iterable[str]) -> list[str]:
    return [f"`{command}`" for command in dict.fromkeys(commands) if command]


def read(app: Sphinx, docname: str, text: list[str]) -> None:
    has_tables = docname in ("claims", "results/papers")
    if has_tables or "<!-- claims -->" in text[0]:
        rows = comparisons.claims()
        app.env.note_dependency("claims.csv")
        text[0] = text[0].replace("<!-- claims -->", claims_of(rows, f"{docname}.md"))
    if has_tables:
        app.env.note_dependency("papers.csv")
        makers = {"verdicts": verdicts, "claims": claims, "commands": commands, "papers": papers}
        text[0] = re.sub(r"<!-- (\w+) ?(.*?) -->", lambda asked: makers[asked[1]](rows, asked[2]), text[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
