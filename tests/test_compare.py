"""Comparing run folders: means and deviations are those of the runs, whichever sweep made them."""

import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import report_runs
from report_runs import copies, small_runs

from fedcommons import load_runs
from fedcommons.errors import UserError
from fedcommons.reports import series
from fedcommons.reports.cells import Cell, once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = {
        f"{alpha}-{lr}-{seed}": {"alpha": alpha, "lr": lr, "seed": seed, "federation.rounds": 1, "data.limit": 40}
        for alpha in (0.1, 1.0)
        for lr in (0.01, 0.1)
        for seed in (0, 1)
    }
    return small_runs(tmp_path_factory.mktemp("runs"), runs)


compare = report_runs.script("compare")


@pytest.mark.long
def test_rows_have_mean_and_sd(
    compare: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    words = [str(folder), "--x", "lr", "--y", "zeta_hat_sq", "--out", str(out)]
    assert compare.compare(words) == 0
    assert "also vary in partition.alpha" in capsys.readouterr().out
    assert compare.compare([*words, "--colour", "alpha"]) == 0
    assert "also vary" not in capsys.readouterr().out
    runs, table = load_runs(folder), pd.read_csv(out / "compare.csv")
    assert len(table) == 4
    for row in table.to_dict("records"):
        own = runs[(runs["lr"] == row["lr"]) & (runs["alpha"] == row["alpha"])]["zeta_hat_sq"].tolist()
        assert (row["seeds"], len(own)) == (2, 2)
        assert row["zeta_hat_sq"] == pytest.approx(fmean(own))
        assert row["zeta_hat_sq_sd"] == pytest.approx(stdev(own))
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    names = {"x": "lr", "y": "last_accuracy", "facet": "alpha", "colour": "algorithm"}
    panels = compare.panels(compare.cells(runs), names)
    assert [panel.title.rpartition(" = ")[2] for panel in panels] == ["0.1", "1"]
    assert [[p.x for p in panel.points] for panel in panels] == [[0.01, 0.1], [0.01, 0.1]]
    assert {p.series for panel in panels for p in panel.points} == {"fedavg"}
    (again,) = copies(folder, tmp_path, "again")  # a run in two folders is one seed
    said: list[str] = []
    assert once(load_runs(folder, again), said.append).equals(runs)
    assert len(said) == 8
    assert all(str(again) in line for line in said)


@pytest.mark.long
def test_bad_requests_are_refused(
    compare: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    for words, part in (
        ("FOLDER --x lrr", "did you mean 'lr'"), ("FOLDER --y zeta_hat_q", "did you mean 'zeta_hat_sq'"),
        ("FOLDER --y algorithm", "--y takes a number"), ("FOLDER --facet seed", "means over seeds"),
        ("--x=lr", "at least one folder"), (".", "holds no run"), ("FOLDER --x=lr --out=.", "is not empty"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=part):
            compare.compare(words.replace("FOLDER", str(folder)).split())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.long
def test_comparing_imports_neither_ray_nor_wandb() -> None:
    code = (
        "import sys, runpy; runpy.run_path('sweeps/compare.py', run_name='x'); print({'ray', 'wandb'} & {*sys.modules})"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def _cell(**columns: list[Any]) -> Cell:
    return Cell({}, pd.DataFrame(columns))


def test_a_point_is_the_mean_over_seeds_and_a_bound_where_one_missed_the_target() -> None:
    reached = _cell(lr=[0.1, 0.1], rounds_to_target=[4, 6], rounds=[30, 30])
    missed = _cell(lr=[0.1, 0.1], rounds_to_target=[4, None], rounds=[30, 30])
    assert series.point(reached, "lr", "rounds_to_target", "") == series.Point(0.1, 5.0, stdev([4, 6]), "", False)
    assert series.point(missed, "lr", "rounds_to_target", "") == series.Point(0.1, 17.0, stdev([4, 30]), "", True)
    assert series.point(_cell(lr=[0.1], MB=[None]), "lr", "MB", "") is None
    assert series.point(_cell(p=[0.3, 0.31], MB=[1, 1]), "p", "MB", "a") == series.Point(0.305, 1.0, 0.0, "a", False)
    assert series.point(_cell(model=["cnn"], MB=[1]), "model", "MB", "") == series.Point("cnn", 1.0, 0.0, "", False)


def test_the_picture_is_drawn_for_numbers_names_and_bounds(tmp_path: Path) -> None:
    points = [series.Point(x, 10.0 * i + 1, 1.0, f"{i % 2}", i == 3) for i, x in enumerate((0.01, 0.01, 1.0, 1.0))]
    named = [series.Point(name, 5.0, 0.0, "0", False) for name in ("fedavg", "scaffold", "fedprox", "moon")]
    many = [series.Point(1.0, i + 1.0, 0.0, f"series {i}", False) for i in range(12)]
    panels = [series.Panel(title, "x", of) for title, of in (("a", points), ("b", named), ("c", many))]
    series.draw(tmp_path / "p.png", panels, "rounds_to_target", "which", "digits, target 80 %")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
