"""Results of a row of the table, from the run folders of all seeds at the chosen learning rates of the row.

An audit looks at the images that clients send, for near-copies of training images and for a membership attack's
advantage. It compares pixels (``fedcommons.audits.copies``). The advantage is 2 a - 1: in matched pairs of a training
image and a held-out image, the distance to the nearest synthetic image identifies the training image with
probability a.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch

from fedcommons.audits.copies import audit
from fedcommons.audits.distances import pixel_space
from fedcommons.audits.nearest_neighbours import subject
from fedcommons.config import target
from fedcommons.config.dotted import choose
from fedcommons.config.experiment import Experiment
from fedcommons.core.worker import fresh_torch
from fedcommons.data.examples import Examples
from fedcommons.federation import checkpoint
from fedcommons.flat_tensors import data
from fedcommons.reports import tables
from fedcommons.reports.cells import Cell
from fedcommons.runs.build import build
from fedcommons.runs.spec import RunSpec
from fedcommons.tracking.run_folder import read_rounds, read_summary
from fedcommons.tune.learning_rates import Rates
from fedcommons.tune.study import Entry
from papers.commons.decide import NO_EPSILON, NOTHING, Row
from papers.commons.ways import SENDS_COUNTS, STAYS, WAYS, Way, is_summed, trains_generators
from papers.fedssyn.private_presets import OF_SUMS


@dataclass(frozen=True)
class LeakAudit:
    """Audit result: share of near-copies among the images; a membership attack's advantage and its 95 % interval."""

    copies: float
    advantage: float
    low: float
    high: float

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> "LeakAudit":
        """Build the result from a record with the probability ``closer`` and its 95 % interval (``low``, ``high``)."""
        ends = (2 * facts[name] - 1 for name in ("closer", "low", "high"))
        return LeakAudit(facts["near_copies"] / facts["images"], *ends)


EXACT = LeakAudit(1.0, 1.0, 1.0, 1.0)
"""Audit result of real images that were sent unchanged."""


@dataclass(frozen=True)
class Measured:
    """A row of the table, with its runs at the chosen learning rates.

    to_target, last: rounds to the target accuracy and last test accuracy, by run. with_clients: mean number of rounds
    in which clients took part. once, per_round: 10^6 bytes before round 1, and in a round with clients. audit: audit of
    the images that clients sent, in the first run in which they could be audited.
    """

    row: Row
    alpha: float
    rates: Rates
    runs: pd.DataFrame
    to_target: Sequence[int | None]
    last: Sequence[float]
    with_clients: float
    once: float
    per_round: float
    audit: LeakAudit | None
    config: Experiment

    @property
    def way(self) -> Way:
        return WAYS[self.row.way]


