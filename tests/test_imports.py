"""Imports: every module can be imported, packages import lower layers only, and heavy libraries load when used."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedcommons.config.registry import KINDS

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "platform" / "fedcommons", ROOT / "lightning_modules")
FILES = sorted(path for folder in PACKAGES for path in folder.rglob("*.py"))
LAYERS = (
    {"errors"},
    {"seeds", "tensors"},
    {"runtime", "storage"},
    {"config", "data"},
    {"privacy"},
    {"core"},
    {"algorithms", "generators"},
    {"federation", "sharing"},
    {"audits", "convergence", "tracking"},
    {"cli", "runs", "testing"},
    {"reports"},
    {"tune"},
)
"""A package may import those of lower layers only, and none of its own layer."""


def module_name(path: Path) -> str:
    root = ROOT / "platform" if "platform" in path.relative_to(ROOT).parts else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "fedcommons" else {module}
    return names


def package_of(name: str) -> str | None:
    """Return the file or folder of fedcommons that a dotted name belongs to."""
    top, *rest = name.split(".")
    return rest[0] if top == "fedcommons" and rest else None


def pairs() -> Iterator[tuple[Path, str]]:
    for path in FILES:
        for name in sorted(imported(path)):
            yield path, name


def test_imports_point_to_lower_layers_only() -> None:
    layer = {name: number for number, names in enumerate(LAYERS) for name in names}
    up = []
    for path, name in pairs():
        mine, other = package_of(module_name(path)), package_of(name)
        if mine and other and other != mine and layer[other] >= layer[mine]:
            up.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not up


def is_allowed(path: Path, name: str) -> bool:
    """Return whether a file may import a module of this name."""
    top, here = name.partition(".")[0], path.relative_to(ROOT).parts
    if top in {"sweeps", "papers"} or ("lightning_modules" in here and top in {"fedcommons", "ray", "wandb"}):
        return False
    if package_of(module_name(path)) in {"federation", "runs", "testing", "tune"} and package_of(name) == "algorithms":
        return False  # methods are looked up by name
    if "algorithms" in here and package_of(name) not in {
        None,
        "algorithms",
        "core",
        "data",
        "privacy",
        *LAYERS[0],
        *LAYERS[1],
    }:
        return False
    if {"algorithms", "data", "convergence"} & {*here} and top in {"ray", "wandb"}:
        return False
    if "testing" in here:
        return top != "pytest"
    return not name.startswith("fedcommons.testing") or module_name(path) == "fedcommons"


def test_a_file_imports_only_what_is_for_it() -> None:
    assert not [f"{path.relative_to(ROOT)} imports {name}" for path, name in pairs() if not is_allowed(path, name)]


def test_every_module_can_be_imported() -> None:
    for path in FILES:
        importlib.import_module(module_name(path))


def test_components_are_named_by_strings_in_one_file_only() -> None:
    named = {where.partition(":")[0] for kind in KINDS.values() for where in kind.known.values()}
    for path in FILES:
        if module_name(path) != "fedcommons.config.registry":
            assert not named & {n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant)}, path


def test_neither_platform_nor_a_sweep_hides_a_module() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    others = {"ray", "wandb", "torch", "diffusers", "opacus", "fedcommons", "pytest", "numpy"}
    assert not {path.stem for path in (ROOT / "sweeps").glob("*.py")} & (sys.stdlib_module_names | others)
    assert not [path for path in FILES if len(path.read_text().splitlines()) > 400]


@pytest.mark.long
def test_no_library_brings_a_heavy_one_with_it() -> None:
    """These cost every worker seconds of start-up."""
    heavy = ("diffusers", "opacus", "wandb")
    code = f"import sys, fedcommons.runs.experiment as _; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_importing_fedcommons_imports_nothing_heavy_and_platform_stays_the_standard_library() -> None:
    code = (
        "import platform, fedcommons, sys; platform.python_version()\n"
        "print([m for m in ('torch', 'ray', 'pandas', 'numpy', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
