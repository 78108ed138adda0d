"""Figures 5, A.7 and A.8: the grid, tables and pictures from frames alone, and the sweep as a user runs it."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import report_runs
from sweep_runs import complete

from fedcommons.reports.frames import load_rounds, load_runs
from papers.fedssyn import courses
from papers.fedssyn.courses import Curve


def run(p: float, seed: int = 0, epochs: int = 90, last: float = 0.5, **more: Any) -> dict:
    """A run whose rounds 0, 5 and 10 were measured, with numbers that are easy to check by hand."""
    rounds = (0, 5, 10)
    values = {"zeta_sq": 8.0, "zeta_hat_sq": 2.5, "sigma_sq": 40.0, "sigma_hat_sq": 19.0, "sigma_avg_sq": 48.0} | more
    if p:
        sums = {"zeta_lemma1_sq": 2.0, "zeta_mix_sq": 2.1, "sigma_lemma1_sq": 20.0, "sigma_mix_sq": 21.0}
        values = sums | {"sigma_pool_sq": 16.0, "delta_sq": 4.0} | values
    return {
        "seed": seed, "p": p, "n_clients": 10, "alpha": 0.1, "generator_epochs": epochs, "run_dir": f"run{p}{seed}",
        "last_accuracy": last, "best_accuracy": last + 0.1, "accuracy": [[r, last + r / 100] for r in range(11)],
        **{name: [[r, value * (1 + r)] for r in rounds] for name, value in values.items()},
    }  # fmt: skip


def curve(label: str, runs: list[dict]) -> Curve:
    """The curve of these runs, as rows of ``load_runs`` and ``load_rounds``."""
    rows, lines = [], []
    for one in runs:
        of = {name: dict(result) for name, result in one.items() if isinstance(result, list)}
        facts = {"run": one["run_dir"], "generator.epochs": one["generator_epochs"]}
        rows.append({**{name: result for name, result in one.items() if name not in of}, **facts})
        for r in sorted({r for result in of.values() for r in result}):
            metrics = {name: result[r] for name, result in of.items() if r in result and name != "accuracy"}
            lines.append({**facts, "p": one["p"], "round": r, "test/accuracy": of["accuracy"].get(r), **metrics})
    return courses.curve(label, pd.DataFrame(rows), pd.DataFrame(lines))


def test_a_curve_is_the_mean_and_range_over_seeds_in_the_rounds_that_all_have() -> None:
    runs = [run(0.5, 0, zeta_hat_sq=2.0), run(0.5, 1, zeta_hat_sq=4.0)]
    runs[1]["zeta_hat_sq"][1][1] = None  # not finite
    result = curve("p = 0.5", runs)
    assert result.course("zeta_hat_sq") == {0: (3.0, 2.0, 4.0), 10: (33.0, 22.0, 44.0)}
    # quotients are taken in each run: 2/2 and 4/2
    assert result.course(courses.ZETA) == {0: (1.5, 1.0, 2.0), 10: (1.5, 1.0, 2.0)}
    assert result.course("L_p") == result.course(courses.L) == {}
    assert result.course("accuracy")[3] == pytest.approx((0.53, 0.53, 0.53))


def test_tables_show_rounds_ends_and_how_often_lemma_1_was_exceeded() -> None:
    for every, rounds in ((1, [0, 3, 15, 30]), (10, [0, 10, 30]), (15, [0, 15, 30]), (30, [0, 30])):
        measured = {**run(0), "zeta_sq": [[r, 1.0] for r in range(0, 31, every)]}
        assert courses.shown([curve("p = 0", [measured])]) == rounds
    # 0.25 * 40 + 0.75 * 16 + 0.1875 * (8 + 4) = 10 + 12 + 2.25, in one round
    exact = 24.25
    curves = [curve("p = 0", [run(0)]), curve("p", [run(0.75, sigma_lemma1_sq=exact)])]
    without, *_, first, _, _ = courses.rows(curves)
    assert {without[name] for name in courses.TERMS.values()} == {None}
    shares = [float(first[name]) for name in courses.TERMS.values()]
    assert shares == pytest.approx([1000 / exact, 1200 / exact, 150 / exact, 75 / exact], rel=1e-5)
    totals = [sum(one[r][0] for one in map(curves[1].course, courses.TERMS.values())) for r in (0, 5)]
    assert totals == pytest.approx([100, 100])
    runs = [run(0.5, 0, last=0.5), run(0.5, 1, last=0.7, zeta_hat_sq=1.0)]
    runs[0]["zeta_hat_sq"][0][1] = 2.0 * (1 + 1e-12)  # equal but for rounding
    ends = [cell.strip() for cell in courses.section("", [curve("x", runs)]).splitlines()[4].split("|")[1:-1]]
    assert ends[4:] == ["0.750 [0.500, 1.250]", "2 of 6", "0.950", "0 of 6"]  # of 0.5, 0.5, 0.5, 1, 1.25, 1.25


def test_the_pictures_draw_the_courses_beside_their_bounds() -> None:
    def drawn(axes: Any) -> list[tuple[Any, ...]]:
        return [(line.get_label(), *np.asarray(line.get_xydata()).T.tolist()) for line in axes.get_lines()]

    labels = {"IID": [run(0)], "p = 0": [run(0)], "p = 0.06": [run(0.06), run(0.06, 1, zeta_hat_sq=3.0)],
              "p = 0.5": [run(0.5)]}  # fmt: skip
    axes = courses.over_rounds([curve(label, some) for label, some in labels.items()], "digits").axes
    assert [len(drawn(one)) for one in axes] == [4, 4, 4, 4, 7, 2]
    assert drawn(axes[1])[3] == ("p = 0.5", [0, 5, 10], [2.5, 15.0, 27.5])
    assert drawn(axes[3])[0][0] == "Lemma 1"
    assert drawn(axes[5]) == [(r"$\hat\zeta^2$", [0, 5, 10], [1.375] * 3), (r"$\hat\sigma^2$", [0, 5, 10], [0.95] * 3)]
    runs = {n: [run(0.5, seed, n, delta_sq=(8.0 + seed) / n) for seed in (0, 2)] for n in (3, 9)}
    axes = courses.over_generator_epochs([curve(f"{n} epochs", of) for n, of in runs.items()], "digits").axes
    assert drawn(axes[3])[0] == ("round 0", [3, 9], [3.0, 1.0])
    assert [line[1:] for line in drawn(axes[1])[:2]] == [([3, 9], [2.0, 2.0]), ([3, 9], [2.5, 2.5])]


sweep = report_runs.script("convergence_parameters")


def cells(sweep: ModuleType, figure: str, *options: str) -> dict[str, list[Any]]:
    """The configs of a figure's curves."""
    result = getattr(sweep, figure)(sweep.arguments(options))
    return {label: [cell.config for cell in several] for label, several in result.items()}


