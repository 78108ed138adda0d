"""Table and pictures of the gradient coding study: figures 1 to 3 of Makkonen et al. (2024).

A curve is an entry of the summary.json of sweeps/gradient_coding.py. It has the partition, q (probability that a client
straggles), d (copies of an example), c (share of examples that is not private) and two lists per quantity. For example,
``accuracy`` lists means over repetitions and ``accuracy_se`` lists the standard errors of these means. Entry r of a
list belongs to the model after r rounds, before round r + 1.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.reports import plots, tables
from fedcommons.storage.atomic_files import write_json, write_text
from papers.agc.gradient_coding import Problem
from papers.agc.presets import PER_CLASS, PRESETS

Curve = Mapping[str, Any]

NAMES = {"iid": "iid", "dirichlet_plain": "Dirichlet(0.1)", "single_class": "single class"}
KEY = "q: probability that a client straggles. d: copies of an image. c: share of images that are copied to clients"
ROUNDS = (10, 20)  # rounds of the CSV, in addition to the last round; the table has only round 10 and the last round
SPAN = 1e4  # the logarithmic part of figure 3's axis spans at most about this factor; near 0 the axis is linear
CLOSE = 0.95  # an accuracy is close if it is at least this share of the last accuracy of iid clients without sharing


def table(curves: Sequence[Curve]) -> str:
    """Return a Markdown table of the curves with the smallest or largest c; for iid clients, only with c = 0."""
    last = len(curves[0]["accuracy"]) - 1
    at = ROUNDS[0] if ROUNDS[0] < last else 0
    head = ["clients", "q", "d", "c", f"accuracy after {at}, %", f"accuracy after {last}, %",
            f"rounds to {CLOSE:.0%} of iid", "second moment after 0", f"second moment after {last}"]  # fmt: skip
    ends, lines = {min(c["c"] for c in curves), max(c["c"] for c in curves)}, []
    for c in curves:
        if c["c"] in ends and not (c["partition"] == "iid" and c["c"]):
            lines.append(
                [NAMES[c["partition"]], f"{c['q']:g}", c["d"], f"{c['c']:g}",
                 *(f"{100 * c['accuracy'][r]:.1f} ± {100 * c['accuracy_se'][r]:.1f}" for r in (at, last)),
                 f">{last}" if (reached := _reached(c, curves)) is None else reached,
                 *(f"{c['second_moment'][r]:.3g}" for r in (0, last))]
            )  # fmt: skip
    return tables.markdown(head, lines)


def summary(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return a CSV row per curve: accuracy and second moment at some rounds, and the round of ``_reached``."""
    last = len(curves[0]["accuracy"]) - 1
    at = [*(r for r in ROUNDS if r < last), last]
    return [
        {**{name: c[name] for name in ("partition", "q", "d", "c")},
         **{f"{name}_after_{r}": f"{c[key][r]:.6g}" for r in at
            for name, key in (("accuracy", "accuracy"), ("accuracy_standard_error", "accuracy_se"))},
         "rounds_to_close_to_iid": _reached(c, curves),
         **{f"second_moment_after_{r}": f"{c['second_moment'][r]:.6g}" for r in (0, *at)}}
        for c in curves
    ]  # fmt: skip


def _reached(curve: Curve, curves: Sequence[Curve]) -> int | None:
    """Return the first round with at least ``CLOSE`` times the reference accuracy; None if no round reaches it.

    The reference is the last accuracy of iid clients without copies. Its curve has the same q (probability to straggle)
    and d (copies of an example) as ``curve``.
    """
    (iid,) = (c for c in curves if (c["partition"], c["q"], c["d"], c["c"]) == ("iid", curve["q"], curve["d"], 0))
    return next((r for r, value in enumerate(curve["accuracy"]) if value >= CLOSE * iid["accuracy"][-1]), None)


