"""Figure 3 of Fedssyn from the summaries of runs: accuracy per data setting, with the central lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from fedcommons.reports.plots import COLOURS, colour_of, save
from fedcommons.reports.plots import panels as empty
from fedcommons.reports.tables import Entry, markdown, mean_std, number

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


def panels(entries: Sequence[Entry]) -> list[Panel]:
    """A panel for each alpha, of last accuracies; the line of the real images stands in all of them."""

    def percent(e: Entry) -> list[float]:
        return [100 * r["last_accuracy"] for r in e.runs]

    federated = [e for e in entries if e.setting not in LINES]
    result = []
    for alpha in dict.fromkeys(e.alpha for e in federated):
        bars = [
            Bar(e.algorithm, e.setting, fmean(percent(e)), stdev(percent(e)) if len(e.runs) > 1 else None)
            for e in federated
            if e.alpha == alpha
        ]
        lines = [(e.setting, fmean(percent(e))) for e in entries if e.setting in LINES and e.alpha in (None, alpha)]
        result.append(Panel(f"{federated[0].dataset}, α = {number(alpha)}", bars, lines))
    return result


def accuracy_table(entries: Sequence[Entry], footnotes: Sequence[str]) -> str:
    """A line for each bar and each central model."""
    head = ["data set", "N", "C", "alpha", "algorithm", "setting", "last acc.", "best acc.", "p", "lr"]

    def show(value: object, form: str = "g") -> str:
        return "" if value is None else format(value, form)

    lines = [
        [e.dataset, show(e.n_clients), show(e.participation), show(e.alpha), e.algorithm, e.setting,
         *(mean_std([100 * r[f"{kind}_accuracy"] for r in e.runs], 1) for kind in ("last", "best")),
         show(e.runs[0].get("p"), ".2f"), show(e.runs[0]["learning_rate"])]
        for e in entries
    ]  # fmt: skip
    return markdown(head, lines) + "".join(f"\n{i}. {note}" for i, note in enumerate(footnotes, 1)) + "\n"


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
        for name, value in panel.lines:
            colour, offset = LINES[name]
            axes.axhline(value, color=colour, linestyle=(offset, (5, 5)), linewidth=1.4, label=name)
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
