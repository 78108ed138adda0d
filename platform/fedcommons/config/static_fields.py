"""What a part of the package declares, read from its source: ``--help`` need not wait for torch, which takes seconds.

It is what ``fields.fields_of`` finds in the imported part; a test compares the two for every part.
"""

import ast
from collections.abc import Collection, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from docstring_parser import parse

from fedcommons.config.fields import Field, field_of

Declared = ast.ClassDef | ast.FunctionDef

PACKAGES = ("fedcommons", "lightning_modules")
"""Packages whose sources are read."""


def fields_in(where: str, handed: Collection[str]) -> dict[str, Field]:
    """The fields of the class or function at ``package.module:Name``, but for those that it is ``handed``.

    Those of its base classes in the package come first, as in a dataclass.
    """
    tree, node = _find(where)
    names = {"Annotated": Annotated, "Any": Any, "Literal": Literal}
    for line in tree.body:  # such as Alpha = Annotated[float, "(0, inf)"]
        if isinstance(line, ast.Assign) and ast.unparse(line.value).startswith("Annotated["):
            names |= {target.id: _value(line.value, names) for target in line.targets if isinstance(target, ast.Name)}
    fields: dict[str, Field] = {}
    for base in reversed(_bases(where)):
        fields |= fields_in(base, handed)
    for name, annotation, default, text in _declarations(node):
        if name in handed:
            continue
        fields[name] = field_of(_value(annotation, names), _value(default, names), " ".join(text.split()))
    return fields


def has(where: str, method: str) -> bool:
    """Whether the class at ``package.module:Name``, or a base class of it, has it: ``def f`` or ``f = other.f``."""
    body = _find(where)[1].body
    defined = {line.name for line in body if isinstance(line, ast.FunctionDef)}
    defined |= {
        of.attr for line in body if isinstance(line, ast.Assign) and isinstance(of := line.value, ast.Attribute)
    }
    return method in defined or any(has(base, method) for base in _bases(where))


def summary(where: str) -> str:
    """The first line of the docstring of the class or function at ``package.module:Name``."""
    return (ast.get_docstring(_find(where)[1]) or "").partition("\n")[0].rstrip(".")


def _bases(where: str) -> list[str]:
    """Where the base classes of a class stand; those outside of the package, such as torch's, are left out."""
    (module, _, _), (tree, node) = where.rpartition(":"), _find(where)
    homes = {line.name: f"{module}:{line.name}" for line in tree.body if isinstance(line, ast.ClassDef)}
    for line in tree.body:
        if isinstance(line, ast.ImportFrom) and (line.module or "").partition(".")[0] in PACKAGES:
            homes |= {one.asname or one.name: f"{line.module}:{one.name}" for one in line.names}
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return [homes[base.id] for base in bases if isinstance(base, ast.Name) and base.id in homes]


def _declarations(node: Declared) -> Iterator[tuple[str, ast.expr, ast.expr, str]]:
    """(name, annotation, default, help) of the fields of a dataclass, or of the parameters that have a default."""
    if isinstance(node, ast.ClassDef) and node.decorator_list:
        for line, below in zip(node.body, [*node.body[1:], None], strict=True):
            if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value):
                continue
            if not ast.unparse(line.annotation).startswith("ClassVar"):
                yield line.target.id, line.annotation, line.value, _text(below)
        return
    helps = {p.arg_name: p.description or "" for p in parse(ast.get_docstring(node) or "").params}
    function = node
    if isinstance(node, ast.ClassDef):
        function = next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    assert isinstance(function, ast.FunctionDef)
    a = function.args
    optional = [*zip(a.args[len(a.args) - len(a.defaults) :], a.defaults, strict=True)]
    optional += [(one, default) for one, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default]
    for one, default in optional:
        assert one.annotation is not None
        yield one.arg, one.annotation, default, helps.get(one.arg, "")


def _text(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "", "eval"), dict(names))


def _find(where: str) -> tuple[ast.Module, Declared]:
    module, _, name = where.rpartition(":")
    tree = _tree(module)
    return tree, next(n for n in tree.body if isinstance(n, Declared) and n.name == name)


@lru_cache(maxsize=256)
def _tree(module: str) -> ast.Module:
    package, *rest = module.split(".")
    spec = find_spec(package)  # of the package alone: finding a module would import all that it stands in
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return ast.parse(Path(spec.submodule_search_locations[0], *rest).with_suffix(".py").read_text(encoding="utf-8"))
