"""Rounds, bytes and clients' work of each row of the comparison until each target accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import target
from fedcommons.reports import tables
from fedcommons.reports.intervals import format_rounds
from fedcommons.tracking.run_folder import read_rounds
from papers.fedssyn import references
from papers.fedssyn.targets import below

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from papers.commons.measured import Measured

HEAD = ("alpha", "way", "target", "rounds", "MB", "client work, s")
NOTE = (
    "Rounds: those in which clients took part until the target. MB and client work: of all clients until the target, "
    "with shared data and generators. >: at least; a seed missed the target and counts with all rounds."
)


@dataclass(frozen=True)
class Until:
    """A run until its target, or all of it if it missed the target.

    rounds: number of rounds in which clients took part. share: of all such rounds of the run. mb: 10^6 bytes.
    """

    rounds: int
    share: float
    mb: float
    is_missed: bool


def until(goal: float | str, lines: Sequence[Mapping[str, Any]]) -> Until:
    """Return what a run needed to reach ``goal``. lines: the records of its rounds."""
    reached = target.first(goal, lines)
    upto = lines if reached is None else [line for line in lines if line["round"] <= reached]
    rounds, of_all = (sum(bool(line.get("clients")) for line in some) for some in (upto, lines))
    return Until(rounds, rounds / of_all if of_all else 0.0, upto[-1]["comm/total_bytes"] / 1e6, reached is None)


def section(rows: "Sequence[Measured]", goals: Sequence[float], work: Mapping[str, Sequence[float]]) -> str:
    """Return the table of all targets as text, and whether a server alone reaches them.

    work: seconds of the clients' training and of their generators, by the name of a row's first run.
    """
    lines, servers = [], []
    for result in rows:
        courses = [read_rounds(Path(run)) for run in result.runs["run"]]
        trained, *generators = work[Path(result.runs["run"].iloc[0]).name]
        goal_of_run = result.config.target
        if result.config.algorithm == references.ONE_SHOT:
            servers.append((f"alpha {result.alpha:g}, {result.row.way}", goal_of_run, fmean(result.last)))
        for goal in dict.fromkeys([goal_of_run, *goals]):
            runs = [until(goal, course) for course in courses]
            missed = sum(run.is_missed for run in runs)
            seconds = trained * fmean(run.share for run in runs) + sum(generators)
            sign, rounds = ">" * bool(missed and result.with_clients), [run.rounds for run in runs]
            alone = references.rounds([None if run.is_missed else 0 for run in runs])
            text = format_rounds(rounds, missed) if result.with_clients else alone
            mb = fmean(run.mb for run in runs)
            lines.append([f"{result.alpha:g}", result.row.way, target.in_words(goal), text, f"{sign}{mb:.3g}",
                          f"{sign}{seconds:.3g}"])  # fmt: skip
    notes = tables.numbered([NOTE, *below(servers, goals)])
    return f"\n## Rounds, bytes and work to each target\n\n{tables.markdown(HEAD, lines)}{notes}"
