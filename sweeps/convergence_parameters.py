"""Figures 5, A.7 and A.8 of Fedssyn: zeta^2, sigma^2 and delta^2 over the rounds, beside what Lemma 1 makes of them.

python sweeps/convergence_parameters.py                     # digits, FedAvg, some minutes on a laptop
python sweeps/convergence_parameters.py --preset smoke      # the same code with smaller numbers, under a minute
python sweeps/convergence_parameters.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's, for GPUs
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcommons.config import cli, parts, presets
from fedcommons.config.cli import Options
from fedcommons.config.flat import choose
from fedcommons.errors import UserError
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.reports.frames import load_rounds
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display

Figure = Mapping[str, Sequence[sweep.Cell]]
"""The curves of a figure, each with a cell for every seed."""

PAPER = {"measure.every": 5, "generator.rho": 1.0}  # rho n_i = 4500 (A.3.5)
PAPER_A8 = {"partition.n_clients": 40, "partition.alpha": 0.01, "generator.rho": 0.75}  # p = 1125/(845 + 1125)
"""Fields of figures 5 and A.7, and of A.8, on top of preset paper, unless they are asked for."""

CHECKPOINTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of generator.epochs: the paper's 50 ... 450 of 500
TAKEN = {"seed": "seeds", "sharing.p": "p", "sharing.setting": "p", "measure.smoothness": "hessians"}
"""Fields that an option of the sweep sets."""

NAMED = {"partition.name": "", "partition.alpha": "alpha", "partition.n_clients": "N", "sharing.p": "p",
         "generator.epochs": "generator", "seed": "seed"}  # fmt: skip
"""Fields in the names of run folders, and what they are called there."""

NOTES = (
    "Measured at the server model after a round (round 0: untrained), in evaluation mode, without augmentation; "
    "Euclidean norm over all parameters, means over clients. Every sigma^2 is per sample: a batch of B has sigma^2/B.",
    "zeta_sq, sigma_sq: on the real data D_i; _hat: on what clients train on, D_i and a part of the pool D~; _mix: on "
    "(1 - p) D_i + p D~; sigma_avg_sq: on all real data as one set; sigma_pool_sq: on D~; delta_sq: between the mean "
    "of the clients' gradients and the pool's.",
    "Lemma 1: (1 - p)^2 zeta^2; (1 - p) sigma^2 + p sigma_pool^2 + p (1 - p) (zeta^2 + delta^2), its terms in % of it. "
    "_mix follows from the gradients on D_i and D~ and equals it at every model; _hat may lie above, as no client has "
    "the whole pool.",
    "Every run is measured at its own server models, so that curves differ in their models too; the columns of a line "
    "and all of panels (d) are at one model. / Lemma 1, rounds above 1: median [least, most], and how many, of all "
    "measured rounds of all seeds.",
)
L_NOTE = (
    "L_max, L_p: the largest Hessian eigenvalue of any client's loss on D_i, and on what it trains on; L_pool: of the "
    "pool's; by Lanczos' iteration, nearly always within 0.1 %. L_lemma1 = (1 - p) L_max + p L_pool."
)


def arguments(argv: Sequence[str]) -> Options:
    """Options of the figures on top of every field of the experiment."""
    preset, dataset = grids.preset_and_dataset(argv)
    if preset == "authors":
        raise UserError("--preset authors has no such figures: use paper, small or smoke.")
    fields = {**presets.preset(preset, dataset), "measure.every": 1, **(PAPER if preset == "paper" else {})}
    lists = {"settings": "real,shuffled_synthetic"}
    parser = cli.parser((__doc__ or "").partition("\n")[0], argv, fields, lists)
    shares = ", ".join(f"{share:g}" for share in CHECKPOINTS)
    for name, kind, default, text in (
        ("preset", str, "small", "smoke, small or paper: sets the defaults of all fields"),
        ("seeds", str, "0", "seeds, separated by commas: mean and range over them"),
        ("p", str, "0,0.06,0.5", "shares of synthetic data, in [0, 1), separated by commas; 0: setting real"),
        ("generator-epochs", str | None, None,
         f"figure A.8: epochs of the generators, empty for none; default: {shares} of generator.epochs"),
        ("generator-p", float, 0.57 if preset == "paper" else 0.5, "figure A.8: share of synthetic data, in (0, 1)"),
        ("out", str, f"runs/convergence-{preset}-{parts.label(dataset)}", "folder of the sweep"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--hessians", action="store_true", help="measure L_p too: hundreds of passes over the data")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    cli.add_dry_run(parser)
    parser.hide(TAKEN)
    options = cli.parse(parser, argv)
    cli.refuse_fields(options, TAKEN)
    if options.measure.every < 1:
        raise UserError(f"measure.every must be at least 1 in this sweep, got {options.measure.every}.")
    return options


def figure_a7(options: Options) -> Figure:
    """Figures 5 and A.7: a curve for each share p, and IID clients without a pool."""
    curves: dict[str, dict[str, Any]] = {"IID": {"partition.name": "iid"}}
    for p in sorted(cli.split("--p", options.p, float)):
        if not 0 <= p < 1:
            raise UserError(f"--p must lie in [0, 1), got {p:g}.")
        shared = {"sharing.setting": "shuffled_synthetic", "sharing.p": p}
        curves[f"p = {p:g}"] = shared if p else {"sharing.setting": "real"}
    return {label: _cells(options, fields) for label, fields in curves.items()}


def figure_a8(options: Options) -> Figure:
    """Figure A.8: a curve for each number of epochs of the generators; none where it was not asked for."""
    given, p = options.generator_epochs, options.generator_p
    if given == "":
        return {}
    if not 0 < p < 1:
        raise UserError(f"--generator-p must lie in (0, 1), got {p:g}: an empty pool has no delta^2.")
    shares = (max(1, round(share * options.generator.epochs)) for share in CHECKPOINTS)
    epochs = shares if given is None else cli.split("--generator-epochs", given, int)
    fields = {name: v for name, v in PAPER_A8.items() if options.preset == "paper" and name not in options.asked}
    fields |= {"sharing.setting": "shuffled_synthetic", "sharing.p": p}
    return {f"{n} epochs": _cells(options, {**fields, "generator.epochs": n}) for n in sorted(set(epochs))}


def _cells(options: Options, fields: Mapping[str, Any]) -> list[sweep.Cell]:
    base = {**grids.base(options), **fields, "measure.smoothness": options.hessians}
    seeds = cli.split("--seeds", options.seeds, int)
    return [sweep.cell(choose({**base, "seed": seed}, options.fields), NAMED) for seed in seeds]


def footnotes(a7: Figure, a8: Figure, options: Options) -> list[str]:
    """What a reader must know to read the numbers."""
    configs, of_a8 = ([cell.config for cells in figure.values() for cell in cells] for figure in (a7, a8))
    c = configs[0]
    some = "all" if c.measure.samples is None else f"{c.measure.samples} (standard errors: rounds.jsonl)"
    notes = [
        *NOTES,
        *([L_NOTE] if options.hessians else []),
        f"A.7: {c.algorithm}, N = {c.partition.n_clients}, C = {c.federation.participation:g}, alpha = "
        f"{grids.several(configs, 'partition.alpha')} (IID: cut equally); generators of {options.generator.epochs} "
        f"epochs on rho = {options.generator.rho:g} of a client's images; measured on {some} of a client's examples. "
        f"{grids.work_note(configs)} Seeds: {options.seeds}; mean [least, most] of several.",
    ]
    if of_a8:
        names = ("partition.n_clients", "partition.alpha", "sharing.p", "generator.rho")
        n, alpha, p, rho = (grids.several(of_a8, name) for name in names)
        notes.append(
            f"A.8: N = {n}, alpha = {alpha}, p = {p} (paper: 40, 0.01, 0.57), rho = {rho}; every number of epochs from "
            "one training. The pools are compared at one model at round 0 only; later every run is at its own."
        )
    different = grids.departures(configs, {*NAMED, "sharing.setting", "generator.rho", "measure.smoothness", "target"})
    return [*notes, f"Not as in the paper: {different}."] if different else notes


def report(a7: Figure, a8: Figure, out: Path, options: Options, display: Display) -> None:
    """Write the tables, the pictures and the summary from the run folders, and show the tables."""
    from fedcommons.reports import courses
    from fedcommons.reports.plots import save

    cells = [cell for figure in (a7, a8) for some in figure.values() for cell in some]
    runs = grids.finished(cells, out, display.say)
    if runs.empty:
        return
    rounds = load_rounds(*runs["run"])

    def curves(figure: Figure) -> list[courses.Curve]:
        found = []
        for label, some in figure.items():
            folders = [str(out / cell.name) for cell in some]
            of, lines = (frame.loc[frame["run"].isin(folders), :] for frame in (runs, rounds))
            found += [courses.curve(label, of, lines)] if len(of) else []
        return found

    over_p, over_epochs = curves(a7), curves(a8)
    if not over_p:
        return
    own, of_a8 = (
        [
            {"curve": one.label, **line}
            for one in some
            for line in tables.records(one.runs, (*tables.RUN, "generator.epochs"))
        ]
        for some in (over_p, over_epochs)
    )
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": own, "a8": of_a8})
    title, smoke = grids.title([c.config for cells in a7.values() for c in cells]), grids.is_smoke(options)
    markdown = grids.stamped(courses.section("Figures 5 and A.7", over_p), options)
    save(courses.over_rounds(over_p, title), out / "convergence_parameters.png", 110, smoke)
    if over_epochs:
        markdown += "\n" + courses.section("Figure A.8: epochs of the generators", over_epochs)
        save(courses.over_generator_epochs(over_epochs, title), out / "generator_epochs.png", 110, smoke)
    notes = [*footnotes(a7, a8, options), *tables.rejected_notes(runs), *tables.lost_notes(runs)]
    markdown += tables.numbered(notes)
    write_text(out / "convergence_parameters.md", markdown)
    write_text(out / "convergence_parameters.csv", tables.to_csv(courses.rows([*over_p, *over_epochs])))
    display.say("\n" + markdown)


def convergence_parameters(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    out, a7, a8 = Path(options.out), figure_a7(options), figure_a8(options)
    # by name: a run that both figures show is played once
    cells = list({c.name: c for figure in (a7, a8) for several in figure.values() for c in several}.values())
    with Display() as display:
        if options.dry_run:
            grids.dry_run(cells, out, display, options.on_cores)
            return 0
        left = sweep.todo(cells, out, display)
        with sweep.open_sweep(out, options.resume):
            outcome = sweep.run_cells(left, out, display)
            report(a7, a8, out, options, display)
            return grids.conclude(outcome, started, out, "convergence_parameters", display)


if __name__ == "__main__":
    cli.main(convergence_parameters)
