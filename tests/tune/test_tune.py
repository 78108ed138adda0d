"""Tuning: which experiments are compared, how they are ranked, and what a sweep leaves."""

import csv
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import report_runs
from ray.tune import schedulers
from rich.console import Console

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.cli.parser import command_line
from fedcommons.cli.values import seconds
from fedcommons.config.dotted import same_results
from fedcommons.errors import UserError
from fedcommons.reports import metrics, ranking
from fedcommons.runs import build, experiment, load_data
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import results, search, sweep
from fedcommons.tune.sweep import Outcome, together
from papers.fedssyn import authors

TINY = ["--preset=smoke", "--setting=real", "--wandb=off", "--data.limit=80", "--client.epochs=1",
        "--federation.rounds=1", "--measure.every=1"]  # fmt: skip


tune = report_runs.script("tune")


def test_metrics_have_a_better_way_and_some_see_test_data(tune: ModuleType) -> None:
    able = [*TINY, "--dp.local=true", "--measure.smoothness=true", "--space=lr=0.1,0.2"]
    for metric in (*metrics.METRICS, "train/loss"):
        options = tune.arguments([*able, f"--metric={metric}"])
        assert len(tune.cells(options)[0]) == 2
        assert options.mode == ("max" if "accuracy" in metric else "min")
    assert tune.arguments([*able, "--metric=test/top3", "--mode=max"]).mode == "max"
    assert (tune.arguments([*able, "--mode=min"]).mode, tune.arguments(able).metric) == ("min", "validation_accuracy")
    seen = [name for name in (*metrics.METRICS, "test/loss", "validation/loss") if metrics.sees_test_data(name)]
    assert seen == ["rounds_to_target", "best_accuracy", "last_accuracy", "test/loss"]


def row(alpha: float, lr: float, seed: int, value: float | None, status: str = "finished", **more: Any) -> dict:
    return {"partition.alpha": alpha, "client.lr": lr, "seed": seed, "validation_accuracy": value, "rounds": 30,
            "rounds_to_target": None, "status": status, "MB": 1.0, **more}  # fmt: skip


def order(rows: list[dict], metric: str) -> list[tuple[dict, list[float]]]:
    groups = ranking.ranked(pd.DataFrame(rows), metric, metrics.mode(metric))
    return [(dict(g.environment), [float(p.runs["client.lr"].iloc[0]) for p in g.points]) for g in groups]


def test_points_are_ranked_by_their_means_in_each_environment() -> None:
    rows = [
        row(0.01, 0.1, 0, 0.5), row(0.01, 0.1, 1, 0.1), row(0.01, 0.2, 0, 0.4), row(0.01, 0.2, 1, 0.4),
        row(1.0, 0.1, 0, 0.9), row(1.0, 0.1, 1, 0.9), row(1.0, 0.2, 0, 0.8), row(1.0, 0.2, 1, 0.8),
    ]  # fmt: skip
    assert order(rows, "validation_accuracy") == [
        ({"partition.alpha": 0.01}, [0.2, 0.1]), ({"partition.alpha": 1.0}, [0.1, 0.2]),
    ]  # fmt: skip
    table = ranking.table(ranking.ranked(pd.DataFrame(rows), "validation_accuracy", "max"), ["client.lr"], "MB", "min")
    assert table.count("| client.lr | MB") == 2  # a table for each
    assert "test data" not in table
    seen = ranking.table(ranking.ranked(pd.DataFrame(rows), "rounds_to_target", "min"), [], "rounds_to_target", "min")
    assert "test data (rounds_to_target)" in seen
    alone = [row(1, 0.1, seed, 0.5 + seed, algorithm="fedavg") for seed in (0, 1)]
    (panel,), _ = ranking.panels(ranking.ranked(pd.DataFrame(alone), "MB", "min"), ["seed"], "MB")
    assert [p.x for p in panel.points] == ["fedavg"]


