"""Figure A.3 of Fedssyn: softmax regression in a federation, real images swapped between iid or one-class clients.

python sweeps/mnist_softmax.py                                    # digits, half a minute
python sweeps/mnist_softmax.py --seeds 0,1,2                      # medians and bands over three seeds
python sweeps/mnist_softmax.py --preset smoke                     # the same code with smaller numbers
python sweeps/mnist_softmax.py --preset paper --data-dir DIR      # MNIST, four minutes
"""

import io
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from jsonargparse import Namespace

from fedcommons.config import cli
from fedcommons.config.experiment import Data
from fedcommons.errors import UserError, unknown
from fedcommons.files import write_bytes, write_json, write_text
from fedcommons.reports import tables
from fedcommons.sharing.swapped import n_swapped
from fedcommons.sweeping import folders
from fedcommons.sweeping.display import Display

if TYPE_CHECKING:  # torch takes seconds to import
    from fedcommons.data.examples import Dataset

PER_CLASS = 1024  # images, Fedssyn A.3.1
PARTITIONS = {"iid": "iid clients", "single_class": "one class per client"}
PRESETS = {"smoke": ("digits", 3), "small": ("digits", 150), "paper": ("mnist", 60)}  # the paper names no rounds
Cell = dict[str, Any]


def arguments(argv: Sequence[str]) -> Namespace:
    """The options, comma lists split and values checked."""
    preset = cli.early(argv, "preset", "small")
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    dataset, rounds = PRESETS[preset]
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0], exit_on_error=False)
    for name, kind, default, text in (
        ("preset", str, preset, f"{', '.join(PRESETS)}: sets the defaults of dataset and rounds"),
        ("dataset", str, dataset, "digits or mnist"),
        ("data-dir", str | None, None, "folder with the data sets; default: FEDCOMMONS_DATA, else ./data"),
        ("seeds", str, "0", "seeds of everything that is drawn, separated by commas: median and range over them"),
        ("p", str, "0,0.02,0.1,0.5,1", "shares of real images that are swapped, separated by commas"),
        ("epochs", str, "1,5", "E, full-batch steps of a client in a round, separated by commas"),
        ("noise", str, "0,0.5", "levels s of the gradient noise N(0, s^2/d), separated by commas"),
        ("lr", float, 2.0, "learning rate"),
        ("rounds", int, rounds, "R, rounds of communication"),
        ("target", float, 0.08, "test loss for rounds-to-target"),
        ("out", str, "runs/mnist-softmax", "folder for the results"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--download", action="store_true", help="fetch the data set if it is not in the folder")
    parser.add_argument("--dry-run", action="store_true", help="say what would be computed, and stop")
    options = cli.parse(parser, argv)
    if options.dataset not in ("digits", "mnist"):
        raise unknown("data set", options.dataset, ("digits", "mnist"))
    for name, kind in (("p", float), ("epochs", int), ("noise", float), ("seeds", int)):
        options[name] = cli.split(f"--{name}", options[name], kind)
    for name, values, allowed, right in (
        ("p", options.p, "in [0, 1]", lambda v: 0 <= v <= 1),
        ("epochs", options.epochs, "at least 1", lambda v: v >= 1),
        ("noise", options.noise, "finite and at least 0", lambda v: 0 <= v < inf),
        ("epochs", options.epochs, "at most 1e9", lambda v: v <= 1e9),
        ("lr", [options.lr], "finite and above 0", lambda v: 0 < v < inf),
        ("rounds", [options.rounds], "at least 1", lambda v: v >= 1),
        ("rounds", [options.rounds], "at most 1e6", lambda v: v <= 1e6),
        ("target", [options.target], "finite and above 0", lambda v: 0 < v < inf),
    ):
        if wrong := [v for v in values if not right(v)]:
            raise UserError(f"--{name} must be {allowed}, got {wrong[0]:g}.")
    return options


def train_all(datasets: "Mapping[int, Dataset]", options: Namespace, display: Display) -> list[Cell]:
    """A cell for each curve and seed, in the order of the table; the noise levels are trained together."""
    from papers.fedssyn.softmax_regression import Labelled, clients, train, zeta_sq

    cells, settings = [], [(seed, name, p) for seed in datasets for name in PARTITIONS for p in options.p]
    for number, (seed, name, p) in enumerate(settings, 1):
        data, test = clients(datasets[seed], name, p, seed), Labelled.of(datasets[seed].test, datasets[seed].n_classes)
        swapped = n_swapped(p, data.a.shape[1])
        facts = {"seed": seed, "partition": name, "p": p, "swapped": swapped, "zeta_sq": zeta_sq(data)}
        for epochs in options.epochs:
            _, losses = train(data, test, lr=options.lr, steps=epochs, rounds=options.rounds,
                              noises=options.noise, seed=seed)  # fmt: skip
            if not losses.isfinite().all():
                raise UserError(f"--lr {options.lr:g} is too much, or --noise: the test loss is not finite.")
            for noise, curve in zip(options.noise, losses.T.tolist(), strict=True):
                reached = next((r for r, value in enumerate(curve) if value <= options.target), None)
                ends = {"last_loss": curve[-1], "rounds_to_target": reached, "losses": curve}
                cells.append({**facts, "epochs": epochs, "noise": noise, **ends})
        display.step("swapped shares", number, len(settings), f"{PARTITIONS[name]}, p = {p:g}, seed {seed}")
    return sorted(cells, key=lambda c: (list(PARTITIONS).index(c["partition"]), c["epochs"], c["noise"]))


def curves(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each curve, which differ in their seeds."""
    groups: dict[tuple, list[Cell]] = {}
    for c in cells:
        groups.setdefault((c["partition"], c["epochs"], c["noise"], c["p"]), []).append(c)
    return list(groups.values())


def band(values: Sequence[float], form: str) -> str:
    """``median [least, most]``, or the one value; inf is a target that was not reached."""
    middle, least, most = (format(v, form) for v in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} [{least}, {most}]"


def table(cells: Sequence[Cell], dataset: "Dataset", options: Namespace) -> str:
    """A line for each curve, and what a reader must know."""
    head = ["clients", "E", "noise s", "p", "swapped", "zeta^2 at the start", "last test loss", "rounds to target"]
    lines = [
        [PARTITIONS[c["partition"]], c["epochs"], f"{c['noise']:g}", f"{c['p']:g}", c["swapped"],
         band([c["zeta_sq"] for c in some], ".5f"), band([c["last_loss"] for c in some], ".4f"),
         band([inf if (r := c["rounds_to_target"]) is None else r for c in some], "g").replace(
             "inf", f">{options.rounds}")]
        for some in curves(cells) for c in some[:1]
    ]  # fmt: skip
    k, n, d = dataset.n_classes, len(dataset.train) // dataset.n_classes, dataset.train.x[0].numel()
    fewer = "" if n == PER_CLASS else f" (all that the smallest class has; paper: {PER_CLASS})"
    notes = f"""
1. {dataset.name}: {n} training images of each class{fewer}; {k} clients with {n} each, of which int(p {n}) are swapped.
2. Test loss: of the server model on {len(dataset.test)} images, with the paper's factor 1/{k}; last: after round \
{options.rounds}; target: {options.target:g}.
3. E full-batch steps of every client in a round, rate {options.lr:g}, start at 0, no bias; noise N(0, s^2/{d}) on \
all coordinates of a step's gradient, the same draws for every p and both kinds of clients. {seeds(options)}.
4. zeta^2: mean squared distance of a client's gradient from their mean, after swapping, without noise.
"""
    return tables.markdown(head, lines) + notes


def seeds(options: Namespace) -> str:
    some = ", ".join(map(str, options.seeds))
    return f"Seed {some}" if len(options.seeds) == 1 else f"Seeds {some}: median and range"


def picture(cells: Sequence[Cell], options: Namespace) -> bytes:
    """A PNG of test loss over rounds: a row for each kind of clients, a column for each E and s, a curve for each p.

    Curves are medians over seeds, and bands go from the least to the most.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    columns = list(product(sorted(options.epochs), sorted(options.noise)))
    figure, grid = plt.subplots(len(PARTITIONS), len(columns), figsize=(1.2 + 2.5 * len(columns), 5.8), sharex=True,
                                sharey=True, squeeze=False, layout="constrained")  # fmt: skip
    for (name, column), axes in zip(product(PARTITIONS, columns), grid.flat, strict=True):
        own = curves([c for c in cells if (c["partition"], c["epochs"], c["noise"]) == (name, *column)])
        for i, some in enumerate(own):
            part = i / max(1, len(own) - 1)
            colour = plt.get_cmap("viridis_r")(0.1 + 0.9 * part)
            width = 5 - 4 * part  # ever thinner, so that all are seen where they coincide
            losses = np.array([c["losses"] for c in some])
            axes.plot(np.median(losses, axis=0), color=colour, linewidth=width, label=f"{some[0]['p']:g}")
            if len(some) > 1:
                axes.fill_between(range(losses.shape[1]), losses.min(0), losses.max(0), color=colour, alpha=0.25, lw=0)
        axes.axhline(options.target, color="0.4", linewidth=0.8, linestyle=":")
        axes.set(title="E = {}, s = {:g}".format(*column), xlabel="round", ylabel=f"{PARTITIONS[name]}\ntest loss")
        axes.set_yscale("log")
        axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 3, 5)), minor_locator=NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.label_outer()
    figure.suptitle(f"{options.dataset}, softmax regression, target test loss {options.target:g} (dotted). "
                    f"{seeds(options)}.", fontsize=10)  # fmt: skip
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(options.p),
                  title="p, share of real images swapped (thin curves lie on thick ones)", frameon=False)  # fmt: skip
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    plt.close(figure)
    return content.getvalue()


