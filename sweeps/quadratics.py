"""Figures 2 and A.4 of Fedssyn, and B.3 of its first version: FedAvg on heterogeneous quadratics, a share p swapped.

python sweeps/quadratics.py                      # the paper's grid, seconds on one core
python sweeps/quadratics.py --preset smoke       # the same code with fewer p and rounds
python sweeps/quadratics.py --models clients     # the error as the captions have it: of models before they are averaged
"""

import io
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcommons.config import cli
from fedcommons.errors import UserError, unknown
from fedcommons.files import write_bytes, write_json, write_text
from fedcommons.reports import tables
from fedcommons.studies import quadratics as q
from fedcommons.sweeping import folders

PRESETS = {"paper": (q.SHARES, q.ROUNDS), "smoke": ((0.0, 0.25, 0.5, 0.75, 1.0), 250)}  # p, rounds
FIT = 1 / np.linspace(5e-5**-0.5, 1e-6**-0.5, 40) ** 2  # eps in [1e-6, 5e-5], evenly in 1/sqrt(eps)
NOISES = (0.0, 1000.0)  # sigma^2 of figure 2 (a)
FIXED = q.STEP_SIZES[[8]]  # its step size, 4.4e-5: every error is flat from round 100 on
KEYS = ("rounds", "step_size", "A_ratio", "theory_ratio", "theory_rounds", "L_p", "zeta_sq", "sigma_sq")
SHOWN = ("p", "swapped", "rounds", "step_size", "theory_rounds", "A", "B", "A_ratio", "theory_ratio", "(1-p)^2")
RED, BLUE = "#c0392b", "#2e6da4"

Rows = Sequence[Mapping[str, Any]]
Curves = Mapping[float, np.ndarray]  # sigma^2 -> errors (p, 1 + rounds)


