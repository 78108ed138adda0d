"""Plots of a metric against a number or a name, with several panels, series in colours, and error bars over seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.config.dotted import NO_SHARING_SHOWN
from fedcommons.reports.cells import Cell, counted, values
from fedcommons.reports.metrics import words

if TYPE_CHECKING:  # pandas and matplotlib take seconds to import, which would slow --help
    import pandas as pd
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
"""Seven series share a marker and differ in colour (``COLOURS``, which colour-blind readers can distinguish)."""

Spread = tuple[float, float, float]
"""Mean, minimum and maximum over seeds."""

BOUND = "hollow: a seed missed\nthe target and counts\nwith all its rounds"

BARS = "bars: one standard deviation over seeds, up and down"


@dataclass(frozen=True)
class Point:
    x: float | str
    y: float  # mean over seeds
    sd: float  # sample standard deviation over seeds
    series: str
    bound: bool  # whether y is a lower bound


@dataclass(frozen=True)
class Panel:
    title: str
    x: str  # label of the axis
    points: Sequence[Point]


def look(number: int) -> tuple[str, str]:
    """Return colour and marker of the series with this number."""
    return COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]


def value(cell: Cell, name: str) -> Any:
    """Return a configuration's value in a column: the mean over seeds if the numbers differ; None without a value."""
    of_runs = values(cell.runs, name)
    numbers = [v for v in of_runs if isinstance(v, int | float)]
    return fmean(numbers) if len(set(of_runs)) > 1 and numbers else next(iter(of_runs), None)


def text(cell: Cell, name: str) -> str:
    """Format a configuration's value in a column for a table or a legend; see ``label``."""
    return label(value(cell, name), name)


def label(value: object, name: str = "") -> str:
    """Format a value for a legend: three significant digits, ``none`` for None, ``no sharing`` for the strategy real.

    name: the value's column.
    """
    if (name, value) == ("sharing.setting", "real"):
        return NO_SHARING_SHOWN
    return "none" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def course(rounds: "pd.DataFrame", name: str) -> dict[int, Spread]:
    """Return mean, minimum and maximum over runs of a column, for each round in which all runs have a value."""
    if name not in rounds:
        return {}
    wide = rounds.pivot(index="round", columns="run", values=name).dropna()
    return {r: (fmean(v), min(v), max(v)) for r, v in zip(wide.index.tolist(), wide.to_numpy().tolist(), strict=True)}


def point(cell: Cell, x: str, y: str, series: str) -> Point | None:
    """Return the point of a configuration in the columns ``x`` and ``y``, or None if no seed has a value ``y``."""
    at, (numbers, missed) = value(cell, x), counted(cell.runs, y)
    if not numbers:
        return None
    place = float(at) if isinstance(at, int | float) and not isinstance(at, bool) else label(at, x)
    return Point(place, fmean(numbers), stdev(numbers) if len(numbers) > 1 else 0.0, series, missed > 0)


def title(runs: "pd.DataFrame") -> str:
    """Return the title of a picture: data set, sharing strategy and target, each only if it is equal in all runs."""
    words = {
        "data.name": str,
        "sharing.setting": lambda name: NO_SHARING_SHOWN if name == "real" else f"sharing {name}",
        "target": lambda value: f"target {target.in_words(value)}",
    }
    several = {name: {*values(runs, name)} for name in words}
    return ", ".join(word(several[name].pop()) for name, word in words.items() if len(several[name]) == 1)


def draw(
    path: Path, panels: Sequence[Panel], y: str, series: str, title: str, smoke: bool = False, *,
    axis: "Callable[[Axes], None] | None" = None, note: str = "", size: tuple[float, float] = (3.6, 3.6),
) -> None:  # fmt: skip
    """Write the picture to a PNG file.

    Args:
        y: name of the metric.
        series: title of the legend, empty without a legend.
        axis: draws an x axis on which the points' ``x`` are positions, with linear axes and without lines between
            points; None: the axis follows from the points.
        note: text below the picture; default: the meaning of error bars, if there are any.
        size: width and height of a panel in inches.
    """
    from fedcommons.reports import plots

    every = [p for panel in panels for p in panel.points]
    names = list(dict.fromkeys(p.series for p in every))
    looks = {name: look(i) for i, name in enumerate(names)}
    wide = 1.6 if series else 0
    figure, (grid,) = plots.panels(1, len(panels), (1 + size[0] * len(panels) + wide, size[1]), sharey=True)
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        _panel(axes, panel, looks, axis)
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if axis is None and _spans([p.y for p in every], 100):
        grid[0].set_yscale("log")
    grid[0].set_ylabel(words(y))
    if handles:
        handles = dict(sorted(handles.items(), key=lambda item: item[0] == BOUND))  # the entry BOUND comes last
        figure.legend([*handles.values()], [*handles], loc="outside right upper", fontsize=8, title=series or None)
    figure.suptitle(title, fontsize=10)
    if note or any(p.sd for p in every):
        figure.supxlabel(note or BARS, fontsize=8, color="0.3")
    plots.save(figure, path, 120, smoke)


def _panel(
    axes: "Axes", panel: Panel, looks: Mapping[str, tuple[str, str]], axis: "Callable[[Axes], None] | None"
) -> None:
    from fedcommons.reports import plots

    places = None  # position of each name on the x axis; None if all points have numbers as x
    if axis:
        axis(axes)
    elif not all(isinstance(p.x, float) for p in panel.points):
        places = {name: i for i, name in enumerate(dict.fromkeys(label(p.x) for p in panel.points))}
    elif _spans([float(p.x) for p in panel.points], 10):
        axes.set_xscale("log")
        plots.plain_ticks(axes.xaxis)

    def position(p: Point) -> float:
        return float(p.x) if places is None else places[label(p.x)]

    names = [name for name in looks if any(p.series == name for p in panel.points)]
    for i, name in enumerate(names):
        colour, marker = looks[name]
        # Series at the same name stand side by side.
        offset = 0 if places is None else 0.12 * (i - (len(names) - 1) / 2)
        points = sorted((p for p in panel.points if p.series == name), key=position)
        xs = [position(p) + offset for p in points]
        line = "-" if not axis and places is None and len(set(xs)) == len(xs) else "none"
        axes.errorbar(
            xs, [p.y for p in points], [p.sd for p in points], color=colour, marker=marker, ms=5, lw=1, ls=line,
            capsize=3, label=name or None,
        )  # fmt: skip
        if bounds := [(x, p.y) for x, p in zip(xs, points, strict=True) if p.bound]:
            axes.plot(*zip(*bounds, strict=True), marker, mfc="w", mec=colour, ms=5, ls="none", label=BOUND, zorder=3)
    if places is not None:
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xticks(list(places.values()), list(places), rotation=20 if len(places) > 3 else 0)
    axes.set_xlabel(panel.x)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)


def _spans(values: Sequence[float], factor: float) -> bool:
    """Return whether all values are positive and the largest value is at least ``factor`` times the smallest."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= factor
