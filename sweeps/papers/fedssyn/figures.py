"""Figure 3 of Fedssyn: accuracy in each data setting, with the central lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from fedcommons.reports.cells import Cell
from fedcommons.reports.columns import identified, method, setting, text
from fedcommons.reports.plots import COLOURS, colour_of, save
from fedcommons.reports.plots import panels as empty
from fedcommons.reports.series import value
from fedcommons.reports.tables import markdown, numbered, percent, share

DARK = ("shuffled_synthetic", "shuffled_real")
LINES = {"central_real": ("k", 0), "central_synthetic": ("#2e8b57", 5)}
"""Colour, as in the paper, and where the dashes begin, so that two lines at the same height are both seen."""


@dataclass(frozen=True)
class Bar:
    """Mean and standard deviation over seeds of an accuracy in percent; no deviation where there is one seed."""

    group: str
    setting: str
    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Panel:
    """Bars, in groups along the axis, and horizontal lines: (central_real or central_synthetic, percent)."""

    title: str
    bars: Sequence[Bar]
    lines: Sequence[tuple[str, float]]


def panels(cells: Sequence[Cell]) -> list[Panel]:
    """A panel for each alpha, of last accuracies; the line of the real images stands in all of them."""

    def last(cell: Cell) -> list[float]:
        return [100 * found for found in cell.values("last_accuracy")]

    def alpha(cell: Cell) -> float | None:
        return value(cell, "partition.alpha")

    central = [cell for cell in cells if value(cell, "algorithm") == "central"]
    federated = [cell for cell in cells if value(cell, "algorithm") != "central"]
    result = []
    for here in dict.fromkeys(map(alpha, federated)):
        inside = [cell for cell in federated if alpha(cell) == here]
        bars = [
            Bar(method(cell), setting(cell), fmean(last(cell)), stdev(last(cell)) if len(cell.runs) > 1 else None)
            for cell in inside
        ]
        lines = [(setting(cell), fmean(last(cell))) for cell in central if alpha(cell) in (None, here)]
        result.append(Panel(f"{value(inside[0], 'data.name')}, α = {text(here)}", bars, lines))
    return result


def accuracy_table(cells: Sequence[Cell], footnotes: Sequence[str]) -> str:
    """A line for each bar and each central model."""
    head, known = identified(cells)
    results = [
        [percent(cell, "last_accuracy"), percent(cell, "best_accuracy"), share(cell), text(value(cell, "lr"))]
        for cell in cells
    ]
    lines = [[*line, *result] for line, result in zip(known, results, strict=True)]
    return markdown([*head, "last acc.", "best acc.", "p", "lr"], lines) + numbered(footnotes)


def accuracy_bars(path: Path, panels: Sequence[Panel], smoke: bool) -> None:
    """A panel for each partition, in it a group of bars for each algorithm and a dashed line for each central model."""
    groups = max(len({b.group for b in p.bars}) for p in panels)
    settings = list(dict.fromkeys(b.setting for p in panels for b in p.bars))
    rows, columns = (len(panels), 1) if groups > 2 else (1, len(panels))
    width, height = max(2.2, 0.6 * len(settings) * groups + 0.6), 2.8 if rows > 1 else 3.4
    size = (1.2 + width * columns, 0.8 + height * rows)
    figure, grid = empty(rows, columns, size, sharey=True)
    pitch = len(settings) + 0.8  # from one group to the next
    for axes, panel in zip(grid.flat, panels, strict=True):
        names = list(dict.fromkeys(b.group for b in panel.bars))
        for b in panel.bars:
            x = names.index(b.group) * pitch + settings.index(b.setting)
            axes.bar(x, b.mean, 0.9, color=colour_of(b.setting, settings), yerr=b.deviation, capsize=3, label=b.setting)
            ink = "w" if b.setting in DARK else "k"
            axes.text(x, 2, f"{b.mean:.1f}", ha="center", fontsize=9, color=ink)  # at the foot, clear of the lines
        for name, height in panel.lines:
            colour, offset = LINES[name]
            axes.axhline(height, color=colour, linestyle=(offset, (5, 5)), linewidth=1.4, label=name)
        axes.set_xticks([i * pitch + (len(settings) - 1) / 2 for i in range(len(names))], names)
        axes.tick_params("x", length=0)
        axes.set(title=panel.title, ylim=(0, 105), ylabel="top-1 test accuracy (%)")
        axes.label_outer()
        axes.spines[["top", "right"]].set_visible(False)
    labelled = [axes.get_legend_handles_labels() for axes in grid.flat]
    found = {name: handle for handles, names in labelled for handle, name in zip(handles, names, strict=True)}
    shown = [name for name in dict.fromkeys((*COLOURS, *settings, *LINES)) if name in found]
    look = {"ncols": 3 if size[0] > 6 else 1, "fontsize": 9, "handlelength": 3, "frameon": False}
    figure.legend([found[n] for n in shown], shown, loc="outside lower center", **look)
    save(figure, path, 120, smoke)
