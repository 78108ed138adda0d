"""sweeps/gradient_coding.py: its numbers are those of the study, its tables those of its curves, and it resumes."""

import csv
import json
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import report_runs
from sweep_runs import rows_of

from fedcommons.config.sections import Data
from fedcommons.errors import UserError
from fedcommons.runs.inputs import load
from papers.agc import coding, curves
from papers.agc.curves import load_problem
from papers.agc.gradient_coding import Problem, Setting, chosen, play

QUICK = ["--preset=smoke", "--workers=1", "--shares=0.2", "--pairs=0.5:3,0.7:4"]


script = report_runs.script("gradient_coding")


@pytest.fixture(scope="module")
def out(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "new" / "out"
    assert script.gradient_coding([*QUICK, f"--out={folder}"]) == 0
    return folder


@pytest.mark.long
def test_curves_are_those_of_the_study_and_table_and_csv_have_their_numbers(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    curves, products = summary["curves"], summary["scalar_products"]
    order = [(c["partition"], (c["q"], c["d"]), c["c"]) for c in curves]
    assert order == list(product(("iid", "dirichlet_plain", "single_class"), ((0.5, 3), (0.7, 4)), (0.0, 0.2)))
    digits = load(Data(validation=0))
    problem = Problem.of(chosen(digits, 30, first=False, seed=0), digits.test, 10, white=1.0)
    for c in (curves[1], curves[6], curves[-1]):
        result = play(problem, Setting(c["partition"], c["q"], c["d"], c["c"], per_class=True, rounds=6), range(4), 0)
        assert c["accuracy"] == result.accuracy.mean(0).tolist()
        assert c["second_moment"] == result.second_moment.mean(0).tolist()
        assert c["accuracy_se"] == pytest.approx(result.accuracy.std(0, ddof=1) / 2)
    assert [(p["partition"], p["q"], p["c"]) for p in products] == [("single_class", 0, 0), ("single_class", 0.5, 0.2)]
    slow = Setting("single_class", 0.5, 3, 0.2, per_class=True, lr=0.01, decay=1.0, rounds=6)
    result = play(problem, slow, range(4), 0)
    assert products[1]["same_class"] == result.same_class.mean(0).tolist()
    assert products[1]["cross_class"] == result.cross_class.mean(0).tolist()
    for p in products:
        np.testing.assert_allclose(np.add(p["same_class"], p["cross_class"]), p["norm_sq"])
    rows = list(csv.DictReader((out / "gradient_coding.csv").read_text().splitlines()))
    assert len(rows) == (12 + 2) * 6
    assert [row["accuracy"] for row in rows[:72]] == [f"{c['accuracy'][r]:.6g}" for c in curves for r in range(6)]
    lines = rows_of((out / "gradient_coding.md").read_text())
    assert len(lines) == 2 + 10  # iid clients at c = 0 only
    c = curves[-1]
    shown = f"{100 * c['accuracy'][5]:.1f} ± {100 * c['accuracy_se'][5]:.1f}"
    assert [*lines[-1][:4], lines[-1][5]] == ["single class", "0.7", "4", "0.2", shown]


def test_rounds_until_it_is_as_good_as_iid() -> None:
    def curve(partition: str, c: float, *accuracy: float) -> dict:
        ones = [1.0] * len(accuracy)
        return {"partition": partition, "q": 0.5, "d": 3, "c": c, "accuracy": list(accuracy), "accuracy_se": ones,
                "second_moment": ones, "second_moment_se": ones}  # fmt: skip

    curves = [curve("iid", 0.0, 0.1, 0.6, 0.8), curve("iid", 0.2, 0.1, 0.77, 0.8),
              curve("single_class", 0.2, 0.1, 0.5, 0.7)]  # fmt: skip
    assert [row["rounds_to_close_to_iid"] for row in coding.summary(curves)] == [2, 1, None]  # 0.76


@pytest.mark.long
def test_it_resumes_with_the_curves_that_are_there(script: ModuleType, out: Path, tmp_path: Path) -> None:
    """A curve that is there is kept, also a changed one; the others are computed."""
    argv = [*QUICK, f"--out={tmp_path}"]
    (tmp_path / "curves").mkdir()
    (tmp_path / ".lock").write_bytes((out / ".lock").read_bytes())
    kept = tmp_path / "curves" / "iid_q0.5_d3_c0.json"
    before = (out / "curves" / kept.name).read_text()
    accuracy = json.loads((out / "summary.json").read_text())["curves"][0]["accuracy"][1]
    kept.write_text(changed := before.replace(json.dumps(accuracy), "0.125", 1))
    assert changed != before
    with pytest.raises(UserError, match="add --resume"):
        script.gradient_coding(argv)
    assert script.gradient_coding([*argv, "--resume"]) == 0
    assert kept.read_text() == changed
    with pytest.raises(UserError, match=r"repetitions = 4, .*5"):
        script.gradient_coding([*argv, "--resume", "--repetitions=5"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_workers_change_no_bit(script: ModuleType, tmp_path: Path) -> None:
    options = ["--preset=smoke", "--shares=0", "--pairs=0.5:3", f"--repetitions={curves.CHUNK + 1}"]
    for workers in (1, 2):
        assert script.gradient_coding([*options, f"--workers={workers}", f"--out={tmp_path / str(workers)}"]) == 0
    one, two = (json.loads((tmp_path / str(workers) / "summary.json").read_text()) for workers in (1, 2))
    assert one["curves"] == two["curves"]
    assert one["scalar_products"] == two["scalar_products"]


def test_the_problem_of_the_released_code_and_of_the_paper(script: ModuleType) -> None:
    authors, paper = (script.arguments([f"--preset={name}", "--dataset=digits"]) for name in ("authors", "paper"))
    assert (authors.repetitions, authors.sharing, authors.pairs) == (1000, "exact", [(0.3, 2), (0.5, 3), (0.7, 4)])
    assert len(script.settings(authors)) == 3 * 3 * 6 + 2
    assert {s.per_class for s in script.settings(authors).values()} == {False}
    assert {s.rounds for s in script.settings(paper).values()} == {50}
    assert len(script.settings(script.arguments(["--shares=0"]))) == 9 + 2
    problem, digits = load_problem(authors), load(Data(validation=0))
    assert (problem.x[:, :-1] == chosen(digits, 30, first=True, seed=0).x.flatten(1)).all()
    assert (problem.x.max(), len(problem.test_y)) == (255, 359)
    assert load_problem(script.arguments([])).x.max() == 1