def taking_part(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the rounds in which clients took part, from the records of all rounds."""
    return [line["round"] for line in lines if line.get("clients")]


def rounds_to_target(goal: float | str, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of rounds in which clients took part until the target ``goal``; None if it is missed."""
    reached = target.first(goal, lines)
    return None if reached is None else sum(number <= reached for number in taking_part(lines))


def best_of(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the best validation accuracy and the test accuracy in its round (the first round in a tie)."""
    both = [(line["validation/accuracy"], line["test/accuracy"]) for line in lines if "validation/accuracy" in line]
    return max(both, key=lambda pair: pair[0])


def measured(entries: Sequence[Entry], runs: pd.DataFrame, out: Path) -> list[Measured]:
    """Return the results of each row and alpha with finished runs."""
    rows = []
    reported = [e for e in entries if not e.is_tuning]
    for way, alpha in dict.fromkeys((e["way"], e["alpha"]) for e in reported):
        cells = {str(out / e.cell.name): e for e in reported if (e["way"], e["alpha"]) == (way, alpha)}
        of_row = runs.loc[runs["run"].isin(cells), :].sort_values("seed")
        if not of_row.empty:
            rows.append(_measured(way, alpha, of_row, cells[of_row["run"].iloc[0]]))
    return rows


def _measured(way: str, alpha: float, runs: pd.DataFrame, first: Entry) -> Measured:
    config, courses = first.cell.config, [read_rounds(Path(run)) for run in runs["run"]]
    with_clients = [len(taking_part(lines)) for lines in courses]
    sent = (runs["bytes_down"] + runs["bytes_up"]).tolist()
    once, disclosed = (fmean(runs[name].tolist()) for name in ("bytes_once", "disclosed"))
    summaries = [(run, read_summary(Path(run)) or {}) for run in runs["run"]]
    audited = next((s for run, summary in summaries if (s := read_audit(summary, config, Path(run)))), None)
    to_target = [rounds_to_target(config.target, lines) for lines in courses]
    row = Row(
        way=way,
        best=dict(zip(runs["seed"].tolist(), [best_of(lines)[1] for lines in courses], strict=True)),
        mb=(once + fmean(sent)) / 1e6,
        rounds=fmean(inf if reached is None else reached for reached in to_target),
        disclosed=disclosed,
        epsilon=_epsilon(config, runs),
        generators=trains_generators(WAYS[way]),
        bound=WAYS[way].bound,
        raw=fmean(summary.get("disclosed_raw", 0.0) for _, summary in summaries),
        summed=is_summed(WAYS[way]),
    )
    return Measured(
        row=row,
        alpha=alpha,
        rates=first["rates"],
        runs=runs,
        to_target=to_target,
        last=runs["last_accuracy"].tolist(),
        with_clients=fmean(with_clients),
        once=once / 1e6,
        per_round=fmean(b / n if n else 0.0 for b, n in zip(sent, with_clients, strict=True)) / 1e6,
        audit=audited,
        config=config,
    )


_OF_POOL = ("data.", "partition.", "sharing.", "dp.", "seed")
"""Prefixes of the config fields that decide a pool of synthetic images fitted to the clients' noisy sums."""


def _epsilon(config: Experiment, runs: pd.DataFrame) -> str:
    """Return the epsilon of all that clients share but the weights, as text."""
    if config.sharing.setting in STAYS:
        return NOTHING
    return NO_EPSILON if config.algorithm in SENDS_COUNTS else tables.commons_epsilon(Cell({}, runs))


def read_audit(summary: Mapping[str, Any], config: Experiment, folder: Path) -> LeakAudit | None:
    """Return the audit result of a run; None if clients send no images (but, for example, means, codes or features)."""
    if summary.get("disclosed_raw"):
        return EXACT
    if config.sharing.setting in STAYS:
        return None
    if facts := (summary.get("audit") or {}).get("pixels"):
        return LeakAudit.from_facts(facts)
    if config.sharing.setting in OF_SUMS:
        return _of_fitted(tuple(field for field in config.flat.items() if field[0].startswith(_OF_POOL)))
    return _of_state(build(config), folder) if config.algorithm in ("feddm", "fedlap", "fedcvae") else None


@cache
@fresh_torch()
def _of_fitted(fields: tuple[tuple[str, Any], ...]) -> LeakAudit | None:
    """Audit images that are fitted to clients' noisy sums; runs do not store them, so they are fitted again here."""
    torch.set_num_threads(1)  # on a busy machine two threads are up to a hundred times slower
    prepared = build(choose(dict(fields)))
    pool = prepared.stage.make(prepared.client_data, ())
    return _against_all(prepared, pool.store[pool.rows])


def _of_state(prepared: RunSpec, folder: Path) -> LeakAudit | None:
    """Audit the server's images in a run's last checkpoint against all training images; None: there are no images."""
    checkpointed, dataset = checkpoint.load_latest(folder / "checkpoints"), prepared.dataset
    if checkpointed is None or "images" not in checkpointed.state:
        return None
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (dataset.mean, dataset.std))
    x = data(checkpointed.state["images"])
    if x.is_floating_point():  # float images are normalised for the network, so this restores 8-bit pixels
        x = (x * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    return _against_all(prepared, Examples(x, data(checkpointed.state["labels"])))


def _against_all(prepared: RunSpec, images: Examples) -> LeakAudit | None:
    """Audit synthetic images against the training images of all clients, with validation images as held-out images."""
    dataset = prepared.dataset
    of_all = subject(0, images, prepared.train, dataset.validation, prepared.record.seed)
    facts = audit([of_all], {"pixels": pixel_space}, prepared.record.seed).record()["pixels"]["all"]
    return LeakAudit.from_facts(facts) if facts else None
