"""Figures 5, A.7 and A.8 of Fedssyn: convergence parameters over the rounds, beside Lemma 1.

Names of parameters as in ``convergence.laboratory``; ``accuracy``: of the server model on the test set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcommons.reports.plots import panels
from fedcommons.reports.series import Spread, course
from fedcommons.reports.tables import markdown, records
from fedcommons.tracking.metric_names import NAMES

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

COLUMNS = ("accuracy", "zeta_hat_sq", ZETA, "sigma_hat_sq", SIGMA, "sigma_pool_sq", "delta_sq", "L_p", L)
"""Of a figure's table; the CSV has all that was measured."""

SHOWN = (0, 0.1, 0.5, 1)
"""A table shows the measured rounds next to these shares of the run; round 0 is the untrained model."""

LEMMA = ("Lemma 1", {"color": "#f2cf63", "linewidth": 7})  # broad, because the equal curve is drawn on top of it
OWN, HAT, MIX = {"color": "k"}, {"color": "#d55e00"}, {"color": "#0072b2", "linestyle": (0, (2, 2))}
Looks = Mapping[str, tuple[str, Mapping[str, Any]]]
PANELS: Mapping[str, Looks] = {
    r"(d) $\zeta^2$": {
        "zeta_lemma1_sq": LEMMA, "zeta_sq": (r"$\zeta^2$", OWN), "zeta_hat_sq": (r"$\hat\zeta^2$", HAT),
        "zeta_mix_sq": (r"$\zeta^2_{mix}$", MIX),
    },
    r"(e) $\sigma^2$ per sample, $\delta^2$": {
        "sigma_lemma1_sq": LEMMA, "sigma_sq": (r"$\sigma^2$", OWN), "sigma_hat_sq": (r"$\hat\sigma^2$", HAT),
        "sigma_mix_sq": (r"$\sigma^2_{mix}$", MIX), "sigma_avg_sq": (r"$\sigma^2_{avg}$", {**OWN, "linestyle": ":"}),
        "sigma_pool_sq": (r"$\tilde\sigma^2_{avg}$", {"color": "#cc79a7"}),
        "delta_sq": (r"$\delta^2$", {"color": "#009e73"}),
    },
    "(f) measured / Lemma 1": {ZETA: (r"$\hat\zeta^2$", HAT), SIGMA: (r"$\hat\sigma^2$", MIX), L: ("$L_p$", OWN)},
}  # fmt: skip
"""Label and line of each term at one model, in Okabe and Ito's colours, which colour-blind readers can tell apart."""

TITLES = {
    "accuracy": "top-1 test accuracy", "zeta_hat_sq": r"$\hat\zeta^2$", "sigma_hat_sq": r"$\hat\sigma^2$, per sample",
    "delta_sq": r"$\delta^2$", "sigma_pool_sq": r"$\tilde\sigma^2_{avg}$, per sample", ZETA: r"$\hat\zeta^2$ / Lemma 1",
}  # fmt: skip

MEANING = "lines: means, bands: least to most of the seeds"


@dataclass(frozen=True)
class Curve:
    """Runs that differ in their seeds: their rows of ``load_runs`` and ``load_rounds``; see ``curve``."""

    label: str
    runs: pd.DataFrame
    rounds: pd.DataFrame

    def course(self, name: str) -> dict[int, Spread]:
        """The spread over seeds in each round that all have measured; empty where none has."""
        return course(self.rounds, name)

    def values(self, name: str) -> list[float]:
        """All that was measured, in any round and of any seed."""
        return self.rounds[name].dropna().tolist() if name in self.rounds else []


def curve(label: str, runs: pd.DataFrame, rounds: pd.DataFrame) -> Curve:
    """The curve of these runs and their rounds, to which values over Lemma 1's and the lemma's terms are added."""
    p, found = rounds["p"], rounds.rename(columns={"test/accuracy": "accuracy"})
    weights = {"sigma_sq": 1 - p, "sigma_pool_sq": p, "zeta_sq": p * (1 - p), "delta_sq": p * (1 - p)}
    shares = [(f"{name} / Lemma 1", name, below, 1) for name, below in LEMMA1.items()]
    shares += [(TERMS[name], name, "sigma_lemma1_sq", 100 * weight) for name, weight in weights.items()]
    for head, name, below, weight in shares:
        if {name, below} <= {*found}:
            found[head] = weight * found[name] / found[below].where(found[below] != 0)
    return Curve(label, runs, found.dropna(axis="columns", how="all"))


