"""When a run ends before its last round: its target is reached, or validation data show no progress any more.

It follows from the record alone, so a run that goes on, or is planned with other rounds, ends in the same round. Round
0, the untrained model, does not count.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedcommons.config import target
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError, shown


@dataclass(frozen=True)
class Stop:
    """never, target or patience: after so many rounds (``patience``) in which ``watched`` has not got better.

    goal: the target. way: max or min, of what is watched. rounds: R.
    """

    rule: str
    goal: float | str
    rounds: int
    patience: int
    watched: str
    way: str

    @property
    def private(self) -> str | None:
        """The metric that decides the number of rounds, unless it is of public data, bytes or an epsilon."""
        metric = {"target": target.read(self.goal).metric, "patience": self.watched}.get(self.rule)
        return None if metric is None or metric.startswith(("test/", "validation/", "privacy/", "comm/")) else metric

    def require_logged(self, round: int, logged: Mapping[str, Any]) -> None:
        """Refuse metrics that a round has not. A target that is a bare number may have none, as not every model has
        an accuracy, unless it is to stop the run.

        Raises:
            NotLogged: round 0 has not logged one, or round 1 where it is of training.
        """
        if isinstance(self.goal, str) or self.rule == "target":
            target.require_logged("target", target.read(self.goal).metric, round, logged)
        if self.rule == "patience":
            target.require_logged("federation.stop_metric", self.watched, round, logged)

    def why(self, lines: Sequence[Mapping[str, Any]]) -> str | None:
        """Why the run ends with the last of these lines of rounds.jsonl; None where it does not, or has R."""
        last = lines[-1]["round"] if lines else 0
        if self.rule == "never" or not 1 <= last < self.rounds:
            return None
        if self.rule == "target":
            reached = target.first(self.goal, lines)
            return f"after round {last}: target {target.in_words(self.goal)} is reached" if reached else None
        if self.watched not in lines[-1]:
            return None  # nothing new is known after a round that is not evaluated
        at = best_round(lines, self.watched, self.way)
        if last - at < self.patience:
            return None
        return f"after round {last}: {self.watched} was best in round {at}, {last - at} rounds before"


def stop_of(config: Experiment) -> Stop:
    """When a run of this experiment ends.

    Raises:
        UserError: a metric will not be measured, or does not say which way is better, or a constant changes nothing.
    """
    f, usual = config.federation, type(config.federation)
    target.require_measured("target", target.read(config.target).metric, config.flat)
    watched, way = _watched(f.stop_metric)
    if f.stop == "patience":
        target.require_measured("federation.stop_metric", watched, config.flat)
    else:
        for name in ("stop_patience", "stop_metric"):
            if getattr(f, name) != getattr(usual, name):
                raise UserError(f"federation.{name} changes nothing without --federation.stop patience.")
    return Stop(f.stop, config.target, f.rounds, f.stop_patience, watched, way)


def _watched(text: str) -> tuple[str, str]:
    """The metric that ``federation.stop_metric`` names, as in rounds.jsonl, and which way is better.

    Raises:
        UserError: it does not say which.
    """
    found = re.fullmatch(r"(?:validation/)?([^\s/]+)(?:\s+(max|min))?", text.strip())
    if not found:
        raise UserError(f"federation.stop_metric must be a metric on validation data, such as loss, got {shown(text)}.")
    way = found[2] or ("max" if "accuracy" in found[1] else "min" if "loss" in found[1] else None)
    if way is None:
        raise UserError(f"federation.stop_metric {shown(text)} needs max or min behind it: which way is better?")
    return f"validation/{found[1]}", way


def best_round(lines: Sequence[Mapping[str, Any]], metric: str, way: str) -> int:
    """The first round from 1 on with the best value of the metric; 0 where none has one."""
    values = [(line[metric], line["round"]) for line in lines if line["round"] >= 1 and line.get(metric) is not None]
    sign = -1 if way == "max" else 1
    return min(((sign * value, number) for value, number in values), default=(0, 0))[1]
