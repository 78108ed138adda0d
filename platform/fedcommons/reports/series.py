"""Plots of a metric against a number or a name, with several panels, series in colours, and error bars over seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.config.dotted import NO_SHARING_SHOWN
from fedcommons.reports.cells import Cell, counted
from fedcommons.reports.metrics import words

if TYPE_CHECKING:  # pandas and matplotlib take seconds to import, which would slow --help
    import pandas as pd
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
"""``COLOURS``: Okabe and Ito's; colour-blind readers can distinguish them. Each of the ``MARKERS`` serves 7 series."""

Spread = tuple[float, float, float]
"""Mean, minimum and maximum over seeds."""

BOUND = "hollow: a seed missed\nthe target and counts\nwith all its rounds"


BARS = "bars: one standard deviation over seeds, up and down"


@dataclass(frozen=True)
class Point:
    """A point in a plot. y, sd: mean and sample standard deviation over seeds. bound: whether y is a lower bound."""

    x: float | str
    y: float
    sd: float
    series: str
    bound: bool


@dataclass(frozen=True)
class Panel:
    """A panel of a picture. x: the label of the x axis."""

    title: str
    x: str
    points: Sequence[Point]


def value(cell: Cell, name: str) -> Any:
    """Return a configuration's value in a column: the mean over seeds if the numbers differ; None without a value."""
    values = [None if v is None or v != v else v for v in cell.runs[name].tolist()] if name in cell.runs else [None]
    numbers = [v for v in values if isinstance(v, int | float)]
    return fmean(numbers) if len(set(values)) > 1 and numbers else values[0]


def label(value: object) -> str:
    """Format a value for a legend: floats with three significant digits, ``none`` for None."""
    return "none" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def course(rounds: "pd.DataFrame", name: str) -> dict[int, Spread]:
    """Return mean, minimum and maximum over runs of a metric, for each round in which all runs have a value.

    rounds: a frame of ``load_rounds``. name: a column; the result is empty if the frame does not have this column.
    """
    if name not in rounds:
        return {}
    wide = rounds.pivot(index="round", columns="run", values=name).dropna()
    return {r: (fmean(v), min(v), max(v)) for r, v in zip(wide.index.tolist(), wide.to_numpy().tolist(), strict=True)}


def point(cell: Cell, x: str, y: str, series: str) -> Point | None:
    """Return the point of a configuration, or None if no seed has the metric ``y``.

    x, y: columns of ``load_runs``. For y = ``rounds_to_target``, a seed that missed the target counts all its rounds.
    """
    at, (values, missed) = value(cell, x), counted(cell.runs, y)
    if not values:
        return None
    place = float(at) if isinstance(at, int | float) and not isinstance(at, bool) else label(at)
    return Point(place, fmean(values), stdev(values) if len(values) > 1 else 0.0, series, missed > 0)


def title(runs: "pd.DataFrame") -> str:
    """Return the title of a picture: data set, sharing strategy and target, each only if it is equal in all runs."""
    words = {
        "data.name": str,
        "sharing.setting": lambda name: NO_SHARING_SHOWN if name == "real" else f"sharing {name}",
        "target": lambda value: f"target {target.in_words(value)}",
    }
    values = {name: runs[name].unique() for name in words}
    return ", ".join(words[name](several[0]) for name, several in values.items() if len(several) == 1)


def draw(path: Path, panels: Sequence[Panel], y: str, series: str, title: str, smoke: bool = False) -> None:
    """Write the picture to a PNG file. y: name of the metric; series: title of the legend, empty without a legend."""
    from fedcommons.reports import plots

    names = list(dict.fromkeys(p.series for panel in panels for p in panel.points))
    look = {n: (COLOURS[i % len(COLOURS)], MARKERS[i // len(COLOURS) % len(MARKERS)]) for i, n in enumerate(names)}
    wide = 1.6 if series else 0
    figure, (grid,) = plots.panels(1, len(panels), (1 + 3.6 * len(panels) + wide, 3.6), sharey=True)
    for axes, panel in zip(grid, panels, strict=True):
        _panel(axes, panel, look)
    every = [p.y for panel in panels for p in panel.points]
    if _spans(every, 100):
        grid[0].set_yscale("log")
    grid[0].set_ylabel(words(y))
    handles: dict[str, Any] = {}
    for axes in grid:
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        handles = dict(sorted(handles.items(), key=lambda item: item[0] == BOUND))  # the entry BOUND comes last
        figure.legend(
            list(handles.values()), list(handles), loc="outside right upper", fontsize=8, title=series or None
        )
    figure.suptitle(title, fontsize=10)
    if any(p.sd for panel in panels for p in panel.points):
        figure.supxlabel(BARS, fontsize=8, color="0.3")
    plots.save(figure, path, 120, smoke)


def _panel(axes: "Axes", panel: Panel, look: Mapping[str, tuple[str, str]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    places = _places(panel.points)
    if places is None and _spans([p.x for p in panel.points], 10):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    names = [name for name in look if any(p.series == name for p in panel.points)]
    for name, (colour, marker) in look.items():
        points = [p for p in panel.points if p.series == name]
        if not points:
            continue
        offset = 0.12 * (names.index(name) - (len(names) - 1) / 2)  # series at the same name stand side by side
        xs = [float(p.x) if places is None else places[label(p.x)] + offset for p in points]
        order = sorted(range(len(points)), key=lambda i: xs[i])
        xs, points = [xs[i] for i in order], [points[i] for i in order]
        line = "-" if places is None and len(set(xs)) == len(xs) else "none"
        axes.errorbar(
            xs, [p.y for p in points], [p.sd for p in points], color=colour, marker=marker, ms=5, lw=1, ls=line,
            capsize=3, label=name or None,
        )  # fmt: skip
        bounds = [(x, p.y) for x, p in zip(xs, points, strict=True) if p.bound]
        if bounds:
            axes.plot(*zip(*bounds, strict=True), marker, mfc="w", mec=colour, ms=5, ls="none", label=BOUND, zorder=3)
    if places is not None:
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xticks(list(places.values()), list(places), rotation=20 if len(places) > 3 else 0)
    axes.set_xlabel(panel.x)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)


def _places(points: Sequence[Point]) -> dict[str, int] | None:
    """Return the position of each name on the x axis, or None if all points have numbers as x."""
    if all(isinstance(p.x, float) for p in points):
        return None
    return {name: i for i, name in enumerate(dict.fromkeys(label(p.x) for p in points))}


def _spans(values: Iterable[Any], factor: float) -> bool:
    """Return whether all values are positive and the largest value is at least ``factor`` times the smallest."""
    numbers = list(values)
    return bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) >= factor
