"""A picture of accuracy against epsilon: a true axis, with a place of its own on either side of it.

On the left stand runs that shared nothing (x = 0), on the right those that shared something which no epsilon covers
(x = inf). Neither is a small or a large epsilon, so that both places are shaded, and lie off the axis.
"""

from collections.abc import Sequence
from math import ceil, floor, inf, log10
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcommons.reports import plots
from fedcommons.reports.series import BARS, COLOURS, MARKERS, Panel, Point

NOTHING, NO_GUARANTEE = "nothing\nshared", "no\nguarantee"


def draw(path: Path, panels: Sequence[Panel], title: str, smoke: bool = False) -> None:
    """Write the picture; x of a point: epsilon, 0 or inf."""
    plots.save(figure(panels, title), path, 120, smoke)


def figure(panels: Sequence[Panel], title: str) -> Figure:
    """The picture: a panel beside the other, a colour for each series."""
    every = [p for panel in panels for p in panel.points]
    names = list(dict.fromkeys(p.series for p in every))
    finite = [x for p in every if 0 < (x := float(p.x)) < inf] or [1.0]
    low, high = floor(log10(min(finite))), ceil(log10(max(finite)))
    high += high == low  # 10^low ... 10^high is the axis
    drawn, (grid,) = plots.panels(1, len(panels), (2.6 + 4.6 * len(panels), 4), sharey=True)
    for axes, panel in zip(grid, panels, strict=True):
        _frame(axes, low, high)
        for i, name in enumerate(names):
            mine = [p for p in panel.points if p.series == name]
            at = [_place(p, low, high) + 0.025 * (high - low) * (i - (len(names) - 1) / 2) for p in mine]
            ys, bars = [p.y for p in mine], [p.sd for p in mine]
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // len(COLOURS) % len(MARKERS)]}
            axes.errorbar(at, ys, bars, ms=5, lw=1, ls="none", capsize=3, label=name, **look)
        axes.set_xlabel(panel.x)
        axes.set_title(panel.title, fontsize=9)
    grid[0].set_ylabel("test accuracy")
    drawn.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, title="way of sharing")
    drawn.suptitle(title, fontsize=10)
    drawn.supxlabel(
        f"{BARS}; without a bar: one seed. Points of one epsilon stand side by side.", fontsize=8, color="0.3"
    )
    return drawn


def _slot(low: int, high: int) -> float:
    """How wide the place on either side is, in powers of ten."""
    return 0.28 * (high - low)


def _place(point: Point, low: int, high: int) -> float:
    """Where a point stands: log10 of its epsilon, or the middle of a place beside the axis."""
    x, beside = float(point.x), 0.7 * _slot(low, high)
    return low - beside if x == 0 else high + beside if x == inf else log10(x)


def _frame(axes: Axes, low: int, high: int) -> None:
    slot, powers = _slot(low, high), range(low, high + 1)
    ends = (low - 0.7 * slot, high + 0.7 * slot)
    marks = [(float(power), f"{10.0**power:g}") for power in powers]
    if high - low <= 2:
        marks += [(power + log10(k), f"{k * 10.0**power:g}") for power in powers[:-1] for k in (2, 5)]
    axes.set_xlim(low - 1.3 * slot, high + 1.3 * slot)
    axes.axvspan(low - 1.3 * slot, low - 0.1 * slot, color="0.92", lw=0)
    axes.axvspan(high + 0.1 * slot, high + 1.3 * slot, color="0.92", lw=0)
    axes.set_xticks([ends[0], *(x for x, _ in marks), ends[1]], [NOTHING, *(text for _, text in marks), NO_GUARANTEE])
    axes.grid(alpha=0.3)
