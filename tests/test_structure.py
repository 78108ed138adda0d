"""The shape of the platform: one module reads an experiment's fields, and what comes after takes values."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedcommons import Experiment, experiment
from fedcommons.config.schema import SECTIONS
from fedcommons.runs.build import build

PLATFORM = Path(__file__).parent.parent / "platform" / "fedcommons"
NAMES = {"config", "record", "experiment", "planned", "existing", "c"}
"""Names of variables and attributes that hold an experiment."""
FIELDS = {*Experiment.__dataclass_fields__, "flat"} - {"source"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield (path, tree) of each file, except those that define fields, parse them, and build a run from them."""
    for path in sorted(PLATFORM.rglob("*.py")):
        name = path.relative_to(PLATFORM).as_posix()
        if not name.startswith(("config/", "cli/")) and name != "runs/build.py":
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def reads_fields(tree: ast.Module) -> bool:
    """Return whether the module has a chain such as ``config.federation.rounds`` or ``c.config.flat``."""
    chains = [n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in FIELDS]
    return bool(NAMES & {getattr(value, "id", getattr(value, "attr", None)) for value in chains})


def takers(tree: ast.Module) -> list[str]:
    """Return the functions with a parameter that is an experiment, a section, or a mapping of dotted names."""
    sources = "fedcommons.config.experiment", "fedcommons.config.schema"
    imports = [n.names for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module in sources]
    kinds = {a.name for names in imports for a in names}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    pairs = [(f.name, a) for f in functions for a in (*f.args.args, *f.args.kwonlyargs)]
    return [f for f, a in pairs if a.arg == "flat" or kinds & {n.id for n in ast.walk(a) if isinstance(n, ast.Name)}]


def imported(tree: ast.Module) -> set[str]:
    names = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module:
            folder = PLATFORM.parent.joinpath(*n.module.split("."))
            modules = {f"{n.module}.{alias.name}" for alias in n.names if (folder / f"{alias.name}.py").exists()}
            names |= modules or {n.module}
    return names


def test_fields_are_read_in_few_files() -> None:
    assert len(readers := [name for name, tree in modules() if reads_fields(tree)]) <= 6, readers


def test_few_functions_of_a_run_take_an_experiment() -> None:
    """A component's own ``check(fields)`` is not counted."""
    users = {name: takers(tree) for name, tree in modules() if not name.startswith(("tune/", "reports/"))}
    assert sum(map(len, users.values())) <= 20, {name: functions for name, functions in users.items() if functions}


def test_build_and_experiment_import_few_modules() -> None:
    for name in ("build", "experiment"):
        assert len(modules := imported(ast.parse((PLATFORM / "runs" / f"{name}.py").read_text()))) <= 25, modules


def walk_values(value: Any, path: str = "spec") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of all that a value holds, except what ``record`` holds."""
    yield path, value
    inner: Mapping[str, Any] = {}
    if isinstance(value, partial):
        inner = {**{str(n): v for n, v in enumerate(value.args)}, **value.keywords}
    elif type(value) is dict:
        inner = value
    elif is_dataclass(value) and type(value).__module__.startswith("fedcommons"):
        inner = {name: getattr(value, name) for name in value.__dataclass_fields__ if name != "record"}
    for name, part in inner.items():
        yield from walk_values(part, f"{path}.{name}")


def test_a_run_holds_no_experiment_and_no_section_but_for_its_record() -> None:
    config = experiment("smoke", values={"sharing.setting": "shuffled_synthetic", "dp.local": True})
    dotted = {name for name in config.flat if "." in name}
    for path, value in walk_values(build(config)):
        assert not isinstance(value, (Experiment, *SECTIONS.values())), path
        assert not (isinstance(value, Mapping) and dotted & set(value)), path
