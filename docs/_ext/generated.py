"""What pages take from the code while they are read, so that it is true of the code.

A page asks for it by a comment of its own, which a reader of the raw file does not see:

<!-- docstring KIND NAME -->   the docstrings of a part of ``config/registry.py`` and a table of its constants
<!-- sweep NAME -->            a sweep's docstring: what it does, its commands, its terms
<!-- options -->               all fields of an experiment, and the options of all sweeps
<!-- components -->            all components by kind: a sentence and the constants of each
<!-- metrics -->               the metrics of rounds: meaning, better direction, and the option that measures each
<!-- columns FUNCTION -->      what the docstring of a function of ``fedcommons`` says of the columns of its frame
<!-- pairs -->                 the options of ``config/pairs.py`` that exclude each other
<!-- public GROUP -->          the reference of the public names of a group in the docstring of ``fedcommons``
<!-- public -->                the summaries of all public names, by group
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

from public_names import public, readable
from sphinx.application import Sphinx

import fedcommons
from fedcommons import UserError, experiment
from fedcommons.cli import parse
from fedcommons.cli.main import COMMANDS
from fedcommons.cli.parser import Parser
from fedcommons.config.dotted import SHORT_NAMES, common_fields
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import Field
from fedcommons.config.pairs import NEEDS, REFUSED
from fedcommons.config.registry import KINDS, choices, find, section
from fedcommons.config.static_fields import fields_in, summary
from fedcommons.convergence import laboratory
from fedcommons.core.capabilities import capabilities_of
from fedcommons.reports.metrics import WORDS, mode, require
from fedcommons.reports.workspace import TITLES
from fedcommons.tracking.metric_names import NAMES

ROOT = Path(__file__).parent.parent.parent


def docstring(kind: str, name: str) -> str:
    """The part's docstrings as Markdown, and a table of its constants."""
    where = KINDS[kind].components[name]
    module, _, attribute = where.partition(":")
    tree = ast.parse(source(module).read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == attribute)
    is_single = (
        len([n for n in KINDS[kind].components.values() if n.startswith(f"{module}:")]) == 1
    )  # its file has no other part
    whole = (ast.get_docstring(tree) or "") if is_single or kind == "algorithm" else ""
    words = re.split(r"\n\n(?:Args|Raises):", ast.get_docstring(node) or "")[0]
    table = constants(section(kind, name), fields_in(where, KINDS[kind].passed))
    first, _, rest = whole.partition("\n\n")
    formula = r"<-|\|\||[\])] = |(?<!\w)CE\(" if kind == "algorithm" else r"(?!)"
    blocks = [block(part) if re.search(formula, part) else prose(part) for part in words.split("\n\n")]
    return "\n\n".join([prose(first), *blocks, prose(rest), table])


def source(module: str) -> Path:
    """The file of a module of the package, which need not be imported."""
    package, *rest = module.split(".")
    home = ROOT / "platform" / package if package == "fedcommons" else ROOT / package
    return home.joinpath(*rest).with_suffix(".py")


def prose(text: str) -> str:
    """A docstring's paragraphs as Markdown; a paragraph that defines symbols becomes a list."""
    return "\n\n".join(paragraph(part) for part in text.split("\n\n"))


def paragraph(text: str) -> str:
    if text.startswith("    "):
        return block(text)
    first, *rest = re.split(r"(?:;  +|(?<=[.,])   +)", " ".join(text.replace(";\n", ";  ").split("\n")))
    symbols = [part for part in [first, *rest] if re.match(r"[\w^~ ,()]{1,30}: ", part)]
    if len(symbols) < 2:
        return plain(text)
    entries = [f"- {plain(part.rstrip('.'))}" for part in rest]
    return "\n".join([*([f"- {plain(first)}"] if first in symbols else [plain(first), ""]), *entries])


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