def test_the_curves_of_a7_are_iid_clients_without_a_pool_and_every_share(sweep: ModuleType) -> None:
    curves = cells(sweep, "figure_a7", "--seeds=0,1", "--p=0.5,0,0.06")
    facts = {label: (c.partition.name, c.sharing.setting, c.flat.get("sharing.p")) for label, (c, _) in curves.items()}
    assert facts == {
        "IID": ("iid", "real", None), "p = 0": ("dirichlet_classes", "real", None),
        "p = 0.06": ("dirichlet_classes", "shuffled_synthetic", 0.06),
        "p = 0.5": ("dirichlet_classes", "shuffled_synthetic", 0.5),
    }  # fmt: skip
    every = [c for several in curves.values() for c in several]
    assert {(c.algorithm, c.measure.every, c.measure.smoothness) for c in every} == {("fedavg", 1, False)}
    assert [c.seed for c in every] == [0, 1] * 4


def test_a8_takes_shares_of_the_generators_epochs_and_preset_paper_the_papers_federations(sweep: ModuleType) -> None:
    for options, epochs in (
        ("", [9, 27, 45, 63, 81]), ("--generator-epochs=40,5", [5, 40]), ("--preset=paper", [50, 150, 250, 350, 450]),
    ):  # fmt: skip
        curves = cells(sweep, "figure_a8", *options.split())
        assert {label: c.generator.epochs for label, (c,) in curves.items()} == {f"{n} epochs": n for n in epochs}

    def facts(figure: str, curve: str) -> tuple:
        c = cells(sweep, figure, "--preset=paper")[curve][0]
        return c.data.name, c.model.name, c.partition.n_clients, c.partition.alpha, c.generator.rho, c.sharing.p

    assert facts("figure_a7", "p = 0.06") == ("cifar10", "vgg11", 10, 0.1, 1.0, 0.06)
    assert facts("figure_a8", "50 epochs") == ("cifar10", "vgg11", 40, 0.01, 0.75, 0.57)


@pytest.mark.long
def test_both_figures_from_small_runs(sweep: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--preset=smoke", "--p=0,0.3", "--federation.rounds=1", "--hessians", "--wandb=off", "--data.limit=80",
            "--model.name=linear", "--partition.n_clients=4", "--generator.sampling_steps=2",
            "--generator.channels=[8,8]", f"--out={out}", f"--artifacts={tmp_path}/artifacts"]  # fmt: skip
    options = sweep.arguments(argv)
    figures = sweep.figure_a7(options), sweep.figure_a8(options)
    runs = [cell for figure in figures for several in figure.values() for cell in several]
    complete(sweep.convergence_parameters, argv, runs, out)
    summary = json.loads((out / "summary.json").read_text())
    assert [c["curve"] for c in summary["cells"]] == ["IID", "p = 0", "p = 0.3"]
    assert [(c["curve"], c["generator.epochs"]) for c in summary["a8"]] == [("1 epochs", 1), ("2 epochs", 2)]
    for c in (summary["cells"][2], *summary["a8"]):
        result = courses.curve("", load_runs(out / c["run_dir"]), load_rounds(out / c["run_dir"]))
        assert list(result.course("zeta_mix_sq")) == [0, 1]
        for exact, bound in (("zeta_mix_sq", "zeta_lemma1_sq"), ("sigma_mix_sq", "sigma_lemma1_sq")):
            assert result.values(exact) == pytest.approx(result.values(bound), rel=1e-9)
        for r in range(2):
            assert sum(result.course(name)[r][0] for name in courses.TERMS.values()) == pytest.approx(100, rel=1e-9)
