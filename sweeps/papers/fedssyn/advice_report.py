"""What the advisor writes: its predictions, what they cost, and how they turned out where that was tried."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.accounting.communication import images_nbytes
from fedcommons.config import cli, parts
from fedcommons.config.experiment import Experiment
from fedcommons.convergence.advisor import LocalWork, Prediction
from fedcommons.federation.participation import joining
from fedcommons.files import write_json, write_text
from fedcommons.reports import tables
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none
    from fedcommons.runs.build import Prepared

Runs = Mapping[tuple[float, float], Sequence[sweep.Trial]]
"""(alpha, p) to a cell for each seed."""


def local_work(config: Experiment, sizes: Sequence[int]) -> LocalWork:
    """What clients with so many examples do in a round."""
    c = config.client
    tau = fmean(c.epochs * (max(1, n // c.batch_size) if c.drop_last else ceil(n / c.batch_size)) for n in sizes)
    return LocalWork(joining(len(sizes), config.federation.participation), tau, c.batch_size)


def costs(ready: "Prepared", p: float) -> tuple[float, float]:
    """Images a client hands over on average, and MB of all clients, both ways."""
    images = parts.make("sharing", ready.config.sharing.setting, {"p": p}).sizes(ready.dealt)
    return fmean(images), 2 * images_nbytes(sum(images), ready.dataset.shape, ready.dealt.itemsize) / 1e6


def outcome(alpha: float, p: float, runs: Runs, out: Path) -> tuple[str, float | None]:
    """(rounds to the target as printed, those over the rounds at p = 0 or None where one is not known)."""
    sides = [grids.finished(runs.get((alpha, share), ()), out) for share in (p, 0.0)]
    if any(side.empty for side in sides):
        return "", None
    (rounds, late), (base, censored) = map(tables.mean_rounds, sides)
    return tables.rounds(sides[0]), None if late or censored else rounds / base


def report(
    found: Mapping[float, tuple["Prepared", Sequence[Prediction], str]], runs: Runs, options: cli.Options, out: Path,
    display: Display,
) -> None:  # fmt: skip
    """Write the tables, the picture and the summary, and show them; found: by alpha, of which pool at the end."""
    from papers.fedssyn.advice import Advice, advice_panels, advice_table

    sections = []
    for alpha, (ready, predicted, pool) in found.items():
        lines = []
        for one in predicted:
            images, mb = costs(ready, one.p)
            rounds, ratio = outcome(alpha, one.p, runs, out)
            lines.append(
                {"alpha": alpha, **asdict(one), "images": images, "mb": mb, "rounds": rounds, "outcome": ratio}
            )
        sections.append(Advice(alpha, pool, lines, outcome(alpha, 0.0, runs, out)[0]))
    records = [line for section in sections for line in section.lines]
    text = grids.stamped(advice_table(sections, options.speed_up), options)
    write_text(out / "advise.md", text)
    write_text(out / "advise.csv", tables.to_csv(records))
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "predictions": records})
    title = grids.title([ready.config for ready, *_ in found.values()])
    advice_panels(out / "advise.png", sections, title, grids.is_smoke(options))
    display.say("\n" + text)
