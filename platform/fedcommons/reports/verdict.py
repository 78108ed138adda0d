"""The sentence with which a report begins: what sharing changes in the rounds to the target, compared seed by seed."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from fedcommons.config import target
from fedcommons.errors import UserError
from fedcommons.reports.cells import ROUNDS, Cell, counted, reached
from fedcommons.reports.collect import Group
from fedcommons.reports.columns import method, place, setting, without_sharing
from fedcommons.reports.intervals import format_rounds
from fedcommons.reports.series import value
from fedcommons.reports.tables import compared, rounds


def verdict(groups: Iterable[Group]) -> str:
    """Return a sentence on the first comparison of sharing with no sharing, and the count of all; "" if there is none.

    Each configuration counts at its best learning rate, with its finished runs only.
    """
    every = [both for group in groups for both in _comparisons(group)]
    if not every:
        return ""
    (base, cell), directions = every[0]
    several = {place(cell) for (_, cell), _ in every}
    who = method(cell) + f" ({place(cell)})" * (len(several) > 1)
    (needed, usual), n = [format_rounds(*counted(c.runs, ROUNDS)) for c in (cell, base)], len(directions)
    instead = f"{needed} rounds, as without sharing," if needed == usual else f"{needed} rounds instead of {usual}"
    parts = [f"With {setting(cell)}, {who} needs {instead} to reach {target.in_words(value(cell, 'target'))}"]
    fewer = f"fewer rounds in {directions.count(-1)} of them"
    same = "all in the same direction" if len({*directions}) == 1 and any(directions) else fewer
    parts.append(f"{n} seeds, {same}" if n > 1 else "1 seed")
    if len(every) > 1:
        better = sum({*directions} == {-1} for _, directions in every)
        parts.append(f"all seeds need fewer rounds in {better} of all {len(every)} comparisons with no sharing")
    return f"{'; '.join(parts)}."


def _comparisons(group: Group) -> list[tuple[tuple[Cell, Cell], list[int]]]:
    """Return each pair (without sharing, with sharing), and for each common seed -1, 0 or 1: fewer, equal, more rounds.

    The runs of a pair are those of the common seeds. A seed that missed the target needs more rounds than any other.
    """
    import pandas as pd

    runs = pd.concat([cell.runs.loc[cell.runs["status"] == "finished", :] for cell in group.cells])
    try:
        cells = compared(runs) if len(runs) else []
    except UserError:  # several learning rates, and no validation data to choose among them
        return []
    result = []
    for cell, base in zip(cells, without_sharing(cells), strict=True):
        if base is None or base is cell:
            continue
        seeds = [seed for seed in base.runs["seed"].tolist() if seed in cell.runs["seed"].tolist()]
        pair = tuple(replace(c, runs=c.runs.loc[c.runs["seed"].isin(seeds), :]) for c in (base, cell))
        if seeds and "-" not in (rounds(pair[0].runs), rounds(pair[1].runs)):
            usual, needed = ([inf if r is None else r for r in reached(c.runs)] for c in pair)
            result.append((pair, [(b > a) - (b < a) for a, b in zip(usual, needed, strict=True)]))
    return result
