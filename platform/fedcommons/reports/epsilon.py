"""A picture of accuracy against the epsilon of shared data, on a logarithmic axis with a shaded area on each side.

The left area shows runs that shared nothing (x = 0). The right area shows runs whose shared data has no privacy
guarantee (x = inf). These values have no place on a logarithmic axis, so the shaded areas are outside of the axis.
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
    """Write the picture to a PNG file. A point's x is an epsilon: 0 if nothing was shared, inf without guarantee."""
    plots.save(figure(panels, title), path, 120, smoke)


def figure(panels: Sequence[Panel], title: str) -> Figure:
    """Return the picture: panels side by side, one colour per series (sharing strategy)."""
    every = [p for panel in panels for p in panel.points]
    names = list(dict.fromkeys(p.series for p in every))
    finite = [x for p in every if 0 < (x := float(p.x)) < inf] or [1.0]
    low, high = floor(log10(min(finite))), ceil(log10(max(finite)))
    high += high == low  # the axis from 10^low to 10^high must not be empty
    picture, (grid,) = plots.panels(1, len(panels), (2.6 + 4.6 * len(panels), 4), sharey=True)
    for axes, panel in zip(grid, panels, strict=True):
        _frame(axes, low, high)
        for i, name in enumerate(names):
            points = [p for p in panel.points if p.series == name]
            at = [_place(p, low, high) + 0.025 * (high - low) * (i - (len(names) - 1) / 2) for p in points]
            ys, bars = [p.y for p in points], [p.sd for p in points]
            look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // len(COLOURS) % len(MARKERS)]}
            axes.errorbar(at, ys, bars, ms=5, lw=1, ls="none", capsize=3, label=name, **look)
        axes.set_xlabel(panel.x)
        axes.set_title(panel.title, fontsize=9)
    grid[0].set_ylabel("test accuracy")
    picture.legend(
        *grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, title="sharing strategy"
    )
    picture.suptitle(title, fontsize=10)
    picture.supxlabel(
        f"{BARS}; without a bar: one seed. Points with equal epsilon are drawn side by side.", fontsize=8, color="0.3"
    )
    return picture


def _slot(low: int, high: int) -> float:
    """Return a length in powers of ten, 28 % of the axis from 10^low to 10^high; a shaded area is 1.2 times as wide."""
    return 0.28 * (high - low)


def _place(point: Point, low: int, high: int) -> float:
    """Return the x position of a point: log10 of its epsilon, or the middle of a shaded area for 0 and inf."""
    x, offset = float(point.x), 0.7 * _slot(low, high)
    return low - offset if x == 0 else high + offset if x == inf else log10(x)


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
