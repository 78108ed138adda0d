"""Comparisons paired by seed: Student's interval, p value, Holm's adjustment over a page, and the verdict on a claim.

docs/comparisons.csv names the comparisons that docs/claims.csv cites, such as {feddm_mb:2 MB} (2 decimals).
``csv``: files of docs/results; ``where``: a condition on their rows; ``rows``, ``base``: conditions of the two sides;
``value``: an expression of CSV columns, larger for ``rows`` than for ``base`` if the claim is right; ``minus``: another
comparison, whose differences are subtracted; ``margin``: for a claim of equality, differences up to this size count as
equal; it was stated before the runs (0: none was stated). A run that missed its target counts with all its rounds.
"""

import csv
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
import yaml
from result_tables import Comparisons, identity, paired, read, table

from fedcommons.reports.intervals import student

DOCS = Path(__file__).parent.parent
VERDICTS = ("holds", "on all seeds", "in part", "not here", "not tried")
"""From the strongest to the weakest."""
MINUTES = 5
"""Where a seed costs less, *holds* needs five seeds; else three."""
LEVEL = 0.05
ZERO = re.compile(r"-(0\.0+\b)")
Row = dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """Differences of paired runs, one per seed.

    margin: of an equality; None: the claim is that the differences are positive. same: identity, see ``identity``.
    holm: the p value after the adjustment for the number of comparisons of the page; None with one seed. seeds: of the
    differences, in their order.
    """

    differences: tuple[float, ...]
    margin: float | None = None
    same: Any = None
    holm: float | None = None
    seeds: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def mean(self) -> float:
        return fmean(self.differences)

    @property
    def low(self) -> float:
        return (student(self.differences) or self.differences)[0]

    @property
    def high(self) -> float:
        return (student(self.differences) or self.differences)[-1]

    def __format__(self, spec: str) -> str:
        """Return the mean with its interval. spec: number of decimals (1 if missing) and unit, both optional."""
        decimals, unit = re.fullmatch(r"(\d*) *(.*)", spec, re.S).groups()  # pyright: ignore[reportOptionalMemberAccess]
        mean, low, high = (f"{value:.{decimals or 1}f}" for value in (self.mean, self.low, self.high))
        return f"{mean} {unit}".rstrip() + f" [{low}, {high}]" * (self.n > 1)


