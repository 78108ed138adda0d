"""A part of the user's and its neighbours: the modules of theirs that it imports, read and hashed without being run.

A neighbour is a Python file that lies beside the part's file, or under the folder in which the command was given, and
that the part or another neighbour imports, wherever in the file. It is found as Python finds it in a fresh process, so
what is installed comes first. What is installed, of the standard library, or used by the platform itself is none, and
what is imported under a computed name is not seen.
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
    "{} (line {}) imports relatively, which only a module in a package can: import the neighbour by its name, or name "
    "the part by its module, such as my_lab.methods:Name."
)

_MAKES_MODULES = re.compile(rb"__path__|sys\.modules")
"""In a package that may have modules which are no files in its folder."""

SURE = 0.8
"""How much the name of a module that is nowhere must resemble a neighbour's to be taken for a misspelt one."""


LARGEST = 16 * 2**20
"""The most bytes of a file of Python code; a file without an end would not be read to its end."""


@dataclass(frozen=True)
class Module:
    """A Python file as it was read. key: a digest of it and of all the neighbours that it imports."""

    file: Path
    content: bytes
    key: str


@dataclass(frozen=True)
class Code:
    """A part's module, called ``name``, and its neighbours, by name.

    digest: of all of them; of a part without neighbours it is that of its file. files: file name to a digest.
    """

    name: str
    modules: Mapping[str, Module]
    digest: str
    files: Mapping[str, str]

    @property
    def file(self) -> Path:
        return self.modules[self.name].file


def of_file(path: Path, base: Path, what: str) -> Code:
    """The code of a part that is named by its file; base: the folder in which the command was given.

    Raises:
        UserError: a neighbour is missing; ``what`` names the part in the sentence.
        OSError: a file cannot be read.
    """
    modules, digest, files = _read("", path, Search((path.parent, base)), what)
    name = f"part_{path.stem}_{digest[:8]}"  # the same in every process, and another where the code is another
    return Code(name, {name: modules.pop(""), **modules}, digest, files)


def of_module(name: str, base: Path, what: str) -> Code | None:
    """The same for a part that is named by its module; None if that is no file of the user's, or is not there."""
    top = name.partition(".")[0]
    entries = [Path(entry) for entry in Search((base,)).entries if not is_installed(entry)]
    search = Search((base, *(entry for entry in entries if inside(entry, top))))
    place = search.place(name)
    return Code(name, *_read(name, place.file, search, what)) if place and place.file else None


def missing(error: ModuleNotFoundError, code: Code) -> str | None:
    """Which file of the user's imports what is not there, in words; None if it is no file of theirs that does."""
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    file, line = [frame for frame in frames if not _IMPORTLIB.search(str(frame[0]))][-1]
    if not error.name or file not in {module.file for module in code.modules.values()}:
        return None
    return _told(file, line, error.name, _beside({code.file.parent, file.parent}))


def clash(codes: Mapping[str, Code]) -> str | None:
    """Which two of these parts import different modules of one name, in words: a process has only one of them."""
    seen: dict[str, tuple[str, Module]] = {}
    for part, code in codes.items():
        for name, module in code.modules.items():
            other, its = seen.setdefault(name, (part, module))
            if its.content != module.content:
                return f"{other} and {part} import different modules called {name} ({its.file}, {module.file})"
    return None


def _read(root: str, file: Path, search: Search, what: str) -> tuple[dict[str, Module], str, dict[str, str]]:
    """The modules by name, the root first; the digest of all; the digest of each file."""
    files, contents, edges, todo = {root: file}, {}, {}, [root]
    while todo:
        name = todo.pop()
        with files[name].open("rb") as source:
            contents[name] = source.read(LARGEST + 1)
        if len(contents[name]) > LARGEST:
            raise UserError(f"{what}: {files[name]} has more than {LARGEST:,} bytes, too many for Python code.")
        edges[name] = dict(_imported(name, files[name], contents[name], search, what))
        todo += [other for other in edges[name] if other not in files]
        files |= {other: found for other, found in edges[name].items() if other not in files}
    sums = {name: sha256(content).hexdigest()[:24] for name, content in contents.items()}
    modules = {name: Module(files[name], contents[name], _key(name, edges, sums)) for name in files}
    others = [name for name in sorted(files) if name != root and not is_empty(contents[name])]
    lines = [sums[root], *(f"{name} {sums[name]}" for name in others)]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:24] if others else sums[root]
    return modules, digest, {file.name: sums[root], **{_shown(name, files[name]): sums[name] for name in others}}


