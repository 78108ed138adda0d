"""What a run is to reach: a metric of a round, and a bound.

A bare number x is test accuracy >= x. ``"loss <= 0.3"`` is a metric of the test data, ``"validation/f1 >= 0.5"`` any of
those that rounds.jsonl has.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcommons.errors import UserError, nearest, shown

ACCURACY = "test/accuracy"

_NEEDS = {
    "validation/": ("data.validation", "above 0"),
    "convergence/": ("measure.every", "above 0"),
    "measure/": ("measure.measure", "a measure"),
    "privacy/": ("dp.local", "true"),
    "clients/worst": ("measure.clients", "true"),
    "personal/": ("evaluate.clients", "true"),
}
"""How metrics begin that are there only with a field, and what this must be."""

_OF_ROUNDS = ("train/", "comm/")
"""Metrics of a played round: round 0, of the untrained model, has not all of them."""


class NotLogged(UserError):
    """A metric is named that no round has. A run that began with it leaves nothing, as none could go on from it."""


@dataclass(frozen=True)
class Target:
    """``metric``, as in rounds.jsonl, is to be at least ``bound`` where ``way`` is ``max``, at most where ``min``."""

    metric: str
    way: str
    bound: float

    def is_met(self, line: Mapping[str, Any]) -> bool:
        """Whether a round has reached it; one without the metric has not."""
        value = line.get(self.metric)
        return value is not None and (value >= self.bound if self.way == "max" else value <= self.bound)


def read(value: float | str) -> Target:
    """The target that a number or a text means.

    Raises:
        UserError: it means none.
    """
    if not isinstance(value, str):
        if not 0 < value <= 1:  # nan neither
            raise UserError(f"target must lie in (0, 1], got {shown(value)}.")
        return Target(ACCURACY, "max", value)
    found = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=)\s*(\S+)\s*", value)
    try:
        bound = float(found[3]) if found else float("nan")
    except ValueError:
        bound = float("nan")
    if not found or not abs(bound) <= 1e100:
        raise UserError(
            f"target must be a test accuracy in (0, 1], or a metric and a bound, such as 'loss <= 0.3', got "
            f"{shown(value)}."
        )
    metric = found[1] if "/" in found[1] else f"test/{found[1]}"
    if metric.endswith("/accuracy") and not 0 <= bound <= 1:
        raise UserError(f"target: an accuracy lies in [0, 1], and {shown(value)} asks for another.")
    return Target(metric, "max" if found[2] == ">=" else "min", bound)


def plain(value: float | str) -> float | str:
    """The target in the one form that it is hashed in: a number, where it is test accuracy to be reached."""
    target = read(value)
    if not isinstance(value, str):
        return value
    if (target.metric, target.way) == (ACCURACY, "max") and target.bound > 0:
        return target.bound
    return f"{target.metric} {'>=' if target.way == 'max' else '<='} {target.bound!r}"


def first(value: float | str, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """The first round from 1 on that has reached the target; None: none has."""
    target = read(value)
    return next((line["round"] for line in lines if line["round"] >= 1 and target.is_met(line)), None)


def in_words(value: float | str) -> str:
    """``80 %`` of a number, which is test accuracy; a text as it is, without ``test/``."""
    return value.removeprefix("test/") if isinstance(value, str) else f"{100 * value:g} %"


def require_measured(field: str, metric: str, known: Mapping[str, Any]) -> None:
    """Refuse a metric that no round will have, as far as this is known before; field: which one names it; known: the
    experiment's fields.

    Raises:
        UserError: another field must be set for it.
    """
    for begins, (needed, value) in _NEEDS.items():
        if metric.startswith(begins) and not known.get(needed):
            raise UserError(f"{field}: {metric} needs --{needed} {value}.")


def require_logged(field: str, metric: str, round: int, logged: Collection[str]) -> None:
    """Refuse a metric that the round of this number should have and has not; field: which one names it.

    In round 0 all that is observed of models is; from round 1 on it may be every few rounds only. A round that nobody
    answered has nothing of training.

    Raises:
        NotLogged: it is not among those that were logged.
    """
    is_of_rounds = metric.startswith(_OF_ROUNDS)
    if metric in logged or round != int(is_of_rounds):
        return
    if metric.startswith("train/") and not any(name.startswith("train/") for name in logged):
        return
    known = sorted(name for name in logged if "/" in name)
    raise NotLogged(
        f"{field}: no round has {shown(metric)}{nearest(metric, known)} Round {round} has {', '.join(known)}."
    )
