"""Tables of figure 2 of Fedssyn, with a row for each swapped share p: per seed, and as ranges over seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcommons.cli import parse
from fedcommons.reports import tables
from papers.fedssyn import fitted_lines as lines
from papers.fedssyn import quadratics as q

NOISES = (0.0, 1000.0)  # values of sigma^2 in figure 2 (a)
FIXED = q.STEP_SIZES[[8]]  # step size of figure 2 (a), 4.4e-5; with it, every error is constant after round 100

Rows = Sequence[Mapping[str, Any]]
Band = tuple[float, float, float]  # (median, minimum, maximum) over seeds


def table(
    problems: Sequence[q.Quadratics], errors: Sequence[np.ndarray], seed: int, options: parse.Options
) -> list[dict[str, Any]]:
    """Return a row for each share p of swapped samples: fewest rounds, best step size, fitted lines and predictions."""
    to = [lines.rounds_to(of_p) for of_p in errors]
    fitted = {kind: lines.fit_all(kind, options.shares, to) for kind in options.fit}
    at = [q.constants(problem, q.optimum(problem)) for problem in problems]
    rows = []
    for k, (p, at_p) in enumerate(zip(options.shares, at, strict=True)):
        ratio = (1 - p) * (at_p.l_max / at[0].l_max) ** 0.5
        rounds, step = lines.fewest_rounds(errors[k], options.target) or (None, None)
        row = {
            "seed": seed, "p": p, "swapped": q.n_swapped(p, q.SHAPE[1]), "rounds": rounds,
            "step_size": None if step is None else float(q.STEP_SIZES[step]), "theory_ratio": ratio,
            "(1-p)^2": (1 - p) ** 2, "L_p": at_p.l_max, "zeta_sq": at_p.zeta_sq, "sigma_sq": at_p.sigma_sq,
        }  # fmt: skip
        for kind, fits in fitted.items():
            (a, b), (a0, _) = fits[k] or (None, None), fits[0] or (None, None)
            row |= {f"A_{kind}": a, f"B_{kind}": b, f"A_ratio_{kind}": None, f"theory_rounds_{kind}": None}
            row[f"R2_{kind}"] = lines.r_squared(to[k], (a, b)) if a is not None and b is not None else None
            if a0 and a is not None and b is not None:
                row[f"A_ratio_{kind}"] = a / a0
                row[f"theory_rounds_{kind}"] = a0 * ratio / options.target**0.5 + b
        rows.append(row)
    return rows


def band(values: Sequence[float | None]) -> Band | None:
    """Return (median, minimum, maximum) of the values that are not None; None if all values are None."""
    present = [value for value in values if value is not None]
    return (float(np.median(present)), float(min(present)), float(max(present))) if present else None


def over_seeds(rows: Rows) -> list[dict[str, Any]]:
    """Return a row for each share p: the number of seeds that reached the target, and ``band`` of all other values."""
    of_p = [[r for r in rows if r["p"] == p] for p in dict.fromkeys(r["p"] for r in rows)]
    names = [name for name in rows[0] if name not in ("seed", "p", "swapped", "(1-p)^2")]
    return [
        {"p": some[0]["p"], "swapped": some[0]["swapped"], "(1-p)^2": some[0]["(1-p)^2"],
         "reached": sum(r["rounds"] is not None for r in some), **{n: band([r[n] for r in some]) for n in names}}
        for some in of_p
    ]  # fmt: skip


def format_band(value: Any) -> str:
    """Format a band as ``median [minimum, maximum]``, or only the median if all three are equal; ``-`` for None."""
    if not isinstance(value, tuple):
        return "-" if value is None else f"{value:.3g}"
    middle, least, most = (f"{v:.3g}" for v in value)
    return middle if least == most else f"{middle} [{least}, {most}]"


def reading(kind: str, least: float, most: float, rows: Rows) -> str:
    """Return a sentence that compares the fitted A_p/A_0 with the theory, (1-p) sqrt(L_p/L_0), and with (1-p)^2."""
    key, some = f"A_ratio_{kind}", [r for r in rows if least < r["p"] <= most and r[f"A_ratio_{kind}"] is not None]
    if not some:
        return f"For {least:g} < p <= {most:g} the {kind} fit has nothing to compare."
    seeds = dict.fromkeys(r["seed"] for r in some)
    theory, square = (
        format_band(
            band([float(np.mean([abs(r[key] - r[other]) for r in some if r["seed"] == seed])) for seed in seeds])
        )
        for other in ("theory_ratio", "(1-p)^2")
    )
    return (
        f"For {least:g} < p <= {most:g}, A_p/A_0 of the {kind} fit is {theory} from theory_ratio and {square} from "
        "(1-p)^2, on average over p."
    )


def report(rows: Rows, curves: Mapping[float, np.ndarray], options: parse.Options) -> str:
    """Return the table of all shares p with footnotes; curves: sigma^2 -> errors (seeds, shares p, 1 + rounds)."""
    bands = over_seeds(rows)
    head = [name for name in bands[0] if name not in {f"{letter}_{kind}" for letter in "AB" for kind in options.fit}]
    falls = [
        format_band(band((np.median(errors[:, 0, -50:], axis=1) / np.median(errors[:, -1, -50:], axis=1)).tolist()))
        for errors in curves.values()
    ]
    notes = (
        f"Numbers are the median over {len(options.seeds)} seeds ({', '.join(map(str, options.seeds))}), with "
        "[minimum, maximum] where they differ. reached: number of seeds that reach the target; rounds and step_size "
        "are bands over these seeds.",
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
    text = tables.markdown(head, [[format_band(row[name]) for name in head] for row in bands])
    return text + tables.numbered(notes)


def chosen(options: parse.Options, n: int) -> list[int]:
    """Return the indices of up to ``n`` of the swapped shares p, evenly spaced from the first to the last."""
    return sorted({round(k) for k in np.linspace(0, len(options.shares) - 1, n)})
