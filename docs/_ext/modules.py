"""Docstrings of modules on pages: ``<!-- module NAME -->``, in which a paragraph of two columns becomes a list."""

import ast
import re
from typing import Any

from generated import plain, prose, source
from sphinx.application import Sphinx


def module(name: str) -> str:
    """Return a module's docstring as Markdown, in which a paragraph of two columns is a list."""
    text = ast.get_docstring(ast.parse(source(name).read_text(encoding="utf-8"))) or ""
    parts = [re.sub(r"\n {5,}", " ", part) if not part.startswith(" ") else part for part in text.split("\n\n")]
    two = re.compile(r"(\S.*?) {2,}(\S.*)")
    lists = {part: [two.fullmatch(line) for line in part.splitlines()] for part in parts}
    return "\n\n".join(
        "\n".join(f"- {plain(row[1])}: {plain(row[2])}" for row in rows if row) if all(rows) else prose(part)
        for part, rows in lists.items()
    )


def read(app: Sphinx, docname: str, text: list[str]) -> None:
    text[0] = re.sub(r"<!-- module ([\w.]+) -->", lambda asked: module(asked[1]), text[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
