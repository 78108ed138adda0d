"""What pages take from the code while they are read, so that it is true of the code.

A page asks for it by a comment of its own, which a reader of the raw file does not see:

<!-- docstring KIND NAME -->   the docstrings of a part of ``config/registry.py`` and a table of its constants
<!-- sweep NAME -->            a sweep's docstring: what it does, its commands, its terms
<!-- options -->               all fields of an experiment, and the options of all sweeps
<!-- public -->                the reference of ``fedcommons``, in the groups of its docstring
"""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints
from zlib import crc32

from sphinx.application import Sphinx

import fedcommons
from fedcommons.cli import parse
from fedcommons.cli.parser import Parser
from fedcommons.config.dotted import SHORT_NAMES, common_fields
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import Field
from fedcommons.config.registry import KINDS, section
from fedcommons.config.static_fields import fields_in, summary

ROOT = Path(__file__).parent.parent.parent
ALIASES = ("Payload", "Replies", "Rule", "State")
"""Names of types, whose words stand below them where they are defined."""


def docstring(kind: str, name: str) -> str:
    """The part's docstrings as Markdown, and a table of its constants."""
    where = KINDS[kind].components[name]
    module, _, of = where.partition(":")
    tree = ast.parse(source(module).read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == of)
    own = (
        len([n for n in KINDS[kind].components.values() if n.startswith(f"{module}:")]) == 1
    )  # its file has no other part
    whole = (ast.get_docstring(tree) or "") if own or kind == "algorithm" else ""
    words = re.split(r"\n\n(?:Args|Raises):", ast.get_docstring(node) or "")[0]
    table = constants(section(kind, name), fields_in(where, KINDS[kind].passed))
    first, _, rest = whole.partition("\n\n")
    said = block(words) if kind == "algorithm" else prose(words)  # of a method these are its formulas
    return "\n\n".join([prose(first), said, prose(rest), table])


def source(module: str) -> Path:
    """The file of a module of the package, which need not be imported."""
    package, *rest = module.split(".")
    home = ROOT / "platform" / package if package == "fedcommons" else ROOT / package
    return home.joinpath(*rest).with_suffix(".py")


def prose(text: str) -> str:
    """A docstring's paragraphs as Markdown; a paragraph that defines symbols becomes a list."""
    return "\n\n".join(paragraph(one) for one in text.split("\n\n"))


def paragraph(text: str) -> str:
    if text.startswith("    "):
        return block(text)
    first, *rest = re.split(r"(?:;  +|(?<=[.,])   +)", " ".join(text.replace(";\n", ";  ").split("\n")))
    symbols = [one for one in [first, *rest] if re.match(r"[\w^~ ,()]{1,30}: ", one)]
    if len(symbols) < 2:
        return plain(text)
    told = [f"- {plain(one.rstrip('.'))}" for one in rest]
    return "\n".join([*([f"- {plain(first)}"] if first in symbols else [plain(first), ""]), *told])


def block(text: str) -> str:
    """Formulas, line by line."""
    return f"```text\n{inspect.cleandoc(text).replace('``', '')}\n```"


def plain(text: str) -> str:
    """Text whose only marks are code and emphasis."""
    pieces = re.split(r"(``[^`]+``)", text.replace("<-", "←").replace("$", r"\$"))
    return "".join(piece[1:-1] if piece.startswith("``") else unmarked(piece) for piece in pieces)


def unmarked(text: str) -> str:
    """Text that is no code, in which only emphasis and links are marks."""
    text = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return text.replace("<", "&lt;").replace("_", r"\_")


def constants(of: str, fields: dict[str, Field]) -> str:
    """A table of constants: option, type, range, default and help."""
    return table("constant", {f"{of}.{name}": field for name, field in fields.items()}) or "It has no constants."


def table(kind: str, fields: Mapping[str, Field]) -> str:
    """A table of options: name with short names, type, range, default and help; empty without fields."""
    rows, components = [], {k.field: ", ".join([*k.components, "an import path"]) for k in KINDS.values()}
    for name, field in fields.items():
        field = replace(field, allowed=components.get(name) or field.allowed)
        names = [name, *(short.replace("_", "-") for short, full in SHORT_NAMES.items() if full == name)]
        rows.append(f"| {', '.join(f'`--{one}`' for one in names)} | {cells(field)} |")
    return "\n".join([f"| {kind} | allowed | default | meaning |", "|---|---|---|---|", *rows] if rows else [])


ELSEWHERE = ("algorithm", "sharing", "generator", "partition")
"""Kinds of components whose constants have pages of their own."""


def options() -> str:
    """All fields of an experiment by section, constants of components without pages, and the options of all sweeps."""
    fields = common_fields()
    of_run = {name: field for name, field in fields.items() if "." not in name}
    text = ["## The run", table("option", of_run)]
    for part, hint in get_type_hints(Experiment).items():
        if own := {name: field for name, field in fields.items() if name.startswith(f"{part}.")}:
            kinds = [one for one in get_args(hint) or (hint,) if one is not NoneType]
            text += [f"## {part}", plain(inspect.getdoc(kinds[0]) or ""), table("option", own)]
        text += [one for kind in KINDS if kind not in ELSEWHERE and KINDS[kind].field.startswith(f"{part}.")
                 for one in of_components(kind)]  # fmt: skip
    parse.add_shared(every := Parser(""))
    shared = {name.replace("_", "-"): option.field for name, option in every.options.items()}
    return "\n\n".join([*text, "## Options of every sweep", table("option", shared)])


