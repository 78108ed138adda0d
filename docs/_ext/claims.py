"""The tables of docs/claims.md and of result pages, from docs/claims.csv, which also has the details and the commands.

<!-- verdicts -->        how many claims have which verdict, by paper and data set
<!-- claims PAPER -->    the claims of a paper
<!-- commands -->        the commands of claims that no result page has
<!-- claims -->          on a page of docs/results: the claims that the page judges
"""

import re
from collections.abc import Iterable
from typing import Any

import comparisons
from comparisons import DOCS, VERDICTS
from sphinx.application import Sphinx

LARGER = ("MNIST", "Fashion-MNIST", "CIFAR-10")
"""Data sets that the table of verdicts counts separately."""

Row = dict[str, str]


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    titles = list(titles)
    cells = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def verdicts(rows: list[Row], paper: str = "") -> str:
    lines: list[list[object]] = []
    for name in dict.fromkeys(row["paper"] for row in rows):
        own = [row for row in rows if row["paper"] == name]
        parts = {data: [row for row in own if row["data"].split(",")[0] == data] for data in LARGER}
        lines.append([f"[{name}](#{name.lower().replace(' ', '-')})", *count(own)])
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


def commands(rows: list[Row], paper: str = "") -> str:
    by_command: dict[str, list[str]] = {}
    for row in rows:
        if row["command"]:
            by_command.setdefault(row["command"], []).append(f"{row['claim']} ({row['data']})")
    return table(["claim", "command"], ([";<br>".join(names), f"`{command}`"] for command, names in by_command.items()))


def read(app: Sphinx, docname: str, text: list[str]) -> None:
    if docname == "claims" or "<!-- claims -->" in text[0]:
        rows = comparisons.claims()
        app.env.note_dependency("claims.csv")
        text[0] = text[0].replace("<!-- claims -->", claims_of(rows, f"{docname}.md"))
    if docname == "claims":
        makers = {"verdicts": verdicts, "claims": claims, "commands": commands}
        text[0] = re.sub(r"<!-- (\w+) ?(.*?) -->", lambda asked: makers[asked[1]](rows, asked[2]), text[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