def p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p value of Student's t test of the mean of two or more differences."""
    from scipy.stats import t

    error, mean = stdev(differences) / sqrt(len(differences)), fmean(differences)
    return 2 * float(t.sf(abs(mean) / error, len(differences) - 1)) if error else float(mean == 0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values after Holm's step-down adjustment for several comparisons."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        adjusted[at] = largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
    return adjusted


def verdict(effect: Comparison, least: int) -> str:
    """Return the verdict on the claim of one comparison. least: number of seeds that *holds* needs, at least three."""
    margin = effect.margin
    if margin is None:
        on_all, inside = min(effect.differences) > 0, effect.low > 0
        otherwise = "in part" if on_all or (inside and effect.n > 2) else "not here"
    else:
        on_all, inside = max(map(abs, effect.differences)) <= margin, -margin < effect.low and effect.high < margin
        otherwise = "not here" if effect.low > margin or effect.high < -margin else "in part"
    if on_all and effect.n > 2:
        return "holds" if inside and effect.n >= least else "on all seeds"
    return otherwise


def combined(verdicts: Sequence[str]) -> str:
    """Return the verdict on a claim that makes several comparisons."""
    if not {*verdicts} - {"holds", "on all seeds"}:
        return max(verdicts, key=VERDICTS.index)
    return "not here" if {*verdicts} == {"not here"} else "in part"


def least_seeds(facts: Mapping[str, Any]) -> int:
    """Return how many seeds *holds* needs. facts: of a page, in pages.yaml; a command names three seeds or more."""
    words = shlex.split(facts["command"])
    seeds = len(words[words.index("--seeds") + 1].split(",")) if "--seeds" in words else 3
    return 5 if facts.get("minutes", MINUTES * seeds) < MINUTES * seeds else 3


@cache
def rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


@cache
def pages(docs: Path = DOCS) -> dict[str, dict[str, Any]]:
    """Return the facts of the result pages, by name (pages.yaml)."""
    return yaml.safe_load((docs / "results" / "pages.yaml").read_text(encoding="utf-8"))


def compare(line: Row, folder: Path, earlier: Mapping[str, Comparison]) -> Comparison:
    """Return the comparison of a row of comparisons.csv, from CSV files in a folder. earlier: those of earlier rows.

    Raises:
        ValueError: a side has no run, or several of a seed, or no value, or the sides or ``minus`` have other seeds.
    """
    frame = read(line["csv"].split(), folder, line["where"])
    masks = [pd.Series(frame.eval(line[side], engine="python"), index=frame.index) for side in ("rows", "base")]
    values = pd.Series(frame.eval(line["value"], engine="python"), index=frame.index)
    seeds = [sorted(frame["seed"][mask]) for mask in masks]
    if not seeds[0] or seeds[0] != seeds[1] or len({*seeds[0]}) < len(seeds[0]):
        raise ValueError(f"docs/comparisons.csv: {line['name']} has runs of seeds {seeds[0]} and {seeds[1]}")
    differences = paired(frame, *(values.loc[mask] for mask in masks)).sort_index()
    if len(differences) < len(seeds[0]):
        raise ValueError(f"docs/comparisons.csv: {line['name']} lacks values, such as `rounds` of a missed target")
    same = identity(frame, masks[0], masks[1], differences)
    if minus := line["minus"]:
        if earlier[minus].seeds != (now := tuple(differences.index)):
            raise ValueError(f"docs/comparisons.csv: {line['name']} has seeds {now}, {minus} {earlier[minus].seeds}")
        same, differences = (same, minus), differences - list(earlier[minus].differences)
    margin = float(line["margin"]) if line["margin"] else None
    return Comparison(tuple(differences), margin, same, seeds=tuple(differences.index))


@cache
def named(docs: Path) -> dict[str, Comparison]:
    """Return the comparisons of comparisons.csv; errors: see ``compare``."""
    result: dict[str, Comparison] = {}
    for line in rows(docs / "comparisons.csv"):
        result[line["name"]] = compare(line, docs / "results", result)
    return result


def cited(*texts: str) -> list[str]:
    """Return the names of the comparisons that texts cite, each once."""
    return [*dict.fromkeys(re.findall(r"\{(\w+)[^\w]", " ".join(texts)))]


@cache
def of_page(page: str, docs: Path = DOCS) -> dict[Any, float]:
    """Return the p values of the comparisons that a page makes in its tables and claims, by identity."""
    collected: Comparisons = {}
    for spec in pages(docs).get(Path(page).stem, {}).get("tables", {}).values():
        table(spec, docs / "results", collected)
    for claim in rows(docs / "claims.csv"):
        for name in cited(claim["effect"], claim["more"]) if claim["page"] == page else ():
            collected[named(docs)[name].same] = named(docs)[name].differences
    return {same: p_value(differences) for same, differences in collected.items() if len(differences) > 1}


def summary(page: str, docs: Path = DOCS) -> str:
    """Return a sentence with the number of comparisons that a page makes, and of those with p < 0.05; "": none."""
    if not (values := [*of_page(page, docs).values()]):
        return ""
    plain, adjusted = (sum(p < LEVEL for p in each) for each in (values, holm(values)))
    return (
        f"**Comparisons.** The tables and claims of this page make {len(values)} comparison{'s' * (len(values) > 1)}, "
        f"paired by seed. Without adjustment, p < {LEVEL} in {plain} of them; after Holm's adjustment for their "
        f"number, in {adjusted}."
    )


def runs(every: Sequence[Comparison]) -> str:
    """Return the number of seeds, and the largest p value after Holm's adjustment over the page."""
    n, largest = min(c.n for c in every), max((c.holm for c in every if c.holm is not None), default=None)
    seeds = "1 seed" if n == 1 else f"{n} seeds"
    return seeds if largest is None else f"{seeds}, p = {largest:.2g}"


@cache
def claims(docs: Path = DOCS) -> list[Row]:
    """Return the rows of claims.csv; where an effect cites comparisons, effect, runs and verdict follow from CSV files.

    A verdict in claims.csv with citations is on what the comparisons do not show, such as settings that were not run.

    Raises:
        ValueError: this verdict is stronger than the one of the comparisons.
    """
    judged = []
    for claim in rows(docs / "claims.csv"):
        adjusted = of_page(claim["page"], docs)
        adjusted = dict(zip(adjusted, holm([*adjusted.values()]), strict=True))
        deciding, every = cited(claim["effect"]), cited(claim["effect"], claim["more"])
        by_name = {name: replace(comparison := named(docs)[name], holm=adjusted.get(comparison.same)) for name in every}
        claim = claim | {key: ZERO.sub(r"\1", claim[key].format(**by_name)) for key in ("effect", "more")}
        if deciding:
            least = least_seeds(pages(docs)[Path(claim["page"]).stem])
            computed, typed = combined([verdict(by_name[name], least) for name in deciding]), claim["verdict"]
            if typed and VERDICTS.index(typed) < VERDICTS.index(computed):
                raise ValueError(f"docs/claims.csv: {claim['claim']} ({claim['page']}): {computed}, by its comparisons")
            claim |= {"verdict": typed or computed, "runs": runs([by_name[name] for name in deciding])}
        judged.append(claim)
    return judged
