"""Tables and pictures of accuracy against the share of examples disclosed, and against the epsilon of shared data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.reports import columns, series, tables
from fedcommons.reports.cells import Cell, drop_duplicates
from fedcommons.reports.frames import load_rounds, load_runs
from fedcommons.reports.metrics import words

if TYPE_CHECKING:  # pandas takes a second to import, which would slow --help
    import pandas as pd

ACCURACY = "accuracy_then"
"""Name of a column: test accuracy after the round at which the runs are compared."""


def points(folders: Sequence[Path], round: int, say: Callable[[str], None]) -> "pd.DataFrame":
    """Return the finished runs of these folders, without duplicates, with their test accuracy after ``round``.

    Runs with fewer rounds are left out; ``say`` is called with a message on each such run.
    """
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
    with_epsilon = private(cells)
    head += ["ε of shared data"] * with_epsilon
    lines = []
    for cell in sorted(cells, key=lambda c: (columns.place(c), columns.method(c), series.value(c, "disclosed"))):
        once = fmean(cell.values("bytes_once")) / 1e6
        lines.append(
            [
                columns.place(cell), columns.method(cell), columns.setting(cell),
                f"{100 * fmean(cell.values('disclosed')):.1f} %", tables.percent(cell, ACCURACY), f"{once:.3g}",
                *[tables.commons_epsilon(cell)] * with_epsilon,
            ]
        )  # fmt: skip
    return tables.markdown(head, lines)


def private(cells: Sequence[Cell]) -> bool:
    """Return whether one of these configurations has an epsilon of the shared data."""
    return any(map(tables.has_epsilon, cells))


def draw(cells: Sequence[Cell], path: Path, x: str, title: str, round: int, smoke: bool) -> None:
    """Write a picture of the accuracy after ``round``, with one panel per federation.

    There is one series per algorithm and sharing strategy. x: ``disclosed`` (share of examples) or ``pool_epsilon``
    (epsilon of the shared data). smoke: print across the picture that it comes from a smoke test.
    """
    from fedcommons.reports import epsilon

    several = len({cell.runs["algorithm"].iloc[0] for cell in cells}) > 1
    panels = []
    for place in dict.fromkeys(map(columns.place, cells)):
        points_of_panel = []
        for cell in sorted((c for c in cells if columns.place(c) == place), key=epsilon_place):
            setting = columns.text(cell.runs["sharing.setting"].iloc[0], "sharing.setting")
            name = f"{cell.runs['algorithm'].iloc[0]}, {setting}" if several else setting
            point = series.point(cell, "disclosed", ACCURACY, name)
            if point:
                points_of_panel.append(point if x == "disclosed" else replace(point, x=epsilon_place(cell)))
        panels.append(series.Panel(place, words(x), points_of_panel))
    title = f"{title}, after round {round}"
    if x == "disclosed":
        series.draw(path, panels, "test accuracy", "sharing strategy", title, smoke)
    else:
        epsilon.draw(path, panels, title, smoke)


def epsilon_place(cell: Cell) -> float:
    """Return the epsilon of a configuration's shared data: 0 if nothing was shared, inf without a privacy guarantee."""
    words_of_epsilon = tables.commons_epsilon(cell)
    return {"-": 0.0, "none": inf}.get(words_of_epsilon, tables.largest_epsilon(cell) or 0.0)
