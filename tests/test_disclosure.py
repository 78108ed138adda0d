"""The picture of accuracy against the disclosed share, from real runs of any folders."""

import csv
import json
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedcommons
from fedcommons.config import presets
from fedcommons.core.accountants import composed
from fedcommons.errors import UserError
from fedcommons.reports import epsilon
from fedcommons.reports.cells import cells
from fedcommons.reports.disclosure import epsilon_place
from fedcommons.reports.frames import load_runs
from fedcommons.reports.series import Panel, Point
from fedcommons.sweeping.display import Display

QUICK = {"federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off"}


def _run(folder: Path, **fields: Any) -> None:
    values = {**QUICK, **{name.replace("__", "."): value for name, value in fields.items()}}
    fedcommons.run(presets.experiment("smoke", "digits", values), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two seeds that disclose nothing, copies, everything, and one that is too short."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        _run(folder / f"real{seed}", seed=seed)
        for c in (0.25, 0.5):
            _run(folder / f"copies{c}-{seed}", seed=seed, setting="raw_copies", sharing__c=c)
    _run(folder / "fedmix", algorithm="fedmix")
    _run(folder / "short", setting="shuffled_real", sharing__p=0.25, federation__rounds=1)
    return folder


@pytest.mark.long
def test_where_an_epsilon_covers_what_was_shared_accuracy_stands_against_it_too(
    tmp_path: Path, sweeps: Callable[[str], ModuleType]
) -> None:
    """On the left a run that shared nothing, then two pools by their epsilon, then one whose class counts are bare."""
    pool = {"setting": "shuffled_synthetic", "generator__name": "user_parts:WithReceipt"}
    _run(tmp_path / "runs/real")
    for sigma in (2.0, 4.0):
        _run(tmp_path / f"runs/pool{sigma:g}", **pool, generator__label_noise=8.0, generator__sigma=sigma)
    _run(tmp_path / "runs/bare", **pool)
    disclosure, out = sweeps("disclosure"), tmp_path / "out"
    options = disclosure.arguments(
        ["--preset", "smoke", "--round", "2", "--also", str(tmp_path / "runs"), "--out", str(out)]
    )
    out.mkdir()
    with Display() as display:
        disclosure.report(disclosure.grid(options), options, out, display)
    expected = [composed(((0.1, sigma, 20), (1.0, 8.0, 1)), 1e-5) for sigma in (2.0, 4.0)]
    rows = [line.split("|") for line in (out / "disclosure.md").read_text().splitlines() if line.startswith("| d")]
    assert {row[-2].strip() for row in rows} == {"-", "none", *(f"{e:.3g} if secret" for e in expected)}
    assert (out / "disclosure_epsilon.png").read_bytes().startswith(b"\x89PNG")
    found = cells(load_runs(tmp_path / "runs"))
    assert sorted(map(epsilon_place, found)) == pytest.approx([0.0, *reversed(expected), inf])


def test_epsilons_stand_on_a_true_axis_and_all_else_beside_it() -> None:
    """Nothing shared and no guarantee lie off the axis, on their own sides, and are called so."""
    points = [Point(x, 0.5, 0.1, "fedavg", False) for x in (0.0, 10.0, 100.0, 1000.0, inf)]
    axes = epsilon.figure([Panel("digits", "epsilon", points)], "digits").axes[0]
    (line, *_) = axes.containers[0]
    nothing, *three, bare = line.get_xdata()
    assert three[1] - three[0] == pytest.approx(three[2] - three[1])
    names = {label.get_text(): x for label, x in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)}
    assert (names["10"], names["1000"]) == pytest.approx((three[0], three[2]))
    assert (names["nothing\nshared"], names["no\nguarantee"]) == pytest.approx((nothing, bare))
    assert nothing < three[0] - 0.2
    assert bare > three[2] + 0.2


@pytest.mark.long
def test_points_of_any_folders(runs: Path, tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    disclosure, out = sweeps("disclosure"), tmp_path / "out"
    shutil.copytree(runs / "real0", tmp_path / "again" / "real0")
    also = f"{runs},{tmp_path / 'again'}"
    options = disclosure.arguments(["--preset", "smoke", "--round", "2", "--also", also, "--out", str(out)])
    out.mkdir()
    said: list[str] = []
    with Display() as display:
        display.say = said.append  # pyright: ignore[reportAttributeAccessIssue]
        disclosure.report(disclosure.grid(options), options, out, display)
    assert any("short has fewer than 2 rounds" in line for line in said)
    assert any(f"{tmp_path / 'again' / 'real0'} is the same experiment" in line for line in said)
    with (out / "disclosure.csv").open() as file:
        found = {line["run_dir"]: float(line["disclosed"]) for line in csv.DictReader(file)}
    expected = {f"copies{c}-{seed}": c for c in (0.25, 0.5) for seed in (0, 1)}
    assert found == pytest.approx({**expected, "real0": 0.0, "real1": 0.0, "fedmix": 1.0}, abs=1e-9)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["round"], len(summary["cells"])) == (2, 7)
    table = (out / "disclosure.md").read_text()
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| d")]
    assert [row[1:4] for row in rows] == [
        ["fedavg", "real", "0.0 %"],
        ["fedavg", "raw_copies sharing.c 0.25", "25.0 %"],
        ["fedavg", "raw_copies sharing.c 0.5", "50.0 %"],
        ["fedmix", "real", "100.0 %"],
    ]
    assert (out / "disclosure.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "disclosure_epsilon.png").exists()


def test_each_stage_is_varied_by_what_it_discloses(sweeps: Callable[[str], ModuleType]) -> None:
    disclosure = sweeps("disclosure")
    argv = ["--shares", "0.1,0.4", "--rhos", "0.3", "--epsilons", "2,5", "--alphas", "0.01", "--seeds", "0,1"]
    argv += ["--settings", "real,raw_copies,shuffled_synthetic,merf,ndpdc"]
    fields = [cell.config.flat for cell in disclosure.grid(disclosure.arguments(argv))]
    by = ("sharing.setting", "sharing.c", "generator.rho", "sharing.target_epsilon", "seed")
    assert [tuple(f.get(name) for name in by) for f in fields] == [
        ("real", None, None, None, 0),
        ("real", None, None, None, 1),
        *(("raw_copies", c, None, None, seed) for seed in (0, 1) for c in (0.1, 0.4)),
        *(("shuffled_synthetic", None, 0.3, None, seed) for seed in (0, 1)),
        *((of, None, None, e, seed) for of in ("merf", "ndpdc") for seed in (0, 1) for e in (2.0, 5.0)),
    ]
    assert {f["federation.rounds"] for f in fields} == {20}


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--sharing.c", "0.1"], "--shares"),
        (["--rho", "0.1"], "--rhos"),
        (["--settings", "merf", "--merf.target_epsilon", "1"], "--epsilons"),
        (["--round", "21"], r"--round .* got 21"),
        (["--shares", "a"], "--shares takes finite float values"),
        (["--settings", "raw_copy"], "raw_copies"),
    ],
)
def test_bad_requests_are_refused(argv: list[str], why: str, sweeps: Callable[[str], ModuleType]) -> None:
    disclosure = sweeps("disclosure")
    with pytest.raises(UserError, match=why):
        disclosure.grid(disclosure.arguments(argv))
