"""Pictures of a number against another or against names: a panel each, series by colour, error bars over seeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.reports.cells import Cell, counted
from fedcommons.reports.metrics import words

if TYPE_CHECKING:  # pandas and matplotlib take seconds to import, and --help needs neither
    import pandas as pd
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
"""Of Okabe and Ito, which all can tell apart; series beyond the seventh have the next marker."""

Spread = tuple[float, float, float]
"""Mean, least and most over seeds."""

BOUND = "hollow: a seed did not\nreach the target, counted\nwith all its rounds"


BARS = "bars: one standard deviation over seeds, up and down"


@dataclass(frozen=True)
class Point:
    """A cell: y and its sample standard deviation over seeds (0 where there is one); ``bound``: y is at least this."""

    x: float | str
    y: float
    sd: float
    series: str
    bound: bool


@dataclass(frozen=True)
class Panel:
    """x: what stands on the axis, in words."""

    title: str
    x: str
    points: Sequence[Point]


def value(cell: Cell, name: str) -> Any:
    """What a cell has in a column: the mean over its seeds of what it measured, the field that they share, or None."""
    found = [None if v is None or v != v else v for v in cell.runs[name].tolist()] if name in cell.runs else [None]
    numbers = [v for v in found if isinstance(v, int | float)]
    return fmean(numbers) if len(set(found)) > 1 and numbers else found[0]


def label(found: object) -> str:
    """A value as a legend has it."""
    return "none" if found is None else f"{found:.3g}" if isinstance(found, float) else str(found)


def course(rounds: "pd.DataFrame", name: str) -> dict[int, Spread]:
    """The spread of a column of ``load_rounds`` in each round for which all runs have it; empty where none has."""
    if name not in rounds:
        return {}
    wide = rounds.pivot(index="round", columns="run", values=name).dropna()
    return {r: (fmean(v), min(v), max(v)) for r, v in zip(wide.index.tolist(), wide.to_numpy().tolist(), strict=True)}


def point(cell: Cell, x: str, y: str, series: str) -> Point | None:
    """The point of a cell; None where no seed has ``y``. Seeds that missed the target count with all their rounds."""
    at, (values, missed) = value(cell, x), counted(cell.runs, y)
    if not values:
        return None
    place = float(at) if isinstance(at, int | float) and not isinstance(at, bool) else label(at)
    return Point(place, fmean(values), stdev(values) if len(values) > 1 else 0.0, series, missed > 0)


def title(runs: "pd.DataFrame") -> str:
    """Return the title of a picture: data set, sharing and target, each where all runs agree in it."""
    words = {
        "data.name": str,
        "sharing.setting": lambda name: "no sharing" if name == "real" else f"sharing {name}",
        "target": lambda value: f"target {target.in_words(value)}",
    }
    values = {name: runs[name].unique() for name in words}
    return ", ".join(words[name](several[0]) for name, several in values.items() if len(several) == 1)


def draw(path: Path, panels: Sequence[Panel], y: str, series: str, title: str, smoke: bool = False) -> None:
    """Write the picture. y: a metric's name; series: of what the colours are, in words; empty: there is one series."""
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
        handles = dict(sorted(handles.items(), key=lambda item: item[0] == BOUND))  # last
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
        mine = [p for p in panel.points if p.series == name]
        if not mine:
            continue
        beside = 0.12 * (names.index(name) - (len(names) - 1) / 2)  # series lie side by side over a name
        xs = [float(p.x) if places is None else places[label(p.x)] + beside for p in mine]
        order = sorted(range(len(mine)), key=lambda i: xs[i])
        xs, mine = [xs[i] for i in order], [mine[i] for i in order]
        line = "-" if places is None and len(set(xs)) == len(xs) else "none"
        axes.errorbar(
            xs, [p.y for p in mine], [p.sd for p in mine], color=colour, marker=marker, ms=5, lw=1, ls=line, capsize=3,
            label=name or None,
        )  # fmt: skip
        bounds = [(x, p.y) for x, p in zip(xs, mine, strict=True) if p.bound]
        if bounds:
            axes.plot(*zip(*bounds, strict=True), marker, mfc="w", mec=colour, ms=5, ls="none", label=BOUND, zorder=3)
    if places is not None:
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_xticks(list(places.values()), list(places), rotation=20 if len(places) > 3 else 0)
    axes.set_xlabel(panel.x)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)


def _places(points: Sequence[Point]) -> dict[str, int] | None:
    """Where the names on an axis stand; None for numbers."""
    if all(isinstance(p.x, float) for p in points):
        return None
    return {name: i for i, name in enumerate(dict.fromkeys(label(p.x) for p in points))}


def _spans(values: Iterable[Any], factor: float) -> bool:
    """Whether these are positive and lie that far apart."""
    found = list(values)
    return bool(found) and min(found) > 0 and max(found) / min(found) >= factor
