"""Tables and pictures of accuracy against the share of examples disclosed, and against the epsilon of shared data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, floor, inf, log10
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.reports import columns, series, tables
from fedcommons.reports.cells import Cell, drop_duplicates
from fedcommons.reports.frames import load_rounds, load_runs
from fedcommons.reports.metrics import words

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd
    from matplotlib.axes import Axes

ACCURACY = "accuracy_then"
"""Name of a column: test accuracy after the round at which the runs are compared."""


def points(folders: Sequence[Path], round: int, say: Callable[[str], None]) -> "pd.DataFrame":
    """Return the finished runs of these folders with their accuracy after ``round``; ``say`` names runs left out."""
    runs, rounds = (load(*folders, say=say) for load in (load_runs, load_rounds))
    runs = drop_duplicates(runs.loc[runs["status"] == "finished", :], say)
    then = rounds.loc[rounds["round"] == round, :].set_index("run")["test/accuracy"]
    runs = runs.assign(**{ACCURACY: runs["run"].map(then)})
    for name in runs.loc[runs[ACCURACY].isna(), "run"]:
        say(f"left out: {name} has fewer than {round} rounds.")
    return runs.loc[runs[ACCURACY].notna() & runs["disclosed"].notna(), :]


def table(cells: Sequence[Cell], round: int) -> str:
    """Return a markdown table with one line per configuration, sorted by federation, method and disclosed share."""
    head = ["federation", "algorithm", "setting", "disclosed", f"accuracy after round {round}", "MB exchanged once"]
    with_epsilon = any(tables.largest_epsilon(cell) is not None for cell in cells)
    lines = []
    for cell in sorted(cells, key=lambda c: (columns.place(c), columns.method(c), series.value(c, "disclosed"))):
        disclosed, once = 100 * fmean(cell.values("disclosed")), fmean(cell.values("bytes_once")) / 1e6
        line = [columns.place(cell), columns.method(cell), columns.setting(cell), f"{disclosed:.1f} %"]
        line += [tables.percent(cell, ACCURACY), f"{once:.3g}", *[tables.commons_epsilon(cell)] * with_epsilon]
        lines.append(line)
    return tables.markdown([*head, *["ε of shared data"] * with_epsilon], lines)


def draw(cells: Sequence[Cell], path: Path, x: str, title: str, round: int, smoke: bool) -> None:
    """Write a picture of the accuracy after ``round``, with a panel per federation. x: disclosed or pool_epsilon."""
    several = len({cell.runs["algorithm"].iloc[0] for cell in cells}) > 1

    def name(cell: Cell) -> str:
        others = {n: series.value(cell, n) for n in columns.others(cell) if "epsilon" not in n}
        texts = {n: value for n, value in others.items() if isinstance(value, str) or (value and not is_share)}
        words = [f"{'' if n.endswith('.name') else n.rpartition('.')[2]} {columns.text(value, n)}".strip()
                 for n, value in texts.items()]  # fmt: skip
        algorithm, setting = (columns.text(series.value(cell, n), n) for n in ("algorithm", "sharing.setting"))
        return ", ".join([*[algorithm] * several, setting, *words])

    panels, is_share = [], x == "disclosed"
    for place in dict.fromkeys(map(columns.place, cells)):
        points_of_panel = []
        for cell in sorted((c for c in cells if columns.place(c) == place), key=epsilon_place):
            if point := series.point(cell, "disclosed", ACCURACY, name(cell)):
                points_of_panel.append(replace(point, x=100 * float(point.x) if is_share else epsilon_place(cell)))
        panels.append(series.Panel(place, words(x) + (", %" if is_share else " (log)"), points_of_panel))
    draw_panels, against = (series.draw, "share of examples disclosed") if is_share else (_draw_epsilons, "epsilon")
    title = f"{title}: test accuracy after round {round} against {against}"
    draw_panels(path, panels, "test accuracy", "sharing strategy", title, smoke)


def epsilon_place(cell: Cell) -> float:
    """Return the epsilon of a configuration's shared data: 0 if nothing was shared, inf without a privacy guarantee."""
    return {"-": 0.0, "none": inf}.get(tables.commons_epsilon(cell), tables.largest_epsilon(cell) or 0.0)


def _draw_epsilons(path: Path, panels: Sequence[series.Panel], y: str, legend: str, title: str, smoke: bool) -> None:
    """Draw accuracy against epsilon on a logarithmic axis, with a shaded area at each end for epsilons 0 and inf."""
    every = [p for panel in panels for p in panel.points]
    names = list(dict.fromkeys(p.series for p in every))
    finite = [x for p in every if 0 < (x := float(p.x)) < inf] or [1.0]
    low, high = floor(log10(min(finite))), ceil(log10(max(finite)))
    high += high == low  # the axis from 10^low to 10^high must not be empty
    wide = high - low
    slot = 0.28 * wide  # width of a shaded area
    ends = {0.0: low - 0.7 * slot, inf: high + 0.7 * slot}

    def move(p: series.Point) -> series.Point:
        neighbours = [name for name in names if any((q.series, f"{q.x:.2g}") == (name, f"{p.x:.2g}") for q in every)]
        offset = 0.025 * wide * (neighbours.index(p.series) - (len(neighbours) - 1) / 2)
        return replace(p, x=offset + (ends[x] if (x := float(p.x)) in ends else log10(x)))

    def axis(axes: "Axes") -> None:
        powers = range(low, high + 1)
        marks = [(float(power), f"{10.0**power:g}") for power in powers]
        if wide <= 2:
            marks += [(power + log10(k), f"{k * 10.0**power:g}") for power in powers[:-1] for k in (2, 5)]
        marks = [(ends[0.0], "nothing\nshared"), *marks, (ends[inf], "no\nguarantee")]
        axes.set_xlim(low - 1.3 * slot, high + 1.3 * slot)
        axes.axvspan(low - 1.3 * slot, low - 0.1 * slot, color="0.92", lw=0)
        axes.axvspan(high + 0.1 * slot, high + 1.3 * slot, color="0.92", lw=0)
        axes.set_xticks([place for place, _ in marks], [text for _, text in marks])

    note = f"{series.BARS}; without a bar: one seed. Points with equal epsilon are drawn side by side."
    panels = [replace(panel, points=[*map(move, panel.points)]) for panel in panels]
    series.draw(path, panels, y, legend, title, smoke, axis=axis, note=note, size=(4.6, 4))
