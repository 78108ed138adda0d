"""Report of sweeps/advise.py: predictions, costs, and the measured effects of the shares p that were run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.config.experiment import Experiment
from fedcommons.convergence.advisor import LocalWork, Prediction
from fedcommons.core.communication import images_nbytes
from fedcommons.federation.client_sampling import joining
from fedcommons.reports import tables
from fedcommons.reports.cells import reached
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Report

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from fedcommons.runs.spec import RunSpec


Runs = Mapping[tuple[float, float], Sequence[sweep.Trial]]
"""Runs of the study by (alpha, share p of shared data), a trial for each seed."""


def local_work(config: Experiment, sizes: Sequence[int]) -> LocalWork:
    """Return participants, mean local steps and batch size of a round; sizes: each client's number of examples."""
    c = config.client
    tau = fmean(c.epochs * (max(1, n // c.batch_size) if c.drop_last else ceil(n / c.batch_size)) for n in sizes)
    return LocalWork(joining(len(sizes), config.federation.participation), tau, c.batch_size)


def costs(ready: "RunSpec", p: float) -> tuple[float, float]:
    """Return the mean number of images that a client sends at share p, and MB of all clients' images, up plus down."""
    images = registry.make("sharing", ready.names["sharing"], {"p": p}).sizes(ready.client_data)
    return fmean(images), 2 * images_nbytes(sum(images), ready.dataset.shape, ready.client_data.itemsize) / 1e6


@dataclass(frozen=True)
class Outcome:
    """The measured effect of a share p of shared data on training. rounds: rounds to the target, as text.

    ratio: mean rounds to the target divided by mean rounds at p = 0; ratios: the same quotient for each seed. ``ratio``
    is None and ``ratios`` is empty if a run is missing or missed the target.
    """

    rounds: str
    ratio: float | None
    ratios: Sequence[float]


def outcome(alpha: float, p: float, runs: Runs, out: Path) -> Outcome:
    """Return the measured effect of the share p of shared data at this alpha, from the finished runs in ``out``."""
    shared, base = (grid.finished(runs.get((alpha, share), ()), out) for share in (p, 0.0))
    if shared.empty or base.empty:
        return Outcome("", None, ())
    at, without = (dict(zip(side["seed"].tolist(), reached(side), strict=True)) for side in (shared, base))
    pairs = [(rounds, without.get(seed)) for seed, rounds in at.items()]
    if None in (*at.values(), *without.values()):
        return Outcome(tables.rounds(shared), None, ())
    ratio = tables.mean_rounds(shared)[0] / tables.mean_rounds(base)[0]
    return Outcome(tables.rounds(shared), ratio, [a / b for a, b in pairs if a and b])


def report(
    advice: Mapping[float, tuple["RunSpec", Sequence[Prediction], str]], runs: Runs, options: parse.Options, out: Path,
    display: Display,
) -> None:  # fmt: skip
    """Write table, CSV, picture and summary into ``out``, and display the table.

    advice: by alpha, the prepared experiment, the predictions for it, and the pool in words.
    """
    from papers.fedssyn.advice import Advice, advice_panels, advice_table

    sections = []
    for alpha, (ready, predicted, pool) in advice.items():
        lines = []
        for prediction in predicted:
            images, mb = costs(ready, prediction.p)
            ended = outcome(alpha, prediction.p, runs, out)
            least, most = (min(ended.ratios), max(ended.ratios)) if ended.ratios else (None, None)
            found_out = {"outcome": ended.ratio, "outcome_least": least, "outcome_most": most}
            costs_of = {"images": images, "mb": mb}
            lines.append({"alpha": alpha, **asdict(prediction), **costs_of, "rounds": ended.rounds, **found_out})
        sections.append(Advice(alpha, pool, lines, outcome(alpha, 0.0, runs, out).rounds))
    records = [line for section in sections for line in section.lines]
    tried = [cell.config for each in runs.values() for cell in each]
    title, smoke = grid.title(tried or [ready.record for ready, *_ in advice.values()]), grid.is_smoke(options)
    Report(
        advice_table(sections, options.speed_up), records, {"preset": options.preset, "predictions": records},
        {"advise.png": lambda path: advice_panels(path, sections, title, smoke)},
    ).write("advise", options, out, display)  # fmt: skip