def rows(curves: Sequence[Curve], repetitions: int) -> list[dict[str, Any]]:
    """Return a CSV row per curve and round: the curve's fields, then all quantities (six digits; empty if missing)."""
    names = list(dict.fromkeys(name for c in curves for name in c))
    fields = [name for name in names if not any(isinstance(c.get(name), list) for c in curves)]
    return [
        {**{name: c[name] for name in fields}, "repetitions": repetitions, "round": r,
         **{name: f"{c[name][r]:.6g}" if name in c else "" for name in names if name not in fields}}
        for c in curves
        for r in range(len(c["norm_sq"] if "norm_sq" in c else c["accuracy"]))
    ]  # fmt: skip


def picture(curves: Sequence[Curve], partition: str, title: str) -> Figure:
    """Plot accuracy (above) and second moment (below) over rounds: a column per pair (q, d), a curve per c."""
    pairs = list(dict.fromkeys((c["q"], c["d"]) for c in curves))
    most = max(c["c"] for c in curves) or 1
    figure, grid = plots.panels(2, len(pairs), (1.5 + 3.6 * len(pairs), 7))
    for (q, d), (above, below) in zip(pairs, grid.T, strict=True):
        of_pair = [c for c in curves if (c["q"], c["d"]) == (q, d)]
        for curve in (c for c in of_pair if c["partition"] == partition):
            colour = colormaps["viridis_r"](0.1 + 0.9 * curve["c"] / most) if curve["c"] else "0.55"
            label = f"c = {curve['c']:g}" if curve["c"] else "c = 0, nothing shared"
            _line_and_band(above, curve, "accuracy", label, color=colour)
            _line_and_band(below, curve, "second_moment", label, color=colour)
        for curve in (c for c in of_pair if partition != "iid" and c["partition"] == "iid" and c["c"] == 0):
            for axes, quantity in ((above, "accuracy"), (below, "second_moment")):
                _line_and_band(axes, curve, quantity, "iid clients, nothing shared", color="#d55e00", linestyle="--")
        above.set_title(f"q = {q:g}, d = {d}", fontsize=10)
        above.set_ylabel("test accuracy" + plots.percent(above.yaxis))
        below.set(xlabel="round", ylabel="second moment of the estimate (log)", yscale="log")
        low, high = below.get_ylim()
        below.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5) if high < 100 * low else (1,)))
        below.yaxis.set(minor_locator=NullLocator(), **({} if high > 1e4 else {"major_formatter": "{x:g}"}))
    plots.finish(figure, title, KEY)
    return figure


def products_picture(curves: Sequence[Curve], title: str) -> Figure:
    """Plot figure 3, a panel per curve: sums of the scalar products of two examples' gradients, over rounds."""
    figure, grid = plots.panels(1, len(curves), (1 + 4.6 * len(curves), 4.6), sharey=True)
    kinds = {
        "same_class": ("pairs of one class (type I)", {"color": "#0072b2", "linewidth": 3}),
        "cross_class": ("pairs of two classes (type II)", {"color": "#e69f00"}),
        "norm_sq": ("both: ‖g‖²", {"color": "k", "linestyle": "--"}),
    }
    sizes = [abs(value) for curve in curves for kind in kinds for value in curve[kind]]
    linear = 10.0 ** np.floor(np.log10(max(min(sizes), max(sizes) / SPAN)))
    powers = [linear * 10**k for k in range(1 + round(np.log10(max(sizes) / linear)))]
    for axes, curve in zip(grid[0], curves, strict=True):
        for kind, (label, look) in kinds.items():
            _line_and_band(axes, curve, kind, label, **look)
        axes.axhline(0, color="0.5", linewidth=0.6)
        if len(powers) > 3:
            axes.axhspan(-linear, linear, color="0.93", zorder=0)
            axes.set_yscale("symlog", linthresh=linear, linscale=0.3)
            axes.set_yticks([*(-p for p in powers if -p > axes.get_ylim()[0]), 0, *powers], minor=False)
        shared = f"c = {curve['c']:g}, d = {curve['d']}" if curve["c"] else "nothing shared"
        axes.set_title(f"{shared}, q = {curve['q']:g}", fontsize=10)
        axes.set_xlabel("round")
    scale = "\n(log on both sides of 0, linear in the grey strip)" * (len(powers) > 3)
    grid[0, 0].set_ylabel(f"sum of scalar products{scale}")
    plots.finish(figure, f"Scalar products of gradients; {title}", KEY)
    return figure


