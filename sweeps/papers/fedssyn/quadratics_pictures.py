"""Pictures of figures 2 and B.3 of Fedssyn: FedAvg on quadratics with swapped samples."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedcommons.cli import parse
from papers.fedssyn import fitted_lines as lines
from papers.fedssyn import quadratics as q
from papers.fedssyn.quadratics_tables import FIXED, Rows, chosen, over_seeds

NAMED = {"plain": "plain fit", "authors": "the authors' fit"}
COLOURS, DASHES = {"plain": "#0072b2", "authors": "#e69f00"}, {"plain": "-", "authors": "--"}
RED, SHARE = "#d55e00", "p, share of the samples swapped"


def picture(rows: Rows, curves: Mapping[float, np.ndarray], options: parse.Options) -> bytes:
    """Return figure 2 as PNG, with medians and ranges over seeds; curves: sigma^2 -> errors (seeds, p, 1 + rounds)."""
    from matplotlib import colormaps

    from fedcommons.reports import plots

    figure, ((over_rounds, fewest, ratios),) = plots.panels(1, 3, (15, 5.6))
    bands = over_seeds(rows)
    p = np.array([r["p"] for r in bands])

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
    over_rounds.set(title=f"(a) error at step size {FIXED[0]:.2g}", xlabel="round", ylabel="error ‖x − x*‖² (log)")

    middle, lowest, highest = column("rounds")
    fewest.errorbar(p, middle, (middle - lowest, highest - middle), fmt="o", color="k", markersize=4, linewidth=0.8,
                    label="measured, fewest rounds of all step sizes")  # fmt: skip
    for kind in options.fit:
        at, _, _ = column(f"theory_rounds_{kind}")
        below = f"; below 0 from p = {p[at < 0].min():g}" if (at < 0).any() else ""
        fewest.plot(p, at, DASHES[kind], color=COLOURS[kind], label=f"theory, {NAMED[kind]}{below}")
        of_fit, *edges = column(f"A_ratio_{kind}")
        ratios.plot(p, of_fit, DASHES[kind], color=COLOURS[kind], marker="o", markersize=3, linewidth=1,
                    label=f"$A_p / A_0$, {NAMED[kind]}")  # fmt: skip
        ratios.fill_between(p, *edges, color=COLOURS[kind], alpha=0.2, linewidth=0)
    fewest.set(title=f"(b) rounds to ε = {options.target:.3g}", xlabel=SHARE, ylabel="rounds")
    fewest.set_ylim(bottom=0)
    theory, *edges = column("theory_ratio")
    ratios.plot(p, theory, color=RED, label=r"theory, $(1-p)\sqrt{L_p / L_0}$")
    ratios.fill_between(p, *edges, color=RED, alpha=0.2, linewidth=0)
    ratios.plot(p, (1 - p) ** 2, ":", color="0.4", label="$(1-p)^2$")
    ratios.set(title="(c) slope of the fitted line", xlabel=SHARE, ylabel="$A_p / A_0$")
    for axes in (over_rounds, fewest, ratios):
        axes.title.set_size(11)
    plots.finish(figure, heading(options), loc="panels")
    return plots.png(figure, 120)


def lines_picture(rows: Rows, errors: Sequence[np.ndarray], options: parse.Options) -> bytes:
    """Return figure B.3 of the first seed as PNG: rounds to error eps over 1/sqrt(eps), and a fitted line per share."""
    from matplotlib import colormaps

    from fedcommons.reports import plots

    figure, (row,) = plots.panels(1, len(options.fit), (6 * len(options.fit), 5.4))
    x = lines.TARGETS**-0.5
    for axes, kind in zip(row, options.fit, strict=True):
        for k in chosen(options, 6):
            p, colour = options.shares[k], colormaps["viridis"](0.9 * options.shares[k])
            axes.plot(x, lines.rounds_to(errors[k]), ".", markersize=3, color=colour)
            if (a := rows[k][f"A_{kind}"]) is not None:
                axes.plot(x, a * x + rows[k][f"B_{kind}"], color=colour, label=f"p = {p:g}")
        axes.set(title=NAMED[kind], xlabel=r"$1 / \sqrt{\varepsilon}$", ylabel="fewest rounds to ε (dots), fit (lines)")
    plots.finish(figure, f"Quadratics, seed {options.seeds[0]}: lines fitted to rounds", loc="panels")
    return plots.png(figure, 120)


def heading(options: parse.Options) -> str:
    """Return the title of the picture: numbers of clients, samples and dimensions, zeta^2, sigma^2 and seeds."""
    n_clients, n, d = q.SHAPE
    seeds = f"{len(options.seeds)} seeds: median, and band or line from minimum to maximum"
    return (
        f"Quadratics: {n_clients} clients, {n} samples each, {d} numbers, ζ² = {options.zeta_sq:g}; (b) and (c): "
        f"σ² = {options.sigma_sq:g}. {seeds if len(options.seeds) > 1 else f'Seed {options.seeds[0]}'}"
    )
