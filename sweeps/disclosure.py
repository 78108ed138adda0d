"""What disclosed data buy: test accuracy after some rounds against the share of the clients' data that was given away.

Where runs share something that an epsilon covers, a second picture has accuracy against this epsilon.

python sweeps/disclosure.py                     # digits: raw copies, and synthetic images that were shuffled
python sweeps/disclosure.py --shares 0.1,0.5 --rhos 0.25,0.75 --seeds 0,1,2
python sweeps/disclosure.py --also runs/mine,runs/other       # points from any other run folders beside these
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import cli
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from fedcommons.paths import user_path
from fedcommons.reports import columns, series, tables
from fedcommons.reports.cells import Cell, cells, once
from fedcommons.reports.frames import load_rounds, load_runs
from fedcommons.reports.metrics import words
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display
from papers.fedssyn import authors

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

ACCURACY = "accuracy_then"
"""Column of the test accuracy after the round that is compared."""


def arguments(argv: Sequence[str]):
    """Options of the picture on top of every field of the experiment."""
    more = (
        ("shares", str, "0.05,0.1,0.2,0.5", "c of raw_copies: shares of examples that others get copies of"),
        ("rhos", str, "0.25,0.75", "rho of stages with generators: shares of examples that they see"),
        ("round", int | None, None, "after which round accuracy is compared; default: federation.rounds, here 20"),
        ("also", str | None, None, "folders with other runs to draw, separated by commas"),
    )
    title = (__doc__ or "").partition("\n")[0]
    lists = {"settings": "real,raw_copies,shuffled_synthetic"}
    parser = grids.parser(title, argv, lists, more, "disclosure")
    smoke = grids.preset_and_dataset(argv)[0] == "smoke"
    parser.set_defaults({"alphas": "0.01", "federation.rounds": 3 if smoke else 20})
    options = cli.parse(parser, argv)
    grids.refuse_fields(options, {"sharing.c": "shares", "generator.rho": "rhos"})
    rounds = cli.flat(options)["federation.rounds"]
    options.round = rounds if options.round is None else options.round
    if not 0 <= options.round <= rounds:
        raise UserError(f"--round must lie in 0 ... federation.rounds = {rounds}, got {options.round}.")
    options.folders = [user_path("--also", name) for name in (options.also or "").split(",") if name]
    return options


def grid(options) -> list[sweep.Cell]:
    """A cell for every value of the field by which its stage gives more or less away."""
    base, found = grids.base(options), []
    shares, rhos = cli.split("--shares", options.shares, float), cli.split("--rhos", options.rhos, float)
    for alpha, algorithm, setting, seed in product(
        cli.split("--alphas", options.alphas, float), cli.split("--algorithms", options.algorithms),
        cli.split("--settings", options.settings), cli.split("--seeds", options.seeds, int),
    ):  # fmt: skip
        values: dict[str, Any] = {
            "seed": seed, "algorithm": algorithm, "partition.alpha": alpha, "sharing.setting": setting,
        }  # fmt: skip
        plain = authors.cell(options, {**base, **values})
        if "c" in plain.config.sharing.constants:
            found += [authors.cell(options, {**base, **values, "sharing.c": c}) for c in shares]
        elif plain.config.generator is not None:
            found += [authors.cell(options, {**base, **values, "generator.rho": rho}) for rho in rhos]
        else:
            found.append(plain)
    return grids.once(found)


def points(folders: Sequence[Path], round: int, display: Display) -> "pd.DataFrame":
    """The finished runs of these folders, each once, with their accuracy after ``round``.

    Shorter runs are left out, and named.
    """
    runs, rounds = (load(*folders, say=display.say) for load in (load_runs, load_rounds))
    runs = once(runs.loc[runs["status"] == "finished", :], display.say)
    then = rounds.loc[rounds["round"] == round, :].set_index("run")["test/accuracy"]
    runs = runs.assign(**{ACCURACY: runs["run"].map(then)})
    for name in runs.loc[runs[ACCURACY].isna(), "run"]:
        display.say(f"left out: {name} has fewer than {round} rounds.")
    return runs.loc[runs[ACCURACY].notna() & runs["disclosed"].notna(), :]


def table(found: Sequence[Cell], round: int) -> str:
    """A line a cell, those that give away least first."""
    head = ["federation", "algorithm", "setting", "given away", f"accuracy after round {round}", "MB exchanged once"]
    private = _private(found)
    head += ["ε of the commons"] * private
    lines = []
    for cell in sorted(found, key=lambda c: (columns.place(c), columns.method(c), series.value(c, "disclosed"))):
        once = fmean(cell.values("bytes_once")) / 1e6
        lines.append(
            [
                columns.place(cell), columns.method(cell), columns.setting(cell),
                f"{100 * fmean(cell.values('disclosed')):.1f} %", tables.percent(cell, ACCURACY), f"{once:.3g}",
                *[tables.commons_epsilon(cell)] * private,
            ]
        )  # fmt: skip
    return tables.markdown(head, lines)


def _private(found: Sequence[Cell]) -> bool:
    """Whether some of them have an epsilon of what they shared."""
    return any(series.value(cell, "pool_epsilon") is not None for cell in found)


def draw(found: Sequence[Cell], path: Path, x: str, title: str, round: int, smoke: bool) -> None:
    """A panel for each federation; a series for each algorithm and way of sharing.

    x: disclosed, or pool_epsilon: then runs that shared nothing stand on the left, those without a guarantee on the
    right.
    """
    several = len({cell.runs["algorithm"].iloc[0] for cell in found}) > 1
    panels = []
    for place in dict.fromkeys(map(columns.place, found)):
        shown = []
        for cell in sorted((c for c in found if columns.place(c) == place), key=lambda c: _epsilon(c)[0]):
            setting = str(cell.runs["sharing.setting"].iloc[0])
            name = f"{cell.runs['algorithm'].iloc[0]}, {setting}" if several else setting
            point = series.point(cell, "disclosed", ACCURACY, name)
            if point:
                shown.append(point if x == "disclosed" else replace(point, x=_epsilon(cell)[1]))
        panels.append(series.Panel(place, words(x), shown))
    series.draw(path, panels, "test accuracy", "way of sharing", f"{title}, after round {round}", smoke)


def _epsilon(cell: Cell) -> tuple[float, str]:
    """Where a cell stands by the epsilon of what it shared, and the name of that place."""
    epsilon = tables.commons_epsilon(cell)
    ends = {"-": (0.0, "nothing"), "none": (inf, "none")}
    return ends[epsilon] if epsilon in ends else (float(epsilon), epsilon)


def report(cells_of_grid: Sequence[sweep.Cell], out: Path, options, display: Display) -> None:
    """Write table, CSV and picture from the run folders, and show the table."""
    own = [folder for cell in cells_of_grid if (folder := out / cell.name).is_dir()]
    if not own and not options.folders:
        return
    runs = points([*own, *options.folders], options.round, display)
    if runs.empty:
        return
    found = cells(runs)
    notes = [
        "Given away: the share of all clients' training examples of which copies were sent, or from which something "
        "that was sent was made, without a differential privacy that can be computed. Model updates, which every run "
        "sends, do not count.",
        "A synthetic image is not its original: a percent by raw copies shows more than a percent by generators.",
        grids.work_note([cell.config for cell in cells_of_grid]),
        *tables.private_notes(runs),
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]
    markdown = grids.stamped(table(found, options.round) + tables.numbered(notes), options)
    write_text(out / "disclosure.md", markdown)
    varied = dict.fromkeys(name for cell in found for name in cell.fields)
    private = ("pool_epsilon",) * _private(found)
    records = tables.records(runs, (*varied, "seed", "disclosed", *private, ACCURACY, "bytes_once"))
    write_text(out / "disclosure.csv", tables.to_csv(records))
    write_json(out / "summary.json", {"name": out.name, "round": options.round, "cells": records})
    datasets = ", ".join(map(str, runs["data.name"].unique()))
    smoke = grids.is_smoke(options)
    draw(found, out / "disclosure.png", "disclosed", datasets, options.round, smoke)
    if _private(found):
        draw(found, out / "disclosure_epsilon.png", "pool_epsilon", datasets, options.round, smoke)
    display.say("\n" + markdown)


def disclosure(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    out, cells_of_grid = Path(options.out), grid(options)
    with Display() as display:
        if options.dry_run:
            grids.dry_run(cells_of_grid, out, display, options.on_cores)
            return 0
        left = sweep.todo(cells_of_grid, out, display)
        with sweep.open_sweep(out, options.resume):
            outcome = sweep.run_cells(left, out, display)
            report(cells_of_grid, out, options, display)
            return grids.conclude(outcome, started, out, "disclosure", display)


if __name__ == "__main__":
    cli.main(disclosure)
