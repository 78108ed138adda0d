"""Tables in which no number breaks: each number of a cell, with its deviation, interval and unit, stays on one line.

A cell of many words gets the class ``long``, so that ``site.css`` keeps room for the words beside columns of numbers.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_VALUE = r"[<>≤≥≈~+−-]*\d[\w.,:/^²×−+-]*(?:[ \xa0]?%)?"
_UNIT = r"(?:[kMGT]i?B|[mµ]?s|min|h)\b"
NUMBER = re.compile(rf"{_VALUE}(?: (?:±|→|to|of|x) {_VALUE})*(?: {_UNIT})?(?: \[{_VALUE},? (?:to )?{_VALUE}\])?")
LONG = 40
"""Characters from which the text of a cell is long."""


class Numbers(SphinxPostTransform):
    """Put each number in a cell of a table into an element of the class ``number``."""

    default_priority = 400

    def run(self, **_: Any) -> None:
        for cell in [*self.document.findall(nodes.entry)]:
            if len(cell.astext()) > LONG:
                cell["classes"].append("long")
            for text in [*cell.findall(nodes.Text)]:
                if not isinstance(text.parent, nodes.literal) and NUMBER.search(text):
                    text.parent.replace(text, pieces(str(text)))


class Percents(SphinxPostTransform):
    """Keep each % on the line of its number."""

    default_priority = 300

    def run(self, **_: Any) -> None:
        for text in [*self.document.findall(nodes.Text)]:
            if not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.raw) and " %" in text:
                text.parent.replace(text, nodes.Text(re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)))


def pieces(text: str) -> list[nodes.Node]:
    """Return the text as nodes: numbers in elements of their own, other text between them."""
    parts: list[nodes.Node] = []
    end = 0
    for number in NUMBER.finditer(text):
        parts += [nodes.Text(text[end : number.start()]), nodes.inline("", number[0], classes=["number"])]
        end = number.end()
    return [*parts, nodes.Text(text[end:])]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(Percents)
    app.add_post_transform(Numbers)
    app.add_js_file("sortable.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
