"""Runs the modules of the user's parts as they were read and hashed, now and whenever they are imported."""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from fedcommons.config.user_code import Code, Module


def load(code: Code) -> ModuleType:
    """A part's module, run as it was read; so are its neighbours, also those that a function imports later.

    A module whose code is what it was when it was run here is taken again. One that somebody else has imported is not,
    as nobody knows what its file held then.
    """
    _modules.hold(code)
    return importlib.import_module(code.name)


class _Loader(SourceFileLoader):
    """Runs what was read. No .pyc is used or written: Python tells these apart by second and size only."""

    def __init__(self, name: str, module: Module) -> None:
        super().__init__(name, str(module.file))
        self.module = module

    def get_data(self, path: str) -> bytes:
        return self.module.content if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError("no .pyc is wanted")

    def exec_module(self, module: ModuleType) -> None:
        key = (module.__name__, self.module.key)
        _modules.run[key] = module  # before it has run, as it may import itself
        try:
            super().exec_module(module)
        except BaseException:
            del _modules.run[key]
            raise


@dataclass(eq=False)
class _Modules:
    """Where Python finds the modules of the parts that were loaded; those of the last one come first.

    run: by name and key, what has been run here.
    """

    held: dict[Path, Code] = field(default_factory=dict)
    run: dict[tuple[str, str], ModuleType] = field(default_factory=dict)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``. Who reloads a module by hand (target) wants what its file holds now."""
        found = [code.modules[name] for code in self.held.values() if name in code.modules]
        if not found or target is not None:
            return None
        file = found[-1].file
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(name, file, loader=_Loader(name, found[-1]), submodule_search_locations=folders)

    def hold(self, code: Code) -> None:
        """See that whoever imports a module of this part gets it as it was read."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self.held.pop(code.file, None)
        self.held[code.file] = code
        wanted = {name: self._run(name, module) for name, module in code.modules.items()}
        for name, module in wanted.items():
            if module is not sys.modules.get(name):
                for other in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
                    _put(other, None)
        for name, module in wanted.items():
            if module is not sys.modules.get(name):
                _put(name, module)

    def _run(self, name: str, module: Module) -> ModuleType | None:
        """The module that was made of this; None if it was not run, or was reloaded by hand since."""
        found = self.run.get((name, module.key))
        loader = getattr(getattr(found, "__spec__", None), "loader", None)
        return found if isinstance(loader, _Loader) and loader.module.key == module.key else None


_modules = _Modules()


def _put(name: str, module: ModuleType | None) -> None:
    """Make this the module of that name, in its package too; None: there is none any more."""
    above, _, leaf = name.rpartition(".")
    old, package = sys.modules.pop(name, None), vars(sys.modules[above]) if above in sys.modules else {}
    if package.get(leaf) is old:
        package.pop(leaf, None)
    if module is not None:
        sys.modules[name] = package[leaf] = module
