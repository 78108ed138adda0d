"""Figures 5, A.7 and A.8 of Fedssyn: convergence parameters over the rounds, compared with Lemma 1's predictions.

Parameters (zeta_sq, sigma_sq, ...) are defined in ``convergence.laboratory``. ``accuracy``: accuracy of the server
model on the test set. p: share of the pool of shared data in the clients' training data.
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

from fedcommons.reports.plots import finish, panels, percent
from fedcommons.reports.series import Spread, course
from fedcommons.reports.tables import markdown, records
from fedcommons.tracking.metric_names import NAMES

LEMMA1 = {"zeta_hat_sq": "zeta_lemma1_sq", "sigma_hat_sq": "sigma_lemma1_sq", "L_p": "L_lemma1"}
"""Parameters measured on the clients' training data, with the names of Lemma 1's predictions for them."""

ZETA, SIGMA, L = QUOTIENTS = tuple(f"{name} / Lemma 1" for name in LEMMA1)
TERMS = {
    "sigma_sq": "(1 - p) sigma_sq, %",
    "sigma_pool_sq": "p sigma_pool_sq, %",
    "zeta_sq": "p (1 - p) zeta_sq, %",
    "delta_sq": "p (1 - p) delta_sq, %",
}
"""The four terms of Lemma 1's prediction sigma_lemma1_sq, each in percent of their sum."""

COLUMNS = ("accuracy", "zeta_hat_sq", ZETA, "sigma_hat_sq", SIGMA, "sigma_pool_sq", "delta_sq", "L_p", L)
"""Columns of a figure's table; the CSV has all measured parameters."""

POSITIONS = (0, 0.1, 0.5, 1)
"""Positions in a run, from 0 (untrained model) to 1 (last round); a table has the measured rounds closest to them."""

LEMMA = ("Lemma 1", {"color": "#f2cf63", "linewidth": 7})  # broad, so that an equal curve does not hide it
PLAIN, HAT, MIX = {"color": "k"}, {"color": "#d55e00", "linewidth": 4}, {"color": "#0072b2", "linestyle": (0, (2, 2))}
Looks = Mapping[str, tuple[str, Mapping[str, Any]]]
PANELS: Mapping[str, Looks] = {
    r"(d) $\zeta^2$": {
        "zeta_lemma1_sq": LEMMA, "zeta_sq": (r"$\zeta^2$", PLAIN), "zeta_hat_sq": (r"$\hat\zeta^2$", HAT),
        "zeta_mix_sq": (r"$\zeta^2_{mix}$", MIX),
    },
    r"(e) $\sigma^2$ per sample, $\delta^2$": {
        "sigma_lemma1_sq": LEMMA, "sigma_sq": (r"$\sigma^2$", PLAIN), "sigma_hat_sq": (r"$\hat\sigma^2$", HAT),
        "sigma_mix_sq": (r"$\sigma^2_{mix}$", MIX), "sigma_avg_sq": (r"$\sigma^2_{avg}$", {**PLAIN, "linestyle": ":"}),
        "sigma_pool_sq": (r"$\tilde\sigma^2_{avg}$", {"color": "#cc79a7"}),
        "delta_sq": (r"$\delta^2$", {"color": "#009e73"}),
    },
    "(f) measured / Lemma 1": {ZETA: (r"$\hat\zeta^2$", HAT), SIGMA: (r"$\hat\sigma^2$", MIX), L: ("$L_p$", PLAIN)},
}  # fmt: skip
"""Label and line style of each curve in panels (d) to (f), in Okabe and Ito's colours for colour-blind readers."""

TITLES = {
    "accuracy": "test accuracy", "zeta_hat_sq": r"$\hat\zeta^2$", "sigma_hat_sq": r"$\hat\sigma^2$, per sample",
    "delta_sq": r"$\delta^2$", "sigma_pool_sq": r"$\tilde\sigma^2_{avg}$, per sample", ZETA: r"$\hat\zeta^2$ / Lemma 1",
}  # fmt: skip

MEANING = "; lines: means over seeds, bands: minimum to maximum"