def of_components(kind: str) -> list[str]:
    """A heading, a summary and a table for each component of a kind that has constants."""
    text: list[str] = []
    for name, where in KINDS[kind].components.items():
        if fields := fields_in(where, KINDS[kind].passed):
            text += [f"### {KINDS[kind].field} {name}", plain(summary(where)), constants(section(kind, name), fields)]
    return text


def cells(field: Field) -> str:
    kind = (field.hint.__name__ if isinstance(field.hint, type) else str(field.hint)).replace("None", "null")
    is_range = field.allowed.startswith(("(", "["))
    allowed = f"{kind} in {field.allowed}" if is_range else field.allowed or kind
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    default = "null" if value is None else value
    texts = [allowed.replace("_", r"\_"), f"`{default}`", plain(field.help)]
    return " | ".join(text.replace("|", r"\|") for text in texts)


def sweep(name: str) -> str:
    """A sweep's docstring, whose commands are a block."""
    text = ast.get_docstring(ast.parse((ROOT / "sweeps" / f"{name}.py").read_text(encoding="utf-8"))) or ""
    parts = re.sub(r"(?<=\S) {3,}#", "  #", text).split("\n\n")
    options = re.compile(r"(?<!`)--[a-z][\w-]*(?:\.[\w-]+)*")
    return "\n\n".join(
        f"```bash\n{part}\n```" if part.startswith("python ") else prose(options.sub(r"``\g<0>``", part))
        for part in parts
    )


def public() -> str:
    """The public names in the groups of the package's docstring, documented by autodoc."""
    listed = re.findall(r"^(\w[\w ]*?)  +(.+(?:\n {4,}.+)*)", fedcommons.__doc__ or "", re.M)
    told = []
    for group, names in listed:
        found = [name for name in re.findall(r"\w+", names) if name in fedcommons.__all__]
        told += [f"## {group.capitalize()}", "```{eval-rst}", *map(entry, found), "```"]
    return "\n\n".join(told)


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


def files() -> str:
    """Every module by its folder, with the first line of its docstring."""
    lines, folder = [], None
    for path in sorted(
        (p for root in ("platform", "lightning_modules", "sweeps") for p in (ROOT / root).rglob("*.py")),
        key=lambda p: (p.parent, p.name),
    ):
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"## `{folder.relative_to(ROOT)}`", ""]
        if path.name != "__init__.py":
            lines.append(f"- `{path.name}`: {plain(summary)}")
    return "\n".join(lines)


def read(app: Sphinx, docname: str, text: list[str]) -> None:
    makers = {"docstring": docstring, "sweep": sweep, "public": public, "files": files, "options": options}

    def one(asked: re.Match[str]) -> str:
        return makers[asked[1]](*asked[2].split())

    if docname.startswith("methods/"):  # a search for a method's name begins with its page
        title, _, rest = text[0].partition("\n")
        text[0] = f"{title}\n\n```{{index}} ! {Path(docname).name.replace('_', ' ')}\n```\n{rest}"
    text[0] = re.sub(r"<!-- (docstring|sweep|public|files|options)((?: \w+)*) -->", one, text[0])


def escaped(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text with ``code``; what reStructuredText would read besides is escaped.

    ``Raises:`` and ``Args:`` get a list, and so does a paragraph of definitions with hanging lines.
    """
    told = []
    for block in "\n".join(lines).strip().split("\n\n"):
        pieces = re.split(r"(``[^`]+``)", block)
        block = "".join(p if p.startswith("``") else re.sub(r"([|*\\]|_\b)", r"\\\1", p) for p in pieces)
        head, _, rest = block.partition("\n")
        if re.fullmatch(r"(Raises|Args|Returns):", head):
            text = inspect.cleandoc(rest)
            told += [f"**{head}**", text if head == "Returns:" else listed(text)]
        else:
            starts = [line for line in block.splitlines() if not line.startswith(" ")]
            is_hanging = len(starts) > 1 and all(re.match(r"[\w, ]+: ", line) for line in starts)
            told.append(listed(block) if is_hanging else block)
    lines[:] = [*"\n\n".join(told).split("\n"), ""]


def listed(block: str) -> str:
    """A list whose items begin where a line does; further lines of an item hang."""
    return re.sub(r"^(?=\S)", "- ", re.sub(r"^ +", "  ", block, flags=re.M), flags=re.M)


def signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, given: str | None, back: str | None
) -> tuple[str | None, str | None]:
    """Without ranges, factories and the arguments of protocols, which nobody calls."""
    if given in (None, "(*args, **kwargs)"):
        return ("" if given else given), back
    return re.sub(r"Annotated\[([\w| ]+), [^\]]*\]+'\]", r"\1", given).replace(" = <factory>", ""), back


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", escaped)
    app.connect("autodoc-process-signature", signature)
    code = sorted(
        path
        for root in ("platform", "lightning_modules", "sweeps", "docs/_ext")
        for path in (ROOT / root).rglob("*.py")
    )
    digest = crc32(b"".join(path.read_bytes() for path in code))  # pages are read again where the code has changed
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": digest}
