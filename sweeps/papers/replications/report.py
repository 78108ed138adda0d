"""The page of replications: each published number, the result of our runs, and a verdict.

Our runs with n seeds (mean and standard deviation s) give a 95 % prediction interval for the mean of m further runs:
mean +- t s sqrt(1/m + 1/n), with Student's t for n - 1 degrees of freedom. The published number is the mean of m runs,
mostly m = 1. Verdicts:

inside        the published number lies in the prediction interval; no tolerance is added
inside, wide  the number lies in the interval, but the half-width exceeds a tenth of the mean, so the test is weak
outside       the number lies outside the interval
cannot tell   there are fewer than three seeds, or a seed missed the target
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev

from fedcommons.reports import tables
from fedcommons.reports.intervals import number, quantile
from fedcommons.reports.plots import finish, panels, save
from fedcommons.tracking.run_folder import read_rounds, read_summary
from fedcommons.tune.study import Report, Results
from papers.replications.rows import PUBLISHED, ROWS, Quantity

LEAST, WIDE = 3, 0.1
"""Smallest number of seeds for a verdict; half-width / mean above which a prediction interval is called wide."""

LOOKS = {
    "inside": ("#009e73", "o", "the interval contains the published number"),
    "inside, wide": ("#e69f00", "s", "so does a wide interval, a weak test"),
    "outside": ("#d55e00", "X", "the interval does not contain it"),
    "cannot tell": ("0.5", "D", "no interval"),
}
"""Colour and marker of each verdict in the picture, and its meaning."""


@dataclass(frozen=True)
class Compared:
    """A published number and our numbers; values: our number of each seed, None if the run missed the target."""

    row: str
    quantity: Quantity
    values: Mapping[int, float | None]

    @property
    def reached(self) -> list[float]:
        return [value for value in self.values.values() if value is not None]

    @property
    def predicted(self) -> tuple[float, float] | None:
        """Return the prediction interval for the mean of ``quantity.runs`` further runs.

        None: there are fewer than ``LEAST`` seeds, or a seed missed the target.
        """
        n = len(self.values)
        if n < LEAST or len(self.reached) < n:
            return None
        half = quantile(n) * stdev(self.reached) * sqrt(1 / self.quantity.runs + 1 / n)
        most = inf if self.quantity.round is None else 100
        return max(0, fmean(self.reached) - half), min(most, fmean(self.reached) + half)

    @property
    def verdict(self) -> str:
        if (interval := self.predicted) is None:
            return "cannot tell"
        if not interval[0] <= self.quantity.published <= interval[1]:
            return "outside"
        return "inside, wide" if (interval[1] - interval[0]) / 2 > WIDE * fmean(self.reached) else "inside"


def compared(runs: Mapping[tuple[str, str], Mapping[int, Mapping[str, float | None]]]) -> list[Compared]:
    """Return a comparison for each published number of the rows that have runs, in the order of the rows."""
    return [
        Compared(name, quantity, {seed: numbers[quantity.words] for seed, numbers in by_seed.items()})
        for name in ROWS
        for quantity in PUBLISHED[name]
        if (by_seed := runs.get((name, quantity.variant)))
    ]


def ours(comparison: Compared) -> str:
    """Return our mean and prediction interval, as ``94.1 (93.2 to 95.0)``; without interval, each seed's number."""
    digits = 1 if comparison.quantity.round is None else 2
    if (interval := comparison.predicted) is None:
        return ", ".join("missed" if value is None else number(value, digits) for value in comparison.values.values())
    return (
        f"{number(fmean(comparison.reached), digits)} ({number(interval[0], digits)} to {number(interval[1], digits)})"
    )


