"""Pareto front and decision tree of the comparison of ways to a commons, from rows of known accuracies."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from types import ModuleType
from typing import Any

import pytest

from fedcommons.reports.intervals import student


@pytest.fixture(scope="module")
def decide(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    sweeps("commons")
    from papers.commons import decide  # in the script's folder, which is on the path by now

    return decide


@pytest.fixture(scope="module")
def row(decide: ModuleType) -> Callable[..., Any]:
    def make(way: str, *percent: float, mb: float = 9.0, rounds: float = 9.0, **more: Any) -> Any:
        best = {seed: p / 100 for seed, p in enumerate(percent)}
        return decide.Row(way, best, mb, rounds, disclosed=0.0, **{"epsilon": "none", **more})

    return make


def leaves(node: Any, path: str = "") -> dict[str, str]:
    """Return the way of each leaf by the answers that lead to it."""
    if hasattr(node, "way"):
        return {path: node.way.way}
    return {place: way for answer, after in node.answers for place, way in leaves(after, f"{path}/{answer}").items()}


def test_the_front(decide: ModuleType) -> None:
    """By cost; equal points stand together, and what is as good and dearer, or as dear and worse, is left out."""
    assert decide.front([(1, 0.5), (1, 0.5), (3, 0.4), (3, 0.5)]) == [0, 1]
    assert decide.front([(5, 0.9), (0, 0.1), (0, 0.3), (5, 0.3)]) == [2, 0]


def test_answers_restrict_and_costs_choose(decide: ModuleType, row: Callable[..., Any]) -> None:
    rows = [
        row("real", 80, 81, 82, epsilon="-"),
        row("weights", 85, 86.5, 87, epsilon="-", mb=20),
        row("private", 83, 84.5, 85, epsilon="10 if secret", mb=3, rounds=0),
        row("copies", 90, 91.5, 92, mb=8, rounds=2),
        row("pool", 95, 96.5, 97, mb=10, rounds=3, generators=True),
        row("few bytes", 79, 80.5, 81, mb=1, rounds=inf),  # half a point to a point less than FedAvg
        row("worse", 70, 71.5, 72, mb=0, rounds=0),
        row("bound", 99, 99.5, 99.7, mb=0, rounds=0, bound=True),
    ]
    assert leaves(decide.tree(rows)) == {
        "/no/rounds or bytes": "real",
        "/no/neither": "weights",
        "/yes/yes/rounds or bytes": "private",
        "/yes/yes/neither": "weights",
        "/yes/no/rounds": "private",
        "/yes/no/bytes": "few bytes",
        "/yes/no/neither/no": "copies",
        "/yes/no/neither/yes": "pool",
    }
    # without the ways that need an epsilon or generators, these questions change nothing
    few = [row for row in rows if row.way in ("real", "copies")]
    assert leaves(decide.tree(few)) == {"/no": "real", "/yes/yes": "real", "/yes/no": "copies"}
    assert leaves(decide.tree(rows[:1])) == {"": "real"}
    assert decide.tree(rows[1:]) is None  # nothing to compare with
    equal = row("equal", 88, 91, 94.5, mb=7)  # the mean of the copies, less in its last bit
    assert equal.accuracy < few[1].accuracy
    assert decide.is_ahead(equal, few[0])
    assert leaves(decide.tree([*few, equal]))["/yes/no/bytes or neither"] == "equal"


def test_rows_with_other_seeds_or_without_numbers_are_left_out(decide: ModuleType, row: Callable[..., Any]) -> None:
    base = row("real", 80, 81, 82, epsilon="-")
    rows = [base, *(row(str(len(best)), *best, mb=1, rounds=1) for best in ((), (99,), (99, 98, 97, 96)))]
    rows.append(row("nan", 99, nan, 99))
    assert decide.left_out(rows) == ["0", "1", "4", "nan"]
    assert leaves(decide.tree(rows)) == {"": "real"}
    assert decide.tree([row("real", nan, 81)]) is None


@pytest.mark.parametrize(
    ("percent", "is_ahead", "is_similar"),
    [
        ((51, 52, 51.5), True, True),
        ((51, 51, 51), False, True),  # equal differences, by chance on a finite test set
        ((80, 50, 40), False, False),  # a higher mean, but one seed is far below
        ((49, 49.5, 49.2), False, True),
        ((47, 48, 48.2), False, False),
    ],
)
def test_significance_is_paired_by_seed(
    decide: ModuleType, row: Callable[..., Any], percent: tuple[float, ...], is_ahead: bool, is_similar: bool
) -> None:
    way, base = row("a", *percent), row("real", 50, 50, 50, 99)  # the fourth seed is not common
    assert (decide.is_ahead(way, base), decide.is_similar(way, base)) == (is_ahead, is_similar)
    assert decide.lower_end(way, base) == pytest.approx((student([p - 50 for p in percent]) or (0,))[0])
    assert decide.is_ahead(row("a", 51), base)  # one seed: the larger number
    assert not decide.is_ahead(base, base)


def test_a_row_from_the_csv(decide: ModuleType) -> None:
    record = {"way": "Fedssyn (DDPM)", "mb": "7.5", "rounds_to_target": "2.0 ± 0.0", "disclosed": "0.7",
              "epsilon": "none", "best_accuracy_seed3": "0.9", "best_accuracy_seed4": ""}  # fmt: skip
    expected = decide.Row("Fedssyn (DDPM)", {3: 0.9}, 7.5, 2.0, 0.7, "none", generators=True)
    assert decide.Row.from_record(record) == expected
    assert decide.Row.from_record({**record, "disclosed_raw": "0.1"}) == replace(expected, raw=0.1)
    assert decide.Row.from_record({**record, "way": "FedMERF (summed)"}).summed
    missed = [(text, inf) for text in (">10 (missed by 1 of 3)", "not reached", "0 (missed by 1 of 3)")]
    for text, rounds in [("0", 0.0), *missed]:
        assert decide.Row.from_record({**record, "rounds_to_target": text}) == replace(expected, rounds=rounds)
