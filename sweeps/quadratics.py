"""Figures 2 and A.4 of Fedssyn, and B.3 of its first version: FedAvg on heterogeneous quadratics, a share p swapped.

python sweeps/quadratics.py                      # the paper's grid, ten seeds, seconds on one core
python sweeps/quadratics.py --preset smoke       # the same code with fewer p and rounds
python sweeps/quadratics.py --fit authors        # A_p and B_p as the released code fits them, and no other way
python sweeps/quadratics.py --models clients     # the error as the captions have it: of models before they are averaged
"""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcommons.config import cli
from fedcommons.errors import UserError, unknown
from fedcommons.files import write_bytes, write_json, write_text
from fedcommons.reports import tables
from fedcommons.sweeping import folders
from fedcommons.sweeping.display import Display
from papers.fedssyn import fitted_lines as lines
from papers.fedssyn import quadratics as q

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.figure import Figure

PRESETS = {"paper": (q.SHARES, q.ROUNDS, 10), "smoke": ((0.0, 0.25, 0.5, 0.75, 1.0), 250, 2)}  # p, rounds, seeds
NOISES = (0.0, 1000.0)  # sigma^2 of figure 2 (a)
FIXED = q.STEP_SIZES[[8]]  # its step size, 4.4e-5: every error is flat from round 100 on
NAMED = {"plain": "plain fit", "authors": "the authors' fit"}
COLOURS = {"plain": "#2e6da4", "authors": "#d98c21"}
RED = "#c0392b"

Rows = Sequence[Mapping[str, Any]]
Band = tuple[float, float, float]  # median, least, most


