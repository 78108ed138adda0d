"""Early stopping: a run ends before its last round if it reaches its target, or if validation shows no progress.

The decision only depends on the metrics in rounds.jsonl, so a resumed run, or a run planned with another number of
rounds, ends in the same round. Round 0, the untrained model, does not count.
"""

from dataclasses import dataclass

from fedcommons.config import target
from fedcommons.runs.callbacks import Callback, Lines, RoundResult


@dataclass(frozen=True)
class Stop(Callback):
    """The stopping rule of a run, and the callback that ends the run by this rule.

    rule: "never", "target", or "patience": stop after ``patience`` rounds without an improvement of ``watched``.
    goal: the target, a test accuracy or a bound such as "loss <= 0.3". rounds: the planned number of rounds R.
    watched: a metric on validation data. way: "max" or "min", the better direction of ``watched``.
    """

    rule: str
    goal: float | str
    rounds: int
    patience: int
    watched: str
    way: str

    @property
    def private(self) -> str | None:
        """Return the metric that decides when the run stops, if this metric depends on clients' data; else None.

        Metrics on test and validation data, sent bytes and epsilon do not count as clients' data.
        """
        metric = {"target": target.read(self.goal).metric, "patience": self.watched}.get(self.rule)
        return None if metric is None or metric.startswith(("test/", "validation/", "privacy/", "comm/")) else metric

    def on_round(self, result: RoundResult) -> None:
        """Check that a round logs the metrics that the target and the stopping rule use.

        A target that is only a number is a test accuracy, which some models do not log. So the accuracy is required
        only if the stopping rule is "target".

        Raises:
            NotLogged: round 0 lacks a metric, or round 1 lacks a metric of training.
        """
        if isinstance(self.goal, str) or self.rule == "target":
            target.require_logged("target", target.read(self.goal).metric, result.standing.round, result.metrics)
        if self.rule == "patience":
            target.require_logged("federation.stop_metric", self.watched, result.standing.round, result.metrics)

    def reason_to_stop(self, lines: Lines) -> str | None:
        """Return why the run ends after the last line; None if it continues, or if all planned rounds are done.

        lines: the lines of rounds.jsonl so far.
        """
        last = lines[-1]["round"] if lines else 0
        if self.rule == "never" or not 1 <= last < self.rounds:
            return None
        if self.rule == "target":
            reached = target.first(self.goal, lines)
            return f"after round {last}: target {target.in_words(self.goal)} is reached" if reached else None
        if self.watched not in lines[-1]:
            return None  # a round without evaluation cannot end the run
        at = best_round(lines, self.watched, self.way)
        if last - at < self.patience:
            return None
        return f"after round {last}: {self.watched} was best in round {at}, {last - at} rounds before"

    def needed(self, lines: Lines) -> Lines:
        """Return the line that ``reason_to_stop`` needs after later rounds: that of the best round so far."""
        best = best_round(lines, self.watched, self.way)
        return [line for line in lines if line["round"] == best]


def best_round(lines: Lines, metric: str, way: str) -> int:
    """Return the number of the first round with the best value of the metric; 0 if no round from 1 on has a value.

    lines: the lines of rounds.jsonl. way: "max" or "min", the better direction.
    """
    values = [(line[metric], line["round"]) for line in lines if line["round"] >= 1 and line.get(metric) is not None]
    sign = -1 if way == "max" else 1
    return min(((sign * value, number) for value, number in values), default=(0, 0))[1]
