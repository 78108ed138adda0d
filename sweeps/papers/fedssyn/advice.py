"""The advisor's table and picture: predicted rounds over those without sharing, and what sharing costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcommons.reports.plots import panels, save
from fedcommons.reports.tables import markdown

NOTES = (
    "Rounds with sharing over rounds without: Lemma 1 and Corollary I (non-convex) at the probe's last model, epsilon "
    "= its ||grad f||^2. Band: over the probe's models, epsilon down to a tenth, and the estimates' 95 % intervals.",
    "The corollary is an upper bound, for the best step size and full participation: its ratio is a guide, no promise.",
    "Images: what a client hands to the server; MB: 10^6 bytes of all clients' images and labels, up and down, once.",
)


@dataclass(frozen=True)
class Advice:
    """The prediction at one alpha, a line for each share p, with the outcome where it was tried.

    A line: p, relative, low, high, images, mb; rounds: those that were needed, as printed; outcome: over those without
    sharing, None where it is not known. ``base``: rounds without sharing, empty where nothing was tried.
    """

    alpha: float
    pool: str
    lines: Sequence[Mapping[str, Any]]
    base: str

    def sentence(self, speed_up: float) -> str:
        """The smallest share that is predicted to be enough, and what it costs."""
        enough = [line for line in self.lines if line["relative"] <= 1 / speed_up]
        if not enough:
            return f"No p of the grid is predicted to be {speed_up:g} times faster."
        best = min(enough, key=lambda line: line["p"])
        return (
            f"Smallest p predicted to be {speed_up:g} times faster: {best['p']:g}, which discloses "
            f"{best['images']:.0f} images of every client and costs {best['mb']:.2f} MB."
        )


def advice_table(sections: Sequence[Advice], speed_up: float) -> str:
    """A table for each alpha, the advice under it, and what a reader must know."""
    text = []
    for section in sections:
        head = ["p", "rounds p / 0", "band", "speed-up", "images a client", "MB once"]
        tried = ["rounds", "outcome p / 0", "in band"] if section.base else []
        lines = [_line(line, bool(tried)) for line in section.lines]
        without = f" Without sharing it took {section.base} rounds." if section.base else ""
        text.append(f"alpha = {section.alpha:g}, predicted for {section.pool}.{without}\n")
        text.append(markdown([*head, *tried], lines))
        text.append(section.sentence(speed_up) + "\n")
    return "\n".join([*text, *(f"{i}. {note}" for i, note in enumerate(NOTES, 1))]) + "\n"


def _line(line: Mapping[str, Any], tried: bool) -> list[str]:
    low, high, ratio = line["low"], line["high"], line["outcome"]
    found = [
        f"{line['p']:g}", f"{line['relative']:.2f}", f"{low:.2f} to {high:.2f}", f"{1 / line['relative']:.1f}x",
        f"{line['images']:.0f}", f"{line['mb']:.2f}",
    ]  # fmt: skip
    if tried:
        found += [
            line["rounds"],
            *(("", "") if ratio is None else (f"{ratio:.2f}", "yes" if low <= ratio <= high else "no")),
        ]
    return found


def advice_panels(path: Path, sections: Sequence[Advice], title: str, smoke: bool) -> None:
    """A panel for each alpha: predicted rounds over those without sharing, with their band, and outcomes as crosses."""
    figure, grid = panels(1, len(sections), (4.2 * len(sections), 3.4), sharey=True)
    for axes, section in zip(grid[0], sections, strict=True):
        p, relative, low, high = ([line[name] for line in section.lines] for name in ("p", "relative", "low", "high"))
        axes.fill_between(p, low, high, color="#2e6da4", alpha=0.2, lw=0)
        axes.plot(p, relative, color="#2e6da4", label="predicted, with its band")
        tried = [(line["p"], line["outcome"]) for line in section.lines if line["outcome"] is not None]
        if tried:
            axes.plot(*zip(*tried, strict=True), "x", color="#c0392b", ms=8, label="outcome")
        axes.axhline(1, color="0.6", lw=0.8)
        axes.set(xlabel="share p of shared data", title=f"alpha = {section.alpha:g}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("rounds with sharing / without")
    grid[0][-1].legend(fontsize=8, loc="upper right")
    figure.suptitle(title, fontsize=11)
    save(figure, path, 120, smoke)
