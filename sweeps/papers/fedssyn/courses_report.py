"""Report of figures 5, A.7 and A.8 of Fedssyn from the run folders: tables with footnotes, CSV, pictures."""

from collections.abc import Sequence
from typing import Any

from fedcommons.reports import tables
from fedcommons.reports.frames import load_rounds
from fedcommons.tune import grid
from fedcommons.tune.study import Report, Results

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


def footnotes(results: Results) -> list[str]:
    options = results.options
    configs, of_a8 = ([e.cell.config for e in results.entries if e["figure"] == name] for name in ("a7", "a8"))
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


def report(results: Results) -> Report | None:
    from fedcommons.reports.plots import save
    from papers.fedssyn import courses

    rounds, smoke = load_rounds(*results.runs["run"].unique()), results.smoke

    def curves(figure: str) -> list[courses.Curve]:
        of_figure = results.runs[results.runs["figure"] == figure].groupby("curve", sort=False)
        return [courses.curve(str(label), runs, rounds.loc[rounds["run"].isin(runs["run"]), :])
                for label, runs in of_figure]  # fmt: skip

    def records(curves: Sequence[courses.Curve]) -> list[dict[str, Any]]:
        each = [(c.label, tables.records(c.runs, (*tables.RUN, "generator.epochs"))) for c in curves]
        return [{"curve": label, **line} for label, lines in each for line in lines]

    over_p, over_epochs = curves("a7"), curves("a8")
    if not over_p:
        return None
    title = grid.title([e.cell.config for e in results.entries if e["figure"] == "a7"], with_target=False)
    title += courses.MEANING * (results.runs["seed"].nunique() > 1)
    text = courses.section("Figures 5 and A.7", over_p)
    pictures = {"convergence_parameters.png": lambda path: save(courses.over_rounds(over_p, title), path, 100, smoke)}
    if over_epochs:
        text += "\n" + courses.section("Figure A.8: epochs of the generators", over_epochs)
        pictures["generator_epochs.png"] = lambda path: save(
            courses.over_generator_epochs(over_epochs, title), path, 100, smoke
        )
    runs = results.runs.drop_duplicates("run")
    notes = [*footnotes(results), *tables.rejected_notes(runs), *tables.lost_notes(runs)]
    return Report(
        text + tables.numbered(notes), courses.rows([*over_p, *over_epochs]),
        {"preset": results.options.preset, "cells": records(over_p), "a8": records(over_epochs)}, pictures,
    )  # fmt: skip
