"""The screen output of one run: a line per round and a summary. The run folder contains all numbers."""

import logging
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedcommons.cli.display import LOG, Display, duration, log, remaining_text
from fedcommons.config.dotted import NO_SHARING_SHOWN
from fedcommons.config.registry import label

NOTHING: Mapping[str, float] = MappingProxyType({})

HEAD = 13
"""Width, in characters, of the column of names in the summary of a run."""


class Rounds:
    """A callable that shows one line per round. It is called with the number of the round and the round's metrics.

    rounds: number of rounds of the run. clock: returns seconds since any fixed time.
    """

    def __init__(self, display: Display, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.display, self.rounds, self.clock = display, rounds, clock
        self.first: tuple[int, float] | None = None

    def __call__(self, number: int, metrics: Mapping[str, float | None]) -> None:
        now = self.clock()
        first, began = self.first = self.first or (number, now)
        remaining = remaining_text(number, self.rounds, first, now - began)
        self.display.say(line(number, self.rounds, metrics, remaining, self.display.width))
        if LOG.isEnabledFor(logging.DEBUG):
            facts = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items() if value is not None)
            log(f"round {number}  {facts}", logging.DEBUG)


def line(number: int, rounds: int, metrics: Mapping[str, float | None], remaining: str, width: int) -> str:
    """Return the line of a round: ``round 3/30  accuracy 0.842  loss 0.512  stragglers 2  12 s left``.

    The line has the values that exist. If the line has more than ``width`` characters, the last values are left out.
    """
    parts = [f"round {number:>{len(str(rounds))}}/{rounds}"]
    parts += [f"{name} {value}" for name, value in judged(metrics).items()]
    parts += [f"personal {name} {_number(metrics[key + '_mean'])}" for name, key in _personal_metric(metrics)]
    parts += [f"{name} {count:.0f}" for name in ("stragglers", "rejected") if (count := metrics.get(name))]
    parts += [remaining] if remaining else []
    while len(text := "  ".join(parts)) > width and len(parts) > 1:
        parts.pop()
    return text


def judged(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Return name -> text of the metrics to show: the test accuracy, or else another test metric, and a loss.

    The loss is the server model's loss on the test set, or else the training loss.
    """
    of_test = {n.removeprefix("test/"): v for n, v in metrics.items() if n.startswith("test/")}
    others = [name for name in of_test if name != "loss"]
    names = ["accuracy"] if "accuracy" in others else others[:1]
    texts = {name: _number(of_test[name]) for name in names}
    if "loss" in of_test:
        texts["loss"] = _number(of_test["loss"])
    elif "train/loss" in metrics:
        texts["training loss"] = _number(metrics["train/loss"])
    return texts


def _personal_metric(metrics: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Return at most one pair (name on screen, prefix of the metric's keys): personal accuracy, else personal loss."""
    of_any = [(f"{prefix}{name}", f"personal/{on}{name}") for name in ("accuracy", "loss") for on, prefix in _DATA]
    return [(name, key) for name, key in of_any if f"{key}_mean" in metrics][:1]


_DATA = (("", ""), ("train_", "training "))
"""(prefix of a metric's key, prefix on the screen), first for clients' test data, then for clients' training data."""


def _number(value: float | None) -> str:
    """Return a number as text with three decimals or three significant digits; None means ``not finite``."""
    if value is None:
        return "not finite"
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e3 else f"{value:.3g}"


def ending(
    summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], seconds: float, out: Path, width: int,
    heterogeneity: Mapping[str, float] = NOTHING,
) -> list[str]:  # fmt: skip
    """Return about ten lines that summarise a run.

    summary: content of summary.json. lines: lines of rounds.jsonl. seconds: duration of this command. out: run folder.
    width: maximum number of characters of a line. heterogeneity: metrics of the partition (``data.heterogeneity``).
    """
    entries = {
        "run": f"{label(summary['algorithm'])} on {label(summary['dataset'])}, {_setting(summary)}, "
        f"{summary['n_clients']} clients",
        **({"partition": _heterogeneity(heterogeneity)} if heterogeneity else {}),
        "rounds": f"{summary['rounds']}; this command took {duration(seconds)}",
        **_results(summary, last := lines[-1] if lines else {}),
        "target": _target(summary),
        "bytes": f"{_bytes(summary['bytes_down'])} down, {_bytes(summary['bytes_up'])} up"
        + (f", {_bytes(summary['bytes_once'])} once" if summary["bytes_once"] else ""),
        "disclosed": f"{100 * summary['disclosed']:.3g} % of all examples were shared without differential privacy, "
        "directly or as data computed from them (model updates do not count)",
    }
    for name, key in _personal_metric(last):
        mean, worst = _number(last[f"{key}_mean"]), _number(last[f"{key}_worst_decile"])
        entries["personal"] = f"{name} {mean}, mean over clients, {worst} of the worst tenth"
    kinds = (("received", "new/accuracy_mean"), ("adapted", "new/adapted_accuracy_mean"))
    if of_new := [f"{_number(last[key])} of the {kind} model" for kind, key in kinds if key in last]:
        entries["new"] = f"accuracy {' and '.join(of_new)}, mean over new clients"
    if rejected := summary["rejected"]:
        entries["rejected"] = f"replies of {len(rejected)} of the clients; see rejected in summary.json"
    if sentences := summary.get("privacy", {}).get("in_words"):
        entries["privacy"] = " ".join(sentences[1:])
    tables = summary.get("privacy", {}).get("mechanisms", {})
    if noise := [table["in_words"] for of_kind in tables.values() for table in of_kind]:
        entries["noise"] = "; ".join(noise)
    entries["files"] = f"{out}: summary.json, rounds.jsonl, config.yaml, checkpoints"
    return [summary_line for name, text in entries.items() for summary_line in _wrapped(name, text, width)]


