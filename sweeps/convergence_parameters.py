"""Figures 5, A.7 and A.8 of Fedssyn: convergence parameters over the rounds, and Lemma 1's predictions for them.

The parameters are the client dissimilarity zeta^2, the gradient variance sigma^2 and the shift delta^2 of the pool.

python sweeps/convergence_parameters.py                     # digits, FedAvg, some minutes on a laptop
python sweeps/convergence_parameters.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/convergence_parameters.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's numbers
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import choose
from fedcommons.errors import UserError
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry, Study
from papers.fedssyn.courses_report import NAMED, report

PAPER = {"measure.every": 5, "generator.rho": 1.0}  # rho = 1: generators see all n_i = 4500 images of a client
PAPER_A8 = {
    "partition.n_clients": 40,
    "partition.alpha": 0.01,
    "generator.rho": 0.75,
}  # a generator sees 845 of a client's 1125 images, so the share of pool images is p = 1125/(845 + 1125)
"""Fields that figures 5 and A.7 (``PAPER``) and A.8 (``PAPER_A8``) add to preset paper; the user's values prevail."""

Figure = Mapping[str, Sequence[sweep.Trial]]
"""The curves of a figure by label, each with a trial for every seed."""

CHECKPOINTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of generator.epochs: 50 ... 450 of 500 in the paper
OPTIONS = {"seed": "seeds", "sharing.p": "p", "sharing.setting": "p", "measure.smoothness": "hessians",
         "generator.steps": "generator-epochs"}  # fmt: skip
"""Fields that options of the sweep set, as field: option; without figure A.8 the user may set generator.steps."""


def arguments(argv: Sequence[str]) -> parse.Options:
    preset, dataset = grid.preset_and_dataset(argv, grid.PRESETS)
    fields = {**presets.preset(preset, dataset), "measure.every": 1, **(PAPER if preset == "paper" else {})}
    lists = {"settings": "real,shuffled_synthetic"}
    shares = ", ".join(f"{share:g}" for share in CHECKPOINTS)
    parser = grid.study_parser(__doc__, argv, "convergence", grid.PRESETS, fields, (
        ("seeds", str, "0", "seeds, separated by commas: mean and range over them"),
        ("p", str, "0,0.06,0.5", "shares of synthetic data, in [0, 1), separated by commas; 0: no sharing"),
        ("generator-epochs", str | None, None,
         f"figure A.8: epochs of the generators, empty for none; default: {shares} of generator.epochs"),
        ("generator-p", Annotated[float, "(0, 1)"], 0.57 if preset == "paper" else 0.5,  # an empty pool has no delta^2
         "figure A.8: share of synthetic data, in (0, 1)"),
        ("hessians", bool, False, "also measure the smoothness L_p: hundreds of passes over the data"),
    ), lists=lists)  # fmt: skip
    parser.hide(OPTIONS)
    options = parse.parse(parser, argv)
    has_a8 = options.generator_epochs != ""
    parse.refuse_fields(options, {f: option for f, option in OPTIONS.items() if has_a8 or f != "generator.steps"})
    if options.measure.every < 1:
        raise UserError(f"measure.every must be at least 1 in this sweep, got {options.measure.every}.")
    return options


def figure_a7(options: parse.Options) -> Figure:
    """Return the trials of figures 5 and A.7 by curve: one per share p of synthetic images, one for IID data."""
    curves: dict[str, dict[str, Any]] = {"IID": {"partition.name": "iid"}}
    for p in sorted(grid.values(options, "p", float, "[0, 1)")):
        shared = {"sharing.setting": "shuffled_synthetic", "sharing.p": p}
        curves[f"p = {p:g}"] = shared if p else {"sharing.setting": "real"}
    return {label: _cells(options, fields) for label, fields in curves.items()}


def figure_a8(options: parse.Options) -> Figure:
    """Return the trials of figure A.8 by curve, one per number of generator epochs; empty if A.8 is left out."""
    if (listed := options.generator_epochs) == "":
        return {}
    shares = (max(1, round(share * options.generator.epochs)) for share in CHECKPOINTS)
    epochs = shares if listed is None else grid.values(options, "generator-epochs", int)
    fields = {name: v for name, v in PAPER_A8.items() if options.preset == "paper" and name not in options.asked}
    fields |= {"sharing.setting": "shuffled_synthetic", "sharing.p": options.generator_p}
    return {f"{n} epochs": _cells(options, {**fields, "generator.epochs": n}) for n in sorted(set(epochs))}


def _cells(options: parse.Options, fields: Mapping[str, Any]) -> list[sweep.Trial]:
    base = {**grid.base(options), **fields, "measure.smoothness": options.hessians}
    seeds = grid.values(options, "seeds", int)
    sweep.require_few(len(seeds) * len(options.p.split(",")))
    return [sweep.cell(choose({**base, "seed": seed}, options.fields), NAMED) for seed in seeds]


def entries(options: parse.Options) -> list[Entry]:
    """Return an entry for each figure, curve and seed; a trial that both figures show runs only once."""
    figures = {"a7": figure_a7(options), "a8": figure_a8(options)}
    return [
        Entry(cell, {"figure": name, "curve": label})
        for name, curves in figures.items() for label, cells in curves.items() for cell in cells
    ]  # fmt: skip


convergence_parameters = Study("convergence_parameters", arguments, entries, report)

if __name__ == "__main__":
    parse.main(convergence_parameters)