def constants(component: str, fields: dict[str, Field]) -> str:
    """A table of constants: option, type, range, default and help."""
    return table("constant", {f"{component}.{name}": field for name, field in fields.items()}) or "It has no constants."


def table(kind: str, fields: Mapping[str, Field]) -> str:
    """A table of options: name with short names, type, range, default and help; empty without fields."""
    rows: list[str] = []
    components = {k.field: ", ".join([*choices(kind), "an import path"]) for kind, k in KINDS.items()}
    for name, field in fields.items():
        field = replace(field, allowed=components.get(name) or field.allowed)
        names = [name, *(short.replace("_", "-") for short, full in SHORT_NAMES.items() if full == name)]
        rows.append(f"| {', '.join(f'`--{option}`' for option in names)} | {cells(field)} |")
    return "\n".join([f"| {kind} | allowed | default | meaning |", "|---|---|---|---|", *rows] if rows else [])


ELSEWHERE = ("algorithm", "sharing", "generator", "partition")
"""Kinds of components whose constants have pages of their own."""


def options() -> str:
    """All fields of an experiment by section, constants of components without pages, and the options of all sweeps."""
    fields = common_fields()
    of_run = {name: field for name, field in fields.items() if "." not in name}
    text = ["## The run", table("option", of_run)]
    for part, hint in get_type_hints(Experiment).items():
        if of_part := {name: field for name, field in fields.items() if name.startswith(f"{part}.")}:
            kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
            text += [f"## {part}", plain(inspect.getdoc(kinds[0]) or ""), table("option", of_part)]
        text += [entry for kind in KINDS if kind not in ELSEWHERE and KINDS[kind].field.startswith(f"{part}.")
                 for entry in of_components(kind)]  # fmt: skip
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


PAGES = {"algorithm": "methods/{}.md", "sharing": "sharing.md#{}", "generator": "generators.md#{}",
         "partition": "ideas/partitions.md#{}"}  # fmt: skip
"""The page of each component, by kind."""


def components() -> str:
    """Return a table per kind of component: name, summary, constants with their defaults."""
    text: list[str] = []
    for kind, group in KINDS.items():
        rows = []
        for name, where in group.components.items():
            fields = fields_in(where, group.passed)
            values = ", ".join(f"`{constant} {default_of(field)}`" for constant, field in fields.items())
            first = plain(summary(where)).replace("|", r"\|")
            label = f"[`{name}`]({PAGES[kind].format(name)})" if kind in PAGES else f"`{name}`"
            rows.append(f"| {label} | {first} | {values} |")
        if rows:
            text += [f"## {kind.capitalize()}", f"Chosen by `--{group.field}`.", ":::{div} sortable"]
            text += ["\n".join(["| name | summary | constants |", "|---|---|---|", *rows]), ":::"]
    return "\n\n".join(text)


def metrics() -> str:
    """Return a table of the metrics of rounds; ``laboratory`` defines the convergence parameters."""
    labels = {
        name: text.removesuffix(" of the last round") for name, text in {**WORDS, **TITLES}.items() if name not in NAMES
    }
    for names, text in re.findall(r"^(\w+(?:, \w+)*)  +(.+)$", inspect.getdoc(laboratory) or "", re.M):
        labels[names.replace(", ", "`, `")] = plain(text).replace("|", r"\|")
    rows = [f"| `{name}` | {text} | {BETTER[mode(first)]} | {options_for(first)} |" for name, text in labels.items()
            if (first := name.partition("`")[0]).startswith(OF_ROUNDS)]  # fmt: skip
    return "\n".join(["| metric | meaning | better | option |", "|---|---|---|---|", *rows])


