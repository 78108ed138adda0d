"""Sweeps of FedDM, FedDPMS, gradient coding and replications: presets, verdicts, tables of small runs."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import report_runs
from scipy.stats import t
from sweep_runs import complete, rows_of

from fedcommons.errors import UserError
from fedcommons.tracking.run_folder import read_summary
from papers.agc import coding, curves
from papers.feddpms import exchange
from papers.replications import report
from papers.replications.report import Compared
from papers.replications.rows import Quantity

feddm = report_runs.script("feddm")


def test_a_run_of_several_tables_is_run_once(feddm: ModuleType) -> None:
    result = feddm.entries(feddm.arguments(["--rates=0.2,2", "--image-rates=1,0.03", "--noisy=feddm,scaffold"]))
    at_one = [e for e in result if e["at"] == 0.1]
    names = {(e["table"], e["method"], e.cell.seed, e.labels.get("rates")): e.cell.name for e in at_one}
    same = [("methods", "feddm"), ("images per class", "feddm, ipc 3"), ("radius", "feddm, radius 5"),
            ("noise level", "feddm, noise level 0")]  # fmt: skip
    for seed, rates in ((0, None), (100, (("feddm.image_lr", 0.03),))):
        assert len({names[*each, seed, rates] for each in same}) == 1
    assert next(e for e in result if e["method"] == "REAL").cell.config.flat["feddm.iterations"] == 0
    for e in result:
        name, rates = ("feddm.image_lr", (1, 0.03)) if "feddm" in e["method"] else ("client.lr", (0.2, 2))
        assert e["method"] == "REAL" or e["field"] == name
        assert e["method"] == "REAL" or e.cell.config.flat[name] == (e["rates"][0][1] if e.is_tuning else rates[0])
        assert e.is_tuning == (e.cell.seed == 100)


def test_a_run_of_one_round_has_the_rate_of_the_longer_run(
    feddm: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    argv = ["--alphas=0.1", "--algorithms=feddm", "--ipcs=", "--radii=", "--image-rates=0.03,0.1,0.3"]
    entries = feddm.entries(feddm.arguments(argv))
    for e in {e.cell.name: e for e in entries if e.is_tuning}.values():
        is_best = e["rates"][0][1] == 0.1
        recorded(tmp_path / e.cell.name, e.cell.config, None, {"validation/accuracy": 0.7 + 0.1 * is_best})
    rounds = [e for e in feddm.feddm.plan(entries, tmp_path) if e["table"] == "round"]
    assert [(e.cell.config.flat["feddm.image_lr"], e.cell.rounds) for e in rounds] == [(0.1, 1)] * 3


@pytest.mark.long
def test_tables_and_pictures_from_small_runs(feddm: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset=smoke", "--seeds=0", "--alphas=0.5", "--study-alpha=0.5", "--algorithms=feddm", "--sigmas=2",
            "--wandb=off", "--noisy=feddm,fedavg", "--image-rates=0.1", "--ipcs=", "--radii=",
            "--feddm.server_epochs=2", f"--out={tmp_path}"]  # fmt: skip
    entries = feddm.entries(feddm.arguments(argv))
    text = complete(feddm.feddm, argv, [e.cell for e in entries], tmp_path)
    every = pd.read_csv(tmp_path / "feddm.csv")
    assert len(every) == len(entries)
    of_methods = every[every["table"] == "methods"]
    lines = rows_of(text, "| 0.5 ")[:2]
    assert [line[4] for line in lines] == [f"{100 * a:.1f}" for a in of_methods["last_accuracy"]]
    first = every.iloc[0]
    of_class = 4 * 64 * 3 + 8  # three images of 8x8 float32, and a label of 8 bytes
    sent = first["bytes_up"] / first["rounds"] / of_class
    assert sent == pytest.approx(round(sent), abs=1e-6)
    assert 10 <= sent <= 40


feddpms = report_runs.script("feddpms")


@pytest.mark.long
def test_the_tables_and_the_bytes_of_small_runs(feddpms: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset=smoke", "--feddpms.sigma=0.3", "--client.epochs=3", "--wandb=off", "--quotas=", "--sigmas=0.3",
            "--algorithms=feddpms,fedavg", f"--out={tmp_path}"]  # fmt: skip
    cells = [e.cell for e in feddpms.entries(feddpms.arguments(argv)) if e["table"] == "Table 1"]
    text = complete(feddpms.feddpms, argv, cells, tmp_path, again=True)
    first, second = (read_summary(tmp_path / cell.name) or {} for cell in cells)
    ours, other = (100 * summary["last_accuracy"] for summary in (first, second))
    rows = [[row[4], row[7], row[9]] for row in rows_of(text, "| dig")]
    assert rows == [["feddpms", f"{ours:.1f}", f"{ours - other:.1f}"], ["fedavg", f"{other:.1f}", ""]]
    assert exchange.read(tmp_path / cells[1].name) is None
    e = exchange.read(tmp_path / cells[0].name)
    assert e is not None
    assert (e.latent, e.preliminary) == (16, 2)
    assert np.array_equal((e.after - e.before).sum(0), [len(e.images.get(c, ())) for c in range(10)])
    # Each way 4 bytes a number of the model; decoders up once and down once; codes with their labels; a byte to ask
    # for decoders, and one in each round of stage II.
    k, rounds, received = 4, 4, sum(map(len, e.images.values()))
    up = 4 * (k * rounds * e.model + k * e.decoder) + e.n_own * (4 * 16 + 8)
    down = 4 * (k * rounds * e.model + k * e.decoder) + received * (4 * 16 + 8) + k * 3
    assert (first["bytes_up"], first["bytes_down"]) == (up, down)
    assert f"| counted        | {up + down}" in text


QUICK = ["--preset=smoke", "--workers=1", "--shares=0.2", "--pairs=0.5:3,0.7:4"]


agc = report_runs.script("gradient_coding")


@pytest.fixture(scope="module")
def out(agc: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "new" / "out"
    assert agc.gradient_coding([*QUICK, f"--out={folder}"]) == 0
    return folder


def test_rounds_until_it_is_as_good_as_iid() -> None:
    def curve(partition: str, c: float, *accuracy: float) -> dict:
        ones = [1.0] * len(accuracy)
        return {"partition": partition, "q": 0.5, "d": 3, "c": c, "accuracy": list(accuracy), "accuracy_se": ones,
                "second_moment": ones, "second_moment_se": ones}  # fmt: skip

    curves = [curve("iid", 0.0, 0.1, 0.6, 0.8), curve("iid", 0.2, 0.1, 0.77, 0.8),
              curve("single_class", 0.2, 0.1, 0.5, 0.7)]  # fmt: skip
    assert [row["rounds_to_close_to_iid"] for row in coding.summary(curves)] == [2, 1, None]  # 0.76


@pytest.mark.long
def test_it_resumes_with_the_curves_that_are_there(agc: ModuleType, out: Path, tmp_path: Path) -> None:
    """A curve that is there is kept, also a changed one; the others are computed."""
    argv = [*QUICK, f"--out={tmp_path}"]
    (tmp_path / "curves").mkdir()
    (tmp_path / ".lock").write_bytes((out / ".lock").read_bytes())
    curve = tmp_path / "curves" / "iid_q0.5_d3_c0.json"
    before = (out / "curves" / curve.name).read_text()
    accuracy = json.loads((out / "summary.json").read_text())["curves"][0]["accuracy"][1]
    curve.write_text(changed := before.replace(json.dumps(accuracy), "0.125", 1))
    assert changed != before
    assert agc.gradient_coding([*argv, "--resume"]) == 0
    assert curve.read_text() == changed
    with pytest.raises(UserError, match=r"repetitions = 4, .*5"):
        agc.gradient_coding([*argv, "--resume", "--repetitions=5"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_workers_change_no_bit(agc: ModuleType, tmp_path: Path) -> None:
    options = ["--preset=smoke", "--shares=0", "--pairs=0.5:3", f"--repetitions={curves.CHUNK + 1}"]
    for workers in (1, 2):
        assert agc.gradient_coding([*options, f"--workers={workers}", f"--out={tmp_path / str(workers)}"]) == 0
    first, second = (json.loads((tmp_path / str(workers) / "summary.json").read_text()) for workers in (1, 2))
    assert first["curves"] == second["curves"]
    assert first["scalar_products"] == second["scalar_products"]


def verdict(values: Sequence[float | None], published: float, note: str = "") -> str:
    return Compared("R1", Quantity("one", None, published, "a paper", note), dict(enumerate(values))).verdict


def test_the_interval_is_the_one_for_a_run_more() -> None:
    values = [40.0, 44.0, 43.0, 45.0, 41.0]
    single = Compared("R1", Quantity("one", None, 1, "a paper"), dict(enumerate(values)))
    half = t.ppf(0.975, 4) * stdev(values) * sqrt(1 + 1 / 5)
    assert single.predicted == pytest.approx((fmean(values) - half, fmean(values) + half))
    five = replace(single, quantity=Quantity("one", 3, 1, "a paper", runs=5))
    half *= sqrt(2 / 5) / sqrt(6 / 5)
    assert five.predicted == pytest.approx((fmean(values) - half, fmean(values) + half))
    wide = replace(five, values={0: 96.0, 1: 92.0, 2: 99.0}).predicted
    assert wide is not None
    assert wide[1] == 100.0  # no accuracy lies above


def test_verdicts() -> None:
    for values, published, note, expected in (
        ([99.0, 100.0, 101.0], 104, "", "inside"), ([1.0, 2.0, 3.0], 2, "", "inside, wide"),
        ([1.0, 2.0, 3.0], 12, "", "outside"), ([1.0, 2.0, None], 2, "", "cannot tell"),
        ([99.0, 100.0, 101.0], 110, "read off to ± 6", "outside"),  # a note moves no verdict
        ([1.0, 2.0], 2, "", "cannot tell"), ([2.0, 2.0, 2.0], 2, "", "inside"), ([2.0, 2.0, 2.0], 3, "", "outside"),
    ):  # fmt: skip
        assert verdict(values, published, note) == expected


def test_the_committed_numbers_have_their_verdicts() -> None:
    file = Path(__file__).parents[2] / "docs" / "results" / "replications.csv"
    lines = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    runs: dict[tuple[str, str], dict[int, dict[str, float | None]]] = {}
    for line in lines:
        of_seed = runs.setdefault((line["row"], line["variant"]), {}).setdefault(int(line["seed"]), {})
        of_seed[line["quantity"]] = float(line["ours"]) if line["ours"] else None
    verdicts = [str(record["verdict"]) for record in report.records(report.compared(runs))]
    assert verdicts == [line["verdict"] for line in lines]
