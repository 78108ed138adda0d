"""Report of figures 5, A.7 and A.8 of Fedssyn from the run folders: tables with footnotes, CSV, pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.reports import tables
from fedcommons.reports.frames import load_rounds
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid, sweep

Figure = Mapping[str, Sequence[sweep.Trial]]
"""The curves of a figure by label, each with a trial for every seed."""

NAMED = {"partition.name": "", "partition.alpha": "alpha", "partition.n_clients": "N", "sharing.p": "p",
         "generator.epochs": "generator", "seed": "seed"}  # fmt: skip
"""Config fields that the names of run folders contain -> label of the field in the name."""

NOTES = (
    "Measured at the server model after a round (round 0: untrained), in evaluation mode, without augmentation; "
    "Euclidean norm over all parameters, means over clients. Every sigma^2 is per sample: a batch of B has sigma^2/B.",
    "zeta_sq, sigma_sq: on the real data D_i of each client; _hat: on the clients' training data, D_i and some images "
    "of the pool D~; _mix: on (1 - p) D_i + p D~; sigma_avg_sq: on all real data as one set; sigma_pool_sq: on D~; "
    "delta_sq: squared distance between the mean of the clients' gradients and the pool's gradient.",
    "Lemma 1 predicts (1 - p)^2 zeta^2 and (1 - p) sigma^2 + p sigma_pool^2 + p (1 - p) (zeta^2 + delta^2); the CSV "
    "has the terms of the second sum, in % of this sum. _mix follows from the gradients on D_i and D~ and equals the "
    "prediction at every model; _hat may be larger, as no client has the whole pool.",
    "Every run is measured at its own server models, so curves differ in their models too. The values in a line, and "
    "in each round all curves of panels (d) to (f), are measured at the same models. / Lemma 1: the measured value "
    "divided by the prediction, median [minimum, maximum]; rounds above 1: in how many of the measured rounds of all "
    "seeds this quotient is above 1.",
)
L_NOTE = (
    "L_max, L_p: the largest Hessian eigenvalue of any client's loss on D_i, and on its training data; L_pool: that of "
    "the pool's loss. Lanczos' iteration has an error nearly always below 0.1 %. L_lemma1 = (1 - p) L_max + p L_pool."
)


def footnotes(a7: Figure, a8: Figure, options: parse.Options) -> list[str]:
    """Return the footnotes: definitions of the parameters, settings of the runs, differences to the paper."""
    configs, of_a8 = ([cell.config for cells in figure.values() for cell in cells] for figure in (a7, a8))
    c = configs[0]
    steps, epochs = options.generator.steps, options.generator.epochs
    trained = f"{steps} steps" if steps else f"{epochs} epochs"
    some = "all" if c.measure.samples is None else f"{c.measure.samples} (standard errors: rounds.jsonl)"
    notes = [
        *NOTES,
        *([L_NOTE] if options.hessians else []),
        f"A.7: {c.algorithm}, N = {c.partition.n_clients}, C = {c.federation.participation:g}, alpha = "
        f"{grid.several(configs, 'partition.alpha')} (IID: cut equally); generators of {trained} "
        f"on rho = {options.generator.rho:g} of a client's images; measured on {some} of a client's examples. "
        f"{grid.work_note(configs)} Seeds: {options.seeds}; mean [minimum, maximum] of several seeds.",
    ]
    if of_a8:
        names = ("partition.n_clients", "partition.alpha", "sharing.p", "generator.rho")
        n, alpha, p, rho = (grid.several(of_a8, name) for name in names)
        notes.append(
            f"A.8: N = {n}, alpha = {alpha}, p = {p} (paper: 40, 0.01, 0.57), rho = {rho}; the epochs are checkpoints "
            "of one training. At round 0 all pools are measured at the same model; later each run has its own models."
        )
    different = grid.departures(configs, {*NAMED, "sharing.setting", "generator.rho", "measure.smoothness", "target"})
    return [*notes, f"Not as in the paper: {different}."] if different else notes


def report(a7: Figure, a8: Figure, options: parse.Options, out: Path, display: Display) -> None:
    """Write tables, CSV, pictures and summary into ``out``; a7, a8: the trials of figures A.7 and A.8."""
    from fedcommons.reports.plots import save
    from papers.fedssyn import courses

    cells = [cell for figure in (a7, a8) for some in figure.values() for cell in some]
    runs = grid.finished(cells, out, display.say)
    if runs.empty:
        return
    rounds = load_rounds(*runs["run"])

    def curves(figure: Figure) -> list[courses.Curve]:
        result = []
        for label, some in figure.items():
            folders = [str(out / cell.name) for cell in some]
            runs_of_curve, lines = (frame.loc[frame["run"].isin(folders), :] for frame in (runs, rounds))
            result += [courses.curve(label, runs_of_curve, lines)] if len(runs_of_curve) else []
        return result

    over_p, over_epochs = curves(a7), curves(a8)
    if not over_p:
        return
    records_a7, of_a8 = (
        [
            {"curve": item.label, **line}
            for item in some
            for line in tables.records(item.runs, (*tables.RUN, "generator.epochs"))
        ]
        for some in (over_p, over_epochs)
    )
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": records_a7, "a8": of_a8})
    title, smoke = grid.title([c.config for cells in a7.values() for c in cells]), grid.is_smoke(options)
    markdown = grid.stamped(courses.section("Figures 5 and A.7", over_p), options)
    save(courses.over_rounds(over_p, title), out / "convergence_parameters.png", 110, smoke)
    if over_epochs:
        markdown += "\n" + courses.section("Figure A.8: epochs of the generators", over_epochs)
        save(courses.over_generator_epochs(over_epochs, title), out / "generator_epochs.png", 110, smoke)
    notes = [*footnotes(a7, a8, options), *tables.rejected_notes(runs), *tables.lost_notes(runs)]
    markdown += tables.numbered(notes)
    write_text(out / "convergence_parameters.md", markdown)
    write_text(out / "convergence_parameters.csv", tables.to_csv(courses.rows([*over_p, *over_epochs])))
    display.say("\n" + markdown)
