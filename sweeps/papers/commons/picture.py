"""Accuracy against bytes and against what was given away, with the fronts; a row of two panels for each alpha."""

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
"""Markers: what is in the commons has an epsilon; it has none, or there is no commons; a bound."""


def spread_out(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places of labels, in the order of ``places`` and as near to them as a ``gap`` between any two allows."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = [0.0] * len(places)
    at = low - gap
    for i in order:
        at = max(at + gap, places[i])
        found[i] = at
    at = high + gap
    for i in reversed(order):
        at = min(at - gap, found[i])
        found[i] = at
    return found


def draw(rows: Sequence[Measured], path: Path, title: str, smoke: bool) -> None:
    """Write the picture."""
    alphas = list(dict.fromkeys(one.alpha for one in rows))
    most = max(sum(one.alpha == alpha for one in rows) for alpha in alphas)
    figure, grid = plots.panels(len(alphas), 2, (13, max(4.5, 1.2 + 0.24 * most) * len(alphas)))
    for (left, right), alpha in zip(grid, alphas, strict=True):
        mine = [one for one in rows if one.alpha == alpha]
        _panel(left, mine, [one.row.mb for one in mine])
        _panel(right, mine, [100 * one.row.disclosed for one in mine])
        left.set(xscale="log", xlabel="MB in all, all clients, both ways", ylabel="test accuracy, %")
        plots.plain_ticks(left.xaxis)
        right.set(xlabel="examples given away without an epsilon, %", xlim=(-4, 104))
        left.set_title(f"alpha = {alpha:g}", fontsize=10)
    figure.legend(handles=_keys(), loc="outside lower center", ncols=4, fontsize=8)
    several = any(len(one.row.best) > 1 for one in rows)
    figure.suptitle(f"{title}{'; a line through a point: least to most of the seeds' * several}", fontsize=10)
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
        point(BOUND, "bound, not on the front", 6, "none"),
        Line2D([], [], color="0.3", label="Pareto front", drawstyle="steps-post"),
    ]


def _panel(axes: "Axes", rows: Sequence[Measured], costs: Sequence[float]) -> None:
    """Points, front, and names in a column at the right, each with a line to its point."""
    heights = [100 * one.row.accuracy for one in rows]
    colours = [COLOURS[list(WAYS).index(one.row.way) % len(COLOURS)] for one in rows]
    for one, colour, x, y in zip(rows, colours, costs, heights, strict=True):
        marker = BOUND if one.row.bound else PRIVATE if one.row.epsilon is not None else PLAIN
        ends = [100 * value for value in one.row.best.values()]
        axes.plot([x, x], [min(ends), max(ends)], color=colour, linewidth=1)
        face = "none" if one.row.bound else colour
        axes.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=11 if marker == PRIVATE else 6)
    free = [i for i, one in enumerate(rows) if not one.row.bound]
    on = [free[i] for i in decide.front([(costs[i], heights[i]) for i in free])]
    xs, ys = [costs[i] for i in on], [heights[i] for i in on]
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
