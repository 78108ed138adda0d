"""The command ``fedcommons``: ``fedcommons NAME ...`` is ``python sweeps/NAME.py ...``, also without a clone.

A wheel has the folder ``sweeps`` as ``fedcommons_sweeps``. Its scripts are run as Python runs a script, with their
folder first on the path and their file as ``sys.argv[0]``, by which Ray's workers find what papers have beside them.
"""

import ast
import runpy
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from fedcommons.cli import parse
from fedcommons.errors import UserError, unknown
from fedcommons.storage.paths import sweeps_folder


def folder() -> Path:
    """Where the sweeps are: in the clone that this package lies in, or beside it.

    Raises:
        UserError: they are in neither place.
    """
    if found := sweeps_folder():
        return found
    package = Path(__file__).resolve().parent.parent
    raise UserError(f"there are no sweeps beside {package}: install the wheel of fedcommons, or its clone.")


def scripts() -> dict[str, Path]:
    """The sweeps by name."""
    return {path.stem: path for path in sorted(folder().glob("*.py"))}


def listing() -> str:
    """What ``fedcommons --help`` prints: each command with the first line of its docstring."""
    told = {name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in scripts().items()}
    width = max(map(len, told))
    columns, indent = max(shutil.get_terminal_size().columns, width + 40), " " * (width + 4)
    lines = [
        textwrap.fill(f"  {name:<{width}}  {(text or '').partition(chr(10))[0]}", columns, subsequent_indent=indent)
        for name, text in told.items()
    ]
    return "\n".join(["usage: fedcommons NAME [options]", "", *lines, "", "fedcommons NAME --help tells its options."])


def command(argv: Sequence[str]) -> int:
    """Run the command that the first word names.

    Raises:
        UserError: there is no such command.
    """
    name, *words = argv or ("--help",)
    if name in ("-h", "--help", "--version"):
        print(f"fedcommons {version('fedcommons')}" if name == "--version" else listing())
        return 0
    known = scripts()
    if name.replace("-", "_") not in known:
        raise unknown("command", name, known)
    path = known[name.replace("-", "_")]
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    return 0


def main() -> NoReturn:
    """What the installed script calls."""
    parse.main(command)