@dataclass(frozen=True)
class Curve:
    """Runs that differ only in their seeds, as rows of ``load_runs``, and their rounds, as rows of ``load_rounds``."""

    label: str
    runs: pd.DataFrame
    rounds: pd.DataFrame

    def course(self, name: str) -> dict[int, Spread]:
        """Return mean, minimum and maximum over seeds of a column, for the rounds that all seeds have measured."""
        return course(self.rounds, name)

    def values(self, name: str) -> list[float]:
        """Return all measured values of a column, of all rounds and seeds; empty if the column is missing."""
        return self.rounds[name].dropna().tolist() if name in self.rounds else []


def curve(label: str, runs: pd.DataFrame, rounds: pd.DataFrame) -> Curve:
    """Return the curve of ``runs``, with columns for measured / predicted values and for the terms of Lemma 1."""
    p, frame = rounds["p"], rounds.rename(columns={"test/accuracy": "accuracy"})
    weights = {"sigma_sq": 1 - p, "sigma_pool_sq": p, "zeta_sq": p * (1 - p), "delta_sq": p * (1 - p)}
    shares = [(f"{name} / Lemma 1", name, below, 1) for name, below in LEMMA1.items()]
    shares += [(TERMS[name], name, "sigma_lemma1_sq", 100 * weight) for name, weight in weights.items()]
    for head, name, below, weight in shares:
        if {name, below} <= {*frame}:
            frame[head] = weight * frame[name] / frame[below].where(frame[below] != 0)
    return Curve(label, runs, frame.dropna(axis="columns", how="all"))


