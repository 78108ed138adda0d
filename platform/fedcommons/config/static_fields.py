"""Constants of the package's components, read from source code without importing it.

So ``--help`` does not wait seconds for the import of torch. The result equals what ``fields.fields_of`` returns for the
imported component; a test compares both for every component.
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
"""Packages whose source code is read; base classes in other packages are ignored."""


def fields_in(where: str, handed: Collection[str]) -> dict[str, Field]:
    """Return name -> ``Field`` of the class or function at the import path ``where`` (``package.module:Name``).

    Fields of base classes in ``PACKAGES`` come first, as in a dataclass.
    handed: names of parameters that the platform passes, so that they are no fields.
    """
    tree, node = _find(where)
    names: dict[str, Any] = {"Annotated": Annotated, "Any": Any, "Literal": Literal}
    for line in tree.body:  # annotations may use the module's type aliases, such as Alpha = Annotated[float, "(0, 1)"]
        if isinstance(line, ast.Assign) and ast.unparse(line.value).startswith("Annotated["):
            exec(ast.unparse(line), names)
    fields: dict[str, Field] = {}
    for base in reversed(_bases(where)):
        fields |= fields_in(base, handed)
    for name, annotation, default, text in _declarations(node):
        if name not in handed:
            hint, value = (eval(compile(ast.Expression(part), "", "eval"), names) for part in (annotation, default))
            fields[name] = field_of(hint, value, " ".join(text.split()))
    return fields


def summary(where: str) -> str:
    """Return the first docstring line, without full stop, of the class or function at the import path ``where``."""
    return (ast.get_docstring(_find(where)[1]) or "").partition("\n")[0].rstrip(".")


def _bases(where: str) -> list[str]:
    """Return the import paths of the base classes that packages in ``PACKAGES`` define."""
    (module, _, _), (tree, node) = where.rpartition(":"), _find(where)
    homes = {line.name: f"{module}:{line.name}" for line in tree.body if isinstance(line, ast.ClassDef)}
    for line in tree.body:
        if isinstance(line, ast.ImportFrom) and (line.module or "").partition(".")[0] in PACKAGES:
            homes |= {alias.asname or alias.name: f"{line.module}:{alias.name}" for alias in line.names}
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return [homes[base.id] for base in bases if isinstance(base, ast.Name) and base.id in homes]


def _declarations(node: Declared) -> Iterator[tuple[str, ast.expr, ast.expr, str]]:
    """Yield (name, annotation, default, help) of a dataclass' fields, or of the parameters that have a default."""
    if isinstance(node, ast.ClassDef) and node.decorator_list:
        for line, below in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value:
                text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
                if not ast.unparse(line.annotation).startswith("ClassVar"):
                    yield line.target.id, line.annotation, line.value, text
        return
    helps = {p.arg_name: p.description or "" for p in parse(ast.get_docstring(node) or "").params}
    function = node
    if isinstance(node, ast.ClassDef):
        function = next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    assert isinstance(function, ast.FunctionDef)
    a = function.args
    optional = [*zip(a.args[len(a.args) - len(a.defaults) :], a.defaults, strict=True)]
    optional += [(argument, default) for argument, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default]
    for argument, default in optional:
        assert argument.annotation is not None
        yield argument.arg, argument.annotation, default, helps.get(argument.arg, "")


def _find(where: str) -> tuple[ast.Module, Declared]:
    module, _, name = where.rpartition(":")
    tree = _tree(module)
    return tree, next(n for n in tree.body if isinstance(n, Declared) and n.name == name)


@lru_cache(maxsize=256)
def _tree(module: str) -> ast.Module:
    package, *rest = module.split(".")
    spec = find_spec(package)  # find_spec("a.b") would import package a, so ``rest`` is left out
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return ast.parse(Path(spec.submodule_search_locations[0], *rest).with_suffix(".py").read_text(encoding="utf-8"))
