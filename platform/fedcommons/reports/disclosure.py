"""Accuracy against what was given away, and against the epsilon of what was shared: points, table, picture."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.reports import columns, series, tables
from fedcommons.reports.cells import Cell, once
from fedcommons.reports.frames import load_rounds, load_runs
from fedcommons.reports.metrics import words

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

ACCURACY = "accuracy_then"
"""Column of the test accuracy after the round that is compared."""


def points(folders: Sequence[Path], round: int, say: Callable[[str], None]) -> "pd.DataFrame":
    """The finished runs of these folders, each once, with their accuracy after ``round``.

    Shorter runs are left out, and named.
    """
    runs, rounds = (load(*folders, say=say) for load in (load_runs, load_rounds))
    runs = once(runs.loc[runs["status"] == "finished", :], say)
    then = rounds.loc[rounds["round"] == round, :].set_index("run")["test/accuracy"]
    runs = runs.assign(**{ACCURACY: runs["run"].map(then)})
    for name in runs.loc[runs[ACCURACY].isna(), "run"]:
        say(f"left out: {name} has fewer than {round} rounds.")
    return runs.loc[runs[ACCURACY].notna() & runs["disclosed"].notna(), :]


def table(found: Sequence[Cell], round: int) -> str:
    """A line a cell, those that give away least first."""
    head = ["federation", "algorithm", "setting", "given away", f"accuracy after round {round}", "MB exchanged once"]
    with_epsilon = private(found)
    head += ["ε of the commons"] * with_epsilon
    lines = []
    for cell in sorted(found, key=lambda c: (columns.place(c), columns.method(c), series.value(c, "disclosed"))):
        once = fmean(cell.values("bytes_once")) / 1e6
        lines.append(
            [
                columns.place(cell), columns.method(cell), columns.setting(cell),
                f"{100 * fmean(cell.values('disclosed')):.1f} %", tables.percent(cell, ACCURACY), f"{once:.3g}",
                *[tables.commons_epsilon(cell)] * with_epsilon,
            ]
        )  # fmt: skip
    return tables.markdown(head, lines)


def private(found: Sequence[Cell]) -> bool:
    """Whether some of them have an epsilon of what they shared."""
    return any(map(tables.has_epsilon, found))


def draw(found: Sequence[Cell], path: Path, x: str, title: str, round: int, smoke: bool) -> None:
    """A panel for each federation; a series for each algorithm and way of sharing. x: disclosed, or pool_epsilon."""
    from fedcommons.reports import epsilon

    several = len({cell.runs["algorithm"].iloc[0] for cell in found}) > 1
    panels = []
    for place in dict.fromkeys(map(columns.place, found)):
        shown = []
        for cell in sorted((c for c in found if columns.place(c) == place), key=epsilon_place):
            setting = str(cell.runs["sharing.setting"].iloc[0])
            name = f"{cell.runs['algorithm'].iloc[0]}, {setting}" if several else setting
            point = series.point(cell, "disclosed", ACCURACY, name)
            if point:
                shown.append(point if x == "disclosed" else replace(point, x=epsilon_place(cell)))
        panels.append(series.Panel(place, words(x), shown))
    title = f"{title}, after round {round}"
    if x == "disclosed":
        series.draw(path, panels, "test accuracy", "way of sharing", title, smoke)
    else:
        epsilon.draw(path, panels, title, smoke)


def epsilon_place(cell: Cell) -> float:
    """The epsilon of what a cell shared; 0 where it shared nothing, inf where no epsilon covers it."""
    said = tables.commons_epsilon(cell)
    return {"-": 0.0, "none": inf}.get(said, tables.largest_epsilon(cell) or 0.0)
