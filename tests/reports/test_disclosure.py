"""The picture of accuracy against the disclosed share, from real runs of any folders."""

import csv
import json
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import ModuleType

import pytest
from report_runs import small_runs

from fedcommons import load_runs
from fedcommons.cli.display import Display
from fedcommons.privacy.accountants import composed
from fedcommons.reports.cells import cells
from papers.disclosure import epsilon_place


def _report(disclosure: ModuleType, out: Path, folders: str) -> Path:
    options = disclosure.arguments(["--preset=smoke", "--round=2", f"--also={folders}", f"--out={out}"])
    out.mkdir()
    with Display() as display:
        disclosure.report(disclosure.grid(options), options, out, display)
    return out


@pytest.mark.long
def test_accuracy_is_plotted_against_a_covering_epsilon(tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    """On the left a run that shared nothing, then two pools by their epsilon, then one whose class counts are bare."""
    pool = {"setting": "shuffled_synthetic", "generator.name": "user_parts:WithReceipt"}
    noisy = {f"pool{sigma}": {**pool, "generator.label_noise": 8.0, "generator.sigma": sigma} for sigma in (2.0, 4.0)}
    small_runs(tmp_path / "runs", {"real": {}, **noisy, "bare": pool})
    out = _report(sweeps("disclosure"), tmp_path / "out", f"{tmp_path / 'runs'}")
    expected = [composed(((0.1, sigma, 20), (1.0, 8.0, 1)), 1e-5) for sigma in (2.0, 4.0)]
    rows = [line.split("|") for line in (out / "disclosure.md").read_text().splitlines() if line.startswith("| d")]
    assert {row[-2].strip() for row in rows} == {"-", "none", *(f"{e:.3g} if secret" for e in expected)}
    assert (out / "disclosure_epsilon.png").read_bytes().startswith(b"\x89PNG")
    results = cells(load_runs(tmp_path / "runs"))
    assert sorted(map(epsilon_place, results)) == pytest.approx([0.0, *reversed(expected), inf])


@pytest.mark.long
def test_points_of_any_folders(tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    """Runs that disclose nothing, copies and everything, one that is too short, and one that stands there twice."""
    runs = {f"copies{c}": {"setting": "raw_copies", "sharing.c": c} for c in (0.25, 0.5)}
    short = {"setting": "shuffled_real", "sharing.p": 0.25, "federation.rounds": 1}
    small_runs(tmp_path / "runs", {"real": {}, **runs, "fedmix": {"algorithm": "fedmix"}, "short": short})
    shutil.copytree(tmp_path / "runs/real", tmp_path / "again/real")
    out = _report(sweeps("disclosure"), tmp_path / "out", f"{tmp_path / 'runs'},{tmp_path / 'again'}")
    with (out / "disclosure.csv").open() as file:
        points = [(line["run_dir"], pytest.approx(float(line["disclosed"]))) for line in csv.DictReader(file)]
    assert sorted(points) == [("copies0.25", 0.25), ("copies0.5", 0.5), ("fedmix", 1.0), ("real", 0.0)]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["round"], len(summary["cells"])) == (2, 4)
    assert (out / "disclosure.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "disclosure_epsilon.png").exists()
