"""Links that leave docs/, as they stand for readers of the repository, lead to pages of the site.

The documents beside docs/ and the examples have pages in docs/project; other files are handed out for download, which
MyST does by itself.
"""

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
EXAMPLES = ROOT / "examples"
PAGES = {ROOT / f"{name}.md": DOCS / "project" / f"{name.lower()}.md"
         for name in ("README", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")}  # fmt: skip


def led(text: str, source: Path, page: Path) -> str:
    """The text with links as they are right on ``page``; it stands in the folder ``source``."""

    def rewrite(link: re.Match[str]) -> str:
        target, mark, anchor = link[1].partition("#")
        if "://" in target or not target:
            return link[0]
        path = (source / target).resolve()
        if path.parent == EXAMPLES:
            path, mark, anchor = DOCS / "project" / "examples.md", "#", path.name.replace(".", "")
        elif path == EXAMPLES:
            path = DOCS / "project" / "examples.md"
        there = os.path.relpath(PAGES.get(path, path), page.parent)
        return f"]({there}{mark}{anchor})"

    return re.sub(r"\]\(([^()\s]+)\)", rewrite, text)


def read(app: Sphinx, docname: str, text: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md":
        if re.search(r"(?m)^ *%", re.sub(r"(?ms)^ *```.*?^ *```", "", text[0])):
            logging.getLogger(__name__).warning("text in a line that begins with % is hidden", location=docname)
        text[0] = led(text[0], page.parent, page)


def included(app: Sphinx, path: Path, docname: str, text: list[str]) -> None:
    text[0] = led(text[0], (DOCS / path).resolve().parent, Path(app.env.doc2path(app.env.docname)))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    app.connect("include-read", included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