def _heterogeneity(metrics: Mapping[str, float]) -> str:
    """Return the metrics of label skew, or without classes that of the sizes, as text."""
    names = {"hellinger": "Hellinger distance of labels", "ssdi": "SSDI", "size_imbalance": "size imbalance"}
    texts = (f"{text} {metrics[name]:.2f}" for name, text in names.items() if name in metrics)
    return f"{', '.join(texts)} (0: equal clients; at most 1)"


def _setting(summary: Mapping[str, Any]) -> str:
    if summary["setting"] == "real":
        return NO_SHARING_SHOWN
    return label(summary["setting"]) + (f" p {summary['p']:.3g}" if summary["p"] else "")


def _results(summary: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, str]:
    """Return the last and best test accuracy, name -> text; without an accuracy, the test metrics of the last round."""
    if summary["last_accuracy"] is None:
        in_training = {"training loss": ("loss", " in training,")}
        named = {in_training.get(name, (name, "")): value for name, value in judged(last).items()}
        return {name: f"{value}{where} after the last round" for (name, where), value in named.items()}
    of_validation = summary["validation_accuracy"]
    also = "" if of_validation is None else f", {of_validation:.3f} on validation data"
    best = f"{summary['last_accuracy']:.3f} after the last round, {summary['best_accuracy']:.3f} at best"
    return {"accuracy": best + also, **{n: f"{v} after the last round" for n, v in judged(last).items() if n == "loss"}}


def _target(summary: Mapping[str, Any]) -> str:
    target, reached = summary["target"], summary["rounds_to_target"]
    wanted = target if isinstance(target, str) else f"accuracy {target:g}"
    if not isinstance(target, str) and summary["last_accuracy"] is None:
        return f"{wanted}: no round has a test accuracy"
    return f"{wanted}: " + (f">{summary['rounds']} rounds" if reached is None else f"reached in round {reached}")


def _bytes(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def _wrapped(name: str, text: str, width: int) -> list[str]:
    """Return a name and its text as lines of at most ``width`` characters; the text stands in an aligned column."""
    column, width = f"{name:<{HEAD}}", max(20 + HEAD, width)
    return textwrap.wrap(text, width, initial_indent=column, subsequent_indent=" " * HEAD, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
