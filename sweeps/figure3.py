"""Figures 3 and 1(c) of Fedssyn: test accuracy of every sharing strategy, against models trained centrally.

python sweeps/figure3.py                     # digits, FedAvg, some minutes on a laptop
python sweeps/figure3.py --preset smoke      # the same code with smaller numbers, about a minute
python sweeps/figure3.py --preset paper --dataset cifar10 --data-dir DIR      # the paper's numbers, for GPUs
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.errors import UserError
from fedcommons.reports import tables
from fedcommons.reports.columns import others
from fedcommons.reports.frames import load_central
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid as grids
from fedcommons.tune import main, sweep
from papers.fedssyn import central_trials

if TYPE_CHECKING:
    from papers.fedssyn.central import Central

P = 0.5  # as in the paper, where each client trains on equal numbers of pool images and of real images
SETTINGS = "real,local_synthetic,shuffled_synthetic,shuffled_real"  # the sharing strategies of the figure
CSV = ("dataset", "n_clients", "participation", "alpha", "algorithm", "setting", "seed", "p", "learning_rate",
       "rounds", "epochs", "images", "last_accuracy", "best_accuracy")  # fmt: skip


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options of the figure, and an option for each field of the experiment's configuration."""
    if grids.preset_and_dataset(argv)[0] == "authors":
        raise UserError("--preset authors has no central models: use paper, small or smoke.")
    more = (
        ("p-real", Annotated[float | None, "[0, 1)"], None,
         "share of real images that shuffled_real swaps; default: sharing.p, else 0.5"),
        ("central-epochs", Annotated[int | None, "[1, 1e9]"], None,
         "epochs of the central models; default: federation.rounds"),
    )  # fmt: skip
    title = (__doc__ or "").partition("\n")[0]
    parser = grids.parser(title, argv, {"settings": SETTINGS}, more, "figure3")
    options = parse.parse(parser, argv)
    grids.refuse_fields(options, {})
    return options


def grid(options: parse.Options) -> list[sweep.Trial]:
    """Return the trials of federated learning, in the order of the figure."""
    base = grids.base(options)
    p = base.get("sharing.p")
    shared = P if p is None else p
    p_real = shared if options.p_real is None else options.p_real
    cells = []
    for alpha, algorithm, setting, seed in grids.combined(
        options, parse.split("--alphas", options.alphas, float), parse.split("--algorithms", options.algorithms),
        parse.split("--settings", options.settings), parse.split("--seeds", options.seeds, int),
    ):  # fmt: skip
        values: dict[str, Any] = {
            "seed": seed, "algorithm": algorithm, "partition.alpha": alpha, "sharing.setting": setting,
            "sharing.p": p_real if setting == "shuffled_real" else p,
        }  # fmt: skip
        cells.append(grids.cell(options, {**base, **values}))
    return grids.once(cells)


def central_lines(cells: Sequence[sweep.Trial], options: parse.Options) -> "list[Central]":
    """Return the central models to compare with: one on the real images per seed, and one on each trial's pool."""
    from papers.fedssyn.central import Central

    lines = []
    for c in cells:
        config = sweep.with_absolute_paths(c.config)
        epochs = options.central_epochs or config.federation.rounds
        lines.append(Central("central_real", config, epochs))
        if config.generator is not None:
            lines.append(Central("central_synthetic", config, epochs))
    return list({line.name: line for line in lines}.values())  # trials that share a central model give one line


def footnotes(cells: Sequence[sweep.Trial], lines: Sequence[Mapping[str, Any]], options: parse.Options) -> list[str]:
    """Return the table's footnotes on accuracy, learning rate, models and seeds; lines: records of central models."""
    c = cells[0].config
    notes = [
        f"Accuracy in %: top-1 of the server model on the whole test set; last: after round R = {c.federation.rounds}, "
        "best: of all rounds (epochs, for central models).",
        grids.work_note([cell.config for cell in cells]),
        f"The learning rate was fixed at {c.client.lr:g} for all configurations and central models, not tuned.",
    ]
    if real := next((line for line in lines if line["setting"] == "central_real"), None):
        n, epochs = real["images"], real["epochs"]
        of_client = c.federation.rounds * c.client.epochs * n / c.partition.n_clients
        notes.append(
            f"central_real: one model on all {n} real training images; central_synthetic: on the union of all clients' "
            f"synthetic images. Both: {epochs} epochs, same model, learning rate and batch size; on the real images "
            f"{epochs * n / c.client.batch_size:.0f} steps, and a client that takes part in every round makes about "
            f"{of_client / c.client.batch_size:.0f}."
        )
    if any(c.config.sharing.setting == "shuffled_real" for c in cells):
        notes.append(
            "shuffled_real: a share p of each client's real images is swapped; the number of images is unchanged."
        )
    return [*notes, f"Seeds: {options.seeds}; ± is the sample standard deviation."]


def report(cells: Sequence[sweep.Trial], options: parse.Options, out: Path, display: Display) -> None:
    """Write figure3.md, .csv, .png and summary.json from the folders of finished runs, and display the table."""
    import pandas as pd

    from papers.fedssyn.figures import accuracy_dots, accuracy_table, panels

    runs, lines = grids.finished(cells, out, display.say), central_lines(cells, options)
    central = load_central(*(out / line.name for line in sorted(lines, key=lambda line: line.source)))
    if runs.empty:
        return
    rows = tables.compared(pd.concat([runs, central], ignore_index=True))
    federated, of_central = (tables.records(frame, (*CSV, *others(rows[0]))) for frame in (runs, central))
    write_json(
        out / "summary.json", {"name": out.name, "preset": options.preset, "cells": federated, "central": of_central}
    )
    notes = [*footnotes(cells, of_central, options), *tables.rejected_notes(runs), *tables.lost_notes(runs)]
    markdown = grids.stamped(accuracy_table(rows, notes), options)
    write_text(out / "figure3.md", markdown)
    write_text(out / "figure3.csv", tables.to_csv([*federated, *of_central]))
    title = f"Test accuracy after round {cells[0].config.federation.rounds}, seeds {options.seeds}"
    accuracy_dots(out / "figure3.png", panels(rows), title, grids.is_smoke(options))
    display.say("\n" + markdown)


def run_cells(
    cells: Sequence[sweep.Trial], options: parse.Options, todo: sweep.Todo, out: Path, display: Display
) -> sweep.Outcome:
    """Run the remaining trials, then train the central models."""
    outcome, started = sweep.run_cells(todo, out, display), time.perf_counter()
    failures = {**outcome.failures, **central_trials.train(central_lines(cells, options), out, display)}
    seconds = {**outcome.seconds, "central models": time.perf_counter() - started}
    return replace(outcome, seconds=seconds, failures=failures)


def figure3(argv: Sequence[str]) -> int:
    options = arguments(argv)
    cells = grid(options)
    return main.run(
        options, "figure3", cells, partial(report, cells, options), play=partial(run_cells, cells, options),
        extra=lambda: central_trials.extra_jobs(central_lines(cells, options)),
    )  # fmt: skip


if __name__ == "__main__":
    parse.main(figure3)