def _shown(name: str, file: Path) -> str:
    """The module's file, from the folder in which it is looked for."""
    return f"{name.replace('.', '/')}{'/__init__' if file.name == '__init__.py' else ''}.py"


def _key(name: str, edges: Mapping[str, Iterable[str]], sums: Mapping[str, str]) -> str:
    """A digest of a module and of all that it imports, itself or through others."""
    reached, todo = {name}, [name]
    while todo:
        new = [other for other in edges[todo.pop()] if other not in reached]
        reached.update(new)
        todo += new
    return sha256("\n".join(f"{other} {sums[other]}" for other in sorted(reached)).encode()).hexdigest()


def _imported(name: str, file: Path, content: bytes, search: Search, what: str) -> Iterator[tuple[str, Path]]:
    """The neighbours that a module imports and their files; Python runs the packages in which they stand as well.

    Raises:
        UserError: one is missing.
    """
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    yield from _files([name] if name else [], search)
    for line in imports(content):
        if module := line.module_from(package):
            yield from _files([module, *(f"{module}.{one}" for one in line.names)], search)
            told = _lacking(module, line, file, search)
        else:
            told = _RELATIVE.format(file, line.line)
        if told and line.sure:
            raise UserError(f"{what}: {told}")


def _files(names: Iterable[str], search: Search) -> Iterator[tuple[str, Path]]:
    """These modules and the packages above them, those that are files of the user's."""
    for name in names:
        steps = name.split(".")
        for end in range(1, len(steps) + 1):
            above = ".".join(steps[:end])
            if (place := search.place(above)) and place.file:
                yield above, place.file


def _lacking(module: str, line: Import, file: Path, search: Search) -> str | None:
    """Which neighbour is not there, in words; None if none is known to be missing.

    Of a module in no package nobody knows whether it should be a neighbour, unless it almost has the name of one: a
    function that is never called may import what is not installed.
    """
    steps, above = module.split("."), Place(None, tuple(search.roots))
    for end in range(1, len(steps) + 1):
        name = ".".join(steps[:end])
        if (place := search.place(name)) is None:
            known = _beside(above.folders)
            near = end > 1 or (get_close_matches(name, known, n=1, cutoff=SURE) and not _is_loadable(name))
            return _told(file, line.line, name, known) if near and not _MAKES_MODULES.search(_content(above)) else None
        above = place
    names = [f"{module}.{one}" for one in line.names if above.folders and not one.startswith("__")]
    lost = [name for name in names if search.place(name) is None]
    if lost and is_empty(_content(above)):  # so it has nothing but modules
        return _told(file, line.line, lost[0], _beside(above.folders))
    return None


def _content(place: Place) -> bytes:
    return place.file.read_bytes() if place.file else b""


def _is_loadable(name: str) -> bool:
    """Whether Python finds this module where nobody else looks."""
    return name in sys.modules or find_spec(name) is not None


def _told(file: Path, line: int, name: str, known: Sequence[str]) -> str:
    above, dot, _ = name.rpartition(".")
    near = nearest(name, [f"{above}{dot}{one}" for one in known if one != file.stem])
    return f"{file} (line {line}) imports {name}, and there is no such module{near}"


def _beside(folders: Iterable[Path]) -> list[str]:
    """The names of the modules in these folders."""
    names: set[str] = set()
    for folder in folders:
        with suppress(OSError):  # a folder that may be entered and not listed
            names.update(name.removesuffix(".py") for name in os.listdir(folder))
    return sorted(name for name in names if name.isidentifier() and not name.startswith("__"))
