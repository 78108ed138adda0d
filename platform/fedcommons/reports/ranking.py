"""Rank the configurations of a hyperparameter search by a metric's mean over seeds, for equal data and federation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.reports import series
from fedcommons.reports.cells import ENVIRONMENT, ROUNDS, Cell, cells, counted, fields, varied
from fedcommons.reports.metrics import is_accuracy, sees_test_data, words
from fedcommons.reports.tables import Column, markdown, numbered, over_seeds, rounds

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

METRICS = (ROUNDS, "validation_accuracy", "last_accuracy", "MB", "epsilon")
"""Metrics in the table in addition to the metric by which configurations are ranked."""


@dataclass(frozen=True)
class Group:
    """Configurations with equal data and federation."""

    environment: Mapping[str, Any]  # values of the fields of data and federation that differ between the groups
    points: Sequence[Cell]  # best first


def ranked(runs: "pd.DataFrame", metric: str, way: str) -> list[Group]:
    """Return configurations (points) by environment, best first. way: better direction, ``min`` or ``max``."""

    # Unfinished configurations come last, because a stopped run has sent fewer bytes than a whole run.
    def worst_last(point: Cell) -> tuple[bool, bool, float, bool]:
        values, missed = counted(point.runs, metric)
        score = fmean(values) if values else 0.0
        ended = set(point.runs["status"]) == {"finished"}
        return not ended, len(values) < len(point.runs), score if way == "min" else -score, missed > 0

    names = varied(runs.loc[:, [name for name in fields(runs) if name.startswith(ENVIRONMENT)]])
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for point in cells(runs):
        groups.setdefault(tuple(series.value(point, name) for name in names), []).append(point)
    return [Group(dict(zip(names, key, strict=True)), sorted(each, key=worst_last)) for key, each in groups.items()]


def format_metric(runs: "pd.DataFrame", metric: str) -> str:
    """Format a metric as mean ± standard deviation over seeds, accuracies in percent; ``-`` if no run has it."""
    if metric == ROUNDS:
        return rounds(runs)
    text, _ = over_seeds(runs, Column(metric, metric, 100, 1) if is_accuracy(metric) else Column(metric, metric))
    n = len(counted(runs, metric)[0])
    return f"{text} ({n} of {len(runs)} seeds)" if 0 < n < len(runs) else text


def table(groups: Sequence[Group], swept: Sequence[str], metric: str, way: str) -> str:
    """Return one markdown table per environment, and notes. swept: fields of the search. way: ``min`` or ``max``."""
    every = [point for group in groups for point in group.points]
    metrics = [n for n in dict.fromkeys((metric, *METRICS)) if any(counted(p.runs, n)[0] for p in every)]
    names = [n for n in swept if n != "seed" and n not in groups[0].environment]
    head = [*names, *(f"{n}, %" if is_accuracy(n) else n for n in metrics), "seeds", "runs"]
    text = []
    for group in groups:
        lines = [
            [*(series.text(p, n) for n in names), *(format_metric(p.runs, n) for n in metrics),
             len(p.runs), ", ".join(dict.fromkeys(p.runs["status"]))]
            for p in group.points
        ]  # fmt: skip
        if group.environment:
            text.append(", ".join(f"{n} = {series.label(v, n)}" for n, v in group.environment.items()) + ":\n")
        text.append(markdown(head, lines))
    better = "highest" if way == "max" else "lowest"
    notes = [f"Best first: {better} {metric}, the mean over seeds; ± is the sample standard deviation."]
    if groups[0].environment:
        notes.append("Configurations are compared only for equal data and federation, as some data are harder.")
    if sees_test_data(metric):
        notes.append(f"The ranking uses test data ({metric}), so the numbers of the best configuration are too good.")
    if ROUNDS in metrics:
        notes.append(">: a lower bound, as seeds missed the target; such a seed counts with all its rounds.")
    if any(set(point.runs["status"]) != {"finished"} for point in every):
        last = "with the numbers of their last round, and are not drawn"
        notes.append(f"Configurations with unfinished runs come last, {last}.")
    return "\n".join(text) + numbered(notes)


def panels(groups: Sequence[Group], swept: Sequence[str], metric: str) -> tuple[list[series.Panel], str]:
    """Return one panel per field of the search (``swept``) with finished configurations, and the legend's title.

    If environments (data and federation) differ, colours distinguish them. Otherwise colours distinguish the values
    of the swept field with the fewest values.
    """
    every = [point for group in groups for point in group.points if set(point.runs["status"]) == {"finished"}]
    values = {n: {series.text(p, n) for p in every} for n in swept if n != "seed"}
    colours = list(groups[0].environment)
    if not colours and len(values) > 1:
        least = min(values, key=lambda n: len(values[n]))
        colours = [least] if len(values[least]) <= len(series.COLOURS) else []

    def name(point: Cell) -> str:
        return ", ".join(series.text(point, n) for n in colours)

    drawings = []  # if only seeds vary, the single panel has the algorithm on its x axis
    for field in [n for n in values if n not in colours] or list(values)[:1] or ["algorithm"]:
        points = [series.point(p, field, metric, name(p)) for p in every]
        drawings.append(series.Panel("", words(field), [p for p in points if p is not None]))
    return drawings, ", ".join(words(n) for n in colours)
