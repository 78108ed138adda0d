"""The command ``fedcommons``: ``fedcommons NAME ...`` runs a command of the package, or ``sweeps/NAME.py``.

A wheel contains the folder ``sweeps`` under the name ``fedcommons_sweeps``. The script runs as with ``python``: its
folder is first in ``sys.path``, and its file is ``sys.argv[0]``. So Ray's workers find the modules next to a script.
"""

import ast
import runpy
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from fedcommons.cli import parse
from fedcommons.config.static_fields import summary
from fedcommons.errors import UserError, unknown
from fedcommons.storage.paths import sweeps_folder

COMMANDS = {
    "gc": "fedcommons.cli.storage_gc:storage_gc",
    "logs": "fedcommons.tune.operate:logs",
    "status": "fedcommons.tune.operate:status",
    "stop": "fedcommons.tune.operate:stop",
    "track": "fedcommons.reports.track:track",
    "wandb": "fedcommons.reports.track:track",
    "watch": "fedcommons.reports.watch:watch",
}
"""Commands of the package: name -> MODULE:FUNCTION. The function's argument is the list of words after the name."""

OLD_COMMANDS = {"storage_gc": "gc"}
"""Old name of a command -> present name. The old name works, with a warning, for one more version."""


def folder() -> Path:
    """Return the folder of the sweeps' scripts: in the clone that contains this package, or next to the package.

    Raises:
        UserError: neither folder exists.
    """
    if path := sweeps_folder():
        return path
    package = Path(__file__).resolve().parent.parent
    raise UserError(f"there is no folder of sweeps next to {package}: install the wheel of fedcommons, or its clone.")


def scripts() -> dict[str, Path]:
    """Return name -> path of the sweeps' scripts.

    Raises:
        UserError: a script has the name of a command of the package.
    """
    paths = {path.stem: path for path in sorted(folder().glob("*.py"))}
    for name in sorted(paths.keys() & {*COMMANDS, *OLD_COMMANDS}):
        raise UserError(f"{paths[name]} has the same name as the command `fedcommons {name}`: rename this script.")
    return paths


def function_of(name: str) -> Any:
    """Return the function of the package's command ``name``."""
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(module), function)


def listing() -> str:
    """Return the text of ``fedcommons --help``: each command with the first line of its docstring."""
    docstrings = {
        name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in scripts().items()
    }
    docstrings |= {name: summary(place) for name, place in COMMANDS.items()}
    width = max(map(len, docstrings))
    columns, indent = max(shutil.get_terminal_size().columns, width + 40), " " * (width + 4)
    lines = [
        textwrap.fill(f"  {name:<{width}}  {(text or '').partition(chr(10))[0]}", columns, subsequent_indent=indent)
        for name, text in docstrings.items()
    ]
    return "\n".join(["usage: fedcommons NAME [options]", "", *lines, "", "fedcommons NAME --help shows its options."])


def command(argv: Sequence[str]) -> int:
    """Run the command that the first word of ``argv`` names, with the other words as options; return its exit code.

    Raises:
        UserError: there is no such command.
    """
    name, *words = argv or ("--help",)
    if name in ("-h", "--help", "--version"):
        print(f"fedcommons {version('fedcommons')}" if name == "--version" else listing())
        return 0
    if name.replace("-", "_") in OLD_COMMANDS:
        new = OLD_COMMANDS[name.replace("-", "_")]
        print(f"`fedcommons {name}` is now `fedcommons {new}`.", file=sys.stderr)
        name = new
    sweeps = scripts()
    if name in COMMANDS:
        sys.argv = [f"fedcommons {name}", *words]
        parse.main(function_of(name), resumes=False)
    if name.replace("-", "_") not in sweeps:
        raise unknown("command", name, (*sweeps, *COMMANDS))
    path = sweeps[name.replace("-", "_")]
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    return 0


def main() -> NoReturn:
    """Run the command line and exit with its code; the installed script ``fedcommons`` calls this function."""
    parse.main(command)
