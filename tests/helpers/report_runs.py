"""Small runs for tests of frames, tables and reports, with functions that read records without the package."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedcommons import experiment, run

FIELDS = {
    "wandb": "off", "federation.rounds": 2, "client.epochs": 1, "measure.every": 1, "data.limit": 80, "alpha": 0.1,
}  # fmt: skip


def script(name: str) -> Any:
    """Return a pytest fixture that loads this script of sweeps/ as a module."""

    @pytest.fixture(scope="module")
    def load(sweeps: Callable[[str], ModuleType]) -> ModuleType:
        return sweeps(name)

    return load


def quiet(text: str) -> None: ...


def small_run(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Run a small experiment with ``FIELDS`` and these fields, and return its summary."""
    return dict(run(experiment("smoke", values={**FIELDS, **fields}), folder, say=quiet).summary)


def small_runs(out: Path, runs: Mapping[str, Mapping[str, Any]]) -> Path:
    """Run a small experiment in ``out/NAME`` for each name, and return ``out``."""
    for name, fields in runs.items():
        small_run(out / name, fields)
    return out


def copies(source: Path, out: Path, *names: str) -> list[Path]:
    """Copy a run folder into ``out`` under these names, and return the new paths."""
    return [Path(shutil.copytree(source, out / name)) for name in names]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def change(file: Path, **values: Any) -> None:
    """Replace these values in a JSON file; the value None removes the key."""
    content = {**json.loads(file.read_text(encoding="utf-8")), **values}
    remaining = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(remaining), encoding="utf-8")
