"""The code of a user-defined component and of the imported modules of the user, read and hashed but not run.

Such an imported module is called a neighbour: a Python file in the folder of the component's file, or under the folder
of the command, that the component or another neighbour imports anywhere in its code. Neighbours are searched as in a
fresh Python process, so installed packages come first. Installed packages, the standard library and packages that the
platform uses are not neighbours. Imports under a computed name are not detected.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb

from fedcommons.config.user_imports import Import, Place, Search, imports, inside, is_empty, is_installed
from fedcommons.errors import UserError, nearest

_IMPORTLIB = re.compile(r"^<frozen importlib|/importlib/__init__\.py$")

_RELATIVE = (
    "{} (line {}) imports relatively, which works only in a package: import the module by its name, or name "
    "the component by its module, such as my_lab.methods:Name."
)

_MAKES_MODULES = re.compile(rb"__path__|sys\.modules")
"""Regular expression of code by which a package may change where Python searches the modules of the package."""

SURE = 0.8
"""Minimum similarity (0 to 1) at which a missing module's name counts as a misspelt name of a user's module."""


LARGEST = 16 * 2**20
"""Maximum size of a file of Python code, in bytes, so that reading an endless file, such as a device, stops."""


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
    modules, digest, files = _read("", path, Search((path.parent, base)), what)
    name = f"part_{path.stem}_{digest[:8]}"  # so equal code has the same name in all processes
    return Code(name, {name: modules.pop(""), **modules}, digest, files)


def of_module(name: str, base: Path, what: str) -> Code | None:
    """Read the code of a component named by its module (see ``of_file``); None if no file of the user has this name."""
    top = name.partition(".")[0]
    entries = [Path(entry) for entry in Search((base,)).entries if not is_installed(entry)]
    search = Search((base, *(entry for entry in entries if inside(entry, top))))
    place = search.place(name)
    return Code(name, *_read(name, place.file, search, what)) if place and place.file else None


def missing(error: ModuleNotFoundError, code: Code) -> str | None:
    """Return a message with the file and line of the user's failed import; None if the import is in other code."""
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    file, line = [frame for frame in frames if not _IMPORTLIB.search(str(frame[0]))][-1]
    if not error.name or file not in {module.file for module in code.modules.values()}:
        return None
    return _message(file, line, error.name, _module_names({code.file.parent, file.parent}))


def clash(codes: Mapping[str, Code]) -> str | None:
    """Return a message if two components import different modules of the same name, else None.

    One process can load only one module per name. codes: component's name -> code.
    """
    seen: dict[str, tuple[str, Module]] = {}
    for part, code in codes.items():
        for name, module in code.modules.items():
            other, its = seen.setdefault(name, (part, module))
            if its.content != module.content:
                return f"{other} and {part} import different modules called {name} ({its.file}, {module.file})"
    return None


def _read(root: str, file: Path, search: Search, what: str) -> tuple[dict[str, Module], str, dict[str, str]]:
    """Read a module and all user's modules that it imports, directly or indirectly.

    Returns name -> module with ``root`` first, the hash of all modules, and file name -> hash. what: component's name
    for messages.
    """
    files, contents, edges, todo = {root: file}, {}, {}, [root]
    while todo:
        name = todo.pop()
        with files[name].open("rb") as source:
            contents[name] = source.read(LARGEST + 1)
        if len(contents[name]) > LARGEST:
            raise UserError(f"{what}: {files[name]} has more than {LARGEST:,} bytes, the maximum for Python code.")
        edges[name] = dict(_imported(name, files[name], contents[name], search, what))
        todo += [other for other in edges[name] if other not in files]
        files |= {other: path for other, path in edges[name].items() if other not in files}
    sums = {name: sha256(content).hexdigest()[:24] for name, content in contents.items()}
    modules = {name: Module(files[name], contents[name], _key(name, edges, sums)) for name in files}
    others = [name for name in sorted(files) if name != root and not is_empty(contents[name])]
    lines = [sums[root], *(f"{name} {sums[name]}" for name in others)]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:24] if others else sums[root]
    return modules, digest, {file.name: sums[root], **{_module_path(name, files[name]): sums[name] for name in others}}