def test_runs_that_are_not_finished_or_lack_the_metric_come_last() -> None:
    rows = [
        row(1, 0.1, 0, 0.1), row(1, 0.2, 0, None), row(1, 0.3, 0, 0.9, "stopped", MB=0.1), row(1, 0.4, 0, 0.5),
        row(1, 0.5, 0, 0.9), row(1, 0.5, 1, None),
    ]  # fmt: skip
    assert order(rows, "validation_accuracy") == [({}, [0.4, 0.1, 0.5, 0.2, 0.3])]
    assert order(rows, "MB")[0][1][-1] == 0.3  # stopped early, so it sent little
    (panel,), colours = ranking.panels(ranking.ranked(pd.DataFrame(rows), "MB", "min"), ["client.lr"], "MB")
    assert {p.x for p in panel.points} == {0.1, 0.2, 0.4, 0.5}
    assert colours == ""


def test_a_seed_that_missed_the_target_counts_with_all_its_rounds() -> None:
    rows = [
        row(1, 0.1, 0, 0.5, rounds_to_target=4), row(1, 0.1, 1, 0.5),  # (4 + 30) / 2 = 17
        row(1, 0.2, 0, 0.5, rounds_to_target=16), row(1, 0.2, 1, 0.5, rounds_to_target=17),
        row(1, 0.3, 0, 0.5), row(1, 0.3, 1, 0.5),
    ]  # fmt: skip
    assert order(rows, "rounds_to_target") == [({}, [0.2, 0.1, 0.3])]
    (group,) = ranking.ranked(pd.DataFrame(rows), "rounds_to_target", "min")
    assert [ranking.format_metric(p.runs, "rounds_to_target") for p in group.points] == [
        "16.5 ± 0.7", ">17 (missed by 1 of 2)", ">30 (missed by 2 of 2)",
    ]  # fmt: skip
    assert ranking.format_metric(group.points[0].runs, "validation_accuracy") == "50.0 ± 0.0"
    assert ranking.format_metric(pd.DataFrame([row(1, 0.1, 0, None)]), "validation_accuracy") == "-"


@pytest.mark.long
def test_a_sweep_leaves_every_number_of_its_runs(tune: ModuleType, tmp_path: Path) -> None:
    options = tune.arguments([*TINY, "--space=alpha=0.1,1", "--space=lr=0.05,0.1", "--metric=zeta_hat_sq"])
    trials, fields = tune.cells(options)
    assert list(tune.batches(options, tmp_path)) == [trials]
    for cell in trials:
        experiment.run(cell.config, tmp_path / cell.name, say=lambda text: None)
    results.report(trials, fields, options, tmp_path, Display(Console(quiet=True)))
    rows = list(csv.DictReader((tmp_path / "tune.csv").read_text().splitlines()))
    cells = json.loads((tmp_path / "summary.json").read_text())["cells"]
    assert len(rows) == len(cells) == 4
    for line, cell in zip(rows, cells, strict=True):
        summary = read_summary(tmp_path / line["run_dir"])
        assert summary is not None
        assert float(line["zeta_hat_sq"]) == cell["zeta_hat_sq"] == summary["zeta_hat_sq"][-1][1]
        assert float(line["partition.alpha"]) == summary["alpha"]
        sent = sum(summary[f"bytes_{way}"] for way in ("down", "up", "once"))
        assert float(line["MB"]) == pytest.approx(sent / 1e6)
        assert line["sharing.setting"] == cell["sharing.setting"] == "real"
    assert cells[0]["zeta_hat_sq"] <= cells[1]["zeta_hat_sq"]
    first = (tmp_path / "tune.md").read_text().splitlines()[6]  # the first row of the first table
    assert f"{cells[0]['zeta_hat_sq']:.4g}" in first
    assert "| no sharing " in first
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


WINNER = "--preset=authors --dataset=cifar10 --space=lr=0.3,0.1 --space=p=0.1,0.5 --alpha=0.1 '--data.dir=a b'"


