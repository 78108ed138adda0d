"""Figures 3 and 1(c) of Fedssyn: test accuracy of every sharing strategy, against models trained centrally.

python sweeps/figure3.py                     # digits, FedAvg, some minutes on a laptop
python sweeps/figure3.py --preset smoke      # the same code with smaller numbers, about a minute
python sweeps/figure3.py --lrs 0.02,0.04,0.1,0.25      # chooses a learning rate for each sharing strategy
python sweeps/figure3.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's numbers, for GPUs
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fedcommons.cli import parse
from fedcommons.reports import tables
from fedcommons.reports.columns import others
from fedcommons.reports.frames import load_central
from fedcommons.tune import grid as grids
from fedcommons.tune import learning_rates
from fedcommons.tune.study import Entry, Report, Results, Study
from papers.fedssyn import central_trials, references
from papers.fedssyn.table1 import line

if TYPE_CHECKING:
    from papers.fedssyn.central import Central

POOL = "shuffled_synthetic"
P = 0.5  # as in the paper, where each client trains on equal numbers of pool images and of real images
SETTINGS = "real,local_synthetic,shuffled_synthetic,shuffled_real"  # the sharing strategies of the figure
CSV = ("dataset", "n_clients", "participation", "alpha", "algorithm", "setting", "seed", "p", "learning_rate",
       "rounds", "epochs", "images", "last_accuracy", "best_accuracy")  # fmt: skip


def arguments(argv: Sequence[str]) -> parse.Options:
    grids.preset_and_dataset(argv, grids.PRESETS)  # no central models with the preset authors
    more = (
        ("p-real", Annotated[float | None, "[0, 1)"], None,
         "share of real images that shuffled_real swaps; default: sharing.p, else 0.5"),
        ("central-epochs", Annotated[int | None, "[1, 1e9]"], None,
         "epochs of the central models; default: federation.rounds"),
        ("lrs", str | None, None, "learning rates to choose from by validation accuracy; default: client.lr alone"),
        learning_rates.OPTION,
    )  # fmt: skip
    parser = grids.parser(__doc__, argv, {"settings": SETTINGS}, more, "figure3")
    options = parse.parse(parser, argv)
    grids.refuse_fields(options, {} if options.lrs is None else {"client.lr": "lrs"})
    grids.require_validation(options, "lrs", several=True)
    learning_rates.tuning_seeds(options)
    return options


def entries(options: parse.Options) -> list[Entry]:
    """Return the trials of federated learning in the order of the figure, after trials that choose learning rates."""
    base, rates = grids.base(options), grids.listed(options, "lrs", float) or (options.client.lr,)
    p = base.get("sharing.p")
    shared = P if p is None else p
    p_real = shared if options.p_real is None else options.p_real
    cells = []
    for point in grids.combined(options, grids.lists(options)):
        share = p_real if point["sharing.setting"] == "shuffled_real" else p
        cells.append(grids.cell(options, {**base, **point, "sharing.p": share, "client.lr": rates[0]}))
    reported = [Entry(cell, {"line": line(cell)}) for cell in grids.once(cells)]
    tries, seeds = [(("client.lr", rate),) for rate in rates], learning_rates.tuning_seeds(options)
    if options.total is not None:  # a dry run that measures a sample
        options.total += options.total // len(grids.values(options, "seeds", int)) * len(rates) * len(seeds)
        return reported
    return learning_rates.with_tuning(reported, tries, seeds)


def central_lines(entries: Sequence[Entry], options: parse.Options) -> "list[Central]":
    """Return the central models of the figure; their default number of epochs is federation.rounds."""
    sources = ("central_real", "central_synthetic")
    return central_trials.lines(entries, options, sources, lambda rounds: options.central_epochs or rounds)


def footnotes(results: Results, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    from papers import client_work

    c = results.configs[0]
    notes = [
        f"Accuracy in %: top-1 of the server model on the whole test set; last: after round R = {c.federation.rounds}, "
        "best: of all rounds (epochs, for central models).",
        grids.work_note(results.configs),
        learning_rates.choice_note(results.entries, f"All learning rates were fixed at {c.client.lr:g}."),
        *learning_rates.notes(results.entries),
    ]
    if real := next((line for line in lines if line["setting"] == "central_real"), None):
        n, epochs = real["images"], real["epochs"]
        of_client = c.federation.rounds * c.client.epochs * n / c.partition.n_clients
        notes.append(
            f"central_real: one model on all {n} real training images; central_synthetic: on the union of all clients' "
            f"synthetic images. Both: {epochs} epochs, same model and batch size; on the real images "
            f"{epochs * n / c.client.batch_size:.0f} steps, and a client that takes part in every round makes about "
            f"{of_client / c.client.batch_size:.0f}."
        )
    reported = [e.cell for e in results.finished if not e.is_tuning]
    pools = {cell.name: cell.config for cell in reported if cell.config.sharing.setting == POOL}
    if first := dict([*pools.items()][:1]):
        *_, generators = client_work.of_runs(first, results.out, results.display)[next(iter(first))]
        sent = results.runs.loc[results.runs["cell"].isin(pools), "bytes_once"].mean() / 2e6
        notes.append(
            f"{references.SERVER}: the clients send the pool, {sent:.3g} MB, once. Their generators take "
            f"{generators:.3g} s on one core, computed as steps times the seconds of a step."
        )
    if any(config.sharing.setting == "shuffled_real" for config in results.configs):
        notes.append(
            "shuffled_real: a share p of each client's real images is swapped; the number of images is unchanged."
        )
    return [*notes, f"Seeds: {results.options.seeds}; ± is the sample standard deviation."]


def report(results: Results) -> Report:
    import pandas as pd

    from papers.fedssyn.figures import accuracy_dots, accuracy_table, panels

    options, runs = results.options, results.reported
    models = central_trials.plan(central_lines(results.entries, options), results.entries, results.out)
    seeds = learning_rates.tuning_seeds(options)
    lines = sorted((line for line in models if line.config.seed not in seeds), key=lambda line: line.source)
    central = load_central(*(results.out / line.name for line in lines))
    rows = tables.compared(pd.concat([runs, central], ignore_index=True))
    federated, of_central = (tables.records(frame, (*CSV, *others(rows[0]))) for frame in (runs, central))
    missing = {line.source for line in models} - {line["setting"] for line in of_central}
    notes = [
        *footnotes(results, of_central),
        *(f"No row {source!r}: the training of a central model has failed or has not ended." for source in missing),
        *tables.rejected_notes(runs),
        *tables.lost_notes(runs),
    ]
    rate = "learning rates chosen on other seeds" if seeds else "one learning rate"
    title = f"Accuracy after round {results.configs[0].federation.rounds}, {rate}, seeds {options.seeds}"
    return Report(
        accuracy_table(rows, notes), [*federated, *of_central],
        {"preset": options.preset, "cells": federated, "central": of_central},
        {"figure3.png": lambda path: accuracy_dots(path, panels(rows), title, results.smoke)},
    )  # fmt: skip


figure3 = Study(
    "figure3", arguments, entries, report,
    partial(central_trials.play, central_lines, run=learning_rates.play),
    partial(central_trials.extra_jobs, central_lines), learning_rates.plan,
)  # fmt: skip

if __name__ == "__main__":
    parse.main(figure3)
