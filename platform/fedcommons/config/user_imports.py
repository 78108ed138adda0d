"""The imports in a Python file, and a search for the user's modules, without running any of their code."""

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path

PLATFORM = frozenset(
    {
        "fedcommons", "lightning_modules", "PIL", "altair", "cryptography", "diffusers", "docstring_parser", "fsspec",
        "jinja2", "lightning", "lightning_fabric", "markupsafe", "matplotlib", "mlflow", "numpy", "opacus", "optuna",
        "pandas", "pytorch_lightning", "ray", "rich", "s3fs", "safetensors", "scipy", "sklearn", "torch",
        "torchmetrics", "torchvision", "trackio", "vl_convert", "wandb", "wandb_workspaces", "yaml",
    }
)  # fmt: skip
"""Packages that the platform uses. A file with one of these names is never loaded as a module of the user."""

_NEVER = PLATFORM | sys.stdlib_module_names | {"__main__"}
_PYTHON = sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})

_added: set[str] = set()


@dataclass(frozen=True)
class Import:
    """An import statement: ``import module``, or ``from module import names``.

    level: number of leading dots of a relative import. line: line number. sure: whether the import is unconditional.
    """

    module: str
    names: tuple[str, ...]
    level: int
    line: int
    sure: bool

    def module_from(self, package: str) -> str | None:
        """Return the module's full name, for an import in a file of ``package``; None if there are too many dots."""
        if not self.level:
            return self.module
        steps = package.split(".") if package else []
        package_names = steps[: max(0, len(steps) - self.level + 1)]
        return ".".join([*package_names, *filter(None, [self.module])]) if package_names else None


@lru_cache(maxsize=1024)
def imports(content: bytes) -> tuple[Import, ...]:
    """Return all imports in a file, also inside functions; () if Python cannot parse the file."""
    if (tree := _parsed(content)) is None:
        return ()
    doubtful = (ast.If, ast.Match, ast.Try, ast.TryStar, ast.With)  # an import in these statements may fail on purpose
    unsure = {id(below) for node in ast.walk(tree) if isinstance(node, doubtful) for below in ast.walk(node)}
    result = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result += [Import(alias.name, (), 0, node.lineno, id(node) not in unsure) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names if alias.name != "*")
            result.append(Import(node.module or "", names, node.level, node.lineno, id(node) not in unsure))
    return tuple(result)


@lru_cache(maxsize=1024)
def is_empty(content: bytes) -> bool:
    """Return whether a file has no statements except constants such as a docstring."""
    tree = _parsed(content)
    return tree is not None and all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in tree.body)


def _parsed(content: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python shows these warnings again when it runs the file
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


@dataclass(frozen=True)
class Place:
    """The location of a module.

    file: the module's file; None for a package without ``__init__.py``. folders: a package's folders; () for a module.
    """

    file: Path | None = None
    folders: tuple[Path, ...] = ()


ELSEWHERE = Place()
"""The location of a module that is not the user's, or that is compiled and so has no source code."""


@dataclass
class Search:
    """A search for the user's modules, which are Python files under the folders ``roots``.

    places: module's name -> location, of the modules searched so far. The search follows ``sys.path`` and then the
    roots, as in a fresh process. It leaves out folders that other components added to ``sys.path``. It accesses only
    files that have the names of the requested modules.
    """

    roots: Sequence[Path]
    places: dict[str, Place | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = [path for path in sys.path if isinstance(path, str) and path not in _added]
        entries = dict.fromkeys(os.path.abspath(path) for path in [*paths, *map(str, self.roots)])
        self.entries = {e: not is_installed(e) and any(_is_under(e, str(r)) for r in self.roots) for e in entries}

    def place(self, name: str) -> Place | None:
        """Return the location of the module called ``name``; None if no folder contains the module."""
        if name not in self.places:
            above, _, leaf = name.rpartition(".")
            self.places[name] = self._below(above, leaf) if above else self._top(leaf)
        return self.places[name]

    def _top(self, name: str) -> Place | None:
        if name in _NEVER:
            return ELSEWHERE
        portions: list[Path] = []
        for entry, is_ours in self.entries.items():
            if is_ours and (place := inside(Path(entry), name)):
                if place.file or place == ELSEWHERE:
                    return place
                portions += place.folders
            elif not is_ours and (spec := PathFinder.find_spec(name, [entry])) and spec.loader:
                return ELSEWHERE
        return Place(None, tuple(portions)) if portions else None

    def _below(self, above: str, leaf: str) -> Place | None:
        package = self.place(above)
        if package is None or package == ELSEWHERE:
            return package
        places = [place for folder in package.folders if (place := inside(folder, leaf))]
        whole = [place for place in places if place.file or place == ELSEWHERE]
        portions = tuple(folder for place in places for folder in place.folders)
        return whole[0] if whole else Place(None, portions) if portions else None


def inside(folder: Path, name: str) -> Place | None:
    """Return the location of the module ``name`` in a folder; None if it is missing or the folder is not accessible."""
    # Path.is_file would raise for a folder that the user may not enter; Python skips such a folder.
    package = folder / name
    if os.path.isfile(file := package / "__init__.py"):
        return Place(file, (package,))
    if any(os.path.isfile(folder / f"{name}{suffix}") for suffix in EXTENSION_SUFFIXES):
        return ELSEWHERE
    if os.path.isfile(file := folder / f"{name}.py"):
        return Place(file)
    return Place(None, (package,)) if os.path.isdir(package) else None


@lru_cache(maxsize=1024)
def is_installed(folder: str) -> bool:
    """Return whether the folder contains installed packages (``site-packages``), or belongs to Python itself."""
    is_of_packages = not {"site-packages", "dist-packages"}.isdisjoint(Path(folder).parts)
    return is_of_packages or any(_is_under(folder, python) for python in _PYTHON)


@lru_cache(maxsize=4096)
def _is_under(path: str, folder: str) -> bool:
    """Return whether a path lies in a folder, either as written or after both symbolic links are resolved."""
    whole, above = os.path.realpath(path), os.path.realpath(folder)
    return Path(path).is_relative_to(os.path.abspath(folder)) or Path(whole).is_relative_to(above)


def add_to_path(folder: Path) -> None:
    """Append a folder to ``sys.path``, so that imports of modules under a computed name work too."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _added.add(str(folder))
