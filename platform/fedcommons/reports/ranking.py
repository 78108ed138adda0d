"""Rank the points of a hyperparameter search within each environment, by the mean of a metric over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.reports import series
from fedcommons.reports.cells import ENVIRONMENT, Cell, cells, counted, fields, varied
from fedcommons.reports.metrics import is_accuracy, sees_test_data, words
from fedcommons.reports.tables import markdown, mean_std, rounds

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

SHOWN = ("rounds_to_target", "validation_accuracy", "last_accuracy", "MB", "epsilon")
"""Metrics that the table shows in addition to the ranking metric."""


@dataclass(frozen=True)
class Group:
    """The points of one environment, best first. environment: values of the fields in which environments differ."""

    environment: Mapping[str, Any]
    points: Sequence[Cell]


def ranked(runs: "pd.DataFrame", metric: str, way: str) -> list[Group]:
    """Return the points of each environment, best first. way: the better direction, ``min`` or ``max``.

    Points with an unfinished run come after finished points, because a run that was stopped early has also sent few
    bytes. Among points with the same state, a point that lacks the metric for a run comes last.
    """

    def worst_last(point: Cell) -> tuple[bool, bool, float, bool]:
        values, missed = counted(point.runs, metric)
        score = fmean(values) if values else 0.0
        ended = set(point.runs["status"]) == {"finished"}
        return not ended, len(values) < len(point.runs), score if way == "min" else -score, missed > 0

    names = environment(runs)
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for point in cells(runs):
        groups.setdefault(tuple(series.value(point, name) for name in names), []).append(point)
    return [
        Group(dict(zip(names, key, strict=True)), sorted(members, key=worst_last)) for key, members in groups.items()
    ]


def environment(runs: "pd.DataFrame") -> list[str]:
    """Return the fields in which the environments of these runs differ."""
    return varied(runs.loc[:, [name for name in fields(runs) if name.startswith(ENVIRONMENT)]])


def format_metric(runs: "pd.DataFrame", metric: str) -> str:
    """Format a metric's mean and standard deviation over seeds, accuracies in percent; ``-`` if no run has it."""
    values, _ = counted(runs, metric)
    if metric == "rounds_to_target":
        return rounds(runs)
    if not values:
        return "-"
    some = f" ({len(values)} of {len(runs)} seeds)" if len(values) < len(runs) else ""
    return (mean_std([100 * v for v in values], 1) if is_accuracy(metric) else mean_std(values, None)) + some


def table(groups: Sequence[Group], swept: Sequence[str], metric: str, way: str) -> str:
    """Return one table per environment with one line per point, and notes on how to read the tables."""
    every = [point for group in groups for point in group.points]
    metrics = [n for n in dict.fromkeys((metric, *SHOWN)) if any(counted(p.runs, n)[0] for p in every)]
    names = [n for n in swept if n != "seed" and n not in groups[0].environment]
    head = [*names, *(f"{n}, %" if is_accuracy(n) else n for n in metrics), "seeds", "runs"]
    text = []
    for group in groups:
        lines = [
            [*(series.label(series.value(p, n)) for n in names), *(format_metric(p.runs, n) for n in metrics),
             len(p.runs), ", ".join(dict.fromkeys(p.runs["status"]))]
            for p in group.points
        ]  # fmt: skip
        if group.environment:
            text.append(", ".join(f"{n} = {series.label(v)}" for n, v in group.environment.items()) + ":\n")
        text.append(markdown(head, lines))
    better = "the most" if way == "max" else "the least"
    notes = [f"Best first: {better} {metric}, the mean over seeds; ± is the sample standard deviation."]
    if groups[0].environment:
        notes.append("Points are compared within an environment only: a harder one is no worse choice.")
    if sees_test_data(metric):
        notes.append(f"This choice was made on test data ({metric}), which makes its numbers too good.")
    if "rounds_to_target" in metrics:
        notes.append(">R: the target was not reached within R rounds; such a seed counts as R in the mean.")
    if any(set(point.runs["status"]) != {"finished"} for point in every):
        notes.append(
            "Points with runs that are not finished come last, with the numbers of their last round, and are not drawn."
        )
    return "\n".join([*text, *(f"{i}. {note}" for i, note in enumerate(notes, 1))]) + "\n"


def panels(groups: Sequence[Group], swept: Sequence[str], metric: str) -> tuple[list[series.Panel], str]:
    """Return one panel per swept field, and the legend title (what the colours mean).

    Colours distinguish environments. With a single environment and several swept fields, colours distinguish the
    values of the field with the fewest values. Points with unfinished runs are left out.
    """
    every = [point for group in groups for point in group.points if set(point.runs["status"]) == {"finished"}]
    values = {n: {series.label(series.value(p, n)) for p in every} for n in swept if n != "seed"}
    colours = list(groups[0].environment)
    if not colours and len(values) > 1:
        least = min(values, key=lambda n: len(values[n]))
        colours = [least] if len(values[least]) <= len(series.COLOURS) else []

    def name(point: Cell) -> str:
        return ", ".join(series.label(series.value(point, n)) for n in colours)

    drawings = []
    for field in (
        [n for n in values if n not in colours] or list(values)[:1] or ["algorithm"]
    ):  # if only seeds vary, one panel by algorithm
        points = [series.point(p, field, metric, name(p)) for p in every]
        drawings.append(series.Panel("", words(field), [p for p in points if p is not None]))
    return drawings, ", ".join(words(n) for n in colours)
