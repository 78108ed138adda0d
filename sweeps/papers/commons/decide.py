"""Which way to choose: the Pareto front of accuracy and a cost, and a decision tree of the measured results.

The tree asks ``QUESTIONS``. Each leaf names the best of the ways that the answers allow and that beat FedAvg without
sharing; without such a way, the leaf names FedAvg. To save rounds (or bytes), a way beats FedAvg if it needs
fewer rounds (bytes) and is at most ``MARGIN`` points less accurate; the best needs fewest. Otherwise, a way beats
FedAvg if it is significantly more accurate; the best has the highest accuracy. Both conditions use the lower end of
Student's 95 % interval of the difference in accuracy, paired by seed.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcommons.reports.intervals import ends, student
from papers.commons.ways import FEDAVG, WAYS, is_summed, trains_generators

ROUNDING = 1e-7
"""Differences, in points, that are closer than this count as equal: rounding separates equal differences."""

MARGIN = 2.0
"""Points of accuracy that a way may lose against FedAvg if it saves rounds or bytes."""

NOTHING, NO_EPSILON = "-", "none"
"""Texts in place of an epsilon: clients share only model weights; shared data has no privacy guarantee."""

RULE = (
    "If you save rounds (to the target) or MB, the tree names the way that needs fewest, if it needs fewer than FedAvg "
    f"and is at most {MARGIN:g} points less accurate than FedAvg. If you save neither, it names the most accurate "
    "way, if it is significantly more accurate than FedAvg. Both conditions use 95 % intervals, paired by seed, not "
    "adjusted for the number of ways."
)

OF_SEED = "best_accuracy_seed"
"""Beginning of the names of the CSV columns with the accuracies of the seeds."""


@dataclass(frozen=True)
class Row:
    """The results of a way (a method with a sharing strategy) for one partition of the data.

    best: test accuracy by seed, in [0, 1], in the round of the best validation accuracy. mb: 10^6 bytes that all
    clients send and receive. rounds: mean number of rounds with clients to the target; infinite if a seed missed it.
    disclosed: share of all examples that was disclosed without an epsilon; raw: the share sent unchanged. epsilon: as
    in the table, as text. generators: clients train generators. bound: the way is an upper bound, for comparison only.
    summed: the epsilon holds only against parties that see nothing but the sum of all clients' messages.
    """

    way: str
    best: Mapping[int, float]
    mb: float
    rounds: float
    disclosed: float
    epsilon: str = NOTHING
    generators: bool = False
    bound: bool = False
    raw: float = 0.0
    summed: bool = False

    @property
    def accuracy(self) -> float:
        return fmean(self.best.values())

    @property
    def is_covered(self) -> bool:
        """Return whether clients share data, and all shared data has an epsilon."""
        return self.epsilon not in (NOTHING, NO_EPSILON)

    @property
    def guarantee(self) -> str:
        """Return the epsilon with its conditions: secret noise, and parties that see only the sum."""
        condition = "and summed" if "secret" in self.epsilon else "if summed"
        return f"{self.epsilon} {condition}" if self.summed else self.epsilon

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> "Row":
        """Build a row from a line of the CSV file."""
        best = {int(name.removeprefix(OF_SEED)): float(value) for name, value in record.items()
                if name.startswith(OF_SEED) and value not in ("", None)}  # fmt: skip
        text, way = str(record["rounds_to_target"]), record["way"]
        rounds = inf if "missed" in text or not text[:1].isdigit() else float(text.split()[0])
        return Row(way, best, float(record["mb"]), rounds, float(record["disclosed"]), str(record["epsilon"]),
                   trains_generators(WAYS[way]), WAYS[way].bound, float(record.get("disclosed_raw") or 0),
                   is_summed(WAYS[way]))  # fmt: skip


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto front of points (cost, accuracy), in the order of cost."""
    beaten = [
        any(c <= cost and a >= accuracy and (c, a) != (cost, accuracy) for c, a in points) for cost, accuracy in points
    ]
    return sorted((i for i, is_beaten in enumerate(beaten) if not is_beaten), key=lambda i: points[i])


def differences(first: Row, second: Row) -> list[float]:
    """Return the accuracy of ``first`` minus that of ``second``, in points, for each seed that both have."""
    return [100 * (first.best[seed] - second.best[seed]) for seed in first.best if seed in second.best]


def lower_end(first: Row, second: Row) -> float:
    """Return the lower end of the 95 % interval of ``differences``; with one seed, the difference."""
    of_seeds = differences(first, second)
    return (student(of_seeds) or of_seeds or [-inf])[0]


def is_ahead(first: Row, second: Row) -> bool:
    """Return whether ``first`` is significantly more accurate than ``second``; with one seed, whether it is better.

    If the accuracy differences are equal in all seeds, their interval has width 0 and the result is False: on a finite
    test set, a few seeds can have equal differences by chance.
    """
    of_seeds = differences(first, second)
    return lower_end(first, second) > 0 and (len(of_seeds) == 1 or max(of_seeds) - min(of_seeds) > ROUNDING)


def is_similar(first: Row, second: Row) -> bool:
    """Return whether ``first`` is at most ``MARGIN`` points less accurate than ``second``, or more accurate."""
    return lower_end(first, second) > -MARGIN


Allows = Callable[[Row, Row], bool]
"""Returns whether an answer allows the first row; the second row is that of FedAvg."""

Cost = Callable[[Row], tuple[float, ...]]
"""Returns the numbers of a row that a leaf minimises; the second number breaks ties."""


def _accuracy(row: Row) -> int:
    """Return the accuracy in units of ``ROUNDING``: means of equal accuracies differ in their last bit."""
    return round(100 * row.accuracy / ROUNDING)


