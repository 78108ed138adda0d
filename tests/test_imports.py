"""Imports: every module can be imported, and heavy libraries load when used. `make lint` checks the layers."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fedcommons.config.registry import KINDS

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "platform" / "fedcommons", ROOT / "lightning_modules")
FILES = sorted(path for folder in PACKAGES for path in folder.rglob("*.py"))


def module_name(path: Path) -> str:
    root = ROOT / "platform" if "platform" in path.relative_to(ROOT).parts else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:fedcommons.sharing.needs:DeprecationWarning")
def test_every_module_can_be_imported() -> None:
    for path in FILES:
        importlib.import_module(module_name(path))


def test_components_are_named_by_strings_in_one_file_only() -> None:
    named = {where.partition(":")[0] for kind in KINDS.values() for where in kind.components.values()}
    for path in FILES:
        if module_name(path) != "fedcommons.config.registry":
            assert not named & {n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant)}, path


def test_neither_platform_nor_a_sweep_hides_a_module() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    others = {"ray", "wandb", "torch", "diffusers", "opacus", "fedcommons", "pytest", "numpy"}
    assert not {path.stem for path in (ROOT / "sweeps").glob("*.py")} & (sys.stdlib_module_names | others)
    assert not [path for path in FILES if len(path.read_text().splitlines()) > 350]


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
