"""The target of a run: a bound on a metric that is logged in each round, such as test accuracy >= 0.8.

A number x means test accuracy >= x. ``"loss <= 0.3"`` is a bound on a metric of the test data. A name with a slash, as
in ``"validation/f1 >= 0.5"``, is the full name of a metric in rounds.jsonl.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
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
"""Prefix of a metric's name -> (field that must be set for the metric to be logged, required value in words)."""

_OF_ROUNDS = ("train/", "comm/", "server/")
"""Prefixes of metrics that describe the training of a round; round 0 (the untrained model) lacks some of them."""


class NotLogged(UserError):
    """A field names a metric that no round logs. A new run's folder is then deleted, unless ``dp.noise`` is secret."""


@dataclass(frozen=True)
class Target:
    """A bound on a metric of rounds.jsonl.

    metric: full name, such as ``test/accuracy``. way: ``max`` if the target is metric >= bound, ``min`` if it is
    metric <= bound.
    """

    metric: str
    way: str
    bound: float

    def is_met(self, line: Mapping[str, Any]) -> bool:
        """Return whether a round with the metrics ``line`` reached the target; False if the metric is missing."""
        value = line.get(self.metric)
        return value is not None and (value >= self.bound if self.way == "max" else value <= self.bound)


def read(value: float | str) -> Target:
    """Return the target for the value of the field ``target``: a test accuracy, or a text with metric and bound.

    Raises:
        UserError: the value is not a valid target.
    """
    if not isinstance(value, str):
        if not 0 < value <= 1:  # this check rejects nan too
            raise UserError(f"target must lie in (0, 1], got {quote(value)}.")
        return Target(ACCURACY, "max", value)
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=)\s*(\S+)\s*", value)
    bound = float("nan")
    with suppress(ValueError):
        bound = float(match[3]) if match else bound
    if not match or not abs(bound) <= 1e100:
        raise UserError(f"target must be an accuracy in (0, 1] or a bound such as 'loss <= 0.3', got {quote(value)}.")
    metric = match[1] if "/" in match[1] else f"test/{match[1]}"
    if metric.endswith("/accuracy") and not 0 <= bound <= 1:
        raise UserError(f"target: an accuracy lies in [0, 1], got {quote(value)}.")
    return Target(metric, "max" if match[2] == ">=" else "min", bound)


def plain(value: float | str) -> float | str:
    """Return the target in its normal form, which is hashed: a number if it is a test accuracy, else a text."""
    target = read(value)
    if not isinstance(value, str):
        return value
    if (target.metric, target.way) == (ACCURACY, "max") and target.bound > 0:
        return target.bound
    return f"{target.metric} {'>=' if target.way == 'max' else '<='} {target.bound!r}"


def first(value: float | str, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first round from 1 on that reached the target, or None. lines: the lines of rounds.jsonl."""
    target = read(value)
    return next((line["round"] for line in lines if line["round"] >= 1 and target.is_met(line)), None)


def in_words(value: float | str) -> str:
    """Return the target as the screen shows it: ``80 %`` for a test accuracy, else a text such as ``loss <= 0.3``."""
    return value.removeprefix("test/") if isinstance(value, str) else f"{100 * value:g} %"


def require_measured(field: str, metric: str, metrics: Mapping[str, Any]) -> None:
    """Check before the run that the run will log a metric, which the field ``field`` requires.

    metric: full name of the metric. metrics: dotted name -> value of the experiment's fields.

    Raises:
        UserError: the metric is logged only if another field is set, or only after the last round.
    """
    if metric.startswith("new/"):
        raise UserError(f"{field}: {metric} is computed after the last round only.")
    for begins, (needed, value) in _NEEDS.items():
        if metric.startswith(begins) and not metrics.get(needed):
            raise UserError(f"{field}: {metric} needs --{needed} {value}.")


def require_logged(field: str, metric: str, round: int, logged: Collection[str]) -> None:
    """Check that the run logs a metric: in round 1 for a metric of training, in round 0 for any other metric.

    Round 0 logs all evaluations of models; later rounds may skip evaluations. A round in which no client replies logs
    no training metric and may skip ``merge``, so that round passes the check.
    field: name of the field that requires the metric. metric: full name of the metric. round: number of the round.
    logged: names of the metrics that the round logged.

    Raises:
        NotLogged: the metric is missing.
    """
    is_of_rounds = metric.startswith(_OF_ROUNDS)
    if metric in logged or round != int(is_of_rounds):
        return
    if metric.startswith(("train/", "server/")) and not any(name.startswith("train/") for name in logged):
        return
    metrics = sorted(name for name in logged if "/" in name)
    raise NotLogged(
        f"{field}: round {round} has no {quote(metric)}{nearest(metric, metrics)} It has {', '.join(metrics)}."
    )


def validation_metric(text: str) -> tuple[str, str]:
    """Return the metric's name in rounds.jsonl and its better direction, "max" or "min".

    text: the value of ``federation.stop_metric``, such as "accuracy" or "validation/f1 max".

    Raises:
        UserError: the text names no validation metric, or its better direction is unknown.
    """
    match = re.fullmatch(r"(?:validation/)?([^\s/]+)(?:\s+(max|min))?", text.strip())
    if not match:
        raise UserError(f"federation.stop_metric must be a metric on validation data, such as loss, got {quote(text)}.")
    way = match[2] or ("max" if "accuracy" in match[1] else "min" if "loss" in match[1] else None)
    if way is None:
        raise UserError(f"federation.stop_metric {quote(text)} must end with max or min, the better direction.")
    return f"validation/{match[1]}", way
