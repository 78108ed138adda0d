"""Figures 5, A.7 and A.8 of Fedssyn from run folders: convergence parameters over the rounds, beside Lemma 1.

Names of parameters as in ``convergence.laboratory``; ``accuracy``: of the server model on the test set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcommons.config.flat import flat_dict
from fedcommons.convergence.names import NAMES
from fedcommons.reports.plots import panels
from fedcommons.reports.tables import Summary, markdown
from fedcommons.tracking.run_folder import read_config, read_rounds, read_summary

LEMMA1 = {"zeta_hat_sq": "zeta_lemma1_sq", "sigma_hat_sq": "sigma_lemma1_sq", "L_p": "L_lemma1"}
"""Parameters of what clients train on, with the names of their values in Lemma 1."""

ZETA, SIGMA, L = QUOTIENTS = tuple(f"{name} / Lemma 1" for name in LEMMA1)
TERMS = {
    "sigma_sq": "(1 - p) sigma_sq, %",
    "sigma_pool_sq": "p sigma_pool_sq, %",
    "zeta_sq": "p (1 - p) zeta_sq, %",
    "delta_sq": "p (1 - p) delta_sq, %",
}
"""The terms of sigma_lemma1_sq, in percent of it."""

TABLES = (
    ("accuracy", "zeta_sq", "zeta_hat_sq", "zeta_mix_sq", "zeta_lemma1_sq", ZETA),
    ("sigma_sq", "sigma_hat_sq", "sigma_mix_sq", "sigma_lemma1_sq", SIGMA, "sigma_avg_sq", "sigma_pool_sq", "delta_sq"),
    tuple(TERMS.values()),
    ("L_max", "L_p", "L_pool", "L_lemma1", L),
)

SHOWN = (0, 0.1, 0.5, 1)
"""Tables show the measured rounds next to these shares of the run; round 0 is the untrained model."""

LEMMA = ("Lemma 1", {"color": "0.8", "linewidth": 6})  # broad, because the equal curve is drawn on top of it
OWN, HAT, MIX = {"color": "k"}, {"color": "#d55e00"}, {"color": "#0072b2", "linestyle": (0, (2, 2))}
Looks = Mapping[str, tuple[str, Mapping[str, Any]]]
PANELS: Mapping[str, Looks] = {
    r"(d) $\zeta^2$": {
        "zeta_lemma1_sq": LEMMA, "zeta_sq": (r"$\zeta^2$", OWN), "zeta_hat_sq": (r"$\hat\zeta^2$", HAT),
        "zeta_mix_sq": (r"$\zeta^2_{mix}$", MIX),
    },
    r"(d) $\sigma^2$ per sample, $\delta^2$": {
        "sigma_lemma1_sq": LEMMA, "sigma_sq": (r"$\sigma^2$", OWN), "sigma_hat_sq": (r"$\hat\sigma^2$", HAT),
        "sigma_mix_sq": (r"$\sigma^2_{mix}$", MIX), "sigma_avg_sq": (r"$\sigma^2_{avg}$", {**OWN, "linestyle": ":"}),
        "sigma_pool_sq": (r"$\tilde\sigma^2_{avg}$", {"color": "#cc79a7"}),
        "delta_sq": (r"$\delta^2$", {"color": "#009e73"}),
    },
    "(d) measured / Lemma 1": {ZETA: (r"$\hat\zeta^2$", HAT), SIGMA: (r"$\hat\sigma^2$", MIX), L: ("$L_p$", OWN)},
}  # fmt: skip
"""Label and line of each term at one model, in Okabe and Ito's colours, which colour-blind readers can tell apart."""

TITLES = {
    "accuracy": "top-1 test accuracy", "zeta_hat_sq": r"$\hat\zeta^2$", "sigma_hat_sq": r"$\hat\sigma^2$, per sample",
    "delta_sq": r"$\delta^2$", "sigma_pool_sq": r"$\tilde\sigma^2_{avg}$, per sample", ZETA: r"$\hat\zeta^2$ / Lemma 1",
}  # fmt: skip

Spread = tuple[float, float, float]
"""Mean, least and most over seeds."""


