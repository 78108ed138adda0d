"""Imports: every module can be imported, and heavy libraries load when used. `make lint` checks the layers."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fedcommons.cli import main
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
    others = {"ray", "wandb", "torch", "diffusers", "opacus", "fedcommons", "pytest", "numpy",
              *main.COMMANDS, *main.OLD_COMMANDS}  # fmt: skip
    assert not {path.stem for path in (ROOT / "sweeps").glob("*.py")} & (sys.stdlib_module_names | others)
    assert not [path for path in FILES if len(path.read_text().splitlines()) > 350]


LAB = """
import sys
import numpy as np
def xy(): return np.random.default_rng(0).normal(size=(300, 8)), np.arange(300) % 2
class Log:
    def log(self, round, metrics): print("modules at round", round, *sys.modules)
    def finish(self, summary): ...
"""
WORDS = "--preset=smoke --wandb=off --data=lab.py:xy --model=linear --tracking.tracker=lab.py:Log"


@pytest.mark.long
def test_a_first_round_imports_only_what_the_chosen_components_need(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text(LAB, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", ROOT / "sweeps" / "run.py", *WORDS.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    loaded = set(done.stdout.partition("modules at round 1 ")[2].partition("\n")[0].split())
    assert not loaded & {"ray", "wandb", "pandas", "altair", "diffusers", "opacus", "sklearn", "fedcommons.reports"}
    methods = {name for name in loaded if name.startswith("fedcommons.algorithms.")}
    assert methods == {"fedcommons.algorithms.fedavg"}, done.stderr


def test_importing_fedcommons_imports_nothing_heavy_and_platform_stays_the_standard_library() -> None:
    code = (
        "import platform, fedcommons, sys; platform.python_version()\n"
        "print([m for m in ('torch', 'ray', 'pandas', 'numpy', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
