"""Results of a hyperparameter sweep: the mean of a metric over seeds, ranked tables and a figure."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.cli.parser import command_line
from fedcommons.errors import RUN, UserError, nearest
from fedcommons.reports import metrics, ranking, series
from fedcommons.reports.cells import counted
from fedcommons.tune import grid
from fedcommons.tune.study import Report
from fedcommons.tune.sweep import Trial

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

CSV = ("status", "rounds", *metrics.METRICS, "train/loss", "alpha", "p", "rho", "sigma", "lr")
"""Columns of tune.csv after the swept fields; a column without any value is left out."""

SHARING = "sharing.setting"
"""The field that every table, title and printed command states, even if it was not swept."""


def frame(cells: Sequence[Trial], out: Path, metric: str, say: Callable[[str], None]) -> "pd.DataFrame":
    """Return a table with one row per trial whose run has finished at least one round.

    Raises:
        UserError: no run has the column ``metric``.
    """
    runs = grid.frame(cells, out, say)
    if len(runs) and metric not in runs:
        numeric = runs.select_dtypes("number").columns
        raise UserError(f"no run has {metric}{nearest(metric, numeric)} Name another metric and add --resume.")
    return runs


def mean(cells: Sequence[Trial], out: Path, metric: str) -> float | None:
    """Return the mean of a metric over trials of different seeds; None if a trial is unfinished or lacks the metric."""
    runs = frame(cells, out, metric, lambda text: None)
    if len(runs) < len(cells) or set(runs["status"]) != {"finished"}:
        return None
    values, _ = counted(runs, metric)
    return fmean(values) if len(values) == len(cells) else None


def report(cells: Sequence[Trial], fields: Sequence[str], options: parse.Options, out: Path, display: Display) -> None:
    """Write tune.md, tune.csv, tune.png and summary.json into ``out``, and print the table; fields: swept fields."""
    import pandas as pd

    runs, metric = frame(cells, out, options.metric, display.say), options.metric
    if runs.empty:
        return
    groups = ranking.ranked(runs, metric, options.mode)
    columns = dict.fromkeys((SHARING, *fields))
    table = ranking.table(groups, [*columns], metric, options.mode)
    swept = [name for name in dict.fromkeys(("seed", *columns, metric, *CSV)) if name in runs]
    ordered = pd.concat([point.runs for group in groups for point in group.points])
    rows = ordered[swept].assign(run_dir=[Path(run).name for run in ordered["run"]])
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    panels, colours = ranking.panels(groups, fields, metric)

    def draw(path: Path) -> None:
        series.draw(path, panels, metric, colours, series.title(runs), grid.is_smoke(options))

    summary = {"metric": metric, "mode": options.mode, "cells": records}
    display.say("\n" + Report(table, records, summary, {"tune.png": draw}).write("tune", options, out))
    for group in groups:
        best = ", ".join(str(out / Path(run).name) for run in group.points[0].runs["run"])
        where = ", ".join(f"{name} {series.label(value, name)}" for name, value in group.environment.items())
        display.say(f"Best {metric}{where and f' with {where}'}: {best}")
        first = Path(group.points[0].runs["run"].iloc[0]).name
        config = next(cell.config for cell in cells if cell.name == first)
        display.say(f"To run it: {RUN} {command_line(config, options.preset, {*options.asked, *fields})}")
