"""What the pool saves: the paper's percentages from its rounds, closed forms, bounds, our own sweeps, bad input."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import report_runs

from fedcommons.accounting.communication import (
    UntilTarget,
    images_nbytes,
    pool_nbytes,
    round_nbytes,
    saved_percent,
    sent,
)
from fedcommons.config import parts, presets
from fedcommons.core.algorithm import Facts
from fedcommons.errors import UserError
from fedcommons.tensors import flatten
from lightning_modules.networks import VGG11
from papers.fedssyn import saved
from papers.fedssyn.published import fedssyn_table_a2

PAPER = Path(__file__).parent.parent / "sweeps" / "papers" / "fedssyn" / "published" / "fedssyn_table1_rounds.csv"
HEAD = "dataset,algorithm,n_clients,participation_rate,alpha,rounds_fedssyn,rounds_vanilla"
FORMULA, TOTAL, PRINTED = "saved % (paper's formula)", "saved % (all clients)", "table A.2 prints"
SUMMARY = ("bytes_down", "bytes_up", "bytes_once", "partition")

Lines = list[dict[str, str]]


script = report_runs.script("communication_saved")


@pytest.fixture
def table(script: ModuleType, tmp_path: Path) -> Callable[[Path], Lines]:
    """The lines of the CSV that the sweep writes."""

    def make(source: Path) -> Lines:
        out = tmp_path / "new" / "out"
        assert script.communication_saved(["--from", str(source), "--out", str(out)]) == 0
        return list(csv.DictReader((out / "communication_saved.csv").read_text().splitlines()))

    return make


def rounds(tmp_path: Path, *rows: str, head: str = HEAD) -> Path:
    path = tmp_path / "rounds.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
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
        for number, one in enumerate(cells):
            summary = {name: one[name] for name in SUMMARY if name in one}
            fields = {name: value for name, value in one.items() if name not in (*SUMMARY, "reached", "validation")}
            config = presets.experiment("smoke", "digits", fields)
            metrics = {"validation/accuracy": one.get("validation")}
            recorded(tmp_path / "runs" / str(number), config, one["reached"], metrics, **summary)
        return tmp_path / "runs"

    return make


def test_the_papers_rounds_give_the_papers_percentages(table: Callable[[Path], Lines]) -> None:
    lines = table(PAPER)
    result = {(r["data set"], int(r["N"]), float(r["C"]), float(r["alpha"]), r["algorithm"]): r for r in lines}
    assert len(result) == 80
    # Fedssyn, table A.2
    assert result["cifar10", 10, 1.0, 0.01, "fedavg"][FORMULA] == "95.0"
    assert result["cifar10", 10, 0.4, 0.01, "fedavg"][FORMULA] == ">95.6"
    assert {key: r[PRINTED] for key, r in result.items() if r[PRINTED]} == fedssyn_table_a2()
    for key, percent in fedssyn_table_a2().items():
        ours = result[key][FORMULA]
        assert ours.startswith(">") == percent.startswith(">")
        assert abs(float(ours.strip(">")) - float(percent.strip(">"))) < 3
    assert result["cifar100", 40, 0.2, 0.1, "fedprox"][FORMULA] == "-"  # 100 rounds are not enough with the pool


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
        algorithm = parts.make("algorithm", name, {})
        message = algorithm.down(algorithm.start(model, Facts(1, [1], 1), 0), 1, 0)
        assert message.nbytes == saved.vgg11_nbytes(10) + saved.vgg11_nbytes(10, saved.CONTROL[name])
    assert images_nbytes(5, (3, 2, 2)) == 65
    assert pool_nbytes(4, 65) == 520  # 65 bytes up and 65 down for each of 4
    assert (round_nbytes(3, 100), round_nbytes(3, 100, control=20)) == (600, 720)
    pool, vanilla = UntilTarget(20, 10, 3, False), UntilTarget(0, 10, 10, False)
    pool_late, vanilla_late = UntilTarget(20, 10, 3, True), UntilTarget(0, 10, 10, True)
    assert sent([pool]) == (50, False)
    assert sent([pool, UntilTarget(20, 10, 10, True)]) == (85, True)
    assert (saved_percent([pool], [vanilla]), saved_percent([vanilla], [pool])) == ("50.0", "-100.0")
    # the paper's formula is the total over clients in units of one client
    n, joined, ms, mc = 10, 4, 7, 11
    total = UntilTarget(pool_nbytes(n, ms), round_nbytes(joined, mc), 6, False)
    assert sent([total], n, joined) == (2 * ms + 2 * 6 * mc, False)
    assert saved_percent([pool], [vanilla_late]) == ">50.0"
    assert saved_percent([pool_late], [vanilla]) == "<50.0"
    assert saved_percent([pool, pool], [vanilla, vanilla_late]) == ">50.0"
    assert saved_percent([pool], []) == saved_percent([], [vanilla]) == "-"


def test_a_sweep_of_ours(table: Callable[[Path], Lines], sweep: Callable[..., Path]) -> None:
    """200 bytes a round for all, 100 for a client that takes part; the pool costs 80 for all, 20 for each."""
    other = {"algorithm": "scaffold", "bytes_down": 2000, "bytes_up": 2000}
    folder = sweep(
        cell("real", 8), cell("shuffled_synthetic", 2),
        cell("real", 4, seed=1), cell("shuffled_synthetic", 2, seed=1),
        cell("real", 9, seed=2),  # its partner failed: left out
        cell("local_synthetic", 1),
        cell("shuffled_synthetic", 3, **{"partition.alpha": 0.5}), cell("real", 3, **{"partition.alpha": 0.7}),
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


def test_bad_files_and_runs_that_cannot_be_compared_are_refused(
    script: ModuleType, sweep: Callable[..., Path], tmp_path: Path
) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(UserError) as error:
            script.communication_saved(["--from", *words])
        return str(error.value)

    for row, part in (
        (GOOD.replace("68", "many"), "must be a number"), (GOOD.replace(",8,", ",0,"), "finite and above 0"),
        (GOOD.replace("1.0", "1.5"), "from 1 to N clients"), (GOOD.replace("10,1.0", "2.5,1.0"), "N must be whole"),
        (GOOD.replace("cifar10", "cifar"), "cifar10"), (GOOD + ",1", "values"), ("", "has no rows"),
    ):  # fmt: skip
        assert part in refused(str(rounds(tmp_path, row)))
    assert "lacks the column 'alpha'" in refused(str(rounds(tmp_path, GOOD, head=HEAD.replace("alpha,", ""))))
    assert "holds no run" in refused(str(tmp_path))
    folder = str(sweep(cell("real", 3), cell("shuffled_synthetic", 3, partition="other")))
    assert "different partitions cannot be compared: 0 and 1" in refused(folder)
    shutil.rmtree(folder)
    sweep(cell("real", 3, seed=1), cell("shuffled_synthetic", 3), cell("local_synthetic", 3))
    assert "no pair of runs" in refused(folder)