def arguments(argv: Sequence[str]):
    """The options; ``shares``: the p, with 0 among them, to which theory refers."""
    preset = cli.early(argv, "preset", "paper")
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0], exit_on_error=False)
    for name, kind, default, text in (
        ("preset", str, "paper", f"{', '.join(PRESETS)}: sets p and rounds"),
        ("target", float, q.TARGET, "error eps to be reached"),
        ("seed", int, 12988, "of samples, swaps and orders; the default is the released code's"),
        ("zeta-sq", float, 10.0, "heterogeneity"),
        ("sigma-sq", float, 0.0, "noise of the samples, but for figure 2 (a), which has 0 and 1000"),
        ("rounds", int, PRESETS[preset][1], "rounds of every cell"),
        ("p", str | None, None, "shares that are swapped, separated by commas; 0 is always among them"),
        ("models", str, "server", "whose error: server, or clients before they are averaged"),
        ("out", str, "runs/quadratics", "folder of the results"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what would be computed, and stop")
    options = cli.parse(parser, argv)
    options.shares = sorted({0.0, *(PRESETS[preset][0] if options.p is None else cli.split("--p", options.p, float))})
    return options


def table(problems: Sequence[q.Quadratics], errors: np.ndarray, options) -> list[dict[str, Any]]:
    """A row for each p: what the grid has shown, and what theory says."""
    lines, at = [q.fit(e, FIT) for e in errors], [q.constants(problem, q.optimum(problem)) for problem in problems]
    rows = []
    for p, found, line, here in zip(options.shares, errors, lines, at, strict=True):
        ratio = (1 - p) * (here.l_max / at[0].l_max) ** 0.5
        rounds, step = q.fewest_rounds(found, options.target) or (None, None)
        row = {
            "p": p, "swapped": q.n_swapped(p, q.SHAPE[1]), "rounds": rounds,
            "step_size": None if step is None else float(q.STEP_SIZES[step]),
            "theory_rounds": None, "A": None, "B": None, "A_ratio": None, "theory_ratio": ratio,
            "(1-p)^2": (1 - p) ** 2, "L_p": here.l_max, "zeta_sq": here.zeta_sq, "sigma_sq": here.sigma_sq,
        }  # fmt: skip
        if line and lines[0] and lines[0][0]:
            (a, b), (a0, _) = line, lines[0]
            row |= {"A": a, "B": b, "A_ratio": a / a0, "theory_rounds": a0 * ratio / options.target**0.5 + b}
        rows.append(row)
    return rows


def reading(name: str, some: Rows) -> str:
    """How theory and outcome agree for some p."""
    if not (some := [r for r in some if r["A_ratio"] is not None]):
        return f"For {name} there is nothing to compare."
    off, square = ([abs(r["A_ratio"] - r[k]) for r in some] for k in ("theory_ratio", "(1-p)^2"))
    worst = some[int(np.argmax(off))]
    return (
        f"For {name}, A_p/A_0 differs from theory's (1-p) sqrt(L_p/L_0) by {np.mean(off):.3f} on average and most at "
        f"p = {worst['p']:g} ({worst['A_ratio']:.3f} against {worst['theory_ratio']:.3f}), from (1-p)^2 by "
        f"{np.mean(square):.3f} on average."
    )


def report(rows: Rows, curves: Curves, options) -> str:
    """The table, and what a reader must know."""
    names = (*SHOWN, *KEYS[-3:])
    lines = [["-" if r[n] is None else f"{r[n]:.3g}" if isinstance(r[n], float) else r[n] for n in names] for r in rows]
    falls = [np.median(found[0, -50:]) / np.median(found[-1, -50:]) for found in curves.values()]
    notes = (
        f"rounds: fewest over {len(q.STEP_SIZES)} step sizes until the error is {options.target}, within "
        f"{options.rounds}; -: not reached. Models: {options.models}. zeta^2 = {options.zeta_sq:g}, sigma^2 = "
        f"{options.sigma_sq:g}, seed {options.seed}; the columns of these names are measured at x*, after the swap.",
        "R = A/sqrt(eps) + B is fitted to the fewest rounds to those of 40 eps in [1e-6, 5e-5] that are reached. "
        "theory_ratio: (1-p) sqrt(L_p/L_0). theory_rounds: A_0 theory_ratio / sqrt(target) + B. swapped: int(100 p) of "
        "100 samples.",
        reading("0 < p <= 0.6", [r for r in rows if 0 < r["p"] <= 0.6]),
        reading("p > 0.6", [r for r in rows if r["p"] > 0.6]),
        f"Figure 2 (a), step size {FIXED[0]:.3g}, median of the last 50 rounds: swapping p = {rows[-1]['p']:g} lowers "
        f"the error {falls[0]:.3g} times with sigma^2 = {NOISES[0]:g} and {falls[1]:.3g} times with {NOISES[1]:g}.",
    )
    return tables.markdown(names, lines) + "".join(f"\n{i}. {note}" for i, note in enumerate(notes, 1)) + "\n"


def pictures(rows: Rows, errors: np.ndarray, curves: Curves, some: Sequence[int], options) -> dict[str, bytes]:
    """Figure 2, and the fitted lines of B.3; ``some``: the p that get curves, by their indices."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure, other = (Figure(figsize=size, layout="constrained") for size in ((15, 4.4), (6.5, 4.6)))
    (over_rounds, fewest, ratios), lines = figure.subplots(1, 3), other.subplots()
    colours = {k: colormaps["viridis"](0.9 * rows[k]["p"]) for k in some}
    p, width = np.array([r["p"] for r in rows]), 0.7 / len(rows)
    column = {name: np.array([np.nan if r[name] is None else r[name] for r in rows]) for name in rows[0]}

    for (sigma_sq, found), style in zip(curves.items(), ("-", ":"), strict=True):
        for k, curve in zip(some, found, strict=True):
            label = f"p = {p[k]:g}" if style == "-" else None
            over_rounds.semilogy(curve, style, color=colours[k], linewidth=1.3, label=label)
        over_rounds.plot([], [], style, color="0.4", label=f"σ² = {sigma_sq:g}")
    over_rounds.set(title=f"(a) step size {FIXED[0]:.2g}", xlabel="round", ylabel="error ‖x − x*‖²")
    fewest.bar(p, column["rounds"], width, color="#9db8d2", label="fewest rounds")
    fewest.hlines(column["theory_rounds"], p - 0.8 * width, p + 0.8 * width, color=RED, label="theory")
    fewest.set(title=f"(b) to ε = {options.target:g}", xlabel="p", ylabel="rounds")
    ratios.plot(p, column["A_ratio"], "o", markersize=4, color=BLUE, label="fitted $A_p / A_0$")
    ratios.plot(p, column["theory_ratio"], color=RED, label=r"theory, $(1-p)\sqrt{L_p / L_0}$")
    ratios.plot(p, column["(1-p)^2"], "--", color="0.5", label="$(1-p)^2$")
    ratios.set(title="(c)", xlabel="p", ylabel="$A_p / A_0$")
    x = FIT**-0.5
    for k in some:
        reached = [at[0] if (at := q.fewest_rounds(errors[k], eps)) else np.nan for eps in FIT]
        lines.plot(x, reached, ".", color=colours[k])
        lines.plot(x, column["A"][k] * x + column["B"][k], color=colours[k], label=f"p = {p[k]:g}")
    lines.set(xlabel=r"$1 / \sqrt{\varepsilon}$", ylabel="fewest rounds to ε")

    for axes in (over_rounds, fewest, ratios, lines):
        axes.legend(fontsize=8, ncols=2 if axes is over_rounds else 1)
        axes.spines[["top", "right"]].set_visible(False)
    contents = {}
    for name, drawn in (("figure2.png", figure), ("fitted_lines.png", other)):
        drawn.savefig(content := io.BytesIO(), dpi=120)
        contents[name] = content.getvalue()
    return contents


def swapped(options, sigma_sq: float, shares: Sequence[float]) -> list[q.Quadratics]:
    """The problem with each of these shares swapped."""
    own = q.draw(options.seed, options.zeta_sq, sigma_sq)
    return [q.swap(own, p, options.seed) for p in shares]


def quadratics(argv: Sequence[str]) -> int:
    options = arguments(argv)
    problems = swapped(options, options.sigma_sq, options.shares)
    q.check(problems[0], options.target, options.rounds, options.models)
    out = Path(options.out)
    if options.dry_run:
        print(f"{out}: {len(q.STEP_SIZES)} step sizes x {len(problems)} p x {options.rounds} rounds to compute")
        return 0
    with folders.open_folder(out):
        return play_all(problems, out, options)


def play_all(problems: Sequence[q.Quadratics], out: Path, options) -> int:
    """Play every cell, and write the tables, the pictures and the summary."""
    play = partial(q.run, rounds=options.rounds, seed=options.seed, models=options.models)
    started = time.perf_counter()
    errors = play(problems, q.STEP_SIZES)
    cells = f"{len(q.STEP_SIZES)} step sizes x {len(problems)} p x {options.rounds} rounds"
    print(f"{cells}: {time.perf_counter() - started:.1f} s")
    if errors.min() > options.target:
        k, step, last = np.unravel_index(errors.argmin(), errors.shape)
        raise UserError(
            f"no cell reaches target {options.target:g}: the floor of {cells} is {errors.min()}, at p = "
            f"{options.shares[k]:g} with step size {q.STEP_SIZES[step]:.3g} in round {last}."
        )
    some = sorted({round(k) for k in np.linspace(0, len(problems) - 1, 6)})
    curves = {s: play(swapped(options, s, [options.shares[k] for k in some]), FIXED)[:, 0] for s in NOISES}

    rows = table(problems, errors, options)
    points = [
        {"sigma_sq": sigma_sq, "p": options.shares[k], "round": r, "error": error}
        for sigma_sq, found in curves.items()
        for k, curve in zip(some, found.tolist(), strict=True)
        for r, error in enumerate(curve)
    ]
    text = report(rows, curves, options)
    for name, content in pictures(rows, errors, curves, some, options).items():
        write_bytes(out / name, content)
    write_text(out / "quadratics.csv", tables.to_csv(rows))
    write_text(out / "figure2a.csv", tables.to_csv(points))
    write_text(out / "quadratics.md", text)
    write_json(out / "summary.json", {key: {r["p"]: r[key] for r in rows} for key in KEYS})
    print(f"\n{text}\n{out}")
    return 0


if __name__ == "__main__":
    cli.main(quadratics)
