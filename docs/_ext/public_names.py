"""The reference of the public names of ``fedcommons``: autodoc and autosummary, with docstrings of plain text."""

import ast
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from docutils.nodes import Text, document
from sphinx.addnodes import desc_annotation
from sphinx.application import Sphinx

import fedcommons

ALIASES = ("Payload", "Replies", "Rule", "State")
"""Names of types, whose words stand below them where they are defined."""


def public(group: str = "") -> str:
    """Return the reference of a group of public names below their summaries; without a group, all summaries."""
    listed = re.findall(r"^(\w+)  +(.+(?:\n {4,}.+)*)", fedcommons.__doc__ or "", re.M)
    groups = {key: [name for name in re.findall(r"\w+", names) if name in fedcommons.__all__] for key, names in listed}
    if group:
        return "\n".join([summaries(groups[group]), "```{eval-rst}", *map(entry, groups[group]), "```"])
    tables = [f"## {key.capitalize()}\n\n{summaries(names)}" for key, names in groups.items()]
    pages = [f"api/{key}" for key in groups]
    return "\n\n".join([*tables, "\n".join(["```{toctree}", ":hidden:", "", *pages, "```"])])


def summaries(names: Sequence[str]) -> str:
    """Return a table with the summary of each public name, which links to its reference."""
    paths = [f"~fedcommons.{home(name)}.{name}" if name in ALIASES else f"~fedcommons.{name}" for name in names]
    lines = ["```{eval-rst}", ".. autosummary::", "   :nosignatures:", "", *(f"   {path}" for path in paths), "```"]
    return "\n".join([*lines, ""])


def entry(name: str) -> str:
    if name in ALIASES:
        return f".. autodata:: fedcommons.{home(name)}.{name}\n   :no-value:\n"
    if inspect.isfunction(getattr(fedcommons, name)):
        return f".. autofunction:: fedcommons.{name}\n"
    return f".. autoclass:: fedcommons.{name}\n   :members:\n"


def home(name: str) -> str:
    """Return the module of a public name, as the package's stub has it."""
    stub = Path(fedcommons.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return next(str(node.module) for node in imports if name in {alias.name for alias in node.names})


def escaped(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text with ``code``; what reStructuredText would read besides is escaped.

    ``Raises:``, ``Args:`` and definitions (name, colon, text) become lists, and so do the comments of a class's fields.
    """
    blocks = []
    for block in "\n".join(lines).strip().split("\n\n"):
        pieces = re.split(r"(``[^`]+``)", block)
        block = "".join(p if p.startswith("``") else re.sub(r"([|*\\]|_\b)", r"\\\1", p) for p in pieces)
        head, _, rest = block.partition("\n")
        if re.fullmatch(r"(Raises|Args|Returns):", head):
            text = dedent(rest)
            blocks += [f"**{head}**", text if head == "Returns:" else listed(text)]
        else:
            blocks.append(block if block.startswith(("- ", " ")) else defined(block))
    if comments := what == "class" and comments_of(thing):
        missing = {n: text for n, text in comments.items() if not re.search(rf"\b{n}\b[\w, ]*: ", "\n".join(lines))}
        blocks.append("\n".join(f"- **{n}**: {text}" for n, text in missing.items()))
    lines[:] = [*"\n\n".join(blocks).split("\n"), ""]


DEFINED = re.compile(
    r"(?:^|(?<=[.;:)] ))((?!default)(?:``[\w/.]+``|[a-z]\w*(?:\([\w, ]*\))?)(?:, (?:``[\w/.]+``|\w+))*): "
)
"""The names that begin a definition in a paragraph, such as ``mean, std: ``."""


def defined(block: str) -> str:
    """Return a paragraph with its definitions as a list; the text before the first definition stays a paragraph."""
    text = " ".join(block.split())
    first, *rest = DEFINED.split(text)
    names = [name if name.startswith("`") else f"**{name}**" for name in rest[::2]]
    items = [f"- {name}: {meaning}" for name, meaning in zip(names, rest[1::2], strict=True)]
    return "\n\n".join(filter(None, [first, "\n".join(items)])) if items else block


def comments_of(kind: type) -> dict[str, str]:
    """Return the comments behind the fields of a class, by field."""
    fields = re.findall(r"^    (\w+): [^#\n]+  # (.+)$", inspect.getsource(kind), re.M)
    return {name: comment for name, comment in fields if name in inspect.get_annotations(kind)}


def listed(block: str) -> str:
    """A list whose items begin where a line does, with their names in bold; further lines of an item hang."""
    block = re.sub(r"^(\w+(?:, \w+)*):", r"**\1**:", block, flags=re.M)
    return re.sub(r"^(?=\S)", "- ", re.sub(r"^ +", "  ", block, flags=re.M), flags=re.M)


def is_old(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the old names of methods and fields, which give a warning."""
    kinds = [vars(kind) for n in fedcommons.__all__ if isinstance(kind := getattr(fedcommons, n), type)]
    return True if any(type(kind.get(name)).__name__ == "_OldName" for kind in kinds) else None


def signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, back: str | None
) -> tuple[str | None, str | None]:
    """Without ranges, factories and the arguments of protocols, which no code calls."""
    if signature in (None, "(*args, **kwargs)"):
        return ("" if signature else signature), back
    return re.sub(r"Annotated\[([\w| ]+), [^\]]*\]+'\]", r"\1", signature).replace(" = <factory>", ""), back


def readable(kind: str, allowed: str) -> str:
    """Return a type and a range such as ``[1, 1e6]`` in words: ``int, 1 to 10^6``."""
    match = re.fullmatch(r"([\[(])(\S+), (\w+)([\])])(.*)", allowed)
    if not match:
        return f"{kind}, {allowed}"
    low, high = (re.sub(r"^1e", "10^", end.replace(str(2**62), "2^62")) for end in match.group(2, 3))
    above, below = "above " * (match[1] == "("), "below " * (match[4] == ")")
    values = f"{above or 'at least '}{low}" if below and high == "inf" else f"{above}{low} to {below}{high}"
    return f"{kind}, {values}{match[5]}"


def show_ranges(app: Sphinx, doctree: document) -> None:
    """Replace ``Annotated`` in the types of fields."""
    for node in doctree.findall(desc_annotation):
        if match := re.fullmatch(r": Annotated\[(.+), '(.+)'\]", node.astext()):
            node.children = [Text(f": {readable(*match.groups())}")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", escaped)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", is_old)
    app.connect("doctree-read", show_ranges)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