def rows(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """A line for every measured round of every run, with six digits; run folders have all digits."""
    names, lines = ("accuracy", *NAMES, *QUOTIENTS, *TERMS.values()), []
    for one in curves:
        facts = records(one.runs, ("seed", "p", "n_clients", "alpha", "generator.epochs"))
        of = dict(zip(one.runs["run"], facts, strict=True))
        measured = one.rounds.reindex(columns=["run", "round", *names]).dropna(subset="zeta_sq")
        for line in measured.to_dict("records"):
            run = of[line["run"]]
            known = {name: run[name] for name in ("seed", "p", "n_clients", "alpha")}
            values = {str(name): None if pd.isna(line[name]) else f"{line[name]:.6g}" for name in names}
            epochs = run["generator.epochs"]
            lines.append({"curve": one.label, **known, "generator_epochs": epochs, "round": line["round"], **values})
    return lines


def section(title: str, curves: Sequence[Curve]) -> str:
    """Two tables of a figure: how its runs ended, and the ``COLUMNS`` that were measured, in some rounds."""
    measured = {name for one in curves for name in one.rounds}
    quotients = [name for name in QUOTIENTS if name in measured]
    head = ["curve", "p", "last acc., %", "best acc., %", *(h for name in quotients for h in (name, "rounds above 1"))]
    ends, names = markdown(head, [_ends(one, quotients) for one in curves]), [n for n in COLUMNS if n in measured]
    lines = []
    for one in curves:
        found = {name: one.course(name) for name in names}
        cells = {r: [_show(course.get(r), _form(name)) for name, course in found.items()] for r in shown(curves)}
        lines += [[one.label, r, *of] for r, of in cells.items() if any(of)]
    return f"## {title}\n\n{ends}\n{markdown(['curve', 'round', *names], lines)}"


def shown(curves: Sequence[Curve]) -> list[int]:
    """The rounds that the table shows."""
    measured = list(curves[0].course("zeta_sq"))
    return list(dict.fromkeys(min(measured, key=lambda r: abs(r - share * measured[-1])) for share in SHOWN))


def _ends(one: Curve, quotients: Sequence[str]) -> list[str]:
    """Accuracies; of each quotient, over all measured rounds and seeds, the median, the range, how often above 1."""
    cells = [one.label, f"{one.runs['p'].iloc[0]:.3g}"]
    for kind in ("last_accuracy", "best_accuracy"):
        percent = [100 * accuracy for accuracy in one.runs[kind]]
        cells.append(_show((fmean(percent), min(percent), max(percent)), ".1f"))
    for name in quotients:
        values = one.values(name)
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
    """(a) accuracy, (b) zeta_hat^2, (c) sigma_hat^2, each at its own model; (d) to (f) all terms at that of one run."""
    one = next((c for c in curves if c.course("zeta_lemma1_sq")), None)
    figure, grid = panels(2 if one else 1, 3, (12, 7.4 if one else 4))
    for letter, name, axes in zip("abc", list(TITLES)[:3], grid[0], strict=True):
        for c, colour in zip(curves, _shades(curves), strict=True):
            style = ("k", "--") if c.label == "IID" else (colour, "-")
            _draw(axes, c.course(name), label=c.label, color=style[0], linestyle=style[1])
        own = "" if name == "accuracy" else ", each at its own models"
        _frame(axes, f"({letter}) {TITLES[name]}{own}", "round", log=name != "accuracy")
    grid[0, 0].legend(fontsize=9)
    if one:
        for (heading, looks), axes in zip(PANELS.items(), grid[1], strict=True):
            for name, (label, look) in looks.items():
                _draw(axes, one.course(name), label=label, **look)
            _frame(axes, f"{heading}, models of {one.label}", "round", log=ZETA not in looks)
            axes.legend(fontsize=9, ncols=2)
    figure.suptitle(f"{title}; {MEANING}", fontsize=11)
    return figure


def over_generator_epochs(curves: Sequence[Curve], title: str) -> Figure:
    """Parameters against the epochs of the generators, a line for each of the rounds in the tables."""
    figure, grid = panels(2, 3, (12, 7.4))
    for (name, heading), axes in zip(TITLES.items(), grid.flat, strict=True):
        for r, colour in zip(shown(curves), _shades(shown(curves)), strict=True):
            for drawn, look in ((LEMMA1.get(name), {"linestyle": ":"}), (name, {"marker": "o", "label": f"round {r}"})):
                found = {_epochs(c): c.course(drawn) for c in curves} if drawn else {}
                points = {epochs: course[r] for epochs, course in found.items() if r in course}
                _draw(axes, points, band=drawn == name, color=colour, **look)
        bound = ", dotted: Lemma 1" if name in LEMMA1 else ""
        _frame(axes, heading + bound, "epochs of the generators", log=name.endswith("_sq"))
        axes.set_xticks([_epochs(c) for c in curves])
    grid[0, 0].legend(fontsize=9)
    own = "Every point is at its own server model, which is the same for all at round 0"
    figure.suptitle(f"{title}; {MEANING}\n{own}", fontsize=11)
    return figure


def _epochs(one: Curve) -> int:
    return int(one.runs["generator.epochs"].iloc[0])


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
        axes.fill_between(list(found), least, most, color=line.get_color(), alpha=0.15, linewidth=0)


def _frame(axes: Axes, title: str, xlabel: str, log: bool) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_yscale("log" if log else "linear")
    if not log:
        axes.ticklabel_format(axis="y", useOffset=False)  # ratios near 1 as they are
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3, which="both" if log else "major")
    axes.spines[["top", "right"]].set_visible(False)
