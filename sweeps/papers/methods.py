"""Report of the comparison of methods: a table with 95 % intervals, and a picture of all methods' curves."""

from pathlib import Path
from statistics import fmean
from typing import Any

from fedcommons.config import target
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import plain
from fedcommons.reports.intervals import ends
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.study import Report, Results, gaps

CSV = ("method", "at", "rate", "MB", *tables.RUN)


def report(results: Results) -> Report:
    """Return the report of the table's seeds."""
    runs = results.reported.assign(rate=results.reported["client.lr"])
    records = tables.records(runs, CSV)
    title = grid.title(results.configs)
    return Report(
        table(runs) + tables.numbered(notes(results, runs)), records,
        {"preset": results.options.preset, "cells": records},
        {"methods.png": lambda path: picture(runs, path, title, results.smoke)},
    )  # fmt: skip


def table(runs: Any) -> str:
    """Return a line for each alpha and method; differences to the first method are paired by seed."""
    lines, first = [], runs["method"].iloc[0]
    for (alpha, method), group in runs.groupby(["at", "method"], sort=False, dropna=False):
        accuracies = [100 * value for value in group["last_accuracy"].dropna()]
        base = runs[(runs["method"] == first) & (runs["at"].isna() if alpha != alpha else runs["at"] == alpha)]
        points = gaps(group, base)
        lines.append([
            columns.text(plain(alpha)), method, columns.text(group["rate"].iloc[0]), len(group),
            f"{fmean(accuracies):.1f} {ends(accuracies)}" if accuracies else "-",
            f"{fmean(points):+.1f} {ends(points, '+')}" if points and method != first else "",
            tables.rounds(group), f"{group['MB'].mean():.2f}",
        ])  # fmt: skip
    head = ("alpha", "method", "learning rate", "seeds", "last accuracy, %", f"minus {first}, points",
            "rounds to target", "MB")  # fmt: skip
    return tables.markdown(head, lines)


def notes(results: Results, runs: Any) -> list[str]:
    options, configs = results.options, results.configs
    c = configs[0]
    rate = learning_rates.choice_note(results.entries)
    fixed = sorted({name for c in configs for name in c.flat if name.endswith(".server_lr")})
    if learning_rates.tuning_seeds(options) and fixed:
        rate += f" Not chosen: {', '.join(fixed)}; choose it by tune --space {fixed[0]}=0.01,0.1."
    return [
        f"{c.data.name}, {runs['n_clients'].max():.0f} clients ({c.partition.name}), "
        f"C = {c.federation.participation:g}, {grid.several(configs, 'federation.rounds')} rounds, "
        f"{grid.several(configs, 'client.epochs')} local epochs, batch size {c.client.batch_size}, {c.model.name}.",
        f"Seeds: {options.seeds}. Last accuracy: on test data, after the last round; [ ]: Student's 95 % interval of "
        "the mean over seeds. Differences are paired by seed.",
        rate,
        f"Target: {target.in_words(c.target)}{'' if isinstance(c.target, str) else ' test accuracy'}; >R: not within "
        "R rounds. MB: 10^6 bytes that all clients send and receive in all rounds.",
        grid.method_note(configs),
        *learning_rates.notes(results.entries),
        *tables.rejected_notes(runs), *tables.lost_notes(runs),
    ]  # fmt: skip


def picture(runs: Any, path: Path, title: str, smoke: bool) -> None:
    """Draw test accuracy over rounds: a panel for each alpha, a curve (mean and range over seeds) for each method."""
    from fedcommons.reports import plots
    from papers.curves import accuracy_curves

    size = (1.8 + 4 * runs["at"].nunique(dropna=False), 4.2)
    figure, grid = accuracy_curves(runs, list(runs["method"].unique()), {"round": "round"}, size)
    for axes in grid.flat:
        axes.locator_params("x", integer=True)
    spread = "\nline: mean, band: minimum to maximum over seeds" * (runs["seed"].nunique() > 1)
    plots.finish(figure, f"Accuracy over rounds; {title}{spread}", "method", "outside right upper")
    plots.save(figure, path, 120, smoke)
