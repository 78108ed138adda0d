"""Picture of accuracy, bytes and disclosure of each method; three panels for each alpha."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fedcommons.reports import plots
from papers.commons import decide
from papers.commons.measured import Measured
from papers.fedssyn import references

PRIVATE, PLAIN, BOUND = "*", "o", "s"
"""Markers: methods whose shared data have an epsilon; other methods; upper bounds."""

ON_FRONT, OFF_FRONT = "#0072b2", "0.6"


def draw(rows: Sequence[Measured], path: Path, title: str, smoke: bool, central: Sequence[float] = ()) -> None:
    """Draw a line of the picture for each method: accuracy, megabytes, share of examples disclosed.

    Methods on the Pareto front of accuracy and a cost are blue in the panel of the cost. central: accuracies of the
    central model, by seed, of which a dashed line shows the mean.
    """
    alphas = list(dict.fromkeys(measured.alpha for measured in rows))
    most = max(sum(measured.alpha == alpha for measured in rows) for alpha in alphas)
    figure, grid = plots.panels(len(alphas), 3, (12, (1.2 + 0.2 * most) * len(alphas) + 0.8), sharey="row")
    for (accuracy, bytes_sent, disclosed), alpha in zip(grid, alphas, strict=True):
        of_alpha = sorted((m for m in rows if m.alpha == alpha), key=lambda m: m.row.accuracy)
        for y, measured in enumerate(of_alpha):
            ends = [100 * value for value in measured.row.best.values()]
            accuracy.plot([min(ends), max(ends)], [y, y], color="k", linewidth=1)
            _point(accuracy, 100 * measured.row.accuracy, y, measured, "k")
        for axes, costs in ((bytes_sent, [m.row.mb for m in of_alpha]),
                            (disclosed, [100 * m.row.disclosed for m in of_alpha])):  # fmt: skip
            free = [i for i, m in enumerate(of_alpha) if not m.row.bound]
            on_front = [free[i] for i in decide.front([(costs[i], of_alpha[i].row.accuracy) for i in free])]
            for y, measured in enumerate(of_alpha):
                _point(axes, costs[y], y, measured, ON_FRONT if y in on_front else OFF_FRONT)
        if central:
            references.draw(accuracy.axvline, references.CENTRAL, [100 * value for value in central])
        names = ["FedAvg, no sharing" if m.row.way == "real" else m.row.way for m in of_alpha]
        accuracy.set_yticks(range(len(of_alpha)), names, fontsize=8)
        accuracy.set(xlabel="test accuracy, %")
        accuracy.set_title(f"alpha = {alpha:g}", fontsize=10)
        bytes_sent.set(xscale="log", xlabel="MB in all, all clients, both ways (log)")
        plots.plain_ticks(bytes_sent.xaxis)
        disclosed.set(xlabel="examples disclosed without an epsilon, %", xlim=(-4, 104))
    several = any(len(measured.row.best) > 1 for measured in rows)
    spread = "; accuracy: mean, and minimum to maximum over seeds" * several
    plots.finish(figure, f"Accuracy and its two costs; {title}{spread}", more=[
        Line2D([], [], marker=marker, ms=size, label=label, color=colour, ls="none", markerfacecolor=face)
        for marker, size, colour, face, label in (
            (PLAIN, 6, ON_FRONT, ON_FRONT, "on the Pareto front: no method is better in one and as good in the other"),
            (PLAIN, 6, OFF_FRONT, OFF_FRONT, "not on the front"),
            (PRIVATE, 11, "0.3", "0.3", "the shared data have an epsilon (if the noise were secret)"),
            (BOUND, 6, "0.3", "none", "upper bound, for comparison only"),
        ) if marker != PRIVATE or any(measured.row.is_covered for measured in rows)
    ])  # fmt: skip
    plots.save(figure, path, 120, smoke)


def _point(axes: Axes, x: float, y: float, measured: Measured, colour: str) -> None:
    marker = BOUND if measured.row.bound else PRIVATE if measured.row.is_covered else PLAIN
    face = "none" if measured.row.bound else colour
    axes.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=11 if marker == PRIVATE else 6)
