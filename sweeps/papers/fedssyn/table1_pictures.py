"""Pictures of Table 1 of Fedssyn: rounds to the target, and test accuracy over the rounds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedcommons.config import target
from fedcommons.reports.cells import Cell, counted
from fedcommons.reports.columns import method, place, setting
from fedcommons.reports.intervals import format_rounds
from fedcommons.reports.plots import colour_of, panels, save
from fedcommons.reports.series import course, value

if TYPE_CHECKING:  # pandas takes a second to import
    import pandas as pd

WIDEST = 4
"""Maximum number of panels in a row of the picture."""

NARROWEST = 6.5
"""Minimum width of a picture in inches, so that the legend fits."""


def rounds_to_target(path: Path, cells: Sequence[Cell], title: str, smoke: bool) -> None:
    """Draw a panel for each federation, with a row for each method and a bar for each sharing strategy."""
    places, methods, settings = (list(dict.fromkeys(map(key, cells))) for key in (place, method, setting))
    has_misses = any(counted(cell.runs, "rounds_to_target")[1] for cell in cells)
    columns = min(WIDEST, len(places))
    rows = -(-len(places) // columns)
    height = 0.6 + 0.22 * len(methods) * (len(settings) + 0.8)
    figure, grid = panels(rows, columns, (max(NARROWEST, 1.4 + 3.4 * columns), 0.9 + height * rows))
    pitch = len(settings) + 0.8
    for axes, where in zip(grid.flat, places, strict=False):
        for cell in (cell for cell in cells if place(cell) == where):
            y = methods.index(method(cell)) * pitch + settings.index(setting(cell))
            _bar(axes, y, cell, colour_of(setting(cell), settings))
        axes.set_yticks([i * pitch + (len(settings) - 1) / 2 for i in range(len(methods))], methods)
        axes.invert_yaxis()
        axes.set_xlim(0, (1.45 if has_misses else 1.15) * axes.get_xlim()[1])  # room for the numbers beside the bars
        axes.set_title(where, fontsize=9)
        axes.set_xlabel("rounds to the target")
        axes.tick_params("y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(places) :]:
        axes.set_visible(False)
    keys: list[Patch | Line2D] = [Patch(color=colour_of(s, settings), label=s) for s in settings]
    if has_misses:
        label = "open bar: a seed missed the target"
        keys.append(Patch(facecolor="w", edgecolor="0.4", label=label))
    if any(len(cell.runs) > 1 for cell in cells):
        keys.append(Line2D([], [], color="k", label="bar: mean; line: minimum to maximum over seeds"))
    _finish(figure, keys, title)
    save(figure, path, 120, smoke)


def _bar(axes: Axes, y: float, cell: Cell, colour: str) -> None:
    needed, missed = counted(cell.runs, "rounds_to_target")
    axes.barh(
        y,
        fmean(needed),
        0.85 - 0.08 * bool(missed),
        color="w" if missed else colour,
        edgecolor=colour if missed else "w",
    )
    if len(needed) > 1:
        axes.plot([min(needed), max(needed)], [y, y], color="k", lw=1.3, marker="|", ms=5)
    text = format_rounds(needed, missed)
    axes.annotate(text, (max(needed), y), (5, 0), textcoords="offset points", va="center", fontsize=8)


def accuracy_over_rounds(path: Path, cells: Sequence[Cell], rounds: "pd.DataFrame", title: str, smoke: bool) -> None:
    """Draw a row of panels for each federation, a column for each method, a curve for each sharing strategy."""
    places, methods, settings = (list(dict.fromkeys(map(key, cells))) for key in (place, method, setting))
    size = (max(NARROWEST, 0.8 + 2.1 * len(methods)), 1.1 + 1.9 * len(places))
    figure, grid = panels(len(places), len(methods), size, sharey=True)
    for cell in cells:
        axes, colour = grid[places.index(place(cell)), methods.index(method(cell))], colour_of(setting(cell), settings)
        spreads = course(rounds.loc[rounds["run"].isin(cell.runs["run"].tolist()), :], target.ACCURACY)
        if spreads:
            mean, least, most = zip(*spreads.values(), strict=True)
            axes.plot(list(spreads), mean, color=colour, lw=1.5)
            axes.fill_between(list(spreads), least, most, color=colour, alpha=0.25, lw=0)
        aim = target.read(value(cell, "target"))
        if aim.metric == target.ACCURACY:
            axes.axhline(aim.bound, color="0.4", lw=0.8, ls=":")
    for axes, name in zip(grid[0], methods, strict=True):
        axes.set_title(name, fontsize=10)
    for axes, where in zip(grid[:, 0], places, strict=True):
        axes.set_ylabel("\n".join([*where.split(", ", 1), "test accuracy"]), fontsize=8)
    for axes in grid.flat:
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
        axes.label_outer()
    keys: list[Patch | Line2D] = [Line2D([], [], color=colour_of(s, settings), label=s) for s in settings]
    keys.append(Line2D([], [], color="0.4", ls=":", lw=0.8, label="target"))
    if any(len(cell.runs) > 1 for cell in cells):
        keys.append(Patch(color="0.8", label="line: mean; band: minimum to maximum over seeds"))
    _finish(figure, keys, title)
    save(figure, path, 120, smoke)


def _finish(figure: Figure, keys: Sequence[Patch | Line2D], title: str) -> None:
    columns = 4 if figure.get_figwidth() > 8 else 2
    figure.legend(handles=keys, fontsize=8, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, fontsize=10)