def arguments(argv: Sequence[str]):
    """The options; ``shares``: the p, with 0 among them, to which theory refers."""
    preset = cli.early(argv, "preset", "paper")
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    shares, rounds, seeds = PRESETS[preset]
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0], exit_on_error=False)
    for name, kind, default, text in (
        ("preset", str, "paper", f"{', '.join(PRESETS)}: sets p, rounds and seeds"),
        ("target", float, q.TARGET, "error eps to be reached"),
        ("seeds", str, ",".join(map(str, range(seeds))), "seeds of samples, swaps and orders, separated by commas"),
        ("zeta-sq", float, 10.0, "zeta^2, how much the clients differ"),
        ("sigma-sq", float, 0.0, "sigma^2, noise of the samples; figure 2 (a) always has 0 and 1000"),
        ("rounds", int, rounds, "rounds after which an error counts as not reached"),
        ("p", str | None, None, "shares that are swapped, separated by commas; 0 is always among them"),
        ("fit", str, ",".join(lines.FITS), "how A_p and B_p are fitted: plain, authors (the released code's), or both"),
        ("models", str, "server", "whose error: server, or clients before they are averaged"),
        ("out", str, "runs/quadratics", "folder of the results"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what would be computed, and stop")
    options = cli.parse(parser, argv)
    options.seeds, options.fit = cli.split("--seeds", options.seeds, int), cli.split("--fit", options.fit)
    if wrong := [kind for kind in options.fit if kind not in lines.FITS]:
        raise unknown("fit", wrong[0], lines.FITS)
    options.shares = sorted({0.0, *(shares if options.p is None else cli.split("--p", options.p, float))})
    return options


def table(problems: Sequence[q.Quadratics], errors: Sequence[np.ndarray], seed: int, options) -> list[dict[str, Any]]:
    """A row for each p of a seed: what the grid has shown, and what theory says."""
    to = [lines.rounds_to(found) for found in errors]
    fitted = {kind: lines.fit_all(kind, options.shares, to) for kind in options.fit}
    at = [q.constants(problem, q.optimum(problem)) for problem in problems]
    rows = []
    for k, (p, here) in enumerate(zip(options.shares, at, strict=True)):
        ratio = (1 - p) * (here.l_max / at[0].l_max) ** 0.5
        rounds, step = lines.fewest_rounds(errors[k], options.target) or (None, None)
        row = {
            "seed": seed, "p": p, "swapped": q.n_swapped(p, q.SHAPE[1]), "rounds": rounds,
            "step_size": None if step is None else float(q.STEP_SIZES[step]), "theory_ratio": ratio,
            "(1-p)^2": (1 - p) ** 2, "L_p": here.l_max, "zeta_sq": here.zeta_sq, "sigma_sq": here.sigma_sq,
        }  # fmt: skip
        for kind, found in fitted.items():
            (a, b), (a0, _) = found[k] or (None, None), found[0] or (None, None)
            row |= {f"A_{kind}": a, f"B_{kind}": b, f"A_ratio_{kind}": None, f"theory_rounds_{kind}": None}
            if a0 and a is not None and b is not None:
                row[f"A_ratio_{kind}"] = a / a0
                row[f"theory_rounds_{kind}"] = a0 * ratio / options.target**0.5 + b
        rows.append(row)
    return rows


def band(values: Sequence[float | None]) -> Band | None:
    """Median, least and most of those that are there."""
    there = [value for value in values if value is not None]
    return (float(np.median(there)), float(min(there)), float(max(there))) if there else None


def over_seeds(rows: Rows) -> list[dict[str, Any]]:
    """A row for each p: how many seeds reached the target, and a band of everything else."""
    of_p = [[r for r in rows if r["p"] == p] for p in dict.fromkeys(r["p"] for r in rows)]
    names = [name for name in rows[0] if name not in ("seed", "p", "swapped", "(1-p)^2")]
    return [
        {"p": some[0]["p"], "swapped": some[0]["swapped"], "(1-p)^2": some[0]["(1-p)^2"],
         "reached": sum(r["rounds"] is not None for r in some), **{n: band([r[n] for r in some]) for n in names}}
        for some in of_p
    ]  # fmt: skip


def shown(value: Any) -> str:
    """``median [least, most]`` of a band, or the median alone where all are equal; ``-`` for None."""
    if not isinstance(value, tuple):
        return "-" if value is None else f"{value:.3g}"
    middle, least, most = (f"{v:.3g}" for v in value)
    return middle if least == most else f"{middle} [{least}, {most}]"


def reading(kind: str, least: float, most: float, rows: Rows) -> str:
    """How far a fit's A_p/A_0 lies from theory and from (1-p)^2 for ``least`` < p <= ``most``."""
    key, some = f"A_ratio_{kind}", [r for r in rows if least < r["p"] <= most and r[f"A_ratio_{kind}"] is not None]
    if not some:
        return f"For {least:g} < p <= {most:g} the {kind} fit has nothing to compare."
    seeds = dict.fromkeys(r["seed"] for r in some)
    theory, square = (
        shown(band([float(np.mean([abs(r[key] - r[other]) for r in some if r["seed"] == seed])) for seed in seeds]))
        for other in ("theory_ratio", "(1-p)^2")
    )
    return (
        f"For {least:g} < p <= {most:g}, A_p/A_0 of the {kind} fit is {theory} from theory_ratio and {square} from "
        "(1-p)^2, on average over p."
    )


def report(rows: Rows, curves: Mapping[float, np.ndarray], options) -> str:
    """The table, and what a reader must know; curves: sigma^2 -> errors (seeds, p, 1 + rounds)."""
    bands = over_seeds(rows)
    head = [name for name in bands[0] if name not in {f"{of}_{kind}" for of in "AB" for kind in options.fit}]
    falls = [
        shown(band((np.median(found[:, 0, -50:], axis=1) / np.median(found[:, -1, -50:], axis=1)).tolist()))
        for found in curves.values()
    ]
    notes = (
        f"Numbers are the median over {len(options.seeds)} seeds ({', '.join(map(str, options.seeds))}), with "
        "[least, most] where they differ. reached: seeds that reach the target; rounds and step_size are of these.",
        f"rounds: fewest over {len(q.STEP_SIZES)} step sizes until the error is {options.target}, within "
        f"{options.rounds}. Models: {options.models}. zeta^2 = {options.zeta_sq:g}, sigma^2 = {options.sigma_sq:g}; "
        "the columns of these names are measured at x*, after the swap. swapped: int(100 p) of 100 samples.",
        f"R_p = A_p/sqrt(eps) + B_p is fitted to the fewest rounds to {len(lines.TARGETS)} eps in [1e-6, 5e-5]. plain: "
        "least squares. authors: with A_p and B_p bounded by those of the p before, as in the released code. "
        "theory_ratio: (1-p) sqrt(L_p/L_0). theory_rounds: A_0 theory_ratio / sqrt(target) + B_p.",
        *(reading(kind, *bounds, rows) for kind in options.fit for bounds in ((0, 0.6), (0.6, 1))),
        f"Figure 2 (a), step size {FIXED[0]:.3g}, median of the last 50 rounds: swapping "
        f"p = {options.shares[-1]:g} lowers the error {falls[0]} times with sigma^2 = {NOISES[0]:g} and {falls[1]} "
        f"times with {NOISES[1]:g}.",
    )
    text = tables.markdown(head, [[shown(row[name]) for name in head] for row in bands])
    return text + tables.numbered(notes)


def picture(rows: Rows, curves: Mapping[float, np.ndarray], options) -> bytes:
    """Figure 2: medians over seeds, and bands from the least to the most."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure, bands = Figure(figsize=(15, 5), layout="constrained"), over_seeds(rows)
    over_rounds, fewest, ratios = figure.subplots(1, 3)
    p, width = np.array([r["p"] for r in bands]), 0.7 / len(bands)

    def column(name: str) -> np.ndarray:
        return np.array([r[name] or (np.nan,) * 3 for r in bands]).T  # median, least, most

    for (sigma_sq, found), style in zip(curves.items(), ("-", ":"), strict=True):
        for of_p, k in enumerate(chosen(options, 3)):
            colour = colormaps["viridis"](0.9 * p[k])
            label = f"p = {p[k]:g}" if style == "-" else None
            over_rounds.semilogy(np.median(found[:, of_p], axis=0), style, color=colour, linewidth=1.3, label=label)
            lowest, highest = found[:, of_p].min(0), found[:, of_p].max(0)
            over_rounds.fill_between(range(len(lowest)), lowest, highest, color=colour, alpha=0.2, linewidth=0)
        over_rounds.plot([], [], style, color="0.4", label=f"σ² = {sigma_sq:g}")
    over_rounds.set(title=f"(a) error at step size {FIXED[0]:.2g}", xlabel="round", ylabel="error ‖x − x*‖²")

    middle, lowest, highest = column("rounds")
    error = {"ecolor": "0.45", "elinewidth": 0.8}
    fewest.bar(p, middle, width, color="#c9d6e3", yerr=(middle - lowest, highest - middle), error_kw=error,
               label="fewest rounds; line: least to most")  # fmt: skip
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
    theory, *edges = column("theory_ratio")
    ratios.plot(p, theory, color=RED, label=r"theory, $(1-p)\sqrt{L_p / L_0}$")
    ratios.fill_between(p, *edges, color=RED, alpha=0.2, linewidth=0)
    ratios.plot(p, (1 - p) ** 2, "--", color="0.4", label="$(1-p)^2$")
    ratios.set(title="(c) slope of the fitted line", xlabel="p, share of the samples swapped", ylabel="$A_p / A_0$")
    for axes in (over_rounds, fewest, ratios):
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(heading(options), fontsize=10)
    return png(figure)


def lines_picture(rows: Rows, errors: Sequence[np.ndarray], options) -> bytes:
    """Figure B.3, of the first seed: fewest rounds over 1/sqrt(eps), and the lines of each fit."""
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


def heading(options) -> str:
    """What every panel shares."""
    n_clients, n, d = q.SHAPE
    seeds = f"{len(options.seeds)} seeds: median, and band or line from the least to the most"
    return (
        f"Quadratics: {n_clients} clients, {n} samples each, {d} numbers, ζ² = {options.zeta_sq:g}; (b) and (c): "
        f"σ² = {options.sigma_sq:g}. {seeds if len(options.seeds) > 1 else f'Seed {options.seeds[0]}'}"
    )


def png(figure: "Figure") -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(content := io.BytesIO(), dpi=120)
    return content.getvalue()


def chosen(options, n: int) -> list[int]:
    """Indices of up to ``n`` shares, evenly from the first to the last."""
    return sorted({round(k) for k in np.linspace(0, len(options.shares) - 1, n)})


def swapped(options, seed: int, sigma_sq: float, shares: Sequence[float]) -> list[q.Quadratics]:
    """The problem of a seed with each of these shares swapped."""
    own = q.draw(seed, options.zeta_sq, sigma_sq)
    return [q.swap(own, p, seed) for p in shares]


def quadratics(argv: Sequence[str]) -> int:
    options = arguments(argv)
    problems = {seed: swapped(options, seed, options.sigma_sq, options.shares) for seed in options.seeds}
    for some in problems.values():
        q.check(some[0], options.target, options.rounds, options.models)
    out = Path(options.out)
    if options.dry_run:
        print(f"{out}: {grid(options)} to compute")
        return 0
    with folders.open_folder(out), Display() as display:
        return play_all(problems, out, options, display)


def grid(options) -> str:
    return (
        f"{len(q.STEP_SIZES)} step sizes x {len(options.shares)} p x {len(options.seeds)} seeds x at most "
        f"{options.rounds} rounds"
    )


def play_all(problems: Mapping[int, Sequence[q.Quadratics]], out: Path, options, display: Display) -> int:
    """Play every cell, and write the tables, the pictures and the summary."""
    play = partial(q.run, rounds=options.rounds, models=options.models)
    least = min(options.target, lines.TARGETS.min())  # nothing is asked about the rounds after it
    errors, curves = {}, []
    for number, (seed, some) in enumerate(problems.items(), 1):
        errors[seed] = play(some, q.STEP_SIZES, seed=seed, until=least)
        shares = [options.shares[k] for k in chosen(options, 3)]
        few = [problem for sigma_sq in NOISES for problem in swapped(options, seed, sigma_sq, shares)]
        curves.append(np.reshape(play(few, FIXED, seed=seed), (len(NOISES), len(shares), -1)))
        display.step("seeds", number, len(problems), f"seed {seed}")
    floors = [(found.min(), seed, k) for seed, every in errors.items() for k, found in enumerate(every)]
    if min(floors)[0] > options.target:
        floor, seed, k = min(floors)
        step, last = np.unravel_index(errors[seed][k].argmin(), errors[seed][k].shape)
        raise UserError(
            f"no cell reaches target {options.target:g}: the floor of {grid(options)} is {floor}, at p = "
            f"{options.shares[k]:g} with step size {q.STEP_SIZES[step]:.3g} in round {last}, seed {seed}."
        )
    stacked = dict(zip(NOISES, np.stack(curves, axis=1), strict=True))
    rows = [row for seed, some in problems.items() for row in table(some, errors[seed], seed, options)]
    points = [
        {"sigma_sq": sigma_sq, "seed": seed, "p": options.shares[k], "round": r, "error": error}
        for sigma_sq, found in stacked.items()
        for seed, of_seed in zip(options.seeds, found, strict=True)
        for k, curve in zip(chosen(options, 3), of_seed.tolist(), strict=True)
        for r, error in enumerate(curve)
    ]
    text, first = report(rows, stacked, options), options.seeds[0]
    write_bytes(out / "figure2.png", picture(rows, stacked, options))
    write_bytes(out / "fitted_lines.png", lines_picture(rows, errors[first], options))
    write_text(out / "quadratics.csv", tables.to_csv(rows))
    write_text(out / "figure2a.csv", tables.to_csv(points))
    write_text(out / "quadratics.md", text)
    facts = {name: options[name] for name in ("seeds", "fit", "target", "rounds", "models", "zeta_sq", "sigma_sq")}
    write_json(out / "summary.json", {**facts, "cells": over_seeds(rows)})
    display.say(f"\n{text}\n{out}")
    return 0


if __name__ == "__main__":
    cli.main(quadratics)