def _module_path(name: str, file: Path) -> str:
    """Return the path of a module's file, relative to the entry of ``sys.path`` that contains it."""
    return f"{name.replace('.', '/')}{'/__init__' if file.name == '__init__.py' else ''}.py"


def _key(name: str, edges: Mapping[str, Iterable[str]], sums: Mapping[str, str]) -> str:
    """Return the hash of a module and of all its imports. edges: module -> imports. sums: module -> hash of content."""
    reached, todo = {name}, [name]
    while todo:
        new = [other for other in edges[todo.pop()] if other not in reached]
        reached.update(new)
        todo += new
    return sha256("\n".join(f"{other} {sums[other]}" for other in sorted(reached)).encode()).hexdigest()


def _imported(name: str, file: Path, content: bytes, search: Search, what: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of the user's modules that the module ``name`` imports, and of all parent packages.

    what: the first words of the error message.

    Raises:
        UserError: an imported module of the user is missing.
    """
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    yield from _files([name] if name else [], search)
    for line in imports(content):
        if module := line.module_from(package):
            yield from _files([module, *(f"{module}.{attribute}" for attribute in line.names)], search)
            message = _missing_neighbour(module, line, file, search)
        else:
            message = _RELATIVE.format(file, line.line)
        if message and line.sure:
            raise UserError(f"{what}: {message}")


def _files(names: Iterable[str], search: Search) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of those modules among ``names`` and their parent packages that are files of the user."""
    for name in names:
        steps = name.split(".")
        for end in range(1, len(steps) + 1):
            above = ".".join(steps[:end])
            if (place := search.place(above)) and place.file:
                yield above, place.file


def _missing_neighbour(module: str, line: Import, file: Path, search: Search) -> str | None:
    """Return a message if the import names a module of the user that is certainly missing, else None.

    A missing top-level module counts as the user's only if its name is similar to the name of a user's module.
    Any other missing module may be a package that is not installed and that only an unused function imports.
    """
    steps, above = module.split("."), Place(None, tuple(search.roots))
    for end in range(1, len(steps) + 1):
        name = ".".join(steps[:end])
        if (place := search.place(name)) is None:
            siblings = _module_names(above.folders)
            near = end > 1 or (get_close_matches(name, siblings, n=1, cutoff=SURE) and not _is_loadable(name))
            return (
                _message(file, line.line, name, siblings)
                if near and not _MAKES_MODULES.search(_content(above))
                else None
            )
        above = place
    names = [f"{module}.{attribute}" for attribute in line.names if above.folders and not attribute.startswith("__")]
    lost = [name for name in names if search.place(name) is None]
    if lost and is_empty(_content(above)):  # a package without code defines no names, so a module is missing
        return _message(file, line.line, lost[0], _module_names(above.folders))
    return None


def _content(place: Place) -> bytes:
    return place.file.read_bytes() if place.file else b""


def _is_loadable(name: str) -> bool:
    """Return whether Python finds the module, also outside the folders that ``Search`` searches."""
    return name in sys.modules or find_spec(name) is not None


def _message(file: Path, line: int, name: str, siblings: Sequence[str]) -> str:
    above, dot, _ = name.rpartition(".")
    near = nearest(name, [f"{above}{dot}{sibling}" for sibling in siblings if sibling != file.stem])
    return f"{file} (line {line}) imports {name}, but there is no such module{near}"


def _module_names(folders: Iterable[Path]) -> list[str]:
    """Return the sorted names of the modules and packages in the folders."""
    names: set[str] = set()
    for folder in folders:
        with suppress(OSError):  # the user may have no permission to list the folder
            names.update(name.removesuffix(".py") for name in os.listdir(folder))
    return sorted(name for name in names if name.isidentifier() and not name.startswith("__"))
