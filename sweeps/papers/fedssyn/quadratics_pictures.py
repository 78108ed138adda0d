"""Pictures of figures 2 and B.3 of Fedssyn: FedAvg on quadratics with swapped samples."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedcommons.cli import parse
from papers.fedssyn import fitted_lines as lines
from papers.fedssyn import quadratics as q
from papers.fedssyn.quadratics_tables import FIXED, Rows, chosen, over_seeds

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.figure import Figure

NAMED = {"plain": "plain fit", "authors": "the authors' fit"}
COLOURS = {"plain": "#2e6da4", "authors": "#d98c21"}
RED = "#c0392b"


def picture(rows: Rows, curves: Mapping[float, np.ndarray], options: parse.Options) -> bytes:
    """Return figure 2 as PNG, with medians and ranges over seeds; curves: sigma^2 -> errors (seeds, p, 1 + rounds)."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure, bands = Figure(figsize=(15, 5), layout="constrained"), over_seeds(rows)
    over_rounds, fewest, ratios = figure.subplots(1, 3)
    p, width = np.array([r["p"] for r in bands]), 0.7 / len(bands)

    def column(name: str) -> np.ndarray:
        return np.array([r[name] or (np.nan,) * 3 for r in bands]).T  # rows: median, minimum, maximum over seeds

    for (sigma_sq, errors), style in zip(curves.items(), ("-", ":"), strict=True):
        for of_p, k in enumerate(chosen(options, 3)):
            colour = colormaps["viridis"](0.9 * p[k])
            label = f"p = {p[k]:g}" if style == "-" else None
            over_rounds.semilogy(np.median(errors[:, of_p], axis=0), style, color=colour, linewidth=1.3, label=label)
            lowest, highest = errors[:, of_p].min(0), errors[:, of_p].max(0)
            over_rounds.fill_between(range(len(lowest)), lowest, highest, color=colour, alpha=0.2, linewidth=0)
        over_rounds.plot([], [], style, color="0.4", label=f"σ² = {sigma_sq:g}")
    over_rounds.set(title=f"(a) error at step size {FIXED[0]:.2g}", xlabel="round", ylabel="error ‖x − x*‖²")

    middle, lowest, highest = column("rounds")
    error = {"ecolor": "0.45", "elinewidth": 0.8}
    fewest.bar(p, middle, width, color="#c9d6e3", yerr=(middle - lowest, highest - middle), error_kw=error,
               label="fewest rounds; line: minimum to maximum")  # fmt: skip
    for kind in options.fit:
        at, _, _ = column(f"theory_rounds_{kind}")
        fewest.hlines(at, p - 0.8 * width, p + 0.8 * width, color=COLOURS[kind], label=f"theory, {NAMED[kind]}")
        of_fit, *edges = column(f"A_ratio_{kind}")
        ratios.plot(
            p, of_fit, "o-", markersize=3, linewidth=1, color=COLOURS[kind], label=f"$A_p / A_0$, {NAMED[kind]}"
        )
        ratios.fill_between(p, *edges, color=COLOURS[kind], alpha=0.2, linewidth=0)
    fewest.set(
        title=f"(b) rounds to ε = {options.target:.3g}", xlabel="p, share of the samples swapped", ylabel="rounds"
    )
    if (lowest := fewest.get_ylim()[0]) < 0:
        fewest.axhspan(lowest, 0, color="0.93", lw=0, zorder=0)
        fewest.text(
            0.02, lowest / 2, "negative: no number of rounds, as the line's B is below 0", fontsize=8, va="center"
        )
        fewest.set_ylim(bottom=lowest)
    theory, *edges = column("theory_ratio")
    ratios.plot(p, theory, color=RED, label=r"theory, $(1-p)\sqrt{L_p / L_0}$")
    ratios.fill_between(p, *edges, color=RED, alpha=0.2, linewidth=0)
    ratios.plot(p, (1 - p) ** 2, "--", color="0.4", label="$(1-p)^2$")
    ratios.set(title="(c) slope of the fitted line", xlabel="p, share of the samples swapped", ylabel="$A_p / A_0$")
    for axes in (over_rounds, fewest, ratios):
        axes.title.set_size(11)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(heading(options), fontsize=10)
    return png(figure)


def lines_picture(rows: Rows, errors: Sequence[np.ndarray], options: parse.Options) -> bytes:
    """Return figure B.3 of the first seed as PNG: rounds to error eps over 1/sqrt(eps), and a fitted line per share."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure, x = Figure(figsize=(6 * len(options.fit), 4.8), layout="constrained"), lines.TARGETS**-0.5
    for axes, kind in zip(figure.subplots(1, len(options.fit), squeeze=False)[0], options.fit, strict=True):
        for k in chosen(options, 6):
            p, colour = options.shares[k], colormaps["viridis"](0.9 * options.shares[k])
            axes.plot(x, lines.rounds_to(errors[k]), ".", markersize=3, color=colour)
            if (a := rows[k][f"A_{kind}"]) is not None:
                axes.plot(x, a * x + rows[k][f"B_{kind}"], color=colour, label=f"p = {p:g}")
        axes.set(title=NAMED[kind], xlabel=r"$1 / \sqrt{\varepsilon}$", ylabel="fewest rounds to ε (dots), fit (lines)")
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"Quadratics, seed {options.seeds[0]}: lines fitted to rounds", fontsize=10)
    return png(figure)


def heading(options: parse.Options) -> str:
    """Return the title of the picture: numbers of clients, samples and dimensions, zeta^2, sigma^2 and seeds."""
    n_clients, n, d = q.SHAPE
    seeds = f"{len(options.seeds)} seeds: median, and band or line from minimum to maximum"
    return (
        f"Quadratics: {n_clients} clients, {n} samples each, {d} numbers, ζ² = {options.zeta_sq:g}; (b) and (c): "
        f"σ² = {options.sigma_sq:g}. {seeds if len(options.seeds) > 1 else f'Seed {options.seeds[0]}'}"
    )


def png(figure: "Figure") -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(content := io.BytesIO(), dpi=120)
    return content.getvalue()