def test_the_printed_command_of_a_winner_runs_it(tune: ModuleType, sweeps: Callable[[str], ModuleType]) -> None:
    options, run = tune.arguments([*shlex.split(WINNER), "--sharing=shuffled_synthetic", "--wandb=off"]), sweeps("run")
    for cell in tune.cells(options)[0]:
        words = shlex.split(command_line(cell.config, options.preset, {*options.asked, *tune.cells(options)[1]}))
        parsed = run.arguments(words)
        again = authors.settled(parsed.preset, parse.experiment(parsed), parsed.asked)
        assert same_results(again, cell.config) == []
        assert again.data.dir == cell.config.data.dir == "a b"


def test_trials_with_equal_data_are_partitioned_once_and_equal_those_built_alone(
    tune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep lacks the same images as its trials, each of them alone."""
    partitioned, partition = list[object](), load_data.partition_examples
    monkeypatch.setattr(load_data, "partition_examples", lambda *a: partitioned.append(a[-1]) or partition(*a))
    words = ["--preset=smoke", "--data.limit=100", "--wandb=off", "--sharing=shuffled_synthetic", "--seeds=0,1"]
    spaces = ["--space=p=0.1,0.2", "--space=lr=0.1,0.2", "--space=alpha=1,10", f"--artifacts={tmp_path / 'a'}"]
    trials = tune.cells(tune.arguments([*words, *spaces]))[0]
    todo = sweep.todo(trials, tmp_path / "out", Display(quiet=True))
    assert (len(trials), len(partitioned)) == (16, 4)
    images: dict[str, set[str]] = {}
    like = None
    for trial in trials:
        alone, like = build.build(trial.config), build.build(trial.config, like)
        assert like.partition.fingerprint == alone.partition.fingerprint
        assert (like.notes, like.noise_key, like.lr) == (alone.notes, alone.noise_key, alone.lr)
        assert like.plan.facts.head == alone.plan.facts.head != ()
        assert todo.data[trial.name] == alone.dataset.digest
        for key in (keys := [need.images_key for need in alone.requests]):
            images.setdefault(key, set()).add(trial.name)
        assert keys == [need.images_key for need in like.requests]
    assert sorted(key for lacking in todo.missing for key in lacking.images) == sorted(images)
    for lacking in todo.missing:
        assert set(lacking.cells) == set().union(*(images[key] for key in lacking.images))


def test_schedulers_are_ray_tunes_and_a_budget_has_units(tune: ModuleType) -> None:
    cells = tune.cells(tune.arguments(["--preset=smoke", "--space=lr=0.1,0.2", "--rounds=10"]))[0]
    assert search.scheduler_of("fifo", cells) is None
    for name, (kind, _) in search.SCHEDULERS.items():
        assert isinstance(search.scheduler_of(name, cells), getattr(schedulers, kind))
    assert [seconds("--time-budget", text) for text in ("90", "1.5h", "30m", ".5d")] == [90, 5400, 1800, 43200]


def test_seeds_repeat_each_point_and_batches_are_one_outcome(
    tune: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--preset=smoke", "--space=lr=uniform(0.1,0.2)", "--samples=2", "--seeds=0,3"]
    cells = tune.cells(tune.arguments(argv))[0]
    with pytest.raises(UserError, match="on-cores"):  # the refusal comes after the sentence, and before any work
        tune.tune(["--preset=smoke", "--space=alpha=uniform(0.1,1)", "--on-cores=2"])
    assert "alpha has its own partition" in capsys.readouterr().out
    points = {seed: [c.config.client.lr for c in cells if c.config.seed == seed] for seed in (0, 3)}
    assert points[0] == points[3]
    assert len(set(points[0])) == 2
    outcome = together([Outcome({"cells": 1.0}, 2, {"a": "why"}), Outcome({"generators": 3.0, "cells": 4.0}, 1, {})])
    assert outcome == Outcome({"cells": 5.0, "generators": 3.0}, 3, {"a": "why"})
