"""Figures 1 to 3 of privacy-flexible federated learning: gradient coding and raw copies of data against stragglers.

python sweeps/gradient_coding.py                                        # digits, 200 repetitions, two minutes
python sweeps/gradient_coding.py --preset smoke                         # the same code with smaller numbers
python sweeps/gradient_coding.py --preset authors --data-dir DIR        # MNIST as in the released code, a quarter hour
python sweeps/gradient_coding.py --preset authors --data-dir DIR --shares 0,0.2
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.errors import UserError, quote
from fedcommons.tune import cached_results, grid, sweep_folder
from papers.agc.presets import PRESETS

if TYPE_CHECKING:  # torch takes seconds to import
    from papers.agc.gradient_coding import Setting


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options and split comma lists.

    ``pairs`` becomes a list of (q, d): probability to straggle and number of copies. ``shares`` becomes the sorted list
    of the shares c of images that are not private; 0 is always among them.
    """
    preset = grid.preset_of(argv, PRESETS)
    chosen = PRESETS[preset]
    parser = parse.Parser(description=__doc__)
    parser.add_options((
        ("preset", str, preset,
         f"{', '.join(PRESETS)}: pixels, images, test images, and defaults of the options below"),
        ("dataset", Annotated[str, "digits | mnist"], chosen.dataset, "digits or mnist"),
        ("data-dir", str | None, None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("shares", str, "0,0.1,0.2,0.3,0.4,0.5", "c, shares of images that are not private; 0 is always among them"),
        ("pairs", str, "0.3:2,0.5:3,0.7:4", "q:d, probability to straggle and number of copies, separated by commas"),
        ("sharing", Annotated[str, "exact | binomial"], "exact",
         "exact: to d other clients; binomial: to each of them with probability d/(N-1)"),
        ("repetitions", Annotated[int, "[2, 1e6]"], chosen.repetitions, "repetitions of each curve"),
        ("seed", Annotated[int, "[0, 4611686018427387904]"], 0, "seed of all random draws"),
        ("workers", Annotated[int | None, "[1, 1e6]"], None,
         "processes, by Ray; default: all cores of Ray; 1: this process, without Ray"),
        ("out", str, "runs/gradient-coding", "folder of the results"),
        ("download", bool, False, "fetch the data set if it is not in the folder"),
        ("resume", bool, False, "keep the curves that are already in that folder"),
        ("dry-run", bool, False, "say what would be computed, and stop"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    options.shares = sorted({0.0, *grid.values(options, "shares", float, "[0, 1]")})
    options.pairs = grid.pairs(options, "pairs", (float, int), "q:d such as 0.5:3")
    if wrong := [f"{q:g}:{d}" for q, d in options.pairs if not (0 <= q < 1 and 1 <= d <= 1e9)]:
        raise UserError(f"--pairs takes q:d with q in [0, 1) and d in [1, 1e9], got {quote(wrong[0])}.")
    return options


def settings(options: parse.Options) -> "dict[str, Setting]":
    """Return the setting of each curve of figures 1 to 3, by the name of the curve's file."""
    from papers.agc.gradient_coding import PARTITIONS, Setting

    preset = PRESETS[options.preset]
    common = {"sharing": options.sharing, "per_class": preset.per_class, "rounds": preset.rounds}
    curves = {
        f"{name}_q{q:g}_d{d}_c{c:g}": Setting(name, q, d, c, **common)
        for name, (q, d), c in product(PARTITIONS, options.pairs, options.shares)
    }
    slow = {**common, "lr": 0.01, "decay": 1.0}
    return {
        **curves,
        "figure3_a": Setting("single_class", 0.0, 3, 0.0, **slow),
        "figure3_b": Setting("single_class", 0.5, 3, 0.2, **slow),
    }


def gradient_coding(argv: Sequence[str]) -> int:
    options = arguments(argv)
    print("Loading torch and the data ...", flush=True)
    from papers.agc.coding import write_all
    from papers.agc.curves import load_problem, run_all, summed_up
    from papers.agc.gradient_coding import check

    problem, wanted, out = load_problem(options), settings(options), Path(options.out)
    for setting in wanted.values():
        check(setting, problem.n_classes, problem.y.bincount().tolist())
    if options.dry_run:
        print(f"{out}: {len(wanted)} curves of {options.repetitions} repetitions to compute")
        return 0
    with sweep_folder.open_folder(out), Display() as display:
        (out / "curves").mkdir(exist_ok=True)
        files = {name: out / "curves" / f"{name}.json" for name in wanted}
        if not options.resume and any(file.exists() for file in files.values()):
            raise UserError(f"--out: {out} holds curves already; add --resume to keep them or name another folder.")
        of_all = {name: options[name] for name in ("preset", "dataset", "repetitions", "seed")}
        facts = {name: {**of_all, **asdict(setting)} for name, setting in wanted.items()}
        curves = {name: curve for name in wanted if (curve := cached_results.read(files[name], facts[name], "curve"))}
        remaining = {name: setting for name, setting in wanted.items() if name not in curves}
        for number, (name, played) in enumerate(run_all(problem, remaining, options), 1):
            curves[name] = summed_up(remaining[name], played)
            cached_results.write(files[name], facts[name], "curve", curves[name])
            display.step("curves", number, len(remaining), name)
        write_all([{**curves[name], "lr": wanted[name].lr} for name in wanted], problem, options, display)
    return 0


if __name__ == "__main__":
    parse.main(gradient_coding)
