"""What lies in the folder where a command is given is executed only if the command names it."""

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from fedcommons.config import parts
from fedcommons.runs import cost

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for every module of Python, of what is installed and of ours; each tells that it was run."""
    folder = tmp_path_factory.mktemp("trap")
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize", "fedcommons"}
    for name in filter(str.isidentifier, names):
        told = f"open({str(folder / 'caught')!r}, 'a').write({name!r} + ' ')"
        (folder / f"{name}.py").write_text(f"{told}\nraise ImportError('caught')\n")
    return folder


@pytest.fixture
def trap(traps: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It is the current folder."""
    (traps / "caught").unlink(missing_ok=True)
    monkeypatch.chdir(traps)
    return traps


def caught(trap: Path) -> str:
    return (trap / "caught").read_text() if (trap / "caught").exists() else ""


def test_the_process_that_a_dry_run_starts_runs_nothing_of_it(
    trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it imports is found before all others here, and imports what Python itself has not."""
    stub = tmp_path / "stub" / "fedcommons" / "runs"
    stub.mkdir(parents=True)
    (stub.parent / "__init__.py").touch()
    (stub / "__init__.py").touch()
    (stub / "experiment.py").write_text("import grp, numpy, sqlite3, wave")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    cost.start_up.cache_clear()
    try:
        assert cost.start_up() > 0
    finally:
        cost.start_up.cache_clear()
    assert caught(trap) == ""


def test_no_other_process_is_started_without_that_switch() -> None:
    """``-P``: neither the current folder nor that of a script is where modules are looked for."""
    code = [path.read_text() for name in ("platform", "sweeps", "examples") for path in (ROOT / name).rglob("*.py")]
    started = [found for text in code for found in re.findall(r"\[sys\.executable, *(\S+),", text)]
    assert started == ['"-P"'] * 2


def test_the_package_s_own_parts_bring_no_folder_where_modules_are_looked_for(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv(parts.HERE, raising=False)
    for kind in ("algorithm", "data", "model", "sharing"):
        parts.find(kind, next(iter(parts.KINDS[kind].known)))
    assert str(trap) not in sys.path
    (trap / "my_lab.py").write_text("class Mine: ...")
    assert parts.find("algorithm", "my_lab.py:Mine").__name__ == "Mine"
    assert parts.find("algorithm", "my_lab:Mine").__name__ == "Mine"
    assert sys.path[-1] == str(trap)  # for what it imports under a computed name: after all others
    assert caught(trap) == ""


@pytest.mark.ray
@pytest.mark.parametrize("script", ["run.py --federation.executor=ray_actors --federation.actors=2", "table1.py"])
def test_ray_s_processes_run_nothing_of_it(trap: Path, tmp_path: Path, script: str) -> None:
    name, *words = script.split()
    fields = ["--preset=smoke", "--federation.rounds=1", "--data.limit=60", "--partition.n_clients=2", "--wandb=off"]
    words += ["--algorithms=fedavg", "--settings=real"] if name == "table1.py" else []
    where = [f"--out={tmp_path / 'out'}", f"--artifacts={tmp_path / 'artifacts'}"]
    command = [sys.executable, str(ROOT / "sweeps" / name), *fields, *words, *where]
    clean = {key: value for key, value in os.environ.items() if key != parts.HERE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=clean)
    assert caught(trap) == ""
    assert done.returncode == 0, done.stderr
