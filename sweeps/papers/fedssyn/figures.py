"""Figure 3 of Fedssyn: accuracy with each sharing strategy, and lines of central models as references."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedcommons.reports.cells import Cell
from fedcommons.reports.columns import identified, method, setting, text
from fedcommons.reports.plots import finish, save
from fedcommons.reports.plots import panels as empty
from fedcommons.reports.series import looks, value
from fedcommons.reports.tables import markdown, numbered, percent, share
from papers.fedssyn import references

NAMES = {"central_real": references.CENTRAL, "central_synthetic": references.SERVER}
"""Names of the central models' rows."""

WHITE = {"color": "w", "pad": 0.3, "alpha": 0.8}
MEANING = "dots and dashed lines: mean over seeds; bars and bands: minimum to maximum"


@dataclass(frozen=True)
class Dot:
    """Accuracies in percent, one per seed, of a method (``group``) with a sharing strategy (``setting``)."""

    group: str
    setting: str
    values: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """A panel: dots, grouped by method, and lines of central models as (name of the model, accuracy per seed in %)."""

    title: str
    dots: Sequence[Dot]
    lines: Sequence[tuple[str, Sequence[float]]]


def panels(cells: Sequence[Cell]) -> list[Panel]:
    """Return a panel of last accuracies for each alpha; central_real, which has no alpha, is in all panels."""

    def last(cell: Cell) -> list[float]:
        return [100 * accuracy for accuracy in cell.values("last_accuracy")]

    def alpha(cell: Cell) -> float | None:
        return value(cell, "partition.alpha")

    central = [cell for cell in cells if value(cell, "algorithm") == "central"]
    federated = [cell for cell in cells if value(cell, "algorithm") != "central"]
    result = []
    for panel_alpha in dict.fromkeys(map(alpha, federated)):
        inside = [cell for cell in federated if alpha(cell) == panel_alpha]
        dots = [Dot(method(cell), setting(cell), last(cell)) for cell in inside if last(cell)]
        lines = [(setting(cell), last(cell)) for cell in central if last(cell) and alpha(cell) in (None, panel_alpha)]
        result.append(Panel(f"{value(inside[0], 'data.name')}, α = {text(panel_alpha)}", dots, lines))
    return result


def accuracy_table(cells: Sequence[Cell], footnotes: Sequence[str]) -> str:
    """Return the Markdown table with a line for each federated configuration and each central model."""
    head, identities = identified(cells)
    results = [
        [percent(cell, "last_accuracy"), percent(cell, "best_accuracy"), share(cell), text(value(cell, "lr"))]
        for cell in cells
    ]
    for line in identities:
        line[head.index("algorithm")] = NAMES.get(line[head.index("setting")], line[head.index("algorithm")])
    lines = [[*line, *result] for line, result in zip(identities, results, strict=True)]
    return markdown([*head, "last acc.", "best acc.", "p", "lr"], lines) + numbered(footnotes)


def accuracy_dots(path: Path, panels: Sequence[Panel], title: str, smoke: bool) -> None:
    """Draw a panel for each partition: a row for each method and sharing strategy, a line for each central model."""
    rows = list(dict.fromkeys((d.group, d.setting) for p in panels for d in p.dots))
    look = looks(name for _, name in rows)
    several = len({group for group, _ in rows}) > 1
    names = [f"{group}, {setting}" if several else setting for group, setting in rows]
    columns = min(2, len(panels))
    size = (2.2 + 3.8 * columns, 1.4 + (0.9 + 0.36 * len(rows)) * -(-len(panels) // columns))
    figure, grid = empty(-(-len(panels) // columns), columns, size, sharey=True)
    every = [seeds for p in panels for seeds in (*(d.values for d in p.dots), *(values for _, values in p.lines))]
    least = min((value for seeds in every for value in seeds), default=0)
    for axes, panel in zip(grid.flat, panels, strict=False):
        for name, values in panel.lines:
            references.draw(axes.axvline, NAMES[name], values)
            axes.axvspan(min(values), max(values), color=references.LINES[NAMES[name]][0], alpha=0.12, lw=0)
        for dot in panel.dots:
            y, mean, colour = rows.index((dot.group, dot.setting)), fmean(dot.values), look[dot.setting][0]
            axes.plot([min(dot.values), max(dot.values)], [y, y], color=colour, lw=1.6, marker="|", ms=7)
            axes.plot(mean, y, "o", color=colour, ms=7)
            axes.annotate(
                f"{mean:.1f}", (mean, y), (0, 6), textcoords="offset points", ha="center", fontsize=8, bbox=WHITE
            )
        axes.set(title=panel.title, xlabel="last test accuracy, %", xlim=(max(0, 5 * ((least - 1) // 5)), 100.5))
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.7)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    finish(figure, f"{title}\n{MEANING}")
    save(figure, path, 120, smoke)
