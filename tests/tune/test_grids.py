"""What the sweeps over a grid put into their runs, preset ``authors`` cell by cell, and what table1 reports."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from sweep_runs import rows_of

from fedcommons.cli.display import Display
from fedcommons.config import presets
from fedcommons.config.dotted import override
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.generators.requests import contribution
from fedcommons.runs.build import build, check, load
from fedcommons.storage.artifact_store import key_of
from fedcommons.tune import dry_run
from fedcommons.tune import grid as grids
from fedcommons.tune import sweep as tuning
from papers.fedssyn import authors, references
from papers.fedssyn import table1 as of_table1

Sweeps = Callable[[str], ModuleType]
POOL = "shuffled_synthetic"


def settled(data: str, algorithm: str, n: int, c: float, alpha: float, setting: str = POOL) -> Experiment:
    values = {"algorithm": algorithm, "partition.n_clients": n, "federation.participation": c, "partition.alpha": alpha,
              "sharing.setting": setting}  # fmt: skip
    return authors.settled("authors", presets.experiment("authors", data, values), ())


SIZES = [
    ("cifar10", 10, 1.0, 3375, 5000, 450, 10), ("cifar10", 40, 0.2, 845, 1125, 450, 30),
    ("cifar10", 100, 0.1, 385, 500, 499, 30), ("cifar100", 40, 0.2, 845, 1125, 499, 40),
    ("cifar100", 100, 0.1, 385, 1000, 499, 40),
]  # fmt: skip
"""Of github.com/lyn1874/fedssyn at 4ceefff: data set, clients, C, images that a generator sees, synthetic images of a
client, generator epochs, local epochs."""
RATES = [
    ("cifar10", "fedavg", 10, 1.0, 0.01, "real", 0.1), ("cifar10", "fedavg", 10, 1.0, 0.1, "real", 0.05),
    ("cifar100", "scaffold", 10, 0.4, 0.1, "real", 0.01), ("cifar10", "fedprox", 100, 0.1, 0.1, "real", 0.05),
    ("cifar10", "feddyn", 10, 1.0, 0.1, "real", 0.01), ("cifar10", "feddyn", 10, 1.0, 0.1, "local_synthetic", 0.1),
    ("cifar10", "fedavg", 10, 1.0, 0.1, POOL, 0.1), ("cifar10", "scaffold", 10, 0.4, 0.1, POOL, 0.05),
    ("cifar10", "fedprox", 100, 0.1, 0.01, POOL, 0.05), ("cifar100", "feddyn", 40, 0.2, 0.1, POOL, 0.05),
]  # fmt: skip


def test_preset_authors_has_the_numbers_of_the_released_code() -> None:
    for data, n, c, seen, synthetic, epochs, local_epochs in SIZES:
        config = settled(data, "fedavg", n, c, 0.1)
        assert config.generator is not None
        assert int(config.generator.rho * (45000 // n)) == seen
        assert contribution(config.sharing.p, 45000, n, 45000 // n) == synthetic
        assert (config.generator.epochs, config.client.epochs) == (epochs, local_epochs)
        assert (config.client.batch_size, config.client.drop_last) == (128, True)
        check(config)
    for data, algorithm, n, c, alpha, setting, rate in RATES:
        assert settled(data, algorithm, n, c, alpha, setting).client.lr == rate
    assert settled("cifar10", "feddyn", 10, 1.0, 0.1, "real").flat["feddyn.alpha"] == 0.001
    assert settled("cifar10", "feddyn", 10, 1.0, 0.1).flat["feddyn.alpha"] == 0.01
    with pytest.raises(UserError, match="Table 1 only"):
        authors.authors(override(settled("cifar10", "fedavg", 10, 1.0, 0.1), {"algorithm": "moon"}))


def test_the_last_images_are_held_out() -> None:
    """On digits: the last tenth of the training images in their order."""
    data = presets.experiment("small", "digits").data
    at_random, last = load(data), load(override(Experiment(data=data), {"data.validation_from": "last"}).data)
    everything = load(override(Experiment(data=data), {"data.validation": 0.0}).data).train
    n = len(last.validation)
    assert n == len(at_random.validation) == int(0.1 * len(everything))
    assert bool((last.validation.x == everything.x[-n:]).all())
    assert bool((last.train.x == everything.x[:-n]).all())
    assert not bool((at_random.validation.x == last.validation.x).all())


@pytest.fixture(scope="module")
def table1(sweeps: Sweeps) -> ModuleType:
    return sweeps("table1")


def configs_of(table1: ModuleType, options: str) -> list[Experiment]:
    return [cell.config for cell in table1.grid(table1.arguments(options.split()))]


def test_preset_authors_sets_each_cell_and_yields_to_an_option(table1: ModuleType) -> None:
    options = "--preset authors --alphas 0.1 --federations 10:1 --algorithms fedavg,feddyn"
    asked = configs_of(table1, f"{options} --client.lr 0.1 --generator.epochs 7")  # 0.1 is the preset's value too
    assert {(c.client.lr, c.generator and c.generator.epochs) for c in asked} == {(0.1, None), (0.1, 7)}
    entries = table1.entries(table1.arguments([*options.split(), "--lrs", "0.05,0.1", "--without-references"]))
    rates = [e.cell.config for e in entries if e.is_tuning]
    assert {(c.client.lr, c.seed) for c in rates} == {(0.05, 100), (0.1, 100)}
    assert len({tuning.cell(c, grids.VARIED).name for c in rates}) == len(rates) == 8


def test_notes_name_departures_from_the_paper_and_published_values_stand_beside_its_own_setting_only(
    table1: ModuleType,
) -> None:
    for options, has_published in (("--preset authors", True), ("--preset paper --client.epochs 3", False)):
        given = table1.arguments(options.split())
        assert bool(of_table1.published(table1.grid(given), given)) == has_published
    given = table1.arguments(["--preset", "authors", "--algorithms", "feddyn,fedavg", "--federations", "10:1,40:0.2"])
    notes = " ".join(of_table1.footnotes(table1.grid(given), given))
    for part in ("E = 10, 30,", "alpha 0.001, 0.01,", "client.epochs 10, 30", "sharing.p 0.5263, 0.5"):
        assert part in notes, notes
    given = table1.arguments(["--settings", "real"])
    assert "in the paper" not in " ".join(of_table1.footnotes(table1.grid(given), given))
    paper = presets.experiment("paper", "cifar10")
    assert grids.departures([paper], ()) == ""
    assert "0.2, 0.5" in grids.title([override(paper, {"target": target}) for target in (0.2, 0.5)])
    values = {"client.batch_size": 10, "seed": 3, "algorithm": "fedprox", "fedprox.mu": 0.5, "data.limit": 50}
    other = override(paper, values)
    assert grids.departures([paper, other], ("seed", "fedprox.mu")) == (
        "data.limit none, 50 (paper: none); client.batch_size 256, 10 (paper: 256)"
    )


def test_a_table_with_a_pool_has_a_server_alone_with_the_same_pool_and_a_central_model(table1: ModuleType) -> None:
    base = ["--alphas=0.1", "--seeds=0,1", "--algorithms=fedprox,fedavg", "--sharing.p=0.3", "--lrs=0.04,0.1"]
    given = table1.arguments(base)
    rows = table1.entries(given)
    federated, alone = ([e.cell.config for e in rows if (e.cell.config.algorithm == "one_shot") == is_alone]
                        for is_alone in (False, True))  # fmt: skip
    assert {(c.sharing.setting, c.sharing.p, c.client.lr, c.seed) for c in alone} == {
        ("server_synthetic", 0.3, lr, seed) for lr, seed in ((0.04, 0), (0.04, 1), (0.04, 100), (0.1, 100))
    }  # fmt: skip
    pools = [c for c in federated if c.sharing.setting == POOL]
    assert {key_of(need.images_facts) for c in alone for need in build(c).requests} == {
        key_of(need.images_facts) for c in pools for need in build(c).requests
    }  # fmt: skip
    models = references.central_lines(rows, given)
    assert {(m.source, m.config.client.lr, m.config.seed) for m in models} == {
        ("central_real", lr, seed) for lr in (0.04, 0.1) for seed in (0, 1, 100)
    }  # fmt: skip
    for words in (["--without-references"], ["--settings=real"], ["--sharing.p=0"]):
        given = table1.arguments(["--alphas=0.1", *words])
        assert table1.entries(given)[-1].cell.config.algorithm != "one_shot"
    given = table1.arguments([*base, "--model.batch_norm=true"])
    rows = table1.entries(given)
    assert "one_shot" not in {e.cell.config.algorithm for e in rows}
    assert "BatchNorm" in " ".join(of_table1.footnotes([e.cell for e in rows], given))


def test_each_target_has_rounds_bytes_and_work_and_says_if_the_pool_alone_reaches_it(
    table1: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    """Rounds of 2 MB; the pool of FedAvg has 10 MB, that of SCAFFOLD 20 MB."""
    words = ["--alphas=0.1", "--algorithms=fedavg,scaffold", "--targets=0.95", f"--out={tmp_path}"]
    given, display = table1.arguments(words), Display(Console(quiet=True))
    rows, sent, work = table1.entries(given), {"bytes_down": 3e7, "bytes_up": 3e7}, {}
    for e in rows:
        c, pool = e.cell.config, 2e7 if e.cell.config.algorithm == "scaffold" else 1e7
        once = {"bytes_down": 0, "bytes_up": 0, "bytes_once": 5e6}
        of = {"real": (9, sent), POOL: (2, {**sent, "bytes_once": pool}), "server_synthetic": (1, once)}
        reached, summary = of[c.sharing.setting]
        recorded(tmp_path / e.cell.name, c, reached, last_accuracy=0.9, best_accuracy=0.9, **summary)
        work[e.cell.name] = [30.0 * (c.algorithm != "one_shot"), 4.0 * bool(c.generator)]
    (tmp_path / "client_work.json").write_text(json.dumps(work))
    table1.table1.report(rows, given, tmp_path, display)
    text = (tmp_path / "table1.md").read_text()
    lines = [line[1:] for line in rows_of(text.split("## ")[1])[2:]]
    assert lines[0] == ["no sharing", "80 %", "9", "18", "0", "", "", "9", "0"]
    assert lines[2] == [POOL, "80 %", "2", "14", "10", "7.0 x 2 = 14", "yes", "6", "4"]
    assert lines[6][5:7] == ["7.0 x 2 = 14", "no"]
    assert lines[3][1:7] == ["95 %", ">30", ">70", "10", "-", "-"]
    assert [line[:8] for line in lines[8:]] == [
        ["server_synthetic", "80 %", "0", "5", "5", "", "", "4"],
        ["server_synthetic", "95 %", "not reached", "5", "5", "", "", "4"],
    ]  # fmt: skip
    assert "below what the pool alone teaches (90.0 %)" in text
    (alone,) = rows_of(text, "| digits   | 10 | 1 | 0.1   | server")
    assert (alone[7], alone[9]) == ("0", "90.0")


@pytest.mark.usefixtures("untimed")
def test_of_very_many_cells_only_a_few_are_made_and_stand_for_all(sweeps: Sweeps, table1: ModuleType) -> None:
    seeds, alphas = ",".join(map(str, range(900))), ",".join(str(0.1 + i / 10) for i in range(20))
    grid = ["--preset", "smoke", "--setting", "real", "--space", f"seed={seeds}", "--space", f"alpha={alphas}"]
    tune = sweeps("tune")
    options = tune.arguments([*grid, "--space", "lr=uniform(0.1,0.2)", "--dry-run"])
    assert len(tune.cells(options)[0]) <= tuning.FEW
    assert options.total == 180_000
    options = table1.arguments(["--preset", "smoke", "--seeds", seeds, "--alphas", alphas, "--dry-run"])
    assert len(table1.grid(options)) <= tuning.FEW
    assert options.total == 900 * 20 * 2 * 2
    with pytest.raises(UserError, match=r"at most 10,000 cells.*18,000"):
        tune.tune(grid)
    tuning.require_few(10_000)
    with pytest.raises(UserError, match="10,001"):
        tuning.require_few(10_001)
    one, many = (dry_run.Bill(times, {"cells": [2.0, 4.0]}) for times in (1.0, 1000.0))
    assert many.span(many.phases["cells"], 2) == 3000
    assert many.seconds(1, in_ray=False) - one.seconds(1, in_ray=False) == pytest.approx(5994, abs=1)
