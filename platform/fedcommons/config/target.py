"""The target of a run: a metric that a round logs, and a bound on this metric.

A bare number x means test accuracy >= x. ``"loss <= 0.3"`` names a metric of the test data. ``"validation/f1 >= 0.5"``
names any metric of rounds.jsonl.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcommons.errors import UserError, nearest, quote

ACCURACY = "test/accuracy"

_NEEDS = {
    "validation/": ("data.validation", "above 0"),
    "convergence/": ("measure.every", "above 0"),
    "measure/": ("measure.measure", "a measure"),
    "privacy/": ("dp.local", "true"),
    "clients/worst": ("measure.clients", "true"),
    "personal/": ("evaluate.clients", "true"),
}
"""Prefix of a metric -> the field that must be set for the metric to be logged, and the required value in words."""

_OF_ROUNDS = ("train/", "comm/")
"""Prefixes of metrics that describe a training round: round 0 (the untrained model) lacks some of these metrics."""


class NotLogged(UserError):
    """A field names a metric that no round logs. A new run deletes its folder, unless its noise is secret."""


@dataclass(frozen=True)
class Target:
    """A bound on a metric of rounds.jsonl: ``way`` max: metric >= ``bound``; ``way`` min: metric <= ``bound``."""

    metric: str
    way: str
    bound: float

    def is_met(self, line: Mapping[str, Any]) -> bool:
        """Return whether a round has reached the target; False if the round has no such metric."""
        value = line.get(self.metric)
        return value is not None and (value >= self.bound if self.way == "max" else value <= self.bound)


def read(value: float | str) -> Target:
    """Return the target that a number or a text means.

    Raises:
        UserError: the value is not a valid target.
    """
    if not isinstance(value, str):
        if not 0 < value <= 1:  # nan fails this check too
            raise UserError(f"target must lie in (0, 1], got {quote(value)}.")
        return Target(ACCURACY, "max", value)
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=)\s*(\S+)\s*", value)
    try:
        bound = float(match[3]) if match else float("nan")
    except ValueError:
        bound = float("nan")
    if not match or not abs(bound) <= 1e100:
        raise UserError(
            f"target must be a test accuracy in (0, 1], or a metric and a bound, such as 'loss <= 0.3', got "
            f"{quote(value)}."
        )
    metric = match[1] if "/" in match[1] else f"test/{match[1]}"
    if metric.endswith("/accuracy") and not 0 <= bound <= 1:
        raise UserError(f"target: an accuracy lies in [0, 1], and {quote(value)} asks for another.")
    return Target(metric, "max" if match[2] == ">=" else "min", bound)


def plain(value: float | str) -> float | str:
    """Return the target in the form used for hashing: a number for a lower bound on test accuracy, else a text."""
    target = read(value)
    if not isinstance(value, str):
        return value
    if (target.metric, target.way) == (ACCURACY, "max") and target.bound > 0:
        return target.bound
    return f"{target.metric} {'>=' if target.way == 'max' else '<='} {target.bound!r}"


def first(value: float | str, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of the first round (from 1 on) that has reached the target; None if no round has."""
    target = read(value)
    return next((line["round"] for line in lines if line["round"] >= 1 and target.is_met(line)), None)


def in_words(value: float | str) -> str:
    """Return a number (a test accuracy) as ``80 %``; return a text unchanged, but without ``test/``."""
    return value.removeprefix("test/") if isinstance(value, str) else f"{100 * value:g} %"


def require_measured(field: str, metric: str, metrics: Mapping[str, Any]) -> None:
    """Check before the run that the experiment's fields allow the metric to be logged.

    field: the field that names the metric. known: the experiment's fields.

    Raises:
        UserError: the metric needs another field to be set.
    """
    for begins, (needed, value) in _NEEDS.items():
        if metric.startswith(begins) and not metrics.get(needed):
            raise UserError(f"{field}: {metric} needs --{needed} {value}.")


def require_logged(field: str, metric: str, round: int, logged: Collection[str]) -> None:
    """Check that the round with this number logged the metric. field: the field that names the metric.

    Round 0 logs all evaluations of models; later rounds may evaluate only every few rounds. A round without a client's
    reply logs no training metric.

    Raises:
        NotLogged: the round did not log the metric.
    """
    is_of_rounds = metric.startswith(_OF_ROUNDS)
    if metric in logged or round != int(is_of_rounds):
        return
    if metric.startswith("train/") and not any(name.startswith("train/") for name in logged):
        return
    metrics = sorted(name for name in logged if "/" in name)
    raise NotLogged(
        f"{field}: no round has {quote(metric)}{nearest(metric, metrics)} Round {round} has {', '.join(metrics)}."
    )
