"""Plots of a metric against a number or a name, with several panels, series in colours, and error bars over seeds."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.config.dotted import NO_SHARING_SHOWN
from fedcommons.reports.cells import Cell, counted, values
from fedcommons.reports.metrics import is_accuracy, words

if TYPE_CHECKING:  # pandas and matplotlib take seconds to import, which would slow --help
    import pandas as pd
    from matplotlib.axes import Axes

COLOURS: Sequence[str] = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
"""Okabe and Ito's colours, which colour-blind readers can distinguish, and grey."""

STYLES: Sequence[tuple[str, Any]] = (
    ("o", "-"),
    ("s", "--"),
    ("^", "-."),
    ("D", ":"),
    ("v", (0, (5, 1, 1, 1, 1, 1))),
    ("P", (0, (3, 1, 1, 1))),
)
"""Pairs of a marker and a dash pattern."""

_PALETTE = (
    "shuffled_real shuffled_synthetic fedgen feddm dense scaffold server_synthetic fedavg",
    "feddpms fedddpm raw_copies local_synthetic fednova fedmix feddyn fedcvae",
    "fedavgm coboosting fedprox fedvae ndpdc merf moon fedpvr",
    "fedadagrad fedadam fedyogi ditto fedbn fedper gradient_coding fedproto",
    "one_shot fedlap dpcda feddf ifca fedbuff fedrep apfl",
    "fedbabu pfedme perfedavg qfedavg",
)  # methods and sharing strategies: a line for each style, a place in the line for each colour
_LOOKS = {name: (i % 8, style) for style, line in enumerate(_PALETTE) for i, name in enumerate(line.split())}
_LOOKS |= {alias: _LOOKS["fedavg"] for alias in (NO_SHARING_SHOWN, "real", "none")}
_LOOKS |= {"fedssyn": _LOOKS["shuffled_synthetic"], "REAL": _LOOKS["shuffled_real"], "FedMERF": _LOOKS["merf"],
           "NDPDC": _LOOKS["ndpdc"], "DP-CDA": _LOOKS["dpcda"]}  # fmt: skip

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


def looks(names: Iterable[str], by_colour: bool = False) -> dict[str, tuple[str, str, Any]]:
    """Return colour, marker and dash pattern of each series of a picture, all different.

    A method or sharing strategy of the package looks the same in every picture. Another name, such as
    ``merf, summed noise``, gets the colour of a method in the name if it is free, or else another free colour.
    by_colour: of two methods with one colour (fedavg, fedpvr) the second gets a free colour as well.
    """
    names = list(dict.fromkeys(names))
    first = {_LOOKS[name][0] if by_colour else name: name for name in reversed(names) if name in _LOOKS}
    result = {name: _LOOKS[name] for name in first.values()}
    for name in (name for name in names if name not in result):
        words = [_LOOKS[word] for word in reversed(re.split("[, ]+", name)) if word in _LOOKS]
        every = [(colour, style) for style in range(len(STYLES)) for colour in range(len(COLOURS))]
        colours = {colour for colour, _ in result.values()}
        free = [place for place in (*words, *every) if place[0] not in colours]
        result[name] = next((place for place in (*free, *every) if place not in result.values()), (0, 0))
    return {name: (COLOURS[result[name][0]], *STYLES[result[name][1]]) for name in names}


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
    look = looks(p.series for p in every)
    wide = 0.6 + 0.065 * max(map(len, look)) if series else 0
    figure, (grid,) = plots.panels(1, len(panels), (1 + size[0] * len(panels) + wide, size[1]), sharey=True)
    for axes, panel in zip(grid, panels, strict=True):
        _panel(axes, panel, look, axis)
    scale = " (log)" if axis is None and _spans([p.y for p in every], 100) else ""
    if scale:
        grid[0].set_yscale("log")
    unit = plots.percent(grid[0].yaxis) if is_accuracy(y) else ""  # set_yscale resets the labels of ticks
    grid[0].set_ylabel(words(y) + unit + scale)
    plots.finish(figure, title, series, "outside right upper", last=BOUND)
    if note or any(p.sd for p in every):
        figure.supxlabel(note or BARS, fontsize=8, color="0.3")
    plots.save(figure, path, 120, smoke)


def _panel(
    axes: "Axes", panel: Panel, looks: Mapping[str, tuple[str, str, Any]], axis: "Callable[[Axes], None] | None"
) -> None:
    from fedcommons.reports import plots

    places, unit = None, ""  # places: position of each name on the x axis; None if all points have numbers as x
    if axis:
        axis(axes)
    elif not all(isinstance(p.x, float) for p in panel.points):
        places = {name: i for i, name in enumerate(dict.fromkeys(label(p.x) for p in panel.points))}
    elif _spans([float(p.x) for p in panel.points], 10):
        axes.set_xscale("log")
        plots.plain_ticks(axes.xaxis)
        unit = " (log)"

    def position(p: Point) -> float:
        return float(p.x) if places is None else places[label(p.x)]

    names = [name for name in looks if any(p.series == name for p in panel.points)]
    lines = [sorted((p for p in panel.points if p.series == name), key=position) for name in names]
    at = lines if places is None and not axis else []  # elsewhere, points stand side by side
    broader = plots.covered([([position(p) for p in line], [p.y for p in line]) for line in at]) or [0] * len(lines)
    for i, (name, points) in enumerate(zip(names, lines, strict=True)):
        colour, marker, dash = looks[name]
        # Series at the same name stand side by side.
        offset = 0 if places is None else 0.12 * (i - (len(names) - 1) / 2)
        xs = [position(p) + offset for p in points]
        line = dash if not axis and places is None and len(set(xs)) == len(xs) else "none"
        axes.errorbar(
            xs, [p.y for p in points], [p.sd for p in points], color=colour, marker=marker, ms=5 + 2 * broader[i],
            lw=1 + 2 * broader[i], ls=line, capsize=3, label=name or None,
        )  # fmt: skip
        if bounds := [(x, p.y) for x, p in zip(xs, points, strict=True) if p.bound]:
            axes.plot(*zip(*bounds, strict=True), marker, mfc="w", mec=colour, ms=5, ls="none", label=BOUND, zorder=3)
    if places is not None:
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xticks(list(places.values()), list(places), rotation=20 if len(places) > 3 else 0)
    axes.set_xlabel(panel.x + unit)
    axes.set_title(panel.title, fontsize=9)


def _spans(values: Sequence[float], factor: float) -> bool:
    """Return whether all values are positive and the largest value is at least ``factor`` times the smallest."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= factor
