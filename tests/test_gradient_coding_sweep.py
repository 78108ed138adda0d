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
KINDS = ("iid", "dirichlet_plain", "single_class")


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
    assert order == list(product(KINDS, ((0.5, 3), (0.7, 4)), (0.0, 0.2)))
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
    for row, (c, r) in zip(rows, [(c, r) for c in [*curves, *products] for r in range(6)], strict=True):
        fields = {name: c[name] for name in ("partition", "q", "d", "c", "lr")} | {"repetitions": 4, "round": r}
        assert {name: row[name] for name in fields} == {name: str(value) for name, value in fields.items()}
        for name in ("accuracy", "second_moment", "same_class", "cross_class", "norm_sq"):
            for column in (name, f"{name}_se"):
                assert row[column] == (f"{c[column][r]:.6g}" if column in c else "")
    text = (out / "gradient_coding.md").read_text()
    lines = rows_of(text)
    assert len(lines) == 2 + 10  # iid clients at c = 0 only
    c = curves[-1]
    shown = f"{100 * c['accuracy'][5]:.1f} ± {100 * c['accuracy_se'][5]:.1f}"
    assert [*lines[-1][:4], lines[-1][5]] == ["single class", "0.7", "4", "0.2", shown]
    assert lines[-1][-2:] == [f"{c['second_moment'][0]:.3g}", f"{c['second_moment'][5]:.3g}"]
    table = list(csv.DictReader((out / "gradient_coding_table.csv").read_text().splitlines()))
    assert [row["second_moment_after_5"] for row in table] == [f"{c['second_moment'][5]:.6g}" for c in curves]
    assert "random 30 training images of each class, 359 test images" in " ".join(text.split())


def test_rounds_until_it_is_as_good_as_iid_and_panels_show_their_curves(out: Path) -> None:
    def curve(partition: str, c: float, *accuracy: float) -> dict:
        ones = [1.0] * len(accuracy)
        return {"partition": partition, "q": 0.5, "d": 3, "c": c, "accuracy": list(accuracy), "accuracy_se": ones,
                "second_moment": ones, "second_moment_se": ones}  # fmt: skip

    curves = [curve("iid", 0.0, 0.1, 0.6, 0.8), curve("iid", 0.2, 0.1, 0.77, 0.8),
              curve("single_class", 0.2, 0.1, 0.5, 0.7)]  # fmt: skip
    assert [row["rounds_to_close_to_iid"] for row in coding.summary(curves)] == [2, 1, None]  # 0.76
    assert [row[6] for row in rows_of(coding.table(curves))[2:]] == ["2", ">2"]
    summary = json.loads((out / "summary.json").read_text())
    curves, products = summary["curves"], summary["scalar_products"]
    figure = coding.picture(curves, "single_class", "title")
    for column, q in enumerate((0.5, 0.7)):
        assert figure.axes[column].get_title() == f"q = {q:g}, d = {3 + column}"
        own = [c for c in curves if c["q"] == q and (c["partition"], c["c"]) == ("iid", 0)]
        own = [c for c in curves if c["q"] == q and c["partition"] == "single_class"] + own  # iid is drawn last
        for axes, name in ((figure.axes[column], "accuracy"), (figure.axes[2 + column], "second_moment")):
            assert [np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()] == [c[name] for c in own]
            low, high = (np.add(own[1][name], k * np.array(own[1][f"{name}_se"])) for k in (-1, 1))
            edges = np.asarray(axes.collections[1].get_paths()[0].vertices)[:, 1]
            assert [edges.min(), edges.max()] == pytest.approx([low.min(), high.max()])
    assert len(coding.picture(curves, "iid", "").axes[0].get_lines()) == 2
    for axes, curve_of in zip(coding.products_picture(products, "").axes, products, strict=True):
        assert axes.get_yscale() == "symlog"
        assert [*np.asarray(axes.get_lines()[1].get_ydata())] == curve_of["cross_class"]


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
    new, old = ((folder / "gradient_coding.csv").read_text().splitlines() for folder in (tmp_path, out))
    assert [a != b for a, b in zip(new, old, strict=True)].count(True) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in out.iterdir())
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