def _any(row: Row, base: Row) -> bool:
    return True


QUESTIONS: Sequence[tuple[str, Sequence[tuple[str, Allows, Cost | None]]]] = (
    ("May anything but model weights leave a client?",
     (("no", lambda row, base: row.epsilon == NOTHING, None), ("yes", _any, None))),
    ("Must an epsilon cover all data but the weights?",
     (("yes", lambda row, base: row.epsilon != NO_EPSILON, None), ("no", _any, None))),
    ("What do you save?", (
        ("rounds", lambda row, base: row.rounds < base.rounds and is_similar(row, base),
         lambda row: (row.rounds, row.mb)),
        ("bytes", lambda row, base: row.mb < base.mb and is_similar(row, base), lambda row: (row.mb, -_accuracy(row))),
        ("neither", is_ahead, lambda row: (-_accuracy(row), row.mb)),
    )),
    ("Can clients train generators?", (("no", lambda row, base: not row.generators, None), ("yes", _any, None))),
)  # fmt: skip
"""Questions in their order. The leaves below an answer with a cost minimise this cost."""


@dataclass(frozen=True)
class Leaf:
    """The advised way; ``base`` itself, FedAvg without sharing, if no allowed way of the table beats it."""

    way: Row
    base: Row

    @property
    def is_base(self) -> bool:
        return self.way == self.base

    @property
    def numbers(self) -> str:
        """Return accuracy, rounds, MB, epsilon and raw images as text, and the difference to FedAvg."""
        rounds = (
            f"{self.way.rounds:.1f}".removesuffix(".0") + f" round{'s' * (self.way.rounds != 1)}"
            if self.way.rounds < inf
            else "target missed"
        )
        epsilon = f", epsilon {self.way.guarantee}" * self.way.is_covered
        raw = f", {100 * self.way.raw:.3g} % of images sent raw" * (self.way.raw > 0)
        text = f"{100 * self.way.accuracy:.1f} %, {rounds}, {self.way.mb:.3g} MB{epsilon}{raw}"
        if self.is_base:
            return f"{text}; no allowed way of the table is better"
        points = differences(self.way, self.base)
        return f"{text}, {fmean(points):+.1f} points" + (f" {ends(points)}" if len(points) > 1 else ", one seed")


@dataclass(frozen=True)
class Question:
    """A question with its answers, and what follows each answer."""

    text: str
    answers: tuple[tuple[str, "Question | Leaf"], ...]


def left_out(rows: Sequence[Row]) -> list[str]:
    """Return the ways with other seeds than FedAvg (the interval could miss), or with an accuracy that is no number."""
    seeds = next((row.best.keys() for row in rows if row.way == FEDAVG), None)
    return [row.way for row in rows if row.best.keys() != seeds or not all(map(isfinite, row.best.values()))]


def tree(rows: Sequence[Row]) -> Question | Leaf | None:
    """Return the decision tree of one partition; None without a row of FedAvg.

    Upper bounds and the rows of ``left_out`` are excluded. A question is omitted where its answer changes nothing.
    Answers with equal results are joined.
    """
    out = left_out(rows)
    base = next((row for row in rows if row.way == FEDAVG and row.way not in out), None)
    ways = [row for row in rows if row is not base and not row.bound and row.way not in out]
    return base and _grow(ways, base, QUESTIONS)


def _grow(rows: Sequence[Row], base: Row, questions: Sequence[Any], cost: Cost | None = None) -> Question | Leaf:
    if not questions:
        return Leaf(min(rows, key=cost, default=base) if cost else base, base)
    (text, answers), *later = questions
    grown = list[tuple[str, Question | Leaf]]()
    for name, allows, of_answer in answers:
        result = _grow([row for row in rows if allows(row, base)], base, later, of_answer or cost)
        equal = next((i for i, (_, other) in enumerate(grown) if other == result), None)
        if equal is None:
            grown.append((name, result))
        else:
            grown[equal] = (f"{grown[equal][0]} or {name}", result)
    return grown[0][1] if len(grown) == 1 else Question(text, tuple(grown))


def walk(node: Question | Leaf, answer: str = "", depth: int = 0) -> Iterator[tuple[int, str, Question | Leaf]]:
    """Yield (depth, answer that leads to the node, node) of a tree, from top to bottom."""
    yield depth, answer, node
    for name, result in node.answers if isinstance(node, Question) else ():
        yield from walk(result, name, depth + 1)


def named(row: Row) -> str:
    return "FedAvg without sharing" if row.way == FEDAVG else row.way


def in_words(node: Question | Leaf) -> str:
    """Return the tree as a nested Markdown list."""
    lines = ""
    for depth, answer, now in walk(node):
        text = now.text if isinstance(now, Question) else f"**{named(now.way)}**: {now.numbers}"
        lines += f"{'  ' * depth}- {f'{answer}: ' * bool(answer)}{text}\n"
    return lines


def trees(rows: Sequence[tuple[float, Row]]) -> dict[float, Question | Leaf]:
    """Return the tree of each alpha that has one. rows: (alpha, row)."""
    grown = {a: tree([row for alpha, row in rows if alpha == a]) for a in dict.fromkeys(alpha for alpha, _ in rows)}
    return {alpha: node for alpha, node in grown.items() if node}


def from_csv(file: Path) -> dict[float, Question | Leaf]:
    """Return the trees of a CSV file that ``commons.py`` wrote; lines without alpha are references, not ways."""
    with file.open(encoding="utf-8", newline="") as lines:
        return trees([(float(line["alpha"]), Row.from_record(line)) for line in csv.DictReader(lines) if line["alpha"]])
