"""Figures 2, A.4 of Fedssyn and B.3 of its first version: FedAvg on quadratics after swapping a share p of samples.

python sweeps/quadratics.py                      # the paper's grid, ten seeds, seconds on one core
python sweeps/quadratics.py --preset smoke       # the same code with fewer values of p and fewer rounds
python sweeps/quadratics.py --fit authors        # fits rounds against 1/sqrt(error) only as the released code does
python sweeps/quadratics.py --models clients     # the error of clients' models before averaging, as in the captions
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.dotted import common_fields
from fedcommons.errors import UserError
from fedcommons.reports import tables
from fedcommons.storage.atomic_files import write_bytes, write_json, write_text
from fedcommons.tune import grid, sweep_folder
from papers.fedssyn import fitted_lines as lines
from papers.fedssyn import quadratics as q
from papers.fedssyn.quadratics_pictures import lines_picture, picture
from papers.fedssyn.quadratics_tables import FIXED, NOISES, chosen, over_seeds, report, table

PRESETS = {"paper": (q.SHARES, q.ROUNDS, 10), "smoke": ((0.0, 0.25, 0.5, 0.75, 1.0), 250, 2)}  # shares p, rounds, seeds


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options; ``shares`` becomes the sorted list of swapped shares p, always with the reference p = 0."""
    preset = grid.preset_of(argv, PRESETS, "paper")
    shares, rounds, seeds = PRESETS[preset]
    parser = parse.Parser(description=__doc__)
    parser.add_options((
        ("preset", str, "paper", f"{', '.join(PRESETS)}: sets p, rounds and seeds"),
        ("target", float, q.TARGET, "error eps to be reached"),
        ("seeds", str, ",".join(map(str, range(seeds))), "seeds of samples, swaps and orders, separated by commas"),
        ("zeta-sq", Annotated[float, "[0, inf)"], 10.0, "zeta^2, difference between the clients"),
        ("sigma-sq", Annotated[float, "[0, inf)"], 0.0,
         "sigma^2, noise of the samples; figure 2 (a) always has 0 and 1000"),
        # With more rounds, the errors of the whole grid would fill more than 1 GB.
        ("rounds", Annotated[int, "[1, 100000]"], rounds, "rounds after which an error counts as not reached"),
        ("p", str | None, None, "shares that are swapped, separated by commas; 0 is always among them"),
        ("fit", str, ",".join(lines.FITS), "how A_p and B_p are fitted: plain, authors (the released code's), or both"),
        ("models", Annotated[str, "server | clients"], "server",
         "models whose error is measured: server, or clients before averaging"),
        ("out", str, "runs/quadratics", "folder of the results"),
        ("dry-run", bool, False, "say what would be computed, and stop"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    options.seeds = grid.values(options, "seeds", int, common_fields()["seed"].allowed)
    options.fit = grid.values(options, "fit", str, " | ".join(lines.FITS))
    options.shares = sorted({0.0, *(shares if options.p is None else grid.values(options, "p", float, "[0, 1]"))})
    return options


def swapped(options: parse.Options, seed: int, sigma_sq: float, shares: Sequence[float]) -> list[q.Quadratics]:
    """Return the quadratic problem of a seed for each share p of samples that are swapped between clients."""
    unswapped = q.draw(seed, options.zeta_sq, sigma_sq)
    return [q.swap(unswapped, p, seed) for p in shares]


def quadratics(argv: Sequence[str]) -> int:
    options = arguments(argv)
    problems = {seed: swapped(options, seed, options.sigma_sq, options.shares) for seed in options.seeds}
    for of_seed in problems.values():
        q.check(of_seed[0], options.target)
    out = Path(options.out)
    if options.dry_run:
        print(f"{out}: {_grid(options)} to compute")
        return 0
    with sweep_folder.open_folder(out), Display() as display:
        return run_all(problems, out, options, display)


def _grid(options: parse.Options) -> str:
    return (
        f"{len(q.STEP_SIZES)} step sizes x {len(options.shares)} p x {len(options.seeds)} seeds x at most "
        f"{options.rounds} rounds"
    )


def run_all(problems: Mapping[int, Sequence[q.Quadratics]], out: Path, options: parse.Options, display: Display) -> int:
    """Run every configuration, and write the tables, the pictures and the summary."""
    play = partial(q.run, rounds=options.rounds, models=options.models)
    least = min(options.target, lines.TARGETS.min())  # the report needs no rounds after the smallest target is reached
    errors, curves = {}, []
    for number, (seed, same_seed) in enumerate(problems.items(), 1):
        errors[seed] = play(same_seed, q.STEP_SIZES, seed=seed, until=least)
        shares = [options.shares[k] for k in chosen(options, 3)]
        few = [problem for sigma_sq in NOISES for problem in swapped(options, seed, sigma_sq, shares)]
        curves.append(np.reshape(play(few, FIXED, seed=seed), (len(NOISES), len(shares), -1)))
        display.step("seeds", number, len(problems), f"seed {seed}")
    floors = [(values.min(), seed, k) for seed, every in errors.items() for k, values in enumerate(every)]
    if min(floors)[0] > options.target:
        floor, seed, k = min(floors)
        step, last = np.unravel_index(errors[seed][k].argmin(), errors[seed][k].shape)
        raise UserError(
            f"no configuration reaches target {options.target:g}: the smallest error of {_grid(options)} is {floor}, "
            f"at p = {options.shares[k]:g} with step size {q.STEP_SIZES[step]:.3g} in round {last}, seed {seed}."
        )
    stacked = dict(zip(NOISES, np.stack(curves, axis=1), strict=True))
    rows = [row for seed, same_seed in problems.items() for row in table(same_seed, errors[seed], seed, options)]
    points = [
        {"sigma_sq": sigma_sq, "seed": seed, "p": options.shares[k], "round": r, "error": error}
        for sigma_sq, values in stacked.items()
        for seed, of_seed in zip(options.seeds, values, strict=True)
        for k, curve in zip(chosen(options, 3), of_seed.tolist(), strict=True)
        for r, error in enumerate(curve)
    ]
    text, first = report(rows, stacked, options), options.seeds[0]
    write_bytes(out / "figure2.png", picture(rows, stacked, options))
    write_bytes(out / "fitted_lines.png", lines_picture(rows, errors[first], options))
    write_text(out / "quadratics.csv", tables.to_csv(rows))
    write_text(out / "figure2a.csv", tables.to_csv(points))
    write_text(out / "quadratics.md", text)
    facts = {name: options[name] for name in ("seeds", "fit", "target", "rounds", "models", "zeta_sq", "sigma_sq")}
    write_json(out / "summary.json", {**facts, "cells": over_seeds(rows)})
    display.say(f"\n{text}\n{out}")
    return 0


if __name__ == "__main__":
    parse.main(quadratics, resumes=False)
