"""The code of a user-defined component and of the imported modules of the user, read and hashed but not run.

Such an imported module is called a neighbour: a Python file in the folder of the component's file, or under the folder
of the command, that the component or another neighbour imports anywhere in its code. Neighbours are searched as in a
fresh Python process, so installed packages come first. Installed packages, the standard library and packages that the
platform uses are not neighbours. Imports under a computed name are not detected.
"""

import ast
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from modulefinder import ModuleFinder
from pathlib import Path
from traceback import walk_tb
from types import NoneType
from typing import Any, cast

from fedcommons.errors import UserError, nearest

_NEVER = {
    "fedcommons", "lightning_modules", "PIL", "altair", "cryptography", "diffusers", "docstring_parser", "fsspec",
    "jinja2", "lightning", "lightning_fabric", "markupsafe", "matplotlib", "mlflow", "numpy", "opacus", "optuna",
    "pandas", "pytorch_lightning", "ray", "rich", "s3fs", "safetensors", "scipy", "sklearn", "torch", "torchmetrics",
    "torchvision", "trackio", "vl_convert", "wandb", "wandb_workspaces", "yaml", "__main__", *sys.stdlib_module_names,
}  # fmt: skip
"""The platform's packages and the standard library. A file with one of these names is never loaded as user code."""

_PYTHON = sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})

_IMPORTLIB = re.compile(r"^<frozen importlib|/importlib/__init__\.py$")

_RELATIVE = "imports relatively, which works only in a package: name the component by its module, my_lab.methods:Name."

_MAKES_MODULES = re.compile(rb"__path__|sys\.modules")
"""Regular expression of code by which a package may change the folders in which Python searches its modules."""

SURE = 0.8
"""Minimum similarity (0 to 1) at which a missing module's name counts as a misspelt name of a user's module."""

LARGEST = 16 * 2**20
"""Maximum size of a file of Python code, in bytes, so that reading an endless file, such as a device, stops."""

_added: set[str] = set()


@dataclass(frozen=True)
class Module:
    """A Python file with its content. key: hash of the file and of all modules of the user that the file imports."""

    file: Path
    content: bytes
    key: str


@dataclass(frozen=True)
class Code:
    """The code of a user-defined component: its module, called ``name``, and the user's modules that it imports.

    modules: name -> module, including the component's. digest: hash of all modules. files: file name -> hash.
    """

    name: str
    modules: Mapping[str, Module]
    digest: str
    files: Mapping[str, str]

    @property
    def file(self) -> Path:
        return self.modules[self.name].file


def of_file(path: Path, base: Path, what: str) -> Code:
    """Read the code of a component that is named by its file, as in ``my_lab.py:Name``.

    base: folder of the command, in which imported modules are searched too. what: the component's name for messages.

    Raises:
        UserError: a user's module that the code imports is missing.
        OSError: a file cannot be read.
    """
    finder = _Finder([path.parent, base], what)
    finder.read("", str(path))
    modules, digest, files = _hashed("", finder)
    name = f"part_{path.stem}_{digest[:8]}"  # the name is the same in all processes with this code
    return Code(name, {name: modules.pop(""), **modules}, digest, files)


def of_module(name: str, base: Path, what: str) -> Code | None:
    """Read the code of a component named by its module (see ``of_file``); None if no file of the user has this name."""
    top = name.partition(".")[0]
    entries = [entry for entry in _search_path([base]) if not _is_installed(entry)]
    finder = _Finder([base, *(Path(entry) for entry in entries if PathFinder.find_spec(top, [entry]))], what)
    with suppress(ImportError):
        finder.import_hook(name)
    return Code(name, *_hashed(name, finder)) if name in finder.contents else None


def missing(error: ModuleNotFoundError, code: Code) -> str | None:
    """Return a message with the file and line of the user's failed import; None if the import is in other code."""
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    file, line = [frame for frame in frames if not _IMPORTLIB.search(str(frame[0]))][-1]
    if not error.name or file not in {module.file for module in code.modules.values()}:
        return None
    siblings = _module_names({code.file.parent, file.parent})
    return f"{file} (line {line}) {_no_module(error.name, siblings, file.stem)}"


