"""The page of replications: each published number beside ours, and a verdict.

Our runs with n seeds give a prediction interval for the mean of m runs more, mean +- t s sqrt(1/m + 1/n) (95 %,
Student's t with n - 1 degrees of freedom), where the published number is the mean of m runs, mostly of one. Verdicts:

inside        the published number lies in that interval; no tolerance is added
inside, wide  so it does, but the interval goes further than a tenth of the mean to each side, so it says little
outside       it does not
cannot tell   there are fewer than three seeds, or a seed missed the target
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev

from fedcommons.reports import tables
from fedcommons.reports.intervals import number, quantile
from fedcommons.reports.plots import panels, save
from fedcommons.storage.atomic_files import write_json, write_text
from papers.replications.rows import ROWS, Published, Quantity

LEAST, WIDE = 3, 0.1
"""Seeds below which there is no verdict; half of an interval over its mean above which it says little."""


@dataclass(frozen=True)
class Compared:
    """A published number beside our runs': ``values`` by seed, None where a run missed the target."""

    row: str
    quantity: Quantity
    published: Published
    values: Mapping[int, float | None]

    @property
    def reached(self) -> list[float]:
        return [value for value in self.values.values() if value is not None]

    @property
    def predicted(self) -> tuple[float, float] | None:
        """The prediction interval for as many runs more as were published; None where there is none."""
        n = len(self.values)
        if n < LEAST or len(self.reached) < n:
            return None
        half = quantile(n) * stdev(self.reached) * sqrt(1 / self.published.runs + 1 / n)
        most = inf if self.quantity.round is None else 100
        return max(0, fmean(self.reached) - half), min(most, fmean(self.reached) + half)

    @property
    def verdict(self) -> str:
        if (found := self.predicted) is None:
            return "cannot tell"
        if not found[0] <= self.published.value <= found[1]:
            return "outside"
        return "inside, wide" if (found[1] - found[0]) / 2 > WIDE * fmean(self.reached) else "inside"


def compared(runs: Mapping[tuple[str, str], Mapping[int, Mapping[str, float | None]]]) -> list[Compared]:
    """All published numbers of the rows that have runs, in the rows' order.

    runs: by row and variant, for each seed whose run is finished the numbers by the quantities' words.
    """
    return [
        Compared(name, quantity, published, {seed: one[quantity.words] for seed, one in of.items()})
        for name, row in ROWS.items()
        for quantity in row.quantities
        for published in quantity.published
        if (of := runs.get((name, quantity.variant)))
    ]


def ours(one: Compared) -> str:
    """``94.1 (93.2 to 95.0)``: the mean over seeds and the prediction interval; the numbers themselves without one."""
    digits = 1 if one.quantity.round is None else 2
    if (found := one.predicted) is None:
        return ", ".join("missed" if value is None else number(value, digits) for value in one.values.values())
    return f"{number(fmean(one.reached), digits)} ({number(found[0], digits)} to {number(found[1], digits)})"


def table(found: Sequence[Compared], seeds: str) -> str:
    """The table with its notes."""
    lines = []
    for one in found:
        note = f", {one.published.note}" if one.published.note else ""
        published = f"{number(one.published.value, None)} ({one.published.source}{note})"
        lines.append(
            [one.row, one.quantity.variant, one.quantity.words, published, len(one.values), ours(one), one.verdict]
        )
    names = list(dict.fromkeys(one.row for one in found))
    notes = [
        *(f"{name}: {ROWS[name].setting}." for name in names),
        *(f"{name} departs: {ROWS[name].departs}." for name in names if ROWS[name].departs),
        f"Seeds {seeds}; n: how many are finished. Ours: the mean, and the 95 % prediction interval for one run more, "
        "or for the mean of as many as were published (Flower: five). Inside: the published number lies in it; no "
        "tolerance is added. Wide: further than a tenth of the mean to each "
        f"side, so it says little. With fewer than {LEAST} seeds, or a missed target, there is no verdict.",
    ]
    head = ["row", "variant", "quantity", "published", "n", "ours", "verdict"]
    return tables.markdown(head, lines) + tables.numbered(notes)


def records(found: Sequence[Compared]) -> list[dict[str, object]]:
    """A line for each published number and seed."""
    return [
        {
            "row": one.row, "variant": one.quantity.variant, "quantity": one.quantity.words,
            "source": one.published.source, "published": one.published.value, "seed": seed, "ours": value,
            "verdict": one.verdict,
        }
        for one in found
        for seed, value in one.values.items()
    ]  # fmt: skip


def picture(path: Path, found: Sequence[Compared]) -> None:
    """Ours over the published number: a dot for the mean, a bar for the prediction interval; 1: the same."""
    figure, grid = panels(1, 1, (7.5, 1.2 + 0.28 * len(found)))
    axes = grid.flat[0]
    for y, one in enumerate(found):
        if not one.reached:
            continue
        colour = {"inside": "tab:green", "inside, wide": "tab:olive", "outside": "tab:red"}.get(one.verdict, "grey")
        if one.predicted:
            axes.plot([end / one.published.value for end in one.predicted], [y, y], color=colour, lw=2)
        axes.plot(fmean(one.reached) / one.published.value, y, "o", color=colour, ms=6)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(
        range(len(found)),
        [f"{one.row} {one.quantity.variant}, {one.quantity.words} ({one.published.source})" for one in found],
        fontsize=7,
    )
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set(xlabel="ours over the published number")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, 120)


def write(found: Sequence[Compared], seeds: str, out: Path) -> str:
    """Write replicate.md, .csv, .png and summary.json; the table."""
    markdown = table(found, seeds)
    write_text(out / "replicate.md", markdown)
    write_text(out / "replicate.csv", tables.to_csv(records(found)))
    write_json(out / "summary.json", {"name": out.name, "seeds": seeds, "verdicts": records(found)})
    picture(out / "replicate.png", found)
    return markdown
