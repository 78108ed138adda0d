"""Picture of accuracy against bytes and against disclosure, with Pareto fronts; two panels for each alpha."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.reports import plots
from fedcommons.reports.series import COLOURS
from papers.commons import decide
from papers.commons.measured import Measured
from papers.commons.ways import WAYS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRIVATE, PLAIN, BOUND = "*", "o", "s"
"""Markers: methods whose shared data have an epsilon; other methods; upper bounds."""


def spread_out(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return label positions between low and high, close to ``places`` and in the same order, at least gap apart."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    result = [0.0] * len(places)
    position = low - gap
    for i in order:
        position = max(position + gap, places[i])
        result[i] = position
    position = high + gap
    for i in reversed(order):
        position = min(position - gap, result[i])
        result[i] = position
    return result


def draw(rows: Sequence[Measured], path: Path, title: str, smoke: bool) -> None:
    """Draw accuracy for each alpha, against megabytes (left panel) and disclosed examples (right panel)."""
    alphas = list(dict.fromkeys(measured.alpha for measured in rows))
    most = max(sum(measured.alpha == alpha for measured in rows) for alpha in alphas)
    figure, grid = plots.panels(len(alphas), 2, (13, max(4.5, 1.2 + 0.24 * most) * len(alphas)))
    for (left, right), alpha in zip(grid, alphas, strict=True):
        of_alpha = [measured for measured in rows if measured.alpha == alpha]
        _panel(left, of_alpha, [measured.row.mb for measured in of_alpha])
        _panel(right, of_alpha, [100 * measured.row.disclosed for measured in of_alpha])
        left.set(xscale="log", xlabel="MB in all, all clients, both ways", ylabel="test accuracy, %")
        plots.plain_ticks(left.xaxis)
        right.set(xlabel="examples disclosed without an epsilon, %", xlim=(-4, 104))
        left.set_title(f"alpha = {alpha:g}", fontsize=10)
    figure.legend(handles=_keys(), loc="outside lower center", ncols=4, fontsize=8)
    several = any(len(measured.row.best) > 1 for measured in rows)
    figure.suptitle(f"{title}{'; a line through a point: minimum to maximum over seeds' * several}", fontsize=10)
    plots.save(figure, path, 120, smoke)


def _keys() -> list[Any]:
    from matplotlib.lines import Line2D

    def point(marker: str, label: str, size: int, face: str = "0.3") -> Line2D:
        return Line2D(
            [], [], marker=marker, markersize=size, label=label, color="0.3", linestyle="none", markerfacecolor=face
        )

    return [
        point(PRIVATE, "the commons has an epsilon (if its noise were secret)", 11),
        point(PLAIN, "no epsilon, or no commons", 6),
        point(BOUND, "upper bound, not on the front", 6, "none"),
        Line2D([], [], color="0.3", label="Pareto front", drawstyle="steps-post"),
    ]


def _panel(axes: "Axes", rows: Sequence[Measured], costs: Sequence[float]) -> None:
    """Draw accuracy against ``costs``: a point per row, the Pareto front, and names linked to the points."""
    heights = [100 * measured.row.accuracy for measured in rows]
    colours = [COLOURS[list(WAYS).index(measured.row.way) % len(COLOURS)] for measured in rows]
    for measured, colour, x, y in zip(rows, colours, costs, heights, strict=True):
        marker = BOUND if measured.row.bound else PRIVATE if measured.row.epsilon is not None else PLAIN
        ends = [100 * value for value in measured.row.best.values()]
        axes.plot([x, x], [min(ends), max(ends)], color=colour, linewidth=1)
        face = "none" if measured.row.bound else colour
        axes.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=11 if marker == PRIVATE else 6)
    free = [i for i, measured in enumerate(rows) if not measured.row.bound]
    on_front = [free[i] for i in decide.front([(costs[i], heights[i]) for i in free])]
    xs, ys = [costs[i] for i in on_front], [heights[i] for i in on_front]
    axes.step([*xs, max(costs)], [*ys, ys[-1]], where="post", color="0.3", linewidth=1, zorder=0)
    low, high = axes.get_ylim()
    gap = (high - low) / max(12, len(rows) + 1)
    for i, place in enumerate(spread_out(heights, gap, low + gap / 2, high - gap / 2)):
        axes.annotate(
            rows[i].row.way, (costs[i], heights[i]), (1.03, (place - low) / (high - low)), xycoords="data",
            textcoords="axes fraction", fontsize=7.5, va="center", color=colours[i],
            arrowprops={"arrowstyle": "-", "color": colours[i], "linewidth": 0.4, "alpha": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip
    axes.set_ylim(low, high)
    axes.spines[["top", "right"]].set_visible(False)