def add_to_path(folder: Path) -> None:
    """Append a folder to ``sys.path``, so that code can import modules whose names it computes at run time."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _added.add(str(folder))


@lru_cache(maxsize=1024)
def _imports(content: bytes) -> tuple[tuple[str, tuple[str, ...], int, bool], ...]:
    """Return (module, imported names, line, is unconditional) of all imports in a file, also inside functions."""
    nodes = list(ast.walk(_parsed(content) or ast.Module([], [])))
    doubtful = (ast.If, ast.Match, ast.Try, ast.TryStar, ast.With)  # an import in these statements may fail on purpose
    unsure = {id(below) for node in nodes if isinstance(node, doubtful) for below in ast.walk(node)}
    imports: list[tuple[str, tuple[str, ...], int, bool]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            imports += [(alias.name, (), node.lineno, id(node) not in unsure) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names if alias.name != "*")
            imports.append(("." * node.level + (node.module or ""), names, node.lineno, id(node) not in unsure))
    return tuple(imports)


@lru_cache(maxsize=1024)
def _is_empty(content: bytes) -> bool:
    """Return whether a file has no statements except constants such as a docstring."""
    tree = _parsed(content)
    return tree is not None and all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in tree.body)


def _parsed(content: bytes) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python shows these warnings again when it runs the file
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None  # Python reports the error when it runs the file


class _Finder(ModuleFinder):
    """A search for the user's modules that a component imports, without running them. what: component for messages.

    contents: name of a user's module -> content. imported: name of a user's module -> names of modules that it imports.
    """

    def __init__(self, roots: Sequence[Path], what: str) -> None:
        super().__init__(_search_path(roots))
        self.users = {e for e in self.path if not _is_installed(e) and any(_is_under(e, str(r)) for r in roots)}
        self.roots, self.what = roots, what
        self.contents: dict[str, bytes] = {}
        self.imported: dict[str, set[str]] = {"": set()}
        self.importer = ""

    def import_module(self, partname: str, fqname: str, parent: Any) -> Any:
        """Return the module, or None if it is missing. Only a module of the user has ``__file__`` or ``__path__``."""
        self.imported[self.importer].add(fqname)
        folders = parent.__path__ if parent else self.path
        if fqname in self.modules or folders is None:
            return self.modules.get(fqname)
        if fqname in _NEVER:
            return self.add_module(fqname)
        if (spec := PathFinder.find_spec(partname, folders)) is None:
            return None
        module: Any = self.add_module(fqname)
        places = list(spec.submodule_search_locations or [str(spec.origin)])
        users = [place for place in places if os.path.dirname(place) in self.users]
        if users and isinstance(spec.loader, SourceFileLoader | NoneType):
            self.users.update(users)
            module.__path__ = places if spec.submodule_search_locations else None
            if spec.origin:
                self.read(fqname, spec.origin)
        return module

    def read(self, name: str, file: str) -> None:
        with open(file, "rb") as source:
            self.contents[name] = source.read(LARGEST + 1)
        if len(self.contents[name]) > LARGEST:
            raise UserError(f"{self.what}: {file} has more than {LARGEST:,} bytes, the maximum for Python code.")
        module: Any = self.add_module(name)
        module.__file__ = file

    def follow(self, name: str) -> None:
        """Read the user's modules that the module ``name`` imports.

        Raises:
            UserError: an imported module of the user is missing.
        """
        self.imported[name], self.importer, module = set(), name, cast(Any, self.modules[name])
        if name:
            self.import_hook(name)  # adds the packages that contain the module to ``modules``
        for relative, names, line, is_sure in _imports(self.contents[name]):
            try:
                full = resolve_name(relative, name if module.__path__ else name.rpartition(".")[0])
            except ImportError:
                message = _RELATIVE
            else:
                for step in (full, *(f"{full}.{attribute}" for attribute in names)):
                    with suppress(ImportError):
                        self.import_hook(step)
                message = self.lost_module(full, names, Path(module.__file__).stem)
            if message and is_sure:
                raise UserError(f"{self.what}: {module.__file__} (line {line}) {message}")

    def lost_module(self, name: str, names: Sequence[str], importer: str) -> str | None:
        """Return a message if ``from name import names`` needs a module of the user that is certainly missing, or None.

        A missing top-level module counts as the user's only if its name is similar to the name of a user's module.
        Any other missing module may be a package that is not installed and that only an unused function imports.
        """
        above: Any = None
        for step in accumulate(name.split("."), "{}.{}".format):
            content = self.contents.get(above.__name__, b"") if above else b""
            if step not in self.modules:
                siblings = _module_names(above.__path__ or () if above else self.roots)
                # find_spec finds installed modules, whose names are not misspelt. A top-level module is not imported.
                is_users = above or (
                    get_close_matches(step, siblings, n=1, cutoff=SURE) and not (step in sys.modules or find_spec(step))
                )
                is_missing = is_users and not _MAKES_MODULES.search(content)
                return _no_module(step, siblings, importer) if is_missing else None
            above = self.modules[step]
            if not (above.__file__ or above.__path__):
                return None
        names = [f"{name}.{attribute}" for attribute in names if above.__path__ and attribute[:2] != "__"]
        lost = [attribute for attribute in names if attribute not in self.modules]
        if lost and _is_empty(self.contents.get(name, b"")):  # an empty __init__.py defines no names
            return _no_module(lost[0], _module_names(above.__path__), importer)
        return None


def _hashed(root: str, finder: _Finder) -> tuple[dict[str, Module], str, dict[str, str]]:
    """Read ``root`` and the user's modules that ``root`` imports; return (name -> module, their hash, file -> hash)."""
    contents, sums = finder.contents, dict[str, str]()
    while new := contents.keys() - sums:
        for name in sorted(new):
            finder.follow(name)
            sums[name] = sha256(contents[name]).hexdigest()[:24]
    files = {name: Path(cast(Any, finder.modules[name]).__file__) for name in contents}
    modules = {name: Module(files[name], contents[name], _key(name, finder.imported, sums)) for name in contents}
    others = [name for name in sorted(contents) if name != root and not _is_empty(contents[name])]
    lines = [sums[root], *(f"{name} {sums[name]}" for name in others)]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:24] if others else sums[root]
    ends = {name: "/__init__.py" if files[name].name == "__init__.py" else ".py" for name in others}
    paths = {name.replace(".", "/") + end: sums[name] for name, end in ends.items()}
    return modules, digest, {files[root].name: sums[root], **paths}


