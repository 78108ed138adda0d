"""A file in the folder where a command is run is executed only if the command names it."""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from fedcommons.config import registry
from fedcommons.tune import cost

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a file for every module there is; each leaves a mark when it is executed."""
    (folder := tmp_path / "trap").mkdir()
    names = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize", "fedcommons"}
    for name in filter(str.isidentifier, names):
        mark = f"open({str(folder / 'caught')!r}, 'a').write({name!r} + ' ')"
        (folder / f"{name}.py").write_text(f"{mark}\nraise ImportError('caught')\n")
    monkeypatch.chdir(folder)
    return folder


def caught(trap: Path) -> str:
    return (trap / "caught").read_text() if (trap / "caught").exists() else ""


def test_the_process_of_a_dry_run_runs_no_files(trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub comes before all others on the path, and imports modules that Python has not imported itself."""
    stub = tmp_path / "stub" / "fedcommons"
    for name in ("__init__", "runs/__init__", "runtime/__init__"):
        (stub / name).parent.mkdir(parents=True, exist_ok=True)
        (stub / f"{name}.py").touch()
    (stub / "runtime" / "libraries.py").write_text("def import_libraries(): ...")
    (stub / "runs" / "experiment.py").write_text("import grp, numpy, sqlite3, wave")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    cost.start_up.cache_clear()
    try:
        assert cost.start_up() > 0
    finally:
        cost.start_up.cache_clear()
    assert caught(trap) == ""


def test_only_a_user_s_component_puts_its_folder_on_the_path(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv(registry.HERE, raising=False)
    for kind in ("algorithm", "data", "model", "sharing"):
        registry.find(kind, next(iter(registry.KINDS[kind].components)))
    assert str(trap) not in sys.path
    (trap / "my_lab.py").write_text("class Mine: ...")
    assert registry.find("algorithm", "my_lab.py:Mine").__name__ == "Mine"
    assert registry.find("algorithm", "my_lab:Mine").__name__ == "Mine"
    assert sys.path[-1] == str(trap)  # after all others
    assert caught(trap) == ""


@pytest.mark.ray
def test_ray_s_processes_run_nothing_of_it(trap: Path, tmp_path: Path) -> None:
    words = ["--preset=smoke", "--federation.rounds=1", "--data.limit=60", "--partition.n_clients=2", "--wandb=off",
             "--federation.executor=ray_actors", "--federation.actors=1", f"--out={tmp_path / 'out'}",
             f"--artifacts={tmp_path / 'artifacts'}"]  # fmt: skip
    command = [sys.executable, str(ROOT / "sweeps" / "run.py"), *words]
    clean = {key: value for key, value in os.environ.items() if key != registry.HERE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=clean)
    assert caught(trap) == ""
    assert done.returncode == 0, done.stderr
