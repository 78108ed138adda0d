"""Report of sweeps/advise.py: rounds predicted with sharing relative to no sharing, its cost, and measured effects."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.config.experiment import Experiment
from fedcommons.convergence.advisor import LocalWork, Prediction
from fedcommons.core.communication import images_nbytes
from fedcommons.federation.client_sampling import joining
from fedcommons.reports import tables
from fedcommons.reports.cells import reached
from fedcommons.reports.plots import finish, panels, save
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Report

if TYPE_CHECKING:  # torch takes seconds to import
    from fedcommons.runs.spec import RunSpec

Runs = Mapping[tuple[float, float], Sequence[sweep.Trial]]
"""Runs of the study by (alpha, share p of shared data), a trial for each seed."""

NOTES = (
    "Rounds p / 0: rounds with sharing divided by rounds without, by Lemma 1 and Corollary I (non-convex) at the "
    "probe's last model, for the accuracy epsilon = ||grad f||^2 of this model. Band: minimum to maximum over the "
    "probe's models, over epsilon and a tenth of it, and over the estimates' 95 % intervals.",
    "The corollary is an upper bound on rounds, for the best step size and full participation. A quotient of two upper "
    "bounds is not a bound: the effect of sharing may be larger or smaller than predicted.",
    "Images: mean number that a client sends to the server. MB: 10^6 bytes of all clients' images and labels, up and "
    "down, sent once.",
)
TRIED = (
    "Outcome: mean rounds to the target at p divided by mean rounds at p = 0, and [minimum, maximum] of the quotients "
    "per seed. In band: whether the outcome lies in the band."
)


@dataclass(frozen=True)
class Advice:
    """The prediction at one alpha (Dirichlet), with a line for each share p of shared data; pool: the pool in words.

    Keys of a line: p; relative: predicted rounds divided by rounds at p = 0; low, high: the prediction's band; images:
    number of images that a client sends; mb: MB of all clients; rounds: measured rounds to the target, as text;
    outcome: measured rounds divided by rounds at p = 0 (None: the share was not run); outcome_least, outcome_most:
    minimum and maximum of this quotient over seeds. ``base``: measured rounds at p = 0, empty if no share was run.
    """

    alpha: float
    pool: str
    lines: Sequence[Mapping[str, Any]]
    base: str

    def sentence(self, speed_up: float) -> str:
        """Return a sentence: the smallest p that is predicted to train ``speed_up`` times faster, and its cost."""
        enough = [line for line in self.lines if line["relative"] <= 1 / speed_up]
        if not enough:
            return f"No p of the grid is predicted to be {speed_up:g} times faster."
        best = min(enough, key=lambda line: line["p"])
        return (
            f"Smallest p predicted to be {speed_up:g} times faster: {best['p']:g}, which discloses "
            f"{best['images']:.0f} images of every client and costs {best['mb']:.2f} MB."
        )


def advice_table(sections: Sequence[Advice], speed_up: float) -> str:
    """Return a Markdown table and a sentence of advice for each alpha, then footnotes that explain the columns."""
    text = []
    for section in sections:
        head = ["p", "rounds p / 0", "band", "speed-up", "images per client", "MB once"]
        tried = ["rounds", "outcome p / 0", "in band"] if section.base else []
        lines = [_line(line, bool(tried)) for line in section.lines]
        without = f" Without sharing it took {section.base} rounds." if section.base else ""
        text.append(f"alpha = {section.alpha:g}, predicted for {section.pool}.{without}\n")
        text.append(tables.markdown([*head, *tried], lines))
        text.append(section.sentence(speed_up) + "\n")
    notes = [*NOTES, *([TRIED] if any(section.base for section in sections) else [])]
    return "\n".join(text) + tables.numbered(notes)


def _line(line: Mapping[str, Any], tried: bool) -> list[str]:
    low, high, ratio = line["low"], line["high"], line["outcome"]
    cells = [
        f"{line['p']:g}", f"{line['relative']:.2f}", f"{low:.2f} to {high:.2f}", f"{1 / line['relative']:.1f}x",
        f"{line['images']:.0f}", f"{line['mb']:.2f}",
    ]  # fmt: skip
    if tried:
        cells += [
            line["rounds"],
            *(("", "") if ratio is None else (_spread(line), "yes" if low <= ratio <= high else "no")),
        ]
    return cells


def _spread(line: Mapping[str, Any]) -> str:
    return f"{line['outcome']:.2f} [{line['outcome_least']:.2f}, {line['outcome_most']:.2f}]"


def advice_panels(path: Path, sections: Sequence[Advice], title: str, smoke: bool) -> None:
    """Draw a panel for each alpha: predicted and measured rounds, divided by rounds without sharing, with bands."""
    figure, grid = panels(1, len(sections), (1.2 + 4.2 * len(sections), 4), sharey=True)
    for axes, section in zip(grid[0], sections, strict=True):
        p, relative, low, high = ([line[name] for line in section.lines] for name in ("p", "relative", "low", "high"))
        axes.fill_between(p, low, high, color="#0072b2", alpha=0.2, lw=0, label="band of the prediction")
        axes.plot(p, relative, color="#0072b2", label="predicted, at the probe's last model")
        tried = [line for line in section.lines if line["outcome"] is not None]
        if tried:
            at, mean, least, most = (
                np.array([line[name] for line in tried]) for name in ("p", "outcome", "outcome_least", "outcome_most")
            )
            axes.errorbar(
                at, mean, (mean - least, most - mean), fmt="o", color="#d55e00", ms=5, capsize=4,
                label="measured: mean over seeds; bar: minimum to maximum",
            )  # fmt: skip
        axes.axhline(1, color="0.6", lw=0.8)
        axes.set_title(f"alpha = {section.alpha:g}", fontsize=10)
        axes.set(xlabel="share p of shared data", ylim=(0, None))
    grid[0][0].set_ylabel("rounds with sharing / rounds without")
    finish(figure, f"Predicted and measured rounds to the target; {title}")
    save(figure, path, 120, smoke)


def local_work(config: Experiment, sizes: Sequence[int]) -> LocalWork:
    """Return participants, mean local steps and batch size of a round; sizes: each client's number of examples."""
    c = config.client
    tau = fmean(c.epochs * (max(1, n // c.batch_size) if c.drop_last else ceil(n / c.batch_size)) for n in sizes)
    return LocalWork(joining(len(sizes), config.federation.participation), tau, c.batch_size)


def costs(ready: "RunSpec", p: float) -> tuple[float, float]:
    """Return the mean number of images that a client sends at share p, and MB of all clients' images, up plus down."""
    images = registry.make("sharing", ready.names["sharing"], {"p": p}).sizes(ready.client_data)
    return fmean(images), 2 * images_nbytes(sum(images), ready.dataset.shape, ready.client_data.itemsize) / 1e6


def outcome(alpha: float, p: float, runs: Runs, out: Path) -> dict[str, Any]:
    """Return the keys rounds and outcome... of a line of ``Advice``, from the finished runs in ``out``."""
    result: dict[str, Any] = {"rounds": "", "outcome": None, "outcome_least": None, "outcome_most": None}
    shared, base = (grid.finished(runs.get((alpha, share), ()), out) for share in (p, 0.0))
    if shared.empty or base.empty:
        return result
    result["rounds"] = tables.rounds(shared)
    at, without = (dict(zip(side["seed"].tolist(), reached(side), strict=True)) for side in (shared, base))
    if None in (*at.values(), *without.values()):
        return result
    ratios = [rounds / base_rounds for seed, rounds in at.items() if rounds and (base_rounds := without.get(seed))]
    ratio = tables.mean_rounds(shared)[0] / tables.mean_rounds(base)[0]
    return {**result, "outcome": ratio, "outcome_least": min(ratios, default=None),
            "outcome_most": max(ratios, default=None)}  # fmt: skip


def report(
    advice: Mapping[float, tuple["RunSpec", Sequence[Prediction], str]], runs: Runs, options: parse.Options, out: Path,
    display: Display,
) -> None:  # fmt: skip
    """Write table, CSV, picture and summary into ``out``, and display the table.

    advice: by alpha, the prepared experiment, the predictions for it, and the pool in words.
    """
    sections = []
    for alpha, (ready, predicted, pool) in advice.items():
        lines = []
        for prediction in predicted:
            images, mb = costs(ready, prediction.p)
            facts = {"alpha": alpha, **asdict(prediction), "images": images, "mb": mb}
            lines.append({**facts, **outcome(alpha, prediction.p, runs, out)})
        sections.append(Advice(alpha, pool, lines, outcome(alpha, 0.0, runs, out)["rounds"]))
    records = [line for section in sections for line in section.lines]
    tried = [cell.config for each in runs.values() for cell in each]
    title, smoke = grid.title(tried or [ready.record for ready, *_ in advice.values()]), grid.is_smoke(options)
    result = Report(
        advice_table(sections, options.speed_up), records, {"preset": options.preset, "predictions": records},
        {"advise.png": lambda path: advice_panels(path, sections, title, smoke)},
    )  # fmt: skip
    display.say("\n" + result.write("advise", options, out))
