"""The package can be imported, its imports point one way, and nothing hides the standard library."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "platform" / "fedcommons", ROOT / "lightning_modules")
FILES = sorted(path for folder in PACKAGES for path in folder.rglob("*.py"))


def module_name(path: Path) -> str:
    root = ROOT / "platform" if "platform" in path.relative_to(ROOT).parts else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "fedcommons" else {module}
    return names


FLOORS = (
    {"files", "seeds", "tensors"},
    {"errors"},
    {"artifacts", "capacity", "locks", "paths"},
    {"config", "data"},
    {"core"},
    {"accounting", "algorithms", "generators"},
    {"federation", "sharing"},
    {"audits", "convergence", "tracking"},
    {"runs", "testing"},
    {"reports"},
    {"sweeping"},
)
"""The rooms of the house: a room may import those of lower floors only, and nobody of its own floor."""


def room(name: str) -> str | None:
    """The file or folder of the package that a dotted name stands in."""
    top, *rest = name.split(".")
    return rest[0] if top == "fedcommons" and rest else None


def test_no_import_points_up() -> None:
    floor = {name: number for number, rooms in enumerate(FLOORS) for name in rooms}
    up = []
    for path in FILES:
        mine = room(module_name(path))
        for name in imported(path):
            other = room(name)
            if mine and other and other != mine and floor[other] >= floor[mine]:
                up.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not up


def test_who_runs_and_prices_methods_knows_none() -> None:
    """A method tells what is special about it; it is found by its name in config/parts.py, or by its path."""
    knowing = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if room(module_name(path)) in {"federation", "runs", "sweeping", "testing"}
        for name in imported(path)
        if room(name) == "algorithms"
    ]
    assert not knowing


def test_every_module_can_be_imported() -> None:
    failed = {}
    for path in FILES:
        try:
            importlib.import_module(module_name(path))
        except Exception as error:
            failed[module_name(path)] = repr(error)
    assert not failed


def allowed(path: Path, name: str) -> bool:
    """Whether a file may import a module of this name."""
    top, here, testing = name.partition(".")[0], path.relative_to(ROOT).parts, name.startswith("fedcommons.testing")
    if top in {"sweeps", "papers"} or ("lightning_modules" in here and top in {"fedcommons", "ray", "wandb"}):
        return False
    if "algorithms" in here and room(name) not in {None, "algorithms", "core", "data", *FLOORS[0], *FLOORS[1]}:
        return False
    if {"algorithms", "data", "convergence"} & {*here} and top in {"ray", "wandb"}:
        return False
    if "testing" in here:
        return top != "pytest"  # whoever tests a method of their own may do so without it
    return not testing or module_name(path) == "fedcommons"  # which names what everybody may use


@pytest.mark.long
def test_nobody_imports_what_is_not_for_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in sorted(imported(path))
        if not allowed(path, name)
    ]
    assert not wrong


def test_methods_data_and_estimators_name_no_trainer() -> None:
    rooms = {"algorithms", "data", "convergence"}
    of_rooms = [path for path in FILES if rooms & {*path.relative_to(ROOT).parts}]
    assert not [str(path.relative_to(ROOT)) for path in of_rooms if "Trainer" in path.read_text()]


def test_platform_is_still_the_standard_library() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform, fedcommons; print(platform.python_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.version.split()[0]


def test_no_sweep_hides_a_module() -> None:
    """``python sweeps/x.py`` puts sweeps/ first on the path: a sweep called ray.py would hide Ray."""
    for path in (ROOT / "sweeps").glob("*.py"):
        assert path.stem not in sys.stdlib_module_names
        assert path.stem not in {"ray", "wandb", "torch", "diffusers", "opacus", "fedcommons", "pytest", "numpy"}


HEAVY = ("diffusers", "opacus", "wandb")
"""They cost every worker seconds of start-up."""


def imported_at_once(path: Path) -> set[str]:
    """Dotted names of what a file imports, or may import, when it is imported itself."""
    names: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef):
            left += ast.iter_child_nodes(node)
    return names


def test_heavy_libraries_are_imported_only_where_they_are_used() -> None:
    ours, reached, left = {module_name(path): path for path in FILES}, set(), ["fedcommons.runs.experiment"]
    while left:
        new = imported_at_once(ours[left.pop()]) - reached
        reached |= new
        left += new & ours.keys()
    assert "pytorch_lightning" in reached
    assert not {name for name in reached if name.partition(".")[0] in HEAVY}


@pytest.mark.ray  # it needs none, but seconds
def test_no_library_brings_a_heavy_one_with_it() -> None:
    code = f"import sys, fedcommons.runs.experiment as _; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_files_are_short() -> None:
    long = {str(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long