def rows(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return a CSV line for every measured round of every run, with six digits; run folders have all digits."""
    names, lines = ("accuracy", *NAMES, *QUOTIENTS, *TERMS.values()), []
    for item in curves:
        facts = records(item.runs, ("seed", "p", "n_clients", "alpha", "generator.epochs"))
        facts_by_run = dict(zip(item.runs["run"], facts, strict=True))
        measured = item.rounds.reindex(columns=["run", "round", *names]).dropna(subset="zeta_sq")
        for line in measured.to_dict("records"):
            run = facts_by_run[line["run"]]
            fields = {name: run[name] for name in ("seed", "p", "n_clients", "alpha")}
            values = {str(name): None if pd.isna(line[name]) else f"{line[name]:.6g}" for name in names}
            epochs = run["generator.epochs"]
            lines.append({"curve": item.label, **fields, "generator_epochs": epochs, "round": line["round"], **values})
    return lines


def section(title: str, curves: Sequence[Curve]) -> str:
    """Return two tables of a figure: final accuracies of the runs, and the ``COLUMNS`` in some measured rounds."""
    measured = {name for item in curves for name in item.rounds}
    quotients = [name for name in QUOTIENTS if name in measured]
    head = ["curve", "p", "last acc., %", "best acc., %", *(h for name in quotients for h in (name, "rounds above 1"))]
    ends, names = markdown(head, [_ends(item, quotients) for item in curves]), [n for n in COLUMNS if n in measured]
    lines = []
    for item in curves:
        spreads = {name: item.course(name) for name in names}
        for r in rounds_of_table(curves):
            texts = [_show(course.get(r), _form(name)) for name, course in spreads.items()]
            lines += [[item.label, r, *texts]] if any(texts) else []
    return f"## {title}\n\n{ends}\n{markdown(['curve', 'round', *names], lines)}"


def rounds_of_table(curves: Sequence[Curve]) -> list[int]:
    """Return the measured rounds that a table shows: the closest to the positions ``POSITIONS`` of the run."""
    measured = list(curves[0].course("zeta_sq"))
    return list(dict.fromkeys(min(measured, key=lambda r: abs(r - share * measured[-1])) for share in POSITIONS))


def _ends(item: Curve, quotients: Sequence[str]) -> list[str]:
    """Return a curve's line of the first table: accuracies, and quotients of measured and predicted values."""
    cells = [item.label, f"{item.runs['p'].iloc[0]:.3g}"]
    for kind in ("last_accuracy", "best_accuracy"):
        percent = [100 * accuracy for accuracy in item.runs[kind]]
        cells.append(_show((fmean(percent), min(percent), max(percent)), ".1f"))
    for name in quotients:
        values = item.values(name)
        above = sum(value > 1 + 1e-9 for value in values)
        spread = (median(values), min(values), max(values)) if values else None
        cells += [_show(spread, _form(name)), f"{above} of {len(values)}" if values else ""]
    return cells


def _form(name: str) -> str:
    return ".3f" if name in ("accuracy", *QUOTIENTS) else ".3g"


def _show(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    mean, least, most = (format(v, form) for v in spread)
    return mean if least == most else f"{mean} [{least}, {most}]"


def over_rounds(curves: Sequence[Curve], title: str) -> Figure:
    """Draw figure A.7: (a) accuracy, (b) zeta_hat^2, (c) sigma_hat^2 of all curves; (d) to (f) terms of Lemma 1."""
    with_lemma = next((c for c in curves if c.course("zeta_lemma1_sq")), None)
    figure, grid = panels(2 if with_lemma else 1, 3, (12, 9.6 if with_lemma else 4.8))
    for letter, name, axes in zip("abc", list(TITLES)[:3], grid[0], strict=True):
        for c, colour in zip(curves, _shades(curves), strict=True):
            style = ("k", "--") if c.label == "IID" else (colour, "-")
            _draw(axes, c.course(name), label=c.label if letter == "a" else None, color=style[0], linestyle=style[1])
        note = "" if name == "accuracy" else ", each at its own models"
        _frame(axes, f"({letter}) {TITLES[name]}{note}", "round", log=name != "accuracy")
    if with_lemma:
        for (heading, looks), axes in zip(PANELS.items(), grid[1], strict=True):
            for name, (label, look) in looks.items():
                _draw(axes, with_lemma.course(name), label=label, **look)
            _frame(axes, f"{heading}, models of {with_lemma.label}", "round", log=ZETA not in looks)
    finish(figure, f"{title}; curves of (b) and (c): see (a)", loc="panels")
    return figure


def over_generator_epochs(curves: Sequence[Curve], title: str) -> Figure:
    """Draw figure A.8: parameters over the generators' epochs, a line for each round in the tables."""
    figure, grid = panels(2, 3, (12, 8))
    for (name, heading), axes in zip(TITLES.items(), grid.flat, strict=True):
        for r, colour in zip(rounds_of_table(curves), _shades(rounds_of_table(curves)), strict=True):
            for term, look in ((LEMMA1.get(name), {"linestyle": ":"}), (name, {"marker": "o", "label": f"round {r}"})):
                courses = {_epochs(c): c.course(term) for c in curves} if term else {}
                points = {epochs: course[r] for epochs, course in courses.items() if r in course}
                _draw(axes, points, band=term == name, color=colour, **look)
        bound = ", dotted: Lemma 1" if name in LEMMA1 else ""
        _frame(axes, heading + bound, "epochs of the generators", log=name.endswith("_sq"))
        axes.set_xticks([_epochs(c) for c in curves])
    note = "Every point is measured at its own server model; at round 0 all have the same model"
    finish(figure, f"{title}\n{note}")
    return figure


def _epochs(item: Curve) -> int:
    return int(item.runs["generator.epochs"].iloc[0])


def _shades(items: Sequence[object]) -> list[Any]:
    colours = colormaps["viridis_r"]
    return [colours(0.15 + 0.85 * i / max(1, len(items) - 1)) for i in range(len(items))]


def _draw(axes: Axes, spreads: Mapping[int, Spread], band: bool = True, **look: Any) -> None:
    """Draw a line of means, and with ``band`` the range over seeds; spreads: (mean, minimum, maximum) by x."""
    if not spreads:
        return
    mean, least, most = zip(*spreads.values(), strict=True)
    (line,) = axes.plot(list(spreads), mean, **{"linewidth": 1.5, **look})
    if band and least != most:
        axes.fill_between(list(spreads), least, most, color=line.get_color(), alpha=0.15, linewidth=0)


def _frame(axes: Axes, title: str, xlabel: str, log: bool) -> None:
    axes.set_title(f"{title} (log)" if log else title, fontsize=10)
    axes.set_xlabel(xlabel)
    axes.set_yscale("log" if log else "linear")
    if "accuracy" in title:
        axes.set_title(title + percent(axes.yaxis), fontsize=10)
    elif not log:
        axes.ticklabel_format(axis="y", useOffset=False)  # an offset would hide that ratios are near 1
        axes.set_ylim(min(0.98, axes.get_ylim()[0]), max(1.02, axes.get_ylim()[1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