def _line_and_band(axes: Axes, curve: Curve, quantity: str, label: str, **style: Any) -> None:
    """Draw the mean of a quantity over repetitions, with a band of one standard error on both sides."""
    mean, error = np.array(curve[quantity]), np.array(curve[f"{quantity}_se"])
    axes.plot(mean, label=label, **{"linewidth": 1.3, **style})
    axes.fill_between(range(len(mean)), mean - error, mean + error, color=style["color"], alpha=0.25, linewidth=0)


def only(curve: Curve, *quantities: str) -> Curve:
    """Return a copy of the curve with ``quantities`` and their standard errors, but without all other quantities."""
    return {
        n: value for n, value in curve.items() if not isinstance(value, list) or n.removesuffix("_se") in quantities
    }


def report(curves: Sequence[Curve], problem: Problem, options: parse.Options) -> str:
    """Return the table of the curves, with notes, as Markdown."""
    preset = PRESETS[options.preset]
    images = "the first" if preset.first else "random"
    share = f"int(c {PER_CLASS}) of each class" if preset.per_class else f"int(c {len(problem.y)}) of all"
    copied = "to d other clients" if options.sharing == "exact" else "to each other client with probability d/(N-1)"
    notes = f"""
1. {options.dataset}, preset {options.preset}: {images} {PER_CLASS} training images of each class, \
{len(problem.test_y)} test images, pixels in [0, {preset.white:g}]; {problem.n_classes} clients, of which \
Dirichlet(0.1) drops those without images. Initial weights: PyTorch's default, anew in each repetition.
2. {options.repetitions} repetitions, seed {options.seed}; ± is the standard error of their mean. All curves use the \
same random numbers.
3. A client straggles in a round with probability q. Learning rate 0.1, times 0.97 after each round in which a \
client answers; in figure 3 it is 0.01 in all rounds.
4. {share} are not private, chosen at random, and each of these images is copied {copied}.
5. second moment after r rounds: E||g^||^2 of the estimate g^ in the next round, over 15 draws of stragglers; 0 if no \
client answers. g^ estimates the mean gradient; the second moment of the sum is {len(problem.y)}^2 times as large.
6. rounds to {CLOSE:.0%} of iid: rounds until the mean accuracy is this share of the last accuracy of iid \
clients without copies, at the same q. All curves: gradient_coding_table.csv; all rounds: gradient_coding.csv.
"""
    return table(curves) + notes


def write_all(curves: Sequence[Curve], problem: Problem, options: parse.Options, display: Display) -> None:
    """Write summary.json, the tables and the pictures of the curves; the last two curves are those of figure 3."""
    grid = [only(curve, "accuracy", "second_moment") for curve in curves[:-2]]
    figure3 = [only(curve, "same_class", "cross_class", "norm_sq") for curve in curves[-2:]]
    out, smoke = Path(options.out), options.preset == "smoke"
    text = report(grid, problem, options)
    facts = {name: options[name] for name in ("preset", "dataset", "repetitions", "seed", "sharing")}
    write_json(out / "summary.json", {"name": out.name, **facts, "curves": grid, "scalar_products": figure3})
    write_text(out / "gradient_coding.md", text)
    write_text(out / "gradient_coding_table.csv", tables.to_csv(summary(grid)))
    write_text(out / "gradient_coding.csv", tables.to_csv(rows([*grid, *figure3], options.repetitions)))
    many = f"mean over {options.repetitions} repetitions, band: ± standard error"
    for file, partition in (("figure1", "dirichlet_plain"), ("figure2", "single_class"), ("iid", "iid")):
        title = f"{options.dataset} (preset {options.preset}), {NAMES[partition]} clients: {many}"
        plots.save(picture(grid, partition, title), out / f"{file}.png", 110, smoke)
    title = f"{options.dataset} (preset {options.preset}), single class, learning rate 0.01: {many}"
    plots.save(products_picture(figure3, title), out / "figure3.png", 110, smoke)
    display.say(f"\n{text}\nAll in {out}: gradient_coding.md, two .csv, figure1, 2, 3 and iid.png, summary.json.")
