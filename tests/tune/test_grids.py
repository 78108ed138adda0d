"""What the sweeps over a grid put into their runs, preset ``authors`` cell by cell, and what table1 reports."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import report_runs
from rich.console import Console
from sweep_runs import rows_of

from fedcommons import Experiment, UserError
from fedcommons.cli.display import Display
from fedcommons.config import presets
from fedcommons.config.dotted import override
from fedcommons.generators.requests import contribution
from fedcommons.reports.cells import Cell
from fedcommons.runs.build import build, check, load
from fedcommons.tune import dry_run
from fedcommons.tune import grid as grids
from fedcommons.tune import sweep as tuning
from fedcommons.tune.study import Entry
from papers.fedssyn import authors, central_trials, references, targets
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


table1 = report_runs.script("table1")


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
        parsed = table1.arguments(options.split())
        assert bool(of_table1.published(table1.grid(parsed), parsed)) == has_published
    parsed = table1.arguments(["--preset", "authors", "--algorithms", "feddyn,fedavg", "--federations", "10:1,40:0.2"])
    notes = " ".join(of_table1.footnotes(table1.grid(parsed), parsed))
    for part in ("E = 10, 30,", "alpha 0.001, 0.01,", "client.epochs 10, 30", "sharing.p 0.5263, 0.5"):
        assert part in notes, notes
    parsed = table1.arguments(["--settings", "real"])
    assert "in the paper" not in " ".join(of_table1.footnotes(table1.grid(parsed), parsed))
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
    options = table1.arguments(base)
    rows = table1.entries(options)
    federated, alone = ([e.cell.config for e in rows if (e.cell.config.algorithm == "one_shot") == is_alone]
                        for is_alone in (False, True))  # fmt: skip
    assert {(c.sharing.setting, c.sharing.p, c.client.lr, c.seed) for c in alone} == {
        ("server_synthetic", 0.3, lr, seed) for lr, seed in ((0.04, 0), (0.04, 1), (0.04, 100), (0.1, 100))
    }  # fmt: skip
    pools = [c for c in federated if c.sharing.setting == POOL]
    assert {need.images_key for c in alone for need in build(c).requests} == {
        need.images_key for c in pools for need in build(c).requests
    }  # fmt: skip
    models = references.central_lines(rows, options)
    assert {(m.source, m.epochs, m.config.client.lr, m.config.seed) for m in models} == {
        ("central_real", 30 * 10, lr, seed) for lr, seed in ((0.04, 0), (0.04, 1), (0.04, 100), (0.1, 100))
    }  # fmt: skip
    for words in (["--without-references"], ["--settings=real"], ["--sharing.p=0"]):
        options = table1.arguments(["--alphas=0.1", *words])
        assert table1.entries(options)[-1].cell.config.algorithm != "one_shot"
    options = table1.arguments([*base, "--model.batch_norm=true"])
    rows = table1.entries(options)
    assert "one_shot" not in {e.cell.config.algorithm for e in rows}
    assert "BatchNorm" in " ".join(of_table1.footnotes([e.cell for e in rows], options))


def write_central(line: Any, out: Path, **values: Any) -> None:
    """Write the summary of a trained central model, with invented numbers."""
    c = line.config
    facts = {"dataset": c.data.name, "algorithm": "central", "setting": line.source, "alpha": None, "n_clients": None,
            "participation": None, "seed": c.seed, "learning_rate": c.client.lr, "epochs": line.epochs, "images": 101,
            "last_accuracy": 0.97, "best_accuracy": 0.98, "validation_accuracy": 0.5, "partition": None,
            **values}  # fmt: skip
    (out / line.name).mkdir(exist_ok=True)
    (out / line.name / "summary.json").write_text(json.dumps(facts))


def test_each_target_has_rounds_bytes_and_work_and_says_if_the_pool_alone_reaches_it(
    table1: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    """Rounds of 2 MB, or 3 MB with a pool of 10 MB; of SCAFFOLD, 20 MB at alpha 0.1 and 80 MB at alpha 0.01."""
    words = ["--alphas=0.01,0.1", "--algorithms=fedavg,scaffold", "--targets=0.95", f"--out={tmp_path}"]
    options, display = table1.arguments(words), Display(Console(quiet=True))
    rows, work = table1.entries(options), {}
    for e in rows:
        c, alpha = e.cell.config, e.cell.config.flat["partition.alpha"]
        pool = 1e7 if c.algorithm == "fedavg" else 2e7 if alpha == 0.1 else 8e7
        base = None if alpha == 0.01 else 9 if c.algorithm == "fedavg" else 12
        outcomes = {"real": (base, 6e7, 0), POOL: (2, 9e7, pool), "server_synthetic": (1, 0, 5e6)}
        reached, sent, once = outcomes[c.sharing.setting]
        amounts = {"bytes_down": sent / 3, "bytes_up": sent * 2 / 3, "bytes_once": once}
        recorded(tmp_path / e.cell.name, c, reached, last_accuracy=0.9, best_accuracy=0.96, **amounts)
        work[e.cell.name] = [30.0 * (c.algorithm != "one_shot"), 4.0 * bool(c.generator)]
    (central,) = references.central_lines(rows, options)
    write_central(central, tmp_path)
    (tmp_path / "client_work.json").write_text(json.dumps(work))
    table1.table1.report(rows, options, tmp_path, display)
    text = (tmp_path / "table1.md").read_text()
    lines = rows_of(text.split("## ")[1])[2:]
    of_pools = {tuple(line[:2]): line[4:] for line in lines if line[2:4] == [POOL, "80 %"]}
    assert of_pools == {
        ("0.01", "fedavg"): ["2", "16", "10", ">28.0 x 2 = 56", "yes", "6", "4"],
        ("0.01", "scaffold"): ["2", "86", "80", ">28.0 x 2 = 56", "-", "6", "4"],
        ("0.1", "fedavg"): ["2", "16", "10", "7.0 x 2 = 14", "yes", "6", "4"],
        ("0.1", "scaffold"): ["2", "26", "20", "10.0 x 2 = 20", "no", "6", "4"],
    }
    assert lines[8][2:] == ["no sharing", "80 %", "9", "18", "0", "", "", "9", "0"]
    assert lines[11][3:] == ["95 %", ">30", ">100", "10", "-", "-", ">34", "4"]
    assert [line[2:9] for line in lines[18:]] == [
        ["server_synthetic", "80 %", "0", "5", "5", "", ""],
        ["server_synthetic", "95 %", "not reached", "5", "5", "", ""],
    ]
    assert "in 2 of 8" in text
    assert (text.count("is below"), text.count("not below")) == (2, 2)  # both pools reach 80, not 95 %
    (alone,), (of_central,) = (rows_of(text, f"| digits   | {row}") for row in ("10 | 1 | 0.1   | server", "-"))
    assert (alone[7], alone[9], of_central[4], of_central[9:11]) == ("0", "90.0", references.CENTRAL, ["97.0", "98.0"])
    assert "300 epochs on 101 images (3300 steps)" in text
    with (tmp_path / "table1.csv").open() as file:
        algorithms = Counter(line["algorithm"] for line in csv.DictReader(file))
    assert algorithms == {"fedavg": 4, "scaffold": 4, "one_shot": 2, "central": 1}


def test_whether_a_pool_pays_is_computed_from_the_seeds_of_both_sides() -> None:
    def cell(rounds: dict[int, int], once: float) -> Cell:
        equal = {"rounds": 100, "bytes_down": 5e7, "bytes_up": 5e7, "bytes_once": once}
        return Cell({}, pd.DataFrame([{"seed": s, "rounds_to_target": r, **equal} for s, r in rounds.items()]))

    base = cell({0: 10, 1: 100, 2: 100}, 0)
    assert targets.pays(base, cell({0: 9}, 2e7)) == ("1.0 x 1 = 1 (1 of 3 seeds)", "no")
    assert targets.pays(base, cell({3: 9}, 2e7)) == ("-", "-")


def test_the_central_rate_is_chosen_on_the_tuning_seeds_also_beyond_the_list(
    table1: ModuleType, tmp_path: Path
) -> None:
    words = ["--alphas=0.1", "--algorithms=fedavg", "--seeds=1,0", "--tuning-seeds=7,8", "--lrs=0.05,0.1,0.2"]
    options = table1.arguments(words)
    rows = table1.entries(options)
    models = references.central_lines(rows, options)

    def train(best: float) -> None:
        """Write the models of the plan as long as it grows; their accuracy is best at ``best``."""
        while new := [m for m in central_trials.plan(models, rows, tmp_path) if not (tmp_path / m.name).exists()]:
            for line in new:
                rate = line.config.client.lr
                write_central(line, tmp_path, validation_accuracy=1 - abs(rate - best), last_accuracy=rate)

    train(0.1)
    row = central_trials.at_best_rate(models, rows, tmp_path)
    assert (row.cells[0].values("seed"), row.cells[0].values("last_accuracy")) == ([0, 1], [0.1, 0.1])
    assert ("edge" in row.about, "0.05, 0.1, 0.2 by" in row.about) == (False, True)
    assert len([*tmp_path.iterdir()]) == 2 * 3 + 2  # the reported seeds have a model at the best rate only
    for best, tried, chosen in ((0.3, "0.05, 0.1, 0.2, 0.4 by", 0.2), (9, "0.05, 0.1, 0.2, 0.4, 0.8, 1.6 by", 1.6)):
        for folder in tmp_path.iterdir():
            rmtree(folder)
        train(best)
        row = central_trials.at_best_rate(models, rows, tmp_path)
        assert row.cells[0].values("last_accuracy") == [chosen] * 2
        assert ("edge" in row.about, tried in row.about) == (best == 9, True)
    assert "of 2 seeds" not in row.about
    (tmp_path / central_trials.plan(models, rows, tmp_path)[-1].name / "summary.json").unlink()
    assert "1 of 2 seeds" in central_trials.at_best_rate(models, rows, tmp_path).about
    (tmp_path / models[0].name / "summary.json").unlink()
    row = central_trials.at_best_rate(models, rows, tmp_path)
    assert row.cells == ()
    assert "tuning seeds" in references.notes([e.cell for e in rows], options, row)[-1]
    fixed = [e for e in rows if not e.is_tuning]
    assert not central_trials.at_best_rate(references.central_lines(fixed, options), fixed, tmp_path / "none").cells


figure3 = report_runs.script("figure3")


def test_central_models_on_other_images_have_learning_rates_of_their_own(figure3: ModuleType, tmp_path: Path) -> None:
    words = ["--alphas=0.1,1", "--settings=real,shuffled_synthetic", "--seeds=0", "--tuning-seeds=7",
             "--lrs=0.05,0.1,0.2,0.4,0.8"]  # fmt: skip
    options = figure3.arguments(words)
    rows = figure3.entries(options)
    models = figure3.central_lines(rows, options)

    def best_of(line: Any) -> float:
        return 0.1 if line.source == "central_real" else 0.2 if line.config.flat["partition.alpha"] == 1 else 0.4

    for line in (m for m in models if m.config.seed == 7):
        write_central(line, tmp_path, validation_accuracy=1 - abs(line.config.client.lr - best_of(line)))
    chosen = [m for m in central_trials.plan(models, rows, tmp_path) if m.config.seed == 0]
    assert [m.config.client.lr == best_of(m) for m in chosen] == [True] * 3


def test_preset_authors_has_one_central_model_per_seed_and_a_note_for_each_number_of_epochs(table1: ModuleType) -> None:
    words = ["--preset=authors", "--alphas=0.1", "--algorithms=fedavg", "--federations=10:1,40:0.2", "--seeds=0,1"]
    options = table1.arguments(words)
    models = references.central_lines([Entry(cell, {}) for cell in table1.grid(options)], options)
    assert [(m.config.seed, m.config.client.lr, m.epochs) for m in models] == [(0, 0.05, 3000), (1, 0.05, 3000)]
    small = table1.arguments(["--alphas=0.1", "--settings=shuffled_synthetic", "--client.drop_last=true"])
    alone = [e.cell for e in table1.entries(small) if e.cell.config.algorithm == "one_shot"]
    longer = [tuning.cell(override(alone[0].config, {"client.epochs": 20, "partition.n_clients": 5}), grids.VARIED)]
    first, second = references.notes([*longer, *alone], small)
    assert "600 epochs on the pool (77400 steps on 1295 images)" in first  # 129 whole batches of 10 images
    assert "300 epochs on the pool (39000 steps on 1300 images)" in second


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
    single, many = (dry_run.Bill(times, {"cells": [2.0, 4.0]}) for times in (1.0, 1000.0))
    assert many.span(many.phases["cells"], 2) == 3000
    assert many.seconds(1, in_ray=False) - single.seconds(1, in_ray=False) == pytest.approx(5994, abs=1)
