"""Picture of test accuracy over rounds or over the bytes sent so far, with a column for each alpha."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from fedcommons.config import target
from fedcommons.reports import plots, series
from fedcommons.reports.cells import plain
from fedcommons.reports.frames import load_rounds

SENT = "sent"
"""Name of the axis of 10^6 bytes that all clients sent and received so far."""


def accuracy_curves(
    frame: Any, methods: Sequence[str], axes_of: Mapping[str, str], size: tuple[float, float]
) -> tuple[Any, Any]:
    """Draw a curve for each method, the mean over seeds, and a band from minimum to maximum; return figure and axes.

    frame: the runs, with the columns ``run``, ``method`` and ``at`` (alpha, or None). axes_of: ``round`` or ``SENT`` ->
    label of the horizontal axis, in a row of the picture. size: width and height of the picture in inches.
    """
    alphas = list(dict.fromkeys(map(plain, frame["at"])))
    rounds: Any = load_rounds(*frame["run"].unique()).merge(frame[["run", "method", "at"]], on="run")
    rounds[SENT] = rounds["comm/total_bytes"].fillna(0) / 10**6
    figure, grid = plots.panels(len(axes_of), len(alphas), size, sharey=True)
    for (row, (name, label)), (j, alpha) in product(zip(grid, axes_of.items(), strict=True), enumerate(alphas)):
        inside, courses = rounds[[plain(at) == alpha for at in rounds["at"]]], {}
        for method in methods:
            of_method = inside[inside["method"] == method]
            x = of_method.groupby("round")[name].mean()
            courses[method] = {x[r]: spread for r, spread in series.course(of_method, target.ACCURACY).items()}
        plots.curves(row[j], courses, methods)
        row[j].set_xlabel(label)
        grid[0][j].set_title("" if alpha is None else f"alpha {alpha:g}")
        row[0].set_ylabel("test accuracy" + plots.percent(row[0].yaxis))
    return figure, grid