def _key(name: str, imported: Mapping[str, Collection[str]], sums: Mapping[str, str]) -> str:
    """Return the hash of a module and of all its imports. sums: user's module -> hash of its content."""
    reached = {name}
    while new := {other for module in reached for other in imported[module] if other in sums} - reached:
        reached |= new
    return sha256("\n".join(f"{other} {sums[other]}" for other in sorted(reached)).encode()).hexdigest()


def _search_path(roots: Iterable[Path]) -> list[str]:
    """Return the folders of ``sys.path``, without those that this module added, followed by ``roots``."""
    PathFinder.invalidate_caches()  # Python may miss a file that was written within the last second
    paths = [path for path in sys.path if isinstance(path, str) and path not in _added]
    return list(dict.fromkeys(os.path.abspath(path) for path in [*paths, *roots]))


@lru_cache(maxsize=1024)
def _is_installed(folder: str) -> bool:
    """Return whether the folder contains installed packages (``site-packages``), or belongs to Python itself."""
    is_of_packages = not {"site-packages", "dist-packages"}.isdisjoint(Path(folder).parts)
    return is_of_packages or any(_is_under(folder, python) for python in _PYTHON)


@lru_cache(maxsize=4096)
def _is_under(path: str, folder: str) -> bool:
    """Return whether a path lies in a folder, either as written or after both symbolic links are resolved."""
    whole, above = os.path.realpath(path), os.path.realpath(folder)
    return Path(path).is_relative_to(os.path.abspath(folder)) or Path(whole).is_relative_to(above)


def _no_module(name: str, siblings: Sequence[str], importer: str) -> str:
    above, dot, _ = name.rpartition(".")
    near = nearest(name, [f"{above}{dot}{sibling}" for sibling in siblings if sibling != importer])
    return f"imports {name}, but there is no such module{near}"


def _module_names(folders: Iterable[str | Path]) -> list[str]:
    """Return the sorted names of the modules and packages in the folders."""
    names: set[str] = set()
    for folder in folders:
        with suppress(OSError):  # the user may have no permission to list the folder
            names.update(name.removesuffix(".py") for name in os.listdir(folder))
    return sorted(name for name in names if name.isidentifier() and not name.startswith("__"))
