"""The picture of accuracy against what was given away, from real runs of any folders."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedcommons
from fedcommons.config import presets
from fedcommons.config.flat import flat_dict
from fedcommons.errors import UserError
from fedcommons.sweeping.display import Display

QUICK = {"federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off"}


def _run(folder: Path, **fields: Any) -> None:
    values = {**QUICK, **{name.replace("__", "."): value for name, value in fields.items()}}
    fedcommons.run(presets.experiment("smoke", "digits", values), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two seeds that give nothing away, copies, everything, and one that is too short."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        _run(folder / f"real{seed}", seed=seed)
        for c in (0.25, 0.5):
            _run(folder / f"copies{c}-{seed}", seed=seed, setting="raw_copies", sharing__c=c)
    _run(folder / "fedmix", algorithm="fedmix")
    _run(folder / "short", setting="shuffled_real", sharing__p=0.25, federation__rounds=1)
    return folder


def test_points_of_any_folders(runs: Path, tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    disclosure, out = sweeps("disclosure"), tmp_path / "out"
    options = disclosure.arguments(["--preset", "smoke", "--round", "2", "--also", str(runs), "--out", str(out)])
    out.mkdir()
    said: list[str] = []
    with Display() as display:
        display.say = said.append  # pyright: ignore[reportAttributeAccessIssue]
        disclosure.report(disclosure.grid(options), out, options, display)
    assert any("short has fewer than 2 rounds" in line for line in said)
    with (out / "disclosure.csv").open() as file:
        found = {line["run_dir"]: float(line["disclosed"]) for line in csv.DictReader(file)}
    expected = {f"copies{c}-{seed}": c for c in (0.25, 0.5) for seed in (0, 1)}
    assert found == pytest.approx({**expected, "real0": 0.0, "real1": 0.0, "fedmix": 1.0}, abs=1e-9)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["round"], len(summary["cells"])) == (2, 7)
    table = (out / "disclosure.md").read_text()
    assert table.startswith("**SMOKE")
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| d")]
    assert [row[1:4] for row in rows] == [
        ["fedavg", "real", "0.0 %"],
        ["fedavg", "raw_copies sharing.c 0.25", "25.0 %"],
        ["fedavg", "raw_copies sharing.c 0.5", "50.0 %"],
        ["fedmix", "real", "100.0 %"],
    ]
    assert (out / "disclosure.png").read_bytes().startswith(b"\x89PNG")


def test_each_stage_is_varied_by_what_makes_it_give_more_away(sweeps: Callable[[str], ModuleType]) -> None:
    disclosure = sweeps("disclosure")
    argv = ["--shares", "0.1,0.4", "--rhos", "0.3", "--alphas", "0.01", "--seeds", "0,1"]
    fields = [flat_dict(cell.config) for cell in disclosure.grid(disclosure.arguments(argv))]
    found = [(f["sharing.setting"], f.get("sharing.c"), f.get("generator.rho"), f["seed"]) for f in fields]
    assert found == [
        ("real", None, None, 0),
        ("real", None, None, 1),
        *(("raw_copies", c, None, seed) for seed in (0, 1) for c in (0.1, 0.4)),
        *(("shuffled_synthetic", None, 0.3, seed) for seed in (0, 1)),
    ]
    assert {f["federation.rounds"] for f in fields} == {20}


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--sharing.c", "0.1"], "--shares"),
        (["--rho", "0.1"], "--rhos"),
        (["--round", "21"], r"--round must lie in 0 \.\.\. federation\.rounds = 20, got 21"),
        (["--shares", "a"], "--shares takes finite float values"),
        (["--settings", "raw_copy"], "raw_copies"),
    ],
)
def test_bad_requests_are_refused(argv: list[str], why: str, sweeps: Callable[[str], ModuleType]) -> None:
    disclosure = sweeps("disclosure")
    with pytest.raises(UserError, match=why):
        disclosure.grid(disclosure.arguments(argv))