def pairs() -> str:
    """Return a table of the options that exclude each other, and of those that need a method with a capability."""
    rows = [f"| `{option}` | `{other}` | {reason} |" for (option, other), reason in REFUSED.items()]
    declared = {name: capabilities_of(find("algorithm", name)) for name in KINDS["algorithm"].components}
    for wanted in dict.fromkeys(NEEDS.values()):
        options = ", ".join(f"`{option}`" for option, names in NEEDS.items() if names == wanted)
        methods = ", ".join(f"`{n}`" for n, its in declared.items() if any(getattr(its, name) for name in wanted))
        rows.append(
            f"| {options} | methods other than {methods} | they do not declare the capability {' or '.join(wanted)} |"
        )
    return "\n".join(["| option | not with | reason |", "|---|---|---|", *rows])


BETTER = {"max": "larger", "min": "smaller"}
OF_ROUNDS = ("train/", "test/", "validation/", "clients/", "personal/", "new/", "comm/", "privacy/epsilon_local",
             *NAMES)  # fmt: skip
"""How the names of the metrics of rounds begin."""


def options_for(metric: str) -> str:
    """Return the options without which no run has the metric, as ``require`` demands them."""
    values: dict[str, Any] = {"measure.every": 0, "data.validation": 0}
    for _ in range(2):
        try:
            require(metric, [experiment("smoke", values=values)])
        except UserError as error:
            option, _, value = str(error).rstrip(".").partition(" needs --")[2].partition(" ")
            values[option] = {"true": True, "above 0": 1 if option == "measure.every" else 0.1}[value]
    return ", ".join(f"`--{option} {str(value).lower()}`" for option, value in values.items() if value)


def columns(function: str) -> str:
    """Return the part of a function's docstring before its arguments, as Markdown."""
    _, _, text = (inspect.getdoc(getattr(fedcommons, function)) or "").partition("\n\n")
    return plain(text.partition("\n\nArgs:")[0])


def default_of(field: Field) -> str:
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return "null" if value is None else str(value)


def cells(field: Field) -> str:
    kind = (field.hint.__name__ if isinstance(field.hint, type) else str(field.hint)).replace("None", "null")
    is_range = field.allowed.startswith(("(", "["))
    allowed = readable(kind, field.allowed) if is_range else field.allowed or kind
    texts = [allowed.replace("_", r"\_"), f"`{default_of(field)}`", plain(field.help)]
    return " | ".join(text.replace("|", r"\|") for text in texts)


def sweep(name: str) -> str:
    """Return the docstring of a sweep or of a command of the package, with its commands as a block."""
    path = ROOT / "sweeps" / f"{name}.py"
    if name in COMMANDS:
        path = ROOT / "platform" / f"{COMMANDS[name].partition(':')[0].replace('.', '/')}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    parts = re.sub(r"(?<=\S) {3,}#", "  #", text).split("\n\n")
    options = re.compile(r"(?<!`)--[a-z][\w-]*(?:\.[\w-]+)*")
    return "\n\n".join(
        f"```bash\n{part}\n```"
        if part.startswith(("python ", "fedcommons "))
        else prose(options.sub(r"``\g<0>``", part))
        for part in parts
    )


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
    makers = {"docstring": docstring, "sweep": sweep, "public": public, "files": files, "options": options,
              "components": components, "metrics": metrics, "columns": columns, "pairs": pairs}  # fmt: skip

    def generate(match: re.Match[str]) -> str:
        return makers[match[1]](*match[2].split())

    if docname.startswith("methods/"):  # a search for a method's name begins with its page
        title, _, rest = text[0].partition("\n")
        text[0] = f"{title}\n\n```{{index}} ! {Path(docname).name.replace('_', ' ')}\n```\n{rest}"
    text[0] = re.sub(r"^\*This (?:page|section) is generated: .*\*\n\n", "", text[0], flags=re.M)  # for the raw file
    text[0] = re.sub(rf"<!-- ({'|'.join(makers)})((?: \w+)*) -->", generate, text[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    code = sorted(
        path
        for root in ("platform", "lightning_modules", "sweeps", "docs/_ext")
        for path in (ROOT / root).rglob("*.py")
    )
    digest = crc32(b"".join(path.read_bytes() for path in code))  # pages are read again where the code has changed
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": digest}
