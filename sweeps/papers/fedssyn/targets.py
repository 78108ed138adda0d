"""Rounds, bytes and clients' work until each target accuracy, and whether a pool pays in bytes (Table 1 of Fedssyn)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import floor
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedcommons.cli.parser import NewOption
from fedcommons.config import target
from fedcommons.core.communication import sent
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import ROUNDS, Cell, counted, reached, until_target
from fedcommons.reports.series import value
from fedcommons.tracking.run_folder import read_rounds
from papers.fedssyn import references

if TYPE_CHECKING:  # pandas takes a second to import
    import pandas as pd

OPTION: NewOption = (
    "targets", str | None, None,
    "further target accuracies, such as 0.9,0.95: the report has the rounds, bytes and work to each target",
)  # fmt: skip
MB = 10**6
HEAD = ("target", "rounds", "MB", "of these the pool", "rounds saved x MB per round", "pays in bytes", "client s",
        "of these generators")  # fmt: skip
NOTE = (
    "All clients together, until the target. MB: 10^6 bytes, both ways, with the pool. Client s: seconds on one core, "
    "computed as steps times the seconds of a step. >: at least; a seed missed the target and counts with all rounds."
)


def at_target(runs: "pd.DataFrame", goal: float | str) -> "pd.DataFrame":
    """Return the runs with the target ``goal`` and the rounds to this target, instead of their own target."""
    needed = [target.first(goal, read_rounds(Path(run))) for run in runs["run"]]
    return runs.assign(target=[goal] * len(runs), rounds_to_target=needed)


def section(
    cells: Sequence[Cell], servers: Sequence[Cell], goals: Sequence[float], work: Mapping[str, Sequence[float]]
) -> str:
    """Return the table of all targets as text: each configuration at its own target and at the ``goals``.

    servers: configurations of the server alone on the pool. work: ``client_work.of_runs``.
    """
    head, facts = columns.identified([*cells, *servers])
    indices = [i for i, name in enumerate(head) if name in ("algorithm", "setting") or len({f[i] for f in facts}) > 1]
    lines, verdicts = [], []
    bases = [*columns.without_sharing(cells), *[None] * len(servers)]
    for cell, identity, base in zip([*cells, *servers], facts, bases, strict=True):
        is_server = value(cell, "algorithm") == references.ONE_SHOT
        identity[head.index("algorithm")] = references.NAMES.get(name := identity[head.index("algorithm")], name)
        for goal in dict.fromkeys([value(cell, "target"), *goals]):
            now, comparison = Cell(cell.fields, at_target(cell.runs, goal)), ("", "")
            if base and base is not cell:
                comparison = pays(Cell(base.fields, at_target(base.runs, goal)), now)
                verdicts.append(comparison[1])
            rounds, numbers = (
                references.rounds(reached(now.runs)) if is_server else tables.rounds(now.runs),
                _amounts(now, work),
            )
            first = [*(identity[i] for i in indices), target.in_words(goal), rounds]
            lines.append([*first, *numbers[:2], *comparison, *numbers[2:]])
    rule = "A pool pays in bytes when rounds saved x bytes per round > bytes of the pool"
    count = f": in {verdicts.count('yes')} of {len(verdicts)} comparisons" if verdicts else ""
    text = tables.markdown([*(head[i] for i in indices), *HEAD], lines)
    alone = [(columns.place(cell), value(cell, "target"), fmean(cell.values("last_accuracy"))) for cell in servers]
    notes = tables.numbered([NOTE, f"{rule}{count}.", *below(alone, goals)])
    return f"\n## Rounds, bytes and work to each target\n\n{text}{notes}"


def pays(base: Cell, cell: Cell) -> tuple[str, str]:
    """Return the bytes that fewer rounds save, as text, and whether they exceed those of the pool: yes, no or ``-``.

    base, cell: configurations without and with a pool, compared on the seeds that both have. ``-``: there is no such
    seed, or seeds that missed the target leave the answer open.
    """
    n = max(len(base.runs), len(cell.runs))
    base, cell = (
        replace(side, runs=side.runs.loc[side.runs["seed"].isin(other.runs["seed"]), :])
        for side, other in ((base, cell), (cell, base))
    )
    if base.runs.empty:
        return "-", "-"
    some = f" ({len(cell.runs)} of {n} seeds)" * (len(cell.runs) < n)
    (slow, missed), (fast, fast_missed) = (counted(c.runs, ROUNDS) for c in (base, cell))
    if fast_missed:
        return "-", "-"
    rounds, each = fmean(slow) - fmean(fast), fmean(run.per_round for run in until_target(base.runs)) / MB
    is_more = rounds * each > fmean(cell.values("bytes_once")) / MB
    text = f"{'>' * bool(missed)}{rounds:.1f} x {each:.3g} = {rounds * each:.3g}{some}"
    return text, "yes" if is_more else "-" if missed else "no"


def _amounts(cell: Cell, work: Mapping[str, Sequence[float]]) -> list[str]:
    """Return, until the target, the MB, the MB of the pool, the clients' seconds, and those of their generators."""
    until, pool = until_target(cell.runs), fmean(cell.values("bytes_once")) / MB
    mean, is_bound = sent(until, MB, MB)
    of_runs = [work[Path(run).name] for run in cell.runs["run"]]
    shares = [r / n for r, n in zip(counted(cell.runs, ROUNDS)[0], cell.runs["rounds"], strict=True)]
    trained = fmean(share * seconds[0] for share, seconds in zip(shares, of_runs, strict=True))
    generators = fmean(seconds[-1] for seconds in of_runs)
    sign = ">" * (is_bound and any(run.per_round for run in until))  # the bytes of the server alone do not grow
    return [f"{sign}{mean:.3g}", f"{pool:.3g}", f"{sign}{trained + generators:.3g}", f"{generators:.3g}"]


def below(servers: Sequence[tuple[str, float | str, float]], goals: Sequence[float]) -> list[str]:
    """Return a sentence per target: whether the server alone exceeds it. If so, the last offers a higher target.

    servers: data and federation as text, own target, and accuracy, of each configuration of the server alone.
    """
    result, best, is_below = [], 0.0, False
    for place, own_target, accuracy in servers:
        best = max(best, accuracy)
        for goal in dict.fromkeys([own_target, *goals]):
            if not isinstance(goal, str):
                is_below |= goal < accuracy
                taught = f"{'below' if goal < accuracy else 'not below'} what the pool alone teaches"
                result.append(f"Target {target.in_words(goal)} ({place}): it is {taught} ({100 * accuracy:.1f} %).")
    above = (floor(100 * best) + 1) / 100
    if is_below and max(goals, default=0) < above < 1:
        listed = ",".join(f"{goal:g}" for goal in (*goals, above))
        result[-1] += f" --targets {listed} adds a target above the accuracy of the pool alone."
    return result
