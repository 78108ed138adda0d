"""Table and picture of figure A.3 of Fedssyn: softmax regression."""

from collections.abc import Sequence
from itertools import product
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcommons.cli import parse
from fedcommons.reports import tables

if TYPE_CHECKING:  # torch and matplotlib take seconds to import, and --help needs neither
    from matplotlib.figure import Figure

    from fedcommons.data.examples import Dataset

PER_CLASS = 1024  # number of images per class in Fedssyn's appendix A.3.1
PARTITIONS = {"iid": "iid clients", "single_class": "one class per client"}
Curve = dict[str, Any]


def curves(cells: Sequence[Curve]) -> list[list[Curve]]:
    """Group records of runs by curve; the runs of a curve differ only in their seeds."""
    groups: dict[tuple, list[Curve]] = {}
    for c in cells:
        groups.setdefault((c["partition"], c["epochs"], c["noise"], c["p"]), []).append(c)
    return list(groups.values())


def band(values: Sequence[float], form: str) -> str:
    """Return ``median [minimum, maximum]`` as text, or only the median if all values are equal; inf: target missed."""
    middle, least, most = (format(v, form) for v in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} [{least}, {most}]"


def table(cells: Sequence[Curve], dataset: "Dataset", options: parse.Options) -> str:
    """Return the Markdown table with a line for each curve, and its footnotes."""
    head = ["clients", "E", "noise s", "p", "swapped", "zeta^2 at the start", "last test loss", "rounds to target"]
    lines = [
        [PARTITIONS[c["partition"]], c["epochs"], f"{c['noise']:g}", f"{c['p']:g}", c["swapped"],
         band([c["zeta_sq"] for c in some], ".5f"), band([c["last_loss"] for c in some], ".4f"),
         band([inf if (r := c["rounds_to_target"]) is None else r for c in some], "g").replace(
             "inf", f">{options.rounds}")]
        for some in curves(cells) for c in some[:1]
    ]  # fmt: skip
    k, n, d = dataset.classes, len(dataset.train) // dataset.classes, dataset.train.x[0].numel()
    fewer = "" if n == PER_CLASS else f" (all that the smallest class has; paper: {PER_CLASS})"
    notes = f"""
1. {dataset.name}: {n} training images of each class{fewer}; {k} clients with {n} each, of which int(p {n}) are swapped.
2. Test loss: of the server model on {len(dataset.test)} images, with the paper's factor 1/{k}; last: after round \
{options.rounds}; target: {options.target:g}.
3. E full-batch steps of every client in a round, learning rate {options.lr:g}, start at 0, no bias; noise \
N(0, s^2/{d}) on all coordinates of a step's gradient, the same draws for every p and both kinds of clients. \
{seeds(options, "median [minimum, maximum]")}.
4. zeta^2: mean squared distance of the clients' gradients from the gradients' mean, after swapping, without noise.
"""
    return tables.markdown(head, lines) + notes


def seeds(options: parse.Options, several: str) -> str:
    some = ", ".join(map(str, options.seeds))
    return f"Seed {some}" if len(options.seeds) == 1 else f"Seeds {some}: {several}"


def picture(cells: Sequence[Curve], options: parse.Options) -> bytes:
    """Return the figure of ``draw`` as PNG bytes."""
    from fedcommons.reports.plots import png

    return png(draw(cells, options), 110)


def draw(cells: Sequence[Curve], options: parse.Options) -> "Figure":
    """Draw test loss over rounds: a row per partition, a column per pair (E local steps, noise s), a curve per p."""
    from matplotlib import colormaps
    from matplotlib.ticker import LogLocator, NullLocator

    from fedcommons.reports.plots import finish, panels

    columns = list(product(sorted(options.epochs), sorted(options.noise)))
    figure, grid = panels(len(PARTITIONS), len(columns), (1.2 + 2.5 * len(columns), 6), sharey=True)
    for (name, column), axes in zip(product(PARTITIONS, columns), grid.flat, strict=True):
        of_panel = curves([c for c in cells if (c["partition"], c["epochs"], c["noise"]) == (name, *column)])
        for i, some in enumerate(of_panel):
            part = i / max(1, len(of_panel) - 1)
            colour = colormaps["viridis_r"](0.1 + 0.9 * part)
            width = 5 - 4 * part  # later curves are thinner, so that all curves are visible where they coincide
            losses = np.array([c["losses"] for c in some])
            axes.plot(np.median(losses, axis=0), color=colour, linewidth=width, label=f"{some[0]['p']:g}")
            if len(some) > 1:
                axes.fill_between(range(losses.shape[1]), losses.min(0), losses.max(0), color=colour, alpha=0.25, lw=0)
        axes.axhline(options.target, color="0.4", linewidth=0.8, linestyle=":")
        axes.set_title("E = {}, s = {:g}".format(*column), fontsize=10)
        axes.set(xlabel="round", ylabel=f"{PARTITIONS[name]}\ntest loss (log)")
        axes.set_yscale("log")
        axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 3, 5)), minor_locator=NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.label_outer()
    what = f"Softmax regression on {options.dataset}: E local steps per round, gradient noise s. Dotted: the target, "
    of_seeds = seeds(options, "lines are medians, bands go from minimum to maximum")
    key = "p, share of real images swapped (thin curves lie on thick ones)"
    finish(figure, f"{what}test loss {options.target:g}.\n{of_seeds}.", key)
    return figure
