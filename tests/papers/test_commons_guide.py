"""Fronts and guide of the comparison of ways to a commons, from rows of known accuracies."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from fedcommons.reports.intervals import student


@pytest.fixture(scope="module")
def decide(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    sweeps("commons")
    from papers.commons import decide  # beside the script, which is found by now

    return decide


@pytest.fixture(scope="module")
def row(decide: ModuleType) -> Callable[..., Any]:
    def make(way: str, mb: float, *percent: float, **more: Any) -> Any:
        values = {"pool_mb": 0.0, "rounds": 9.0, "disclosed": 0.0, "raw": 0.0, **more}
        return decide.Row(way, {seed: p / 100 for seed, p in enumerate(percent)}, mb, **values)

    return make


def lines(decide: ModuleType, rows: Sequence[Any]) -> dict[str, list[tuple[str, set[str]]]]:
    result: dict[str, list[tuple[str, set[str]]]] = {}
    for advice in decide.guide(rows):
        result.setdefault(advice.limit, []).append((advice.best.way, {one.way for one in advice.alike}))
    return result


def test_the_front(decide: ModuleType) -> None:
    """By cost; equal points stand together, and what is as good and dearer, or as dear and worse, is left out."""
    assert decide.front([(1, 0.5), (1, 0.5), (3, 0.4), (3, 0.5)]) == [0, 1]
    assert decide.front([(5, 0.9), (0, 0.1), (0, 0.3), (5, 0.3)]) == [2, 0]


WHATEVER, NOTHING_RAW = "disclose whatever helps", "disclose nothing raw, nor more than 5 % near-copies"


@pytest.mark.parametrize(
    ("rows", "limit", "expected"),
    [
        # "dear" is significantly better than "a"; "wide", with its mean for less, is not, as its seeds differ
        ([("a", 1, 50, 50.1, 49.9), ("wide", 2, 80, 40, 75), ("dear", 3, 65.5, 64.5, 65)], WHATEVER,
         [("a", set()), ("dear", {"wide"})]),
        # "b" and "d" are not significantly better than those before
        ([("a", 1, 49, 50, 51), ("b", 2, 53, 50, 50), ("c", 3, 79.1, 80, 80.9), ("d", 4, 84, 80, 79)], WHATEVER,
         [("a", set()), ("c", set())]),
        # "c" is not significantly worse than "b", and costs less; "a" is
        ([("a", 1, 10, 11, 12), ("c", 2, 85, 70, 79), ("b", 2, 80.1, 81, 81.9)], WHATEVER,
         [("a", set()), ("b", {"c"})]),
        ([("a", 1, 10), ("b", 2, 99), ("c", 3, 50)], WHATEVER, [("b", {"a"})]),  # one seed: nothing is significant
    ],
)  # fmt: skip
def test_more_bytes_are_advised_only_where_they_help_significantly(
    decide: ModuleType, row: Callable[..., Any], rows: list[Any], limit: str, expected: list[Any]
) -> None:
    assert lines(decide, [row(*one) for one in rows])[limit] == expected


def test_limits_leave_out_what_breaks_them_and_bounds(decide: ModuleType, row: Callable[..., Any]) -> None:
    rows = [
        row("copies", 1, 90, 91, 92, raw=0.1, disclosed=0.1),
        row("near-copies", 1, 85, 86, 87, disclosed=0.9, near_copies=0.8),
        row("pool", 1, 80, 81, 82, disclosed=0.75, near_copies=0.03),
        row("private", 1, 70, 71, 72, epsilon=10.0, rounds=0.0),
        row("alone", 1, 60, 61, 62),
        row("bound", 1, 98, 98, 99, bound=True),
    ]
    result = {limit: [way for way, _ in of] for limit, of in lines(decide, rows).items()}
    assert result == {
        "disclose whatever helps": ["copies"],
        NOTHING_RAW: ["pool"],
        "put nothing into a commons that no epsilon covers": ["private"],
        "have clients in one round at most": ["private"],
        "have clients in one round at most and disclose nothing that no epsilon covers": ["private"],
    }


def test_ahead_is_by_common_seeds(decide: ModuleType, row: Callable[..., Any]) -> None:
    one, other = row("a", 1, 20, 50, 90), row("b", 1, 19, 48.9, 89)
    assert decide.is_ahead(one, other)
    assert not decide.is_ahead(one, row("b", 1, 19, 49, 89))
    assert not decide.is_ahead(other, one)
    assert not decide.is_ahead(one, one)
    assert student([0.1, 0.2, 0.3]) == pytest.approx((0.2 - 0.24841377, 0.2 + 0.24841377))
