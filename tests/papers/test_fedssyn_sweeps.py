"""Figures 5, A.7 and A.8 and the communication that the pool saves: the grid, closed forms, tables, a small run."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import report_runs
from sweep_runs import complete

from fedcommons import Facts, UserError, flatten, load_rounds, load_runs
from fedcommons.config import presets, registry
from fedcommons.core.communication import UntilTarget, images_nbytes, saved_percent, sent
from lightning_modules.networks import VGG11
from papers.fedssyn import courses, saved
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
    """Return the curve of runs, from their rows of ``load_runs`` and ``load_rounds``."""
    rows, lines = [], []
    for record in runs:
        series = {name: dict(result) for name, result in record.items() if isinstance(result, list)}
        facts = {"run": record["run_dir"], "generator.epochs": record["generator_epochs"]}
        rows.append({**{name: result for name, result in record.items() if name not in series}, **facts})
        for r in sorted({r for result in series.values() for r in result}):
            metrics = {name: result[r] for name, result in series.items() if r in result and name != "accuracy"}
            lines.append({**facts, "p": record["p"], "round": r, "test/accuracy": series["accuracy"].get(r), **metrics})
    return courses.curve(label, pd.DataFrame(rows), pd.DataFrame(lines))


def test_a_curve_is_the_mean_and_range_over_seeds_in_the_rounds_that_all_have() -> None:
    runs = [run(0.5, 0, zeta_hat_sq=2.0), run(0.5, 1, zeta_hat_sq=4.0)]
    runs[1]["zeta_hat_sq"][1][1] = None  # not finite
    result = curve("p = 0.5", runs)
    assert result.course("zeta_hat_sq") == {0: (3.0, 2.0, 4.0), 10: (33.0, 22.0, 44.0)}
    # quotients are taken in each run: 2/2 and 4/2
    assert result.course(courses.ZETA) == {0: (1.5, 1.0, 2.0), 10: (1.5, 1.0, 2.0)}


def test_tables_show_rounds_ends_and_how_often_lemma_1_was_exceeded() -> None:
    measured = {**run(0), "zeta_sq": [[r, 1.0] for r in range(31)]}
    assert courses.rounds_of_table([curve("p = 0", [measured])]) == [0, 3, 15, 30]
    # 0.25 * 40 + 0.75 * 16 + 0.1875 * (8 + 4) = 10 + 12 + 2.25, in one round
    exact = 24.25
    curves = [curve("p = 0", [run(0)]), curve("p", [run(0.75, sigma_lemma1_sq=exact)])]
    without, *_, first, _, _ = courses.rows(curves)
    assert {without[name] for name in courses.TERMS.values()} == {None}
    shares = [float(first[name]) for name in courses.TERMS.values()]
    assert shares == pytest.approx([1000 / exact, 1200 / exact, 150 / exact, 75 / exact], rel=1e-5)
    totals = [sum(term[r][0] for term in map(curves[1].course, courses.TERMS.values())) for r in (0, 5)]
    assert totals == pytest.approx([100, 100])
    runs = [run(0.5, 0, last=0.5), run(0.5, 1, last=0.7, zeta_hat_sq=1.0)]
    runs[0]["zeta_hat_sq"][0][1] = 2.0 * (1 + 1e-12)  # equal but for rounding
    ends = [cell.strip() for cell in courses.section("", [curve("x", runs)]).splitlines()[4].split("|")[1:-1]]
    assert ends[4:] == ["0.750 [0.500, 1.250]", "2 of 6", "0.950", "0 of 6"]  # of 0.5, 0.5, 0.5, 1, 1.25, 1.25


parameters = report_runs.script("convergence_parameters")


@pytest.mark.long
def test_both_figures_from_small_runs(parameters: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--preset=smoke", "--p=0,0.3", "--federation.rounds=1", "--hessians", "--wandb=off", "--data.limit=80",
            "--model.name=linear", "--partition.n_clients=4", "--generator.sampling_steps=2",
            "--generator.channels=[8,8]", f"--out={out}", f"--artifacts={tmp_path}/artifacts"]  # fmt: skip
    options = parameters.arguments(argv)
    figures = parameters.figure_a7(options), parameters.figure_a8(options)
    runs = [cell for figure in figures for several in figure.values() for cell in several]
    complete(parameters.convergence_parameters, argv, runs, out)
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


HEAD = "dataset,algorithm,n_clients,participation_rate,alpha,rounds_fedssyn,rounds_vanilla"
FORMULA, TOTAL = "saved % (paper's formula)", "saved % (all clients)"
SUMMARY = ("bytes_down", "bytes_up", "bytes_once", "partition")

Lines = list[dict[str, str]]


saving = report_runs.script("communication_saved")


@pytest.fixture
def table(saving: ModuleType, tmp_path: Path) -> Callable[[Path], Lines]:
    """The lines of the CSV that the sweep writes."""

    def make(source: Path) -> Lines:
        out = tmp_path / "new" / "out"
        assert saving.communication_saved(["--from", str(source), "--out", str(out)]) == 0
        return list(csv.DictReader((out / "communication_saved.csv").read_text().splitlines()))

    return make


def rounds(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "rounds.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return path


def cell(setting: str, reached: int | None, seed: float = 0, **more: Any) -> dict[str, Any]:
    """A run of 10 rounds of 2 of 4 clients with a model of 50 bytes, and a pool of 4 parts of 10 bytes."""
    return {
        "sharing.setting": setting, "seed": seed, "partition.alpha": 0.1, "partition.n_clients": 4,
        "federation.participation": 0.5, "federation.rounds": 10, "reached": reached, "bytes_down": 1000,
        "bytes_up": 1000, "bytes_once": 0 if setting == "real" else 80, "partition": f"p{seed}", **more,
    }  # fmt: skip


@pytest.fixture
def sweep(recorded: Callable[..., None], tmp_path: Path) -> Callable[..., Path]:
    """A folder with these runs."""

    def make(*cells: dict[str, Any]) -> Path:
        for number, cell in enumerate(cells):
            summary = {name: cell[name] for name in SUMMARY if name in cell}
            fields = {name: value for name, value in cell.items() if name not in (*SUMMARY, "reached")}
            config = presets.experiment("smoke", "digits", fields)
            recorded(tmp_path / "runs" / str(number), config, cell["reached"], {}, **summary)
        return tmp_path / "runs"

    return make


def test_totals_over_all_clients_and_bounds_by_hand(table: Callable[[Path], Lines], tmp_path: Path) -> None:
    """All 40 clients exchange synthetic images, 8 of them a model, each in either direction."""
    reached = ("4,>100", ">100,50", ">100,>100", "4,", "4,89")
    first, scaffold, *lines = table(rounds(
        tmp_path, "cifar10,fedavg,40,0.2,0.1,21,59", "cifar10,scaffold,10,1,0.1,5,10",
        *(f"cifar10,fedavg,10,1.0,0.01,{row}" for row in reached),
    ))  # fmt: skip
    once, per_round = 2 * 40 * 1250 * (3 * 32 * 32 + 1), 2 * 8 * 4 * 9_750_922  # VGG-11 has 9,750,922 float32
    total, without = once + 21 * per_round, 59 * per_round
    assert (first["MB with pool"], first["MB without"]) == (f"{total / 1e6:.1f}", f"{without / 1e6:.1f}")
    assert first[TOTAL] == f"{100 * (1 - total / without):.1f}" == "63.6"
    assert scaffold["MB without"] == "15601.5"  # twice what FedAvg sends
    assert [r[FORMULA] for r in lines] == [">95.6", "<-100.8", "-", "-", "95.0"]
    assert [r[TOTAL] for r in lines] == [">95.6", "<-100.8", "-", "-", "95.1"]


def test_closed_forms_by_hand_and_of_the_algorithms_messages() -> None:
    model = flatten(dict(VGG11((3, 32, 32), 10).named_parameters()))
    for name in ("fedavg", "fedprox", "feddyn", "scaffold", "fedpvr"):
        algorithm = registry.make("algorithm", name, {})
        message = algorithm.down(algorithm.start(model, Facts(1, [1], 1), 0), 1, 0)
        assert message.nbytes == saved.vgg11_nbytes(10) + saved.vgg11_nbytes(10, saved.CONTROL[name])
    assert images_nbytes(5, (3, 2, 2)) == 65
    pool, vanilla = UntilTarget(20, 10, 3, False), UntilTarget(0, 10, 10, False)
    pool_late, vanilla_late = UntilTarget(20, 10, 3, True), UntilTarget(0, 10, 10, True)
    assert sent([pool, UntilTarget(20, 10, 10, True)]) == (85, True)
    assert (saved_percent([pool], [vanilla]), saved_percent([vanilla], [pool])) == ("50.0", "-100.0")
    # the paper's formula is the total over clients in units of one client
    n, joined, ms, mc = 10, 4, 7, 11
    total = UntilTarget(2 * n * ms, 2 * joined * mc, 6, False)
    assert sent([total], n, joined) == (2 * ms + 2 * 6 * mc, False)
    assert saved_percent([pool], [vanilla_late]) == ">50.0"
    assert saved_percent([pool_late], [vanilla]) == "<50.0"
    assert saved_percent([pool], []) == saved_percent([], [vanilla]) == "-"


def test_a_sweep_of_ours(table: Callable[[Path], Lines], sweep: Callable[..., Path]) -> None:
    """200 bytes a round for all, 100 for a client that takes part; the pool costs 80 for all, 20 for each."""
    other = {"algorithm": "scaffold", "bytes_down": 2000, "bytes_up": 2000}
    folder = sweep(
        cell("real", 8), cell("shuffled_synthetic", 2),
        cell("real", 4, seed=1), cell("shuffled_synthetic", 2, seed=1),
        cell("real", 9, seed=2),  # its partner failed: left out
        cell("real", 10, **other), cell("shuffled_synthetic", 5, **other),
        cell("real", None, **{"partition.alpha": 9.0}), cell("shuffled_synthetic", 2, **{"partition.alpha": 9.0}),
    )  # fmt: skip
    first, second, third = table(folder)
    assert (first["rounds with pool"], first["rounds without"], first["seeds"]) == ("2.0 ± 0.0", "6.0 ± 2.8", "2")
    assert first[TOTAL] == "60.0"  # 80 + 400 against 1200
    assert first[FORMULA] == "63.3"  # 20 + 200 against 600
    assert second[TOTAL] == "48.0"  # 80 + 2000 against 4000
    assert (third["rounds without"], third[TOTAL], third[FORMULA]) == (">10", ">76.0", ">78.0")


GOOD = "cifar10,fedavg,10,1.0,0.1,8,68"


def test_bad_files_and_other_runs_are_refused(saving: ModuleType, sweep: Callable[..., Path], tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(UserError) as error:
            saving.communication_saved(["--from", *words])
        return str(error.value)

    for row, part in (
        (GOOD.replace("68", "many"), "must be a number"), (GOOD.replace(",8,", ",0,"), "finite and above 0"),
        (GOOD.replace("1.0", "1.5"), "from 1 to N clients"), (GOOD + ",1", "values"), ("", "has no rows"),
    ):  # fmt: skip
        assert part in refused(str(rounds(tmp_path, row)))
    folder = sweep(cell("real", 3), cell("shuffled_synthetic", 3, partition="other"))
    assert "different partitions cannot be compared: 0 and 1" in refused(str(folder))
