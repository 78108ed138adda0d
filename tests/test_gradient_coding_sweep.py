"""What sweeps/gradient_coding.py writes, refuses and goes on with."""

import csv
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fedcommons.config.sections import Data
from fedcommons.errors import UserError
from fedcommons.runs.inputs import load
from papers.agc import coding, curves
from papers.agc.curves import load_problem
from papers.agc.gradient_coding import Problem, Setting, chosen, play

QUICK = ["--preset=smoke", "--workers=1", "--shares=0.2", "--pairs=0.5:3,0.7:4"]
KINDS = ("iid", "dirichlet_plain", "single_class")
FILES = [".lock", "curves", "figure1.png", "figure2.png", "figure3.png", "gradient_coding.csv", "gradient_coding.md",
         "gradient_coding_table.csv", "iid.png", "summary.json"]  # fmt: skip


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("gradient_coding")


@pytest.fixture(scope="module")
def out(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "new" / "out"
    assert script.gradient_coding([*QUICK, f"--out={folder}"]) == 0
    return folder


def test_the_sweep_leaves_what_it_promises(script: ModuleType, out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == FILES
    for name in ("figure1", "figure2", "figure3", "iid"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "summary.json").read_text())
    curves, products = summary.pop("curves"), summary.pop("scalar_products")
    assert summary == {
        "name": "out", "preset": "smoke", "dataset": "digits", "repetitions": 4, "seed": 0, "sharing": "exact",
    }  # fmt: skip
    order = [(c["partition"], (c["q"], c["d"]), c["c"]) for c in curves]
    assert order == list(product(KINDS, ((0.5, 3), (0.7, 4)), (0.0, 0.2)))
    digits = load(Data(validation=0))
    problem = Problem.of(chosen(digits, 30, first=False, seed=0), digits.test, 10, white=1.0)
    for c in (curves[1], curves[6], curves[-1]):
        found = play(problem, Setting(c["partition"], c["q"], c["d"], c["c"], per_class=True, rounds=6), range(4), 0)
        assert c["accuracy"] == found.accuracy.mean(0).tolist()
        assert c["second_moment"] == found.second_moment.mean(0).tolist()
        assert c["accuracy_se"] == pytest.approx(found.accuracy.std(0, ddof=1) / 2)
    assert {len(value) for c in (*curves, *products) for value in c.values() if isinstance(value, list)} == {6}
    assert [(p["partition"], p["q"], p["c"]) for p in products] == [("single_class", 0, 0), ("single_class", 0.5, 0.2)]
    slow = Setting("single_class", 0.5, 3, 0.2, per_class=True, lr=0.01, decay=1.0, rounds=6)
    found = play(problem, slow, range(4), 0)
    assert products[1]["same_class"] == found.same_class.mean(0).tolist()
    assert products[1]["cross_class"] == found.cross_class.mean(0).tolist()
    for p in products:
        np.testing.assert_allclose(np.add(p["same_class"], p["cross_class"]), p["norm_sq"])


def test_table_and_csv_say_what_the_curves_say(script: ModuleType, out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    curves, products = summary["curves"], summary["scalar_products"]
    rows = list(csv.DictReader((out / "gradient_coding.csv").read_text().splitlines()))
    assert len(rows) == (12 + 2) * 6
    for row, (c, r) in zip(rows, [(c, r) for c in [*curves, *products] for r in range(6)], strict=True):
        fields = {name: c[name] for name in ("partition", "q", "d", "c", "lr")} | {"repetitions": 4, "round": r}
        assert {name: row[name] for name in fields} == {name: str(value) for name, value in fields.items()}
        for name in ("accuracy", "second_moment", "same_class", "cross_class", "norm_sq"):
            for column in (name, f"{name}_se"):
                assert row[column] == (f"{c[column][r]:.6g}" if column in c else "")
    assert {row["lr"] for row in rows[:72]} == {"0.1"}
    assert {(row["lr"], bool(row["same_class"])) for row in rows[72:]} == {("0.01", True)}
    text = (out / "gradient_coding.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 10  # iid clients at c = 0 only
    c = curves[-1]
    shown = f"{100 * c['accuracy'][5]:.1f} ± {100 * c['accuracy_se'][5]:.1f}"
    assert [*lines[-1][:4], lines[-1][5]] == ["single class", "0.7", "4", "0.2", shown]
    table = list(csv.DictReader((out / "gradient_coding_table.csv").read_text().splitlines()))
    assert [row["second_moment_after_5"] for row in table] == [f"{c['second_moment'][5]:.6g}" for c in curves]
    assert lines[-1][-2:] == [f"{c['second_moment'][0]:.3g}", f"{c['second_moment'][5]:.3g}"]
    notes = re.sub(r"\s+", " ", text)
    for said in ("random 30 training images of each class, 359 test images, pixels in [0, 1]", "4 repetitions, seed 0",
                 "int(c 30) of each class", "to d other clients", "300^2 times"):  # fmt: skip
        assert said in notes


def test_rounds_until_it_is_as_good_as_iid() -> None:
    def curve(partition: str, c: float, *accuracy: float) -> dict:
        ones = [1.0] * len(accuracy)
        return {"partition": partition, "q": 0.5, "d": 3, "c": c, "accuracy": list(accuracy), "accuracy_se": ones,
                "second_moment": ones, "second_moment_se": ones}  # fmt: skip

    curves = [
        curve("iid", 0.0, 0.1, 0.6, 0.8),
        curve("iid", 0.2, 0.1, 0.77, 0.8),
        curve("single_class", 0.2, 0.1, 0.5, 0.7),
    ]
    assert [row["rounds_to_close_to_iid"] for row in coding.summary(curves)] == [2, 1, None]  # 0.76
    lines = [line.split("|")[7].strip() for line in coding.table(curves).splitlines()]
    assert lines == ["rounds to 95% of iid", "-" * 22, "2", ">2"]


def test_figure_3_is_logarithmic_on_both_sides_of_zero_and_says_the_rate_of_its_runs(out: Path) -> None:
    products = json.loads((out / "summary.json").read_text())["scalar_products"]
    for axes, curve in zip(coding.products_picture(products, "").axes, products, strict=True):
        assert axes.get_yscale() == "symlog"
        assert [*np.asarray(axes.get_lines()[1].get_ydata())] == curve["cross_class"]
    assert {curve["lr"] for curve in products} == {0.01}
    assert "in figure 3 it is 0.01 throughout" in " ".join((out / "gradient_coding.md").read_text().split())


def test_panels_show_their_curves(out: Path) -> None:
    curves = json.loads((out / "summary.json").read_text())["curves"]
    figure = coding.picture(curves, "single_class", "what it is")
    assert figure.get_suptitle() == "what it is"
    for column, q in enumerate((0.5, 0.7)):
        above, below = figure.axes[column], figure.axes[2 + column]
        assert above.get_title() == f"q = {q:g}, d = {3 + column}"
        own = [
            c
            for c in curves
            if c["q"] == q and (c["partition"] == "single_class" or (c["partition"] == "iid" and not c["c"]))
        ]
        own.sort(key=lambda c: c["partition"] == "iid")  # drawn last
        for axes, name in ((above, "accuracy"), (below, "second_moment")):
            assert [np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()] == [c[name] for c in own]
            low, high = (np.add(own[1][name], k * np.array(own[1][f"{name}_se"])) for k in (-1, 1))
            edges = np.asarray(axes.collections[1].get_paths()[0].vertices)[:, 1]
            assert [edges.min(), edges.max()] == pytest.approx([low.min(), high.max()])
    assert len(coding.picture(curves, "iid", "").axes[0].get_lines()) == 2


@pytest.mark.long
def test_it_goes_on_where_it_stopped(
    script: ModuleType, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in another process, with more c: the curves that are there are not computed again."""
    again, played = tmp_path / "again", []

    def killed(problem: Problem, setting: Setting, repetitions: range, seed: int):
        played.append(setting)
        if len(played) == 4:
            raise KeyboardInterrupt
        return play(problem, setting, repetitions, seed)

    with monkeypatch.context() as patch:
        patch.setattr(curves, "job", killed)
        with pytest.raises(KeyboardInterrupt):
            script.gradient_coding([*QUICK, f"--out={again}"])
    assert len(list((again / "curves").iterdir())) == 3
    with pytest.raises(UserError, match="holds curves already; add --resume to keep them or name another folder"):
        script.gradient_coding([*QUICK, f"--out={again}"])
    assert script.gradient_coding([*QUICK, f"--out={again}", "--resume"]) == 0
    for name in ("gradient_coding.md", "gradient_coding.csv"):
        assert (again / name).read_bytes() == (out / name).read_bytes()
    found = [json.loads((folder / "summary.json").read_text()) for folder in (again, out)]
    assert found[0]["curves"] == found[1]["curves"]
    with monkeypatch.context() as patch:
        patch.setattr(curves, "job", None)  # nothing is left to compute
        assert script.gradient_coding([*QUICK, f"--out={again}", "--resume"]) == 0
    sentence = "iid_q0.5_d3_c0.json is of repetitions = 4, and now it is 5; name another --out."
    with pytest.raises(UserError, match=re.escape(sentence)):
        script.gradient_coding([*QUICK, f"--out={again}", "--resume", "--repetitions=5"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_workers_change_no_bit(script: ModuleType, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "CHUNK", 50)
    options = ["--preset=smoke", "--shares=0", "--pairs=0.5:3", "--repetitions=120"]
    for workers in (1, 2):
        assert script.gradient_coding([*options, f"--workers={workers}", f"--out={tmp_path / str(workers)}"]) == 0
    one, two = (json.loads((tmp_path / str(workers) / "summary.json").read_text()) for workers in (1, 2))
    assert one["curves"] == two["curves"]
    assert one["scalar_products"] == two["scalar_products"]


def test_a_dry_run_computes_nothing(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.gradient_coding([*QUICK, f"--out={tmp_path / 'out'}", "--dry-run"]) == 0
    assert "14 curves of 4 repetitions to compute" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_presets(script: ModuleType) -> None:
    found = {name: script.arguments([f"--preset={name}"]) for name in script.PRESETS}
    assert {name: (o.dataset, o.repetitions) for name, o in found.items()} == {
        "authors": ("mnist", 1000), "paper": ("mnist", 1000), "small": ("digits", 200), "smoke": ("digits", 4),
    }  # fmt: skip
    for options in found.values():
        assert options.pairs == [(0.3, 2), (0.5, 3), (0.7, 4)]
        assert options.shares == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
        assert options.sharing == "exact"
    assert len(script.settings(found["authors"])) == 3 * 3 * 6 + 2
    assert {s.per_class for s in script.settings(found["authors"]).values()} == {False}
    assert {s.rounds for s in script.settings(found["paper"]).values()} == {50}
    assert len(script.settings(script.arguments(["--shares=0"]))) == 9 + 2
    problem = load_problem(script.arguments(["--preset=authors", "--dataset=digits"]))
    digits = load(Data(validation=0))
    first = chosen(digits, 30, first=True, seed=0).x.flatten(1)
    assert (problem.x[:, :-1] == first).all()
    assert (problem.x.max(), len(problem.test_y)) == (255, 359)
    assert load_problem(script.arguments([])).x.max() == 1


BAD = [
    ("--shares=0,1.5", "--shares must lie in [0, 1], got 1.5."),
    ("--shares=0.01", "c = 0.01 of a class, 30 images, is less than one; use 0 or a larger c."),
    ("--shares=most", "--shares takes finite float values separated by commas, got 'most'."),
    ("--pairs=1:3", "--pairs takes q:d with q in [0, 1) and d in [1, 1e9], got '1:3'."),
    ("--pairs=0.5:10", "d, the number of copies, must be in [1, 9] for 10 clients, got 10."),
    ("--pairs=0.5", "--pairs takes q:d, such as 0.5:3, separated by commas, got '0.5'."),
    ("--pairs=0.5:3,0.5:3", "--pairs takes different values separated by commas"),
    ("--pairs=nan:3", "--pairs takes q:d, such as 0.5:3, separated by commas, got 'nan:3'."),
    ("--sharing=exakt", "unknown sharing 'exakt'; did you mean 'exact'?"),
    ("--preset=author", "unknown preset 'author'; did you mean 'authors'?"),
    ("--dataset=cifar10", "unknown data set 'cifar10'. Known: digits, mnist."),
    ("--dataset=mnist --data-dir=/nowhere", "data set mnist is not there: looked in /nowhere"),
    ("--repetitions=1", "--repetitions must lie in [2, 1e6], got 1."),
    ("--workers=0", "--workers must lie in [1, 1e6], got 0."),
    ("--share=0.1", "did you mean '--shares'?"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD, ids=[options for options, _ in BAD])
def test_a_bad_request_is_refused_before_any_work(
    script: ModuleType, tmp_path: Path, options: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        script.gradient_coding([*options.split(), f"--out={tmp_path / 'out'}"])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
