"""Pictures of Table 1 of Fedssyn: rounds to the target, and test accuracy over the rounds."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedcommons.config import target
from fedcommons.reports.cells import Cell, counted
from fedcommons.reports.columns import method, place, setting
from fedcommons.reports.intervals import format_rounds
from fedcommons.reports.plots import curves, finish, panels, percent, save
from fedcommons.reports.series import course, looks, value
from papers.fedssyn import references

WIDEST = 4
"""Maximum number of panels in a row of the picture."""

NARROWEST = 6.5
"""Minimum width of a picture in inches, so that the legend fits."""


def rounds_to_target(path: Path, cells: Sequence[Cell], title: str, smoke: bool) -> None:
    """Draw a panel for each federation, with a row for each method and a bar for each sharing strategy."""
    places, methods, settings = (list(dict.fromkeys(map(key, cells))) for key in (place, method, setting))
    columns, look = min(WIDEST, len(places)), looks(settings)
    rows, pitch = -(-len(places) // columns), len(settings) + 0.8
    height = 0.6 + 0.22 * len(methods) * pitch
    figure, grid = panels(rows, columns, (max(NARROWEST, 1.4 + 3.4 * columns), 1.1 + height * rows))
    for axes, where in zip(grid.flat, places, strict=False):
        for cell in (cell for cell in cells if place(cell) == where):
            y = methods.index(method(cell)) * pitch + settings.index(setting(cell))
            _bar(axes, y, cell, look[setting(cell)][0])
        axes.set_yticks([i * pitch + (len(settings) - 1) / 2 for i in range(len(methods))], methods)
        axes.invert_yaxis()
        has_misses = any(" " in text.get_text() for text in axes.texts)
        axes.set_xlim(0, (1.45 if has_misses else 1.15) * axes.get_xlim()[1])  # room for the numbers beside the bars
        axes.set_title(where, fontsize=9)
        axes.set_xlabel("rounds to the target")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params("y", length=0)
    for axes in grid.flat[len(places) :]:
        axes.set_visible(False)
    keys: list[Patch | Line2D] = [Patch(color=look[s][0], label=s) for s in settings]
    if any(counted(cell.runs, "rounds_to_target")[1] for cell in cells):
        keys.append(Patch(facecolor="w", edgecolor="0.4", label="open bar, up to the last round: a seed missed it"))
    if any(len(cell.runs) > 1 for cell in cells):
        keys.append(Line2D([], [], color="k", label="bar: mean; line: minimum to maximum over seeds"))
    finish(figure, f"Rounds to the target; {title}", more=keys)
    for axes in grid.flat:
        axes.yaxis.grid(visible=False)
    save(figure, path, 120, smoke)


def _bar(axes: Axes, y: float, cell: Cell, colour: str) -> None:
    """Draw the mean over seeds; if a seed missed the target, an open bar up to the last round."""
    needed, missed = counted(cell.runs, "rounds_to_target")
    width, face, edge = (max(needed), "w", colour) if missed else (fmean(needed), colour, "w")
    axes.barh(y, width, 0.85 - 0.08 * bool(missed), color=face, edgecolor=edge, linewidth=1 + bool(missed))
    if len(needed) > 1:
        axes.plot([min(needed), max(needed)], [y, y], color="k", lw=1.3, marker="|", ms=5)
    text = format_rounds(needed, missed)
    axes.annotate(text, (max(needed), y), (5, 0), textcoords="offset points", va="center", fontsize=8)


def accuracy_over_rounds(
    path: Path, cells: Sequence[Cell], rounds: pd.DataFrame, title: str, smoke: bool, servers: Sequence[Cell] = (),
    central: Sequence[Cell] = (),
) -> None:  # fmt: skip
    """Draw a row of panels for each federation, a column for each method, a curve for each sharing strategy.

    servers, central: configurations of the server alone and of the central model, whose last accuracy is a dashed line.
    """
    several_pools = len({setting(cell) for cell in servers}) > 1
    places, methods, settings = (list(dict.fromkeys(map(key, cells))) for key in (place, method, setting))
    size = (max(NARROWEST, 0.8 + 2.1 * len(methods)), 1.3 + 1.9 * len(places))
    figure, grid = panels(len(places), len(methods), size, sharey=True)
    for (i, where), (j, name) in product(enumerate(places), enumerate(methods)):
        inside = [cell for cell in cells if (place(cell), method(cell)) == (where, name)]
        frames = {setting(cell): rounds.loc[rounds["run"].isin(cell.runs["run"].tolist()), :] for cell in inside}
        courses = {name: course(frame, target.ACCURACY) for name, frame in frames.items()}
        curves(grid[i, j], courses, settings)
        aim = target.read(value((inside or cells)[0], "target"))
        if aim.metric == target.ACCURACY:
            grid[i, j].axhline(aim.bound, color="0.4", lw=0.8, ls=":", label="target")
        for cell in (cell for cell in servers if place(cell) == where):
            pool = f" ({setting(cell)})" * several_pools
            references.draw(
                grid[i, j].axhline, references.SERVER, cell.values("last_accuracy"), references.SERVER + pool
            )
        for cell in central:
            references.draw(grid[i, j].axhline, references.CENTRAL, cell.values("last_accuracy"))
        grid[i, j].set(xlabel="round", title=name if i == 0 else "")
    for axes, where in zip(grid[:, 0], places, strict=True):
        axes.set_ylabel("\n".join([*where.split(", ", 1), f"test accuracy{percent(axes.yaxis)}"]), fontsize=8)
    for axes in grid.flat:
        axes.label_outer()
    several = any(len(cell.runs) > 1 for cell in cells)
    keys = [Patch(color="0.8", label="line: mean; band: minimum to maximum over seeds")] if several else []
    finish(figure, f"Test accuracy over rounds; {title}", more=keys)
    save(figure, path, 120, smoke)