@dataclass(frozen=True)
class Curve:
    """Runs that differ in their seeds. A run is its summary, where every course is [[round, value], ...]."""

    label: str
    runs: tuple[Summary, ...]

    def course(self, name: str) -> dict[int, Spread]:
        """The spread over seeds in each round that all have measured; empty where none has."""
        each = [_course(run, name) for run in self.runs]
        values = {r: [one[r] for one in each] for r in each[0] if all(r in one for one in each)}
        return {r: (fmean(v), min(v), max(v)) for r, v in values.items()}


def read(label: str, folders: Sequence[Path]) -> Curve | None:
    """The curve of those runs that are done; None where none is."""
    runs = []
    for folder in folders:
        if summary := read_summary(folder):
            accuracy = [[line["round"], line["test/accuracy"]] for line in read_rounds(folder)]
            epochs = flat_dict(read_config(folder)).get("generator.epochs")
            facts = {"generator_epochs": epochs, "run_dir": folder.name}
            runs.append({**summary, **facts, "accuracy": accuracy})
    return curve(label, runs) if runs else None


def curve(label: str, runs: Sequence[Summary]) -> Curve:
    """The curve of some runs, with derived courses: values over Lemma 1's, and the lemma's terms."""
    return Curve(label, tuple({"curve": label, **run, **_derived(run)} for run in runs))


def _course(run: Summary, name: str) -> dict[int, float]:
    """Values by round; values that were not finite (null in the record) are left out."""
    return {r: value for r, value in run.get(name, ()) if value is not None}


def _derived(run: Summary) -> dict[str, list[list[float]]]:
    p = run["p"]
    weights = {"sigma_sq": 1 - p, "sigma_pool_sq": p, "zeta_sq": p * (1 - p), "delta_sq": p * (1 - p)}

    def over(below: str, name: str, weight: float) -> list[list[float]]:
        under = _course(run, below)
        return [[r, weight * value / under[r]] for r, value in _course(run, name).items() if under.get(r)]

    quotients = {f"{name} / Lemma 1": over(below, name, 1) for name, below in LEMMA1.items()}
    terms = {TERMS[name]: over("sigma_lemma1_sq", name, 100 * weight) for name, weight in weights.items()}
    return {name: course for name, course in (quotients | terms).items() if course}