def table(comparisons: Sequence[Compared], seeds: str) -> str:
    """Return the table of the comparisons, with notes, as Markdown."""
    lines = []
    for item in comparisons:
        q = item.quantity
        published = f"{number(q.published, None)} ({q.source}{q.note and f', {q.note}'})"
        lines.append([item.row, q.variant, q.words, published, len(item.values), ours(item), item.verdict])
    names = list(dict.fromkeys(item.row for item in comparisons))
    notes = [
        *(f"{name}: {ROWS[name].setting}." for name in names),
        *(f"{name} departs: {ROWS[name].departs}." for name in names if ROWS[name].departs),
        f"Seeds {seeds}; n: number of finished seeds. Ours: the mean, and the 95 % prediction interval for one further "
        "run, or for the mean of the published number of runs (Flower: five). Inside: the published number lies in the "
        "interval, without tolerance. Wide: the interval is wider than a tenth of the mean on each "
        f"side, so the test is weak. With fewer than {LEAST} seeds, or a missed target, there is no verdict.",
    ]
    head = ["row", "variant", "quantity", "published", "n", "ours", "verdict"]
    return tables.markdown(head, lines) + tables.numbered(notes)


def records(comparisons: Sequence[Compared]) -> list[dict[str, object]]:
    """Return a CSV row for each published number and seed."""
    return [
        {
            "row": item.row, "variant": item.quantity.variant, "quantity": item.quantity.words,
            "source": item.quantity.source, "published": item.quantity.published, "seed": seed, "ours": value,
            "verdict": item.verdict,
        }
        for item in comparisons
        for seed, value in item.values.items()
    ]  # fmt: skip


def picture(path: Path, comparisons: Sequence[Compared]) -> None:
    """Draw our number divided by the published number: a dot for the mean, a bar for the prediction interval."""
    from matplotlib.lines import Line2D

    figure, grid = panels(1, 1, (8.5, 1.6 + 0.28 * len(comparisons)))
    axes = grid.flat[0]
    for y, item in enumerate(comparisons):
        if not item.reached:
            continue
        colour, marker, _ = LOOKS[item.verdict]
        if item.predicted:
            axes.plot([end / item.quantity.published for end in item.predicted], [y, y], color=colour, lw=2)
        axes.plot(fmean(item.reached) / item.quantity.published, y, marker, color=colour, ms=6)
    axes.axvline(1, color="black", lw=0.8)
    names = [f"{c.row} {c.quantity.variant}, {c.quantity.words} ({c.quantity.source})" for c in comparisons]
    names = [name.replace("late ones", "stragglers").replace("none late", "no stragglers") for name in names]
    names = [name.replace("% late", "% stragglers") for name in names]
    axes.set_yticks(range(len(comparisons)), names, fontsize=7)
    axes.set_ylim(len(comparisons) - 0.5, -0.5)
    axes.set(xlabel="our number / published number (1: equal)")
    verdicts = {item.verdict for item in comparisons}
    more = [Line2D([], [], color=colour, marker=marker, lw=2, label=f"{verdict}: {words}")
            for verdict, (colour, marker, words) in LOOKS.items() if verdict in verdicts]  # fmt: skip
    title = "Our number divided by the published number; bar: 95 % prediction interval"
    finish(figure, f"{title}\nRounds: fewer are better; accuracy: more is better", more=more)
    save(figure, path, 120)


def numbers(folder: Path, quantities: Sequence[Quantity]) -> dict[str, float | None]:
    """Return the finished run's value of each quantity by name, accuracies in percent."""
    accuracy = {line["round"]: 100 * line["test/accuracy"] for line in read_rounds(folder) if "test/accuracy" in line}
    summary = read_summary(folder) or {}
    return {q.words: summary["rounds_to_target"] if q.round is None else accuracy[q.round] for q in quantities}


def report(results: Results) -> Report:
    runs: dict[tuple[str, str], dict[int, dict[str, float | None]]] = {}
    for (row, variant), group in results.groups("row", "variant").items():
        quantities = [q for q in PUBLISHED[row] if q.variant == variant]
        seeds_and_runs = zip(group["seed"].tolist(), group["run"], strict=True)
        runs[row, variant] = {seed: numbers(Path(run), quantities) for seed, run in seeds_and_runs}
    comparisons, seeds = compared(runs), results.options.seeds
    lines = records(comparisons)
    return Report(
        table(comparisons, seeds), lines, {"seeds": seeds, "verdicts": lines},
        {"replicate.png": lambda path: picture(path, comparisons)},
    )  # fmt: skip
