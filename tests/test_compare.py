"""Comparing run folders: means and deviations are those of the runs, whoever made them."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

import pandas as pd
import pytest

from fedcommons import experiment, load_runs, run
from fedcommons.errors import UserError
from fedcommons.reports import series
from fedcommons.reports.cells import Cell, cells, once

FIELDS = {"wandb": "off", "federation.rounds": 1, "client.epochs": 1, "measure.every": 1, "data.limit": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    for alpha in (0.1, 1.0):
        for lr in (0.01, 0.1):
            for seed in (0, 1):
                fields = {**FIELDS, "alpha": alpha, "lr": lr, "seed": seed}
                run(experiment("smoke", values=fields), out / f"{alpha}-{lr}-{seed}", say=lambda text: None)
    return out


@pytest.fixture(scope="module")
def compare(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("compare")


def test_a_row_is_a_cell_with_mean_and_deviation(compare: ModuleType, folder: Path, tmp_path: Path) -> None:
    words = [str(folder), "--x", "lr", "--y", "zeta_hat_sq", "--colour", "alpha", "--out", str(tmp_path / "c")]
    assert compare.compare(words) == 0
    runs, table = load_runs(folder), pd.read_csv(tmp_path / "c" / "compare.csv")
    assert len(table) == 4
    for row in table.to_dict("records"):
        own = runs[(runs["lr"] == row["lr"]) & (runs["alpha"] == row["alpha"])]["zeta_hat_sq"].tolist()
        assert (row["seeds"], len(own)) == (2, 2)
        assert row["zeta_hat_sq"] == pytest.approx(fmean(own))
        assert row["zeta_hat_sq_sd"] == pytest.approx(stdev(own))
    assert (tmp_path / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_in_two_folders_is_one_seed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "again")
    runs, said = load_runs(folder, tmp_path / "again"), []
    assert once(runs, said.append).equals(load_runs(folder))
    assert [len(cell.runs) for cell in cells(once(runs, said.append))] == [2] * 4
    assert len(said) == 16
    assert all(str(tmp_path / "again") in line for line in said)


def test_a_panel_for_each_facet_and_a_point_for_each_cell(compare: ModuleType, folder: Path) -> None:
    runs = load_runs(folder)
    names = {"x": "lr", "y": "last_accuracy", "facet": "alpha", "colour": "algorithm"}
    panels = compare.panels(compare.cells(runs), names)
    assert [panel.title for panel in panels] == [r"Dirichlet concentration $\alpha$ = 0.1",
                                                 r"Dirichlet concentration $\alpha$ = 1"]  # fmt: skip
    assert [[p.x for p in panel.points] for panel in panels] == [[0.01, 0.1], [0.01, 0.1]]
    assert {p.series for panel in panels for p in panel.points} == {"fedavg"}


def test_what_varies_besides_is_named(
    compare: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"--out={tmp_path / 'c'}"
    compare.compare([str(folder), "--x=lr", "--y=MB", out])
    assert "they also vary in partition.alpha." in capsys.readouterr().out
    compare.compare([str(folder), "--x=lr", "--y=MB", "--facet=alpha", out])
    assert "also vary" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--x lrr", "unknown column --x 'lrr'; did you mean 'lr'?"),
        ("--y zeta_hat_q", "unknown column --y 'zeta_hat_q'; did you mean 'zeta_hat_sq'?"),
        ("--y algorithm", "--y takes a number, and algorithm is none."),
        ("--facet seed", "--facet seed cannot be shown: points are means over seeds."),
    ],
)
def test_a_column_that_cannot_be_shown_is_refused(
    compare: ModuleType, folder: Path, tmp_path: Path, options: str, said: str
) -> None:
    with pytest.raises(UserError) as error:
        compare.compare([str(folder), *options.split(), f"--out={tmp_path / 'c'}"])
    assert said in str(error.value)
    assert not (tmp_path / "c").exists()


def test_folders_come_first_and_must_have_runs(
    compare: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="name at least one folder"):
        compare.compare(["--x=lr"])
    with pytest.raises(UserError, match="holds no run"):
        compare.compare([str(tmp_path)])
    (tmp_path / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not empty"):
        compare.compare([str(folder), "--x=lr", "--out=."])


def _cell(**columns: list) -> Cell:
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


def test_comparing_starts_no_ray_and_changes_no_backend() -> None:
    code = "import sys, runpy; runpy.run_path('sweeps/compare.py', run_name='x'); print([m for m in ('ray', 'wandb') "
    code += "if m in sys.modules])"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert "pyplot" not in Path(series.__file__).read_text(encoding="utf-8")
