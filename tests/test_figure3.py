"""Figure 3: its table and picture from frames alone, and the sweep as a user runs it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fedcommons.errors import UserError
from fedcommons.reports import tables
from papers.fedssyn import figures
from papers.fedssyn.figures import Dot, Panel, accuracy_dots, accuracy_table, panels

ROOT = Path(__file__).parent.parent


def run(setting: str, seed: int, last: float, alpha: float | None = 0.1, **more: Any) -> dict:
    return {
        "data.name": "digits", "partition.n_clients": 10, "federation.participation": 1.0, "partition.alpha": alpha,
        "algorithm": "fedavg", "sharing.setting": setting, "seed": seed, "client.lr": 0.04, "lr": 0.04, "p": 0.5,
        "partition": f"{alpha} {seed}", "last_accuracy": last, "best_accuracy": last + 0.01, **more,
    }  # fmt: skip


CENTRAL = {"algorithm": "central", "federation.participation": None, "p": None, "client.lr": None}
CENTRAL_REAL = {**CENTRAL, "partition.n_clients": None}
RUNS = [
    run("real", 0, 0.5), run("real", 1, 0.6), run("shuffled_synthetic", 0, 0.9), run("shuffled_synthetic", 1, 0.9),
    run("real", 0, 0.4, alpha=0.01), run("real", 1, 0.3, alpha=0.01),
    *(run("central_real", seed, 0.98 - 0.02 * seed, None, **CENTRAL_REAL) for seed in range(2)),
    *(run("central_synthetic", seed, 0.95, **CENTRAL) for seed in range(2)),
]  # fmt: skip


def test_the_table_has_a_line_for_each_dot_and_each_central_model() -> None:
    text = accuracy_table(tables.compared(pd.DataFrame(RUNS)), ["One note."])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[2] == ["digits", "10", "1", "0.1", "fedavg", "real", "55.0 ± 7.1", "56.0 ± 7.1", "0.50", "0.04"]
    assert rows[5] == ["digits", "-", "-", "-", "central", "central_real", "97.0 ± 1.4", "98.0 ± 1.4", "-", "0.04"]
    assert [row[5] for row in rows[2:]] == ["real", "shuffled_synthetic", "real", "central_real", "central_synthetic"]
    assert text.endswith("\n1. One note.\n")


def test_a_panel_has_the_dots_and_lines_of_its_alpha() -> None:
    first, second = panels(tables.compared(pd.DataFrame(RUNS)))
    assert first.dots[0] == Dot("fedavg", "real", [50.0, 60.0])
    assert [name for name, _ in first.lines] == ["central_real", "central_synthetic"]
    assert first.lines[0][1] == pytest.approx([98, 96])
    assert second.lines == first.lines[:1]  # no synthetic images were made for this alpha
    one_seed = panels(tables.compared(pd.DataFrame(RUNS[:1])))
    assert one_seed == [Panel("digits, α = 0.1", [Dot("fedavg", "real", [50.0])], [])]


def test_what_else_varies_has_a_column_and_dots_of_its_own() -> None:
    more = [run("my_stage", 0, 0.1 * d, **{"sharing.d": d, "straggler.q": q}) for d in (2, 3) for q in (0.0, 0.3)]
    cells = tables.compared(pd.DataFrame([*more, *RUNS[-4:]]))
    assert "| setting           | sharing.d | straggler.q |" in accuracy_table(cells, [])
    (panel,) = panels(cells)
    assert [(dot.group, dot.setting) for dot in panel.dots] == [
        (f"fedavg straggler.q {q}", f"my_stage sharing.d {d}") for d in (2, 3) for q in ("0", "0.3")
    ]
    assert [name for name, _ in panel.lines] == ["central_real", "central_synthetic"]


@pytest.mark.parametrize("algorithms", [["fedavg"], ["fedavg", "fedprox", "scaffold"]])
def test_the_picture_is_drawn(algorithms: list[str], tmp_path: Path) -> None:
    dots = [Dot(a, setting, [50.0, 52.0]) for a in algorithms for setting in ("real", "shuffled_real")]
    several = [Panel("α = 0.1", dots, [("central_real", [98.0])]), Panel("α = 1", dots[:1], [])]
    accuracy_dots(tmp_path / "f.png", several, "digits", False)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_the_axis_begins_below_the_least_accuracy_and_dots_are_means(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, *rest: drawn.append(figure))
    dots = [Dot("fedavg", "real", [78.0, 84.0]), Dot("fedavg", "shuffled_real", [97.0, 98.0])]
    accuracy_dots(Path("f.png"), [Panel("α = 0.1", dots, [("central_real", [98.0, 99.0])])], "digits", False)
    axes = drawn[0].axes[0]
    assert axes.get_xlim() == (75, 100)
    assert [np.asarray(line.get_xydata())[0, 0] for line in axes.get_lines() if line.get_marker() == "o"] == [
        81.0,
        97.5,
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["real", "shuffled_real"]
    assert "bars and bands: least to most" in drawn[0].get_suptitle()


@pytest.fixture(scope="module")
def figure3(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("figure3")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--p-real 1", "--p-real must lie in [0, 1), got 1."),
        ("--central-epochs 0", "--central-epochs must lie in [1, 1e9], got 0."),
        ("--sharing.setting shuffled_real", "use --settings instead of shuffled_real"),
        ("--p-rael 0.3", "did you mean '--p-real'?"),
        ("--settings real,real", "--settings takes different values"),
        ("--alphas some", "--alphas takes finite float values"),
    ],
)
def test_a_bad_request_is_refused_in_one_sentence(figure3: ModuleType, options: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        figure3.grid(figure3.arguments(options.split()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "shares"),
    [("", (None, 0.5)), ("--sharing.p 0.2", (0.2, 0.2)), ("--p-real 0.1", (None, 0.1)), ("--p-real 0", (None, 0.0))],
)
def test_shuffled_real_has_a_share_of_its_own(
    figure3: ModuleType, options: str, shares: tuple[float | None, float]
) -> None:
    cells = figure3.grid(figure3.arguments(options.split()))
    found = {c.config.sharing.setting: c.config.flat.get("sharing.p") for c in cells}
    assert (found["shuffled_synthetic"], found["shuffled_real"]) == shares


def test_cells_share_their_central_models(figure3: ModuleType) -> None:
    def lines(*argv: str) -> list[str]:
        options = figure3.arguments(["--preset=smoke", "--alphas=0.01,0.1", "--seeds=0,1", *argv])
        return sorted(line.name.rpartition("-")[0] for line in figure3.central_lines(figure3.grid(options), options))

    real = ["central_real-seed0", "central_real-seed1"]
    synthetic = [f"central_synthetic-alpha{alpha}-seed{seed}" for alpha in (0.01, 0.1) for seed in (0, 1)]
    assert lines() == sorted(real + synthetic)
    assert lines("--settings=real,shuffled_real") == real


def script(*options: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "sweeps" / "figure3.py"), "--preset=smoke", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=cwd)


@pytest.mark.ray
def test_the_sweep_leaves_what_it_promises_and_resumes_by_its_folders(tmp_path: Path) -> None:
    options = ["--out=out", "--artifacts=artifacts", "--alphas=0.1", "--federation.rounds=2", "--p-real=0.3"]
    done = script(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert (out / "figure3.md").read_text() in done.stdout
    assert "failed" not in done.stdout
    assert (out / "figure3.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "figure3.csv").read_text().splitlines()) == 1 + 4 + 2
    summary = json.loads((out / "summary.json").read_text())
    shares = {c["setting"]: c["p"] for c in summary["cells"]}
    assert shares["real"] == 0
    assert shares["local_synthetic"] == shares["shuffled_synthetic"] == pytest.approx(0.5, abs=0.01)
    assert shares["shuffled_real"] == pytest.approx(0.3, abs=0.01)
    assert [(c["setting"], c["epochs"], c["images"]) for c in summary["central"]] == [
        ("central_real", 2, 200),
        ("central_synthetic", 2, 200),
    ]
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/summary.json")}
    assert len(before) == 6
    assert "--resume" in script(*options, cwd=tmp_path).stderr
    again = script(*options, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "4 of 4 cells are done already" in again.stdout
    assert {p: p.stat().st_mtime_ns for p in out.glob("*/summary.json")} == before
    assert json.loads((out / "summary.json").read_text()) == summary