def rows(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """A line for every measured round of every run, with six digits; run folders have all digits."""
    facts = ("curve", "seed", "p", "n_clients", "alpha", "generator_epochs")
    names = ("accuracy", *NAMES, *QUOTIENTS)
    lines = []
    for run in (run for one in curves for run in one.runs):
        found = {name: {r: f"{v:.6g}" for r, v in _course(run, name).items()} for name in names}
        known = {name: run[name] for name in facts}
        lines += [{**known, "round": r, **{n: found[n].get(r) for n in names}} for r in found["zeta_sq"]]
    return lines


def section(title: str, curves: Sequence[Curve]) -> str:
    """The tables of a figure: how its runs ended, then all parameters in some rounds."""
    measured = {name for one in curves for run in one.runs for name in run}
    quotients = [name for name in QUOTIENTS if name in measured]
    head = ["curve", "p", "last acc., %", "best acc., %", *(h for name in quotients for h in (name, "rounds above 1"))]
    parts, rounds = [markdown(head, [_ends(one, quotients) for one in curves])], shown(curves)
    for table in TABLES:
        if names := [name for name in table if name in measured]:
            lines = []
            for one in curves:
                found = {name: one.course(name) for name in names}
                cells = {r: [_show(course.get(r), _form(name)) for name, course in found.items()] for r in rounds}
                lines += [[one.label, r, *cells[r]] for r in rounds if any(cells[r])]
            parts.append(markdown(["curve", "round", *names], lines))
    return f"## {title}\n\n" + "\n".join(parts)


def shown(curves: Sequence[Curve]) -> list[int]:
    """The rounds that the tables show."""
    measured = list(curves[0].course("zeta_sq"))
    return list(dict.fromkeys(min(measured, key=lambda r: abs(r - share * measured[-1])) for share in SHOWN))


def _ends(one: Curve, quotients: Sequence[str]) -> list[str]:
    """Accuracies; of each quotient, over all measured rounds and seeds, the median, the range, how often above 1."""
    cells = [one.label, f"{one.runs[0]['p']:.3g}"]
    for kind in ("last_accuracy", "best_accuracy"):
        percent = [100 * run[kind] for run in one.runs]
        cells.append(_show((fmean(percent), min(percent), max(percent)), ".1f"))
    for name in quotients:
        values = [value for run in one.runs for _, value in run.get(name, ())]
        above = sum(value > 1 + 1e-9 for value in values)
        spread = (median(values), min(values), max(values)) if values else None
        cells += [_show(spread, _form(name)), f"{above} of {len(values)}" if values else ""]
    return cells


def _form(name: str) -> str:
    return ".3f" if name in ("accuracy", *QUOTIENTS) else ".3g"


def _show(found: Spread | None, form: str) -> str:
    if found is None:
        return ""
    mean, least, most = (format(v, form) for v in found)
    return mean if least == most else f"{mean} [{least}, {most}]"


def over_rounds(curves: Sequence[Curve], title: str) -> Figure:
    """(a) accuracy, (b) zeta_hat^2, (c) sigma_hat^2, each at its own model; (d) all terms at that of one run."""
    one = next((c for c in curves if c.course("zeta_lemma1_sq")), None)
    figure, grid = panels(2 if one else 1, 3, (12, 7.4 if one else 4))
    for letter, name, axes in zip("abc", list(TITLES)[:3], grid[0], strict=True):
        for c, colour in zip(curves, _shades(curves), strict=True):
            style = ("k", "--") if c.label == "IID" else (colour, "-")
            _draw(axes, c.course(name), label=c.label, color=style[0], linestyle=style[1])
        _frame(axes, f"({letter}) {TITLES[name]}, own models", "round", log=name != "accuracy")
    grid[0, 0].legend(fontsize=9)
    if one:
        for (heading, looks), axes in zip(PANELS.items(), grid[1], strict=True):
            for name, (label, look) in looks.items():
                _draw(axes, one.course(name), band=ZETA in looks, label=label, **look)
            _frame(axes, f"{heading}, {one.label}, one model", "round", log=ZETA not in looks)
            axes.legend(fontsize=9, ncols=2)
    figure.suptitle(title, fontsize=11)
    return figure


def over_generator_epochs(curves: Sequence[Curve], title: str) -> Figure:
    """Parameters against the epochs of the generators, a line for each of the rounds in the tables."""
    figure, grid = panels(2, 3, (12, 7.4))
    for (name, heading), axes in zip(TITLES.items(), grid.flat, strict=True):
        for r, colour in zip(shown(curves), _shades(shown(curves)), strict=True):
            for drawn, look in ((LEMMA1.get(name), {"linestyle": ":"}), (name, {"marker": "o", "label": f"round {r}"})):
                found = {c.runs[0]["generator_epochs"]: c.course(drawn) for c in curves} if drawn else {}
                points = {epochs: course[r] for epochs, course in found.items() if r in course}
                _draw(axes, points, band=drawn == name, color=colour, **look)
        bound = ", dotted: Lemma 1" if name in LEMMA1 else ""
        _frame(axes, heading + bound, "epochs of the generators", log=name.endswith("_sq"))
        axes.set_xticks([c.runs[0]["generator_epochs"] for c in curves])
    grid[0, 0].legend(fontsize=9)
    own = "every point at its own server model, which is the same for all at round 0"
    figure.suptitle(f"{title}; {own}", fontsize=11)
    return figure


def _shades(of: Sequence[object]) -> list[Any]:
    colours = colormaps["viridis_r"]
    return [colours(0.15 + 0.85 * i / max(1, len(of) - 1)) for i in range(len(of))]


def _draw(axes: Axes, found: Mapping[int, Spread], band: bool = True, **look: Any) -> None:
    """A line of means; with ``band`` the range over seeds about it."""
    if not found:
        return
    mean, least, most = zip(*found.values(), strict=True)
    (line,) = axes.plot(list(found), mean, **{"linewidth": 1.5, **look})
    if band and least != most:
        axes.fill_between(list(found), least, most, color=line.get_color(), alpha=0.2, linewidth=0)


def _frame(axes: Axes, title: str, xlabel: str, log: bool) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_yscale("log" if log else "linear")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3, which="both" if log else "major")
    axes.spines[["top", "right"]].set_visible(False)
