"""Figure A.3 of Fedssyn: softmax regression in a federation, real images swapped between iid or one-class clients.

python sweeps/mnist_softmax.py                                    # digits, half a minute
python sweeps/mnist_softmax.py --seeds 0,1,2                      # medians and bands over three seeds
python sweeps/mnist_softmax.py --preset smoke                     # the same code with smaller numbers
python sweeps/mnist_softmax.py --preset paper --data-dir DIR      # MNIST, four minutes
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config.dotted import common_fields
from fedcommons.config.schema import Data
from fedcommons.errors import UserError
from fedcommons.reports import tables
from fedcommons.sharing.swapped import n_swapped
from fedcommons.storage.atomic_files import write_bytes, write_json, write_text
from fedcommons.tune import grid, sweep_folder
from papers.fedssyn.softmax_report import PARTITIONS, PER_CLASS, Curve, picture, table

if TYPE_CHECKING:  # torch takes seconds to import
    from papers.fedssyn.softmax_regression import Dataset

PRESETS = {
    "smoke": ("digits", 3),
    "small": ("digits", 150),
    "paper": ("mnist", 60),
}  # preset: (data set, number of rounds, which the paper does not state)


def arguments(argv: Sequence[str]) -> parse.Options:
    """Parse the options; ``p``, ``epochs``, ``noise`` and ``seeds`` become sequences of valid numbers."""
    preset = grid.preset_of(argv, PRESETS)
    dataset, rounds = PRESETS[preset]
    parser = parse.Parser(description=__doc__)
    parser.add_options((
        ("preset", str, preset, f"{', '.join(PRESETS)}: sets the defaults of dataset and rounds"),
        ("dataset", Annotated[str, "digits | mnist"], dataset, "digits or mnist"),
        ("data-dir", str | None, None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("seeds", str, "0", "seeds of all random draws, separated by commas: median and range over them"),
        ("p", str, "0,0.02,0.1,0.5,1", "shares of real images that are swapped, separated by commas"),
        ("epochs", str, "1,5", "E, full-batch steps of a client in a round, separated by commas"),
        ("noise", str, "0,0.5", "levels s of the gradient noise N(0, s^2/d), separated by commas"),
        ("lr", Annotated[float, "(0, inf)"], 2.0, "learning rate"),
        ("rounds", Annotated[int, "[1, 1e6]"], rounds, "R, rounds of communication"),
        ("target", Annotated[float, "(0, inf)"], 0.08, "test loss for rounds-to-target"),
        ("out", str, "runs/mnist-softmax", "folder for the results"),
        ("download", bool, False, "fetch the data set if it is not in the folder"),
        ("dry-run", bool, False, "say what would be computed, and stop"),
    ))  # fmt: skip
    options = parse.parse(parser, argv)
    for name, kind, allowed in (
        ("p", float, "[0, 1]"), ("epochs", int, "[1, 1e9]"), ("noise", float, "[0, inf)"),
        ("seeds", int, common_fields()["seed"].allowed),
    ):  # fmt: skip
        options[name] = grid.values(options, name, kind, allowed)
    return options


def train_all(datasets: "Mapping[int, Dataset]", options: parse.Options, display: Display) -> list[Curve]:
    """Train and return the test-loss curves, in the order of the table."""
    from papers.fedssyn.softmax_regression import Labelled, clients, train, zeta_sq

    cells, settings = [], [(seed, name, p) for seed in datasets for name in PARTITIONS for p in options.p]
    for number, (seed, name, p) in enumerate(settings, 1):
        data = clients(datasets[seed], name, p, seed)
        test = Labelled.from_examples(datasets[seed].test, datasets[seed].classes)
        swapped = n_swapped(p, data.a.shape[1])
        facts = {"seed": seed, "partition": name, "p": p, "swapped": swapped, "zeta_sq": zeta_sq(data)}
        for epochs in options.epochs:
            _, losses = train(data, test, lr=options.lr, steps=epochs, rounds=options.rounds,
                              noises=options.noise, seed=seed)  # fmt: skip
            if not losses.isfinite().all():
                raise UserError(f"--lr {options.lr:g} or --noise is too large: the test loss is not finite.")
            for noise, curve in zip(options.noise, losses.T.tolist(), strict=True):
                reached = next((r for r, value in enumerate(curve) if value <= options.target), None)
                ends = {"last_loss": curve[-1], "rounds_to_target": reached, "losses": curve}
                cells.append({**facts, "epochs": epochs, "noise": noise, **ends})
        display.step("swapped shares", number, len(settings), f"{PARTITIONS[name]}, p = {p:g}, seed {seed}")
    return sorted(cells, key=lambda c: (list(PARTITIONS).index(c["partition"]), c["epochs"], c["noise"]))


def mnist_softmax(argv: Sequence[str]) -> int:
    options = arguments(argv)
    import torch

    from fedcommons.runs.build import load
    from papers.fedssyn.softmax_regression import balanced

    torch.set_num_threads(1)  # with more threads, sums would be rounded differently
    loaded = load(Data(options.dataset, options.data_dir, options.download, validation=0))
    datasets, out = {seed: balanced(loaded, PER_CLASS, seed) for seed in options.seeds}, Path(options.out)
    dataset = datasets[options.seeds[0]]
    if options.dry_run:
        n = len(PARTITIONS) * len(options.p) * len(options.epochs) * len(options.noise) * len(options.seeds)
        print(f"{out}: {n} curves of {options.rounds} rounds on {len(dataset.train)} images to compute")
        return 0
    with sweep_folder.open_folder(out), Display() as display:
        cells = train_all(datasets, options, display)
        facts = {name: options[name] for name in ("preset", "dataset", "seeds", "lr", "rounds", "target")}
        images = len(dataset.train) // dataset.classes
        write_json(out / "summary.json", {"name": out.name, **facts, "images_per_class": images, "cells": cells})
        write_text(out / "mnist_softmax.md", table(cells, dataset, options))
        write_text(out / "mnist_softmax.csv", tables.to_csv(cells))
        write_bytes(out / "mnist_softmax.png", picture(cells, options))
        display.say(f"\n{table(cells, dataset, options)}\nAll in {out}: mnist_softmax.md, .csv, .png, summary.json.")
    return 0


if __name__ == "__main__":
    parse.main(mnist_softmax, resumes=False)