def mnist_softmax(argv: Sequence[str]) -> int:
    options = arguments(argv)
    import torch

    from fedcommons.data.datasets import load
    from papers.fedssyn.softmax_regression import balanced

    torch.set_num_threads(1)  # more threads would round differently
    loaded = load(Data(options.dataset, options.data_dir, options.download, validation=0))
    datasets, out = {seed: balanced(loaded, PER_CLASS, seed) for seed in options.seeds}, Path(options.out)
    dataset = datasets[options.seeds[0]]
    if options.dry_run:
        n = len(PARTITIONS) * len(options.p) * len(options.epochs) * len(options.noise) * len(options.seeds)
        print(f"{out}: {n} curves of {options.rounds} rounds on {len(dataset.train)} images to compute")
        return 0
    with folders.open_folder(out), Display() as display:
        cells = train_all(datasets, options, display)
        facts = {name: options[name] for name in ("preset", "dataset", "seeds", "lr", "rounds", "target")}
        images = len(dataset.train) // dataset.n_classes
        write_json(out / "summary.json", {"name": out.name, **facts, "images_per_class": images, "cells": cells})
        write_text(out / "mnist_softmax.md", table(cells, dataset, options))
        write_text(out / "mnist_softmax.csv", tables.to_csv(cells))
        write_bytes(out / "mnist_softmax.png", picture(cells, options))
        display.say(f"\n{table(cells, dataset, options)}\nAll in {out}: mnist_softmax.md, .csv, .png, summary.json.")
    return 0


if __name__ == "__main__":
    cli.main(mnist_softmax)
