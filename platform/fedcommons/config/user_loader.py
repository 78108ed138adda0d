"""Import of user-defined components, which run exactly the hashed code, even if the files changed afterwards."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from fedcommons.config import user_code
from fedcommons.config.user_code import Code, Module
from fedcommons.errors import UserError, before_any_work, user_code_context

codes: dict[tuple[Path, str], Code | None] = {}
"""(folder of the command, import path) -> the component's code as read last; None if the code is not the user's."""


def read(where: str, base: Path, what: str, reread: bool = True) -> Code | None:
    """Return the code of the file or module ``where``; None if ``where`` is not a file of the user.

    base: folder of the command. what: the component's name for messages. reread: read files that were read before.
    """
    if reread or (base, where) not in codes:
        try:
            if not where.endswith(".py"):
                codes[base, where] = user_code.of_module(where, base, what)
            elif (path := base / Path(where).expanduser()).is_file():
                codes[base, where] = user_code.of_file(path, base, what)
            else:
                raise UserError(f"{what}: there is no file {path}.")
        except OSError as error:
            raise UserError(f"{what}: {error.filename} cannot be read ({error.strerror}).") from error
    return codes[base, where]


def module(where: str, base: Path, what: str) -> ModuleType:
    """Import the file or module ``where`` with its code as read last, and return the Python module; see ``read``.

    The user's modules that the code imports, now or later, were read with it and run as read. A module that this loader
    has already run with the same code is reused. A module that another loader imported is imported again, because the
    content of its file at that time is unknown.
    """
    code = read(where, base, what, reread=False)
    if code:  # for an installed package, no folder is added, so that it cannot import the user's files
        for folder in ([code.file.parent] if where.endswith(".py") else []) + [base]:
            user_code.add_to_path(folder)  # by default, sys.path has only the script's folder
        _modules.hold(code)
    with before_any_work(), user_code_context(f"{what}: importing {where} failed"):
        try:
            return importlib.import_module(code.name if code else where)
        except ModuleNotFoundError as error:
            if code and (message := user_code.missing(error, code)):
                raise UserError(f"{what}: {message}") from error
            raise


class _Loader(SourceFileLoader):
    """A loader that runs code which was read before. The loader ignores .pyc files, as they may be outdated."""

    def __init__(self, name: str, module: Module) -> None:
        super().__init__(name, str(module.file))
        self.module = module

    def get_data(self, path: str) -> bytes:
        return self.module.content if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError("no .pyc file is used")

    def exec_module(self, module: ModuleType) -> None:
        key = (module.__name__, self.module.key)
        _modules.run[key] = module  # set before the module runs, as the module may import itself
        try:
            super().exec_module(module)
        except BaseException:
            del _modules.run[key]
            raise


@dataclass(eq=False)
class _Modules:
    """A finder (``sys.meta_path``) of the modules of loaded components; the component loaded last takes precedence.

    code_by_file: component's file -> code. run: (name, hash of the code) -> module that ``_Loader`` has run.
    """

    code_by_file: dict[Path, Code] = field(default_factory=dict)
    run: dict[tuple[str, str], ModuleType] = field(default_factory=dict)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        modules = [code.modules[name] for code in self.code_by_file.values() if name in code.modules]
        if not modules or target is not None:  # ``importlib.reload`` passes a target, and Python reads the file again
            return None
        file = modules[-1].file
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(
            name, file, loader=_Loader(name, modules[-1]), submodule_search_locations=folders
        )

    def hold(self, code: Code) -> None:
        """Make each later import of one of the component's modules run this code."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self.code_by_file.pop(code.file, None)
        self.code_by_file[code.file] = code
        wanted = {name: self._run(name, module) for name, module in code.modules.items()}
        for name, module in wanted.items():
            if module is not sys.modules.get(name):
                for other in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
                    _put(other, None)
        for name, module in wanted.items():
            if module is not sys.modules.get(name):
                _put(name, module)

    def _run(self, name: str, module: Module) -> ModuleType | None:
        """Return the loaded module with this name and code; None if it was not loaded, or was reloaded since."""
        candidate = self.run.get((name, module.key))
        loader = getattr(getattr(candidate, "__spec__", None), "loader", None)
        return candidate if isinstance(loader, _Loader) and loader.module.key == module.key else None


_modules = _Modules()


def _put(name: str, module: ModuleType | None) -> None:
    """Set the module called ``name`` in ``sys.modules`` and as an attribute of its package; None removes it."""
    above, _, leaf = name.rpartition(".")
    old, package = sys.modules.pop(name, None), vars(sys.modules[above]) if above in sys.modules else {}
    if package.get(leaf) is old:
        package.pop(leaf, None)
    if module is not None:
        sys.modules[name] = package[leaf] = module
