"""Test accuracy after some rounds against the disclosed share of the clients' data.

If shared data has a differential privacy guarantee, a second picture shows accuracy against its epsilon.

python sweeps/disclosure.py                     # digits: raw copies, and shuffled synthetic images
python sweeps/disclosure.py --shares 0.1,0.5 --rhos 0.25,0.75 --seeds 0,1,2
python sweeps/disclosure.py --settings real,raw_copies,merf,ndpdc --epsilons 1,10 --seeds 0,1,2
python sweeps/disclosure.py --also runs/mine,runs/other       # also draws runs of other folders
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.errors import UserError
from fedcommons.reports import tables
from fedcommons.reports.cells import cells
from fedcommons.storage.paths import user_path
from fedcommons.tune import grid as grids
from fedcommons.tune import main, sweep
from fedcommons.tune.study import Report
from papers.disclosure import ACCURACY, draw, points, table
from papers.fedssyn import authors


def arguments(argv: Sequence[str]) -> parse.Options:
    more = (
        ("shares", str, "0.05,0.1,0.2,0.5", "c of raw_copies: shares of examples copied to other clients"),
        ("rhos", str, "0.25,0.75", "rho of sharing strategies with generators: shares of examples that they see"),
        ("epsilons", str, "1,10", "sharing.target_epsilon of sharing strategies that have this field, such as merf"),
        ("round", int | None, None, "round after which accuracy is compared; default: federation.rounds, here 20"),
        ("also", str | None, None, "folders with other runs to draw, separated by commas"),
    )
    lists = {"settings": "real,raw_copies,shuffled_synthetic", "alphas": "0.01"}
    parser = grids.parser(__doc__, argv, lists, more, "disclosure")
    smoke = grids.preset_and_dataset(argv)[0] == "smoke"
    parser.set_defaults({"federation.rounds": 3 if smoke else 20})
    options = parse.parse(parser, argv)
    owned = {"sharing.c": "shares", "generator.rho": "rhos", "sharing.target_epsilon": "epsilons"}
    grids.refuse_fields(options, owned)
    rounds = parse.flat(options)["federation.rounds"]
    options.round = rounds if options.round is None else options.round
    if not 0 <= options.round <= rounds:
        raise UserError(f"--round must lie in 0 ... federation.rounds = {rounds}, got {options.round}.")
    options.folders = [user_path("--also", name) for name in (options.also or "").split(",") if name]
    return options


def grid(options: parse.Options) -> list[sweep.Trial]:
    """Return a trial for every value of the field that sets how much a sharing strategy discloses."""
    base, trials = grids.base(options), []
    shares, rhos, epsilons = (grids.values(options, name, float) for name in ("shares", "rhos", "epsilons"))
    lists = grids.lists(options)
    for values in product(*lists.values()):
        point = dict(zip(lists, values, strict=True))
        sweep.require_few(len(trials) + 1)
        plain = authors.cell(options, {**base, **point})
        if "c" in plain.config.sharing.constants:
            trials += [authors.cell(options, {**base, **point, "sharing.c": c}) for c in shares]
        elif "target_epsilon" in plain.config.sharing.constants:
            trials += [authors.cell(options, {**base, **point, "sharing.target_epsilon": e}) for e in epsilons]
        elif plain.config.generator is not None:
            trials += [authors.cell(options, {**base, **point, "generator.rho": rho}) for rho in rhos]
        else:
            trials.append(plain)
    return grids.once(trials)


def report(cells_of_grid: Sequence[sweep.Trial], options: parse.Options, out: Path, display: Display) -> None:
    """Write the table, CSV and picture from the folders of finished runs, and display the table."""
    folders = [folder for cell in cells_of_grid if (folder := out / cell.name).is_dir()]
    if not folders and not options.folders:
        return
    runs = points([*folders, *options.folders], options.round, display.say)
    if runs.empty:
        return
    configurations = cells(runs)
    notes = [
        "Disclosed: the share of all clients' training examples that were sent as copies, or that shared data was "
        "computed from without a differential privacy guarantee. Model updates, which every run sends, do not count.",
        "One percent sent as raw copies discloses more than one percent seen by generators: synthetic images are not "
        "the originals.",
        grids.work_note([cell.config for cell in cells_of_grid]),
        *tables.private_notes(runs),
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
    ]
    varied = dict.fromkeys(name for cell in configurations for name in cell.fields)
    epsilon = tuple(name for name in tables.POOL_EPSILON if name in runs)
    records = tables.records(runs, (*varied, "seed", "disclosed", *epsilon, ACCURACY, "bytes_once"))
    datasets = ", ".join(map(str, runs["data.name"].unique()))

    def picture(x: str) -> Callable[[Path], object]:
        return lambda path: draw(configurations, path, x, datasets, options.round, grids.is_smoke(options))

    pictures = {"disclosure.png": picture("disclosed")}
    if epsilon:
        pictures["disclosure_epsilon.png"] = picture(epsilon[-1])
    text = table(configurations, options.round) + tables.numbered(notes)
    result = Report(text, records, {"round": options.round, "cells": records}, pictures)
    display.say("\n" + result.write("disclosure", options, out))


def disclosure(argv: Sequence[str]) -> int:
    options = arguments(argv)
    cells_of_grid = grid(options)
    return main.run(options, "disclosure", cells_of_grid, partial(report, cells_of_grid, options))


if __name__ == "__main__":
    parse.main(disclosure)
