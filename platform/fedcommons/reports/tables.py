"""Table 1 from the summaries of run folders: rounds to a target accuracy, per setting, with the speed-up."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedcommons.federation.rejections import told

Summary = Mapping[str, Any]

COLUMNS = ("dataset", "n_clients", "participation", "alpha", "algorithm", "setting")
"""The fields that make a cell of the table, with others that vary among its runs; these differ in their seeds."""


@dataclass(frozen=True)
class Entry:
    """One cell of the table: its runs, one for each seed.

    varied: names and values of other fields in which runs of the same key differ.
    """

    key: tuple
    runs: tuple[Summary, ...]
    varied: tuple[tuple[str, Any], ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name in COLUMNS:
            return self.key[COLUMNS.index(name)]
        raise AttributeError(name)

    @property
    def rounds(self) -> str:
        """Rounds to the target over seeds, ``>R`` where a seed never reached it."""
        return rounds_needed([r["rounds_to_target"] for r in self.runs], self.runs[0]["rounds"])

    @property
    def mean_rounds(self) -> tuple[float, bool]:
        """Mean rounds to the target, those not reached counted as R; and whether any was so counted."""
        return fmean(self._counted), any(r["rounds_to_target"] is None for r in self.runs)

    @property
    def deviation_of_rounds(self) -> float | None:
        """The standard deviation over seeds of what ``mean_rounds`` is the mean of; None for one seed."""
        return stdev(self._counted) if len(self.runs) > 1 else None

    @property
    def _counted(self) -> list[int]:
        return [r["rounds"] if r["rounds_to_target"] is None else r["rounds_to_target"] for r in self.runs]


def rounds_needed(reached: Sequence[float | None], most: int) -> str:
    """Rounds to the target over seeds (None: not reached), ``>R`` where a seed did not reach it within ``most``."""
    if n := reached.count(None):
        return f">{most}" if n == len(reached) else f">{most} ({n} of {len(reached)} seeds)"
    return mean_std([r for r in reached if r is not None], 0 if len(reached) == 1 else 1)


def mean_std(values: Sequence[float], digits: int | None) -> str:
    """``mean +/- sample standard deviation``; the value alone where there is one. digits: after the point; None: .4g"""
    form = ".4g" if digits is None else f".{digits}f"
    mean = format(fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(stdev(values), form if digits is not None else '.2g')}"


def choose_learning_rate(summaries: Sequence[Summary]) -> list[Summary]:
    """For each cell keep the learning rate with the best validation accuracy of the last round, the mean over seeds.

    Ties go to the smaller rate. Test accuracy has no part in it.
    """
    chosen = []
    for key in dict.fromkeys(_key(s) for s in summaries):
        runs = [s for s in summaries if _key(s) == key]
        rates = sorted({s["learning_rate"] for s in runs})
        if len(rates) > 1:
            scores = {lr: fmean(s["validation_accuracy"] for s in runs if s["learning_rate"] == lr) for lr in rates}
            best = max(rates, key=lambda lr: (scores[lr], -lr))
            runs = [s for s in runs if s["learning_rate"] == best]
        chosen += runs
    return chosen


def entries(summaries: Sequence[Summary]) -> list[Entry]:
    """The table's cells, in the order their first runs stand in.

    Raises:
        ValueError: runs of one seed and recipe that should share a partition do not.
    """
    partitions: dict[tuple, str] = {}
    for s in summaries:
        same = (s["dataset"], s["n_clients"], s["alpha"], s["seed"])
        if partitions.setdefault(same, s["partition"]) != s["partition"]:
            raise ValueError(f"runs of {same} rest on different partitions and cannot be compared")
    cells: dict[tuple, list[Summary]] = {}
    for s in summaries:
        cells.setdefault((_key(s), _varied(s, summaries)), []).append(s)
    return [Entry(key, tuple(runs), varied) for (key, varied), runs in cells.items()]


def _varied(summary: Summary, summaries: Sequence[Summary]) -> tuple[tuple[str, Any], ...]:
    """The fields of a run, but the seed, that are not the same in all runs of its key; older summaries have none."""
    same = [s.get("config", {}) for s in summaries if _key(s) == _key(summary)]
    names = dict.fromkeys(n for flat in same for n in flat if n != "seed")
    differ = [n for n in names if any(flat.get(n) != same[0].get(n) for flat in same)]
    own = summary.get("config", {})
    return tuple((n, tuple(v) if isinstance(v := own.get(n), list) else v) for n in differ)


def _key(summary: Summary) -> tuple:
    return tuple(summary[name] for name in COLUMNS)


def speed_up(base: Entry, other: Entry) -> str:
    """How many times fewer rounds ``other`` needs; a bound where one of them did not reach the target."""
    (slow, slow_censored), (fast, fast_censored) = base.mean_rounds, other.mean_rounds
    if slow_censored and fast_censored:
        return "-"
    sign = ">" if slow_censored else "<" if fast_censored else ""
    return f"{sign}{slow / fast:.1f}x"


def effect(cells: Sequence[Entry]) -> str:
    """One federation and algorithm in a line: the rounds in each setting, and how many times fewer than with real."""
    first, base = cells[0], next((e for e in cells if e.setting == "real"), None)
    parts = [labelled(first), f"alpha {number(first.alpha)}", f"N {first.n_clients}", f"C {first.participation:g}"]
    for e in sorted(cells, key=lambda e: e.setting != "real"):
        parts.append(f"{e.setting} {e.rounds} rounds")
        if base and base is not e:
            parts.append(speed_up(base, e))
    return "  ".join(parts)


def table1_markdown(cells: Sequence[Entry], published: Mapping[tuple, str], footnotes: Sequence[str]) -> str:
    """The paper's Table 1, a line for each federation and setting; ``published``: the paper's rounds, if comparable."""
    head = ["data set", "N", "C", "alpha", "algorithm", "setting", "target", "rounds", "speed-up", "last acc.",
            "best acc.", "p", "lr", "MB exchanged"]  # fmt: skip
    if published:
        head.append("paper")
    lines = []
    for e in cells:
        run = e.runs[0]
        bases = [b for b in cells if b.key == (*e.key[:-1], "real")]
        base = next((b for b in bases if b.varied in (e.varied, ())), None)
        total = fmean(r["bytes_down"] + r["bytes_up"] + r["bytes_once"] for r in e.runs)
        line = [e.dataset, e.n_clients, f"{e.participation:g}", number(e.alpha), labelled(e), e.setting,
                f"{100 * run['target']:g} %", e.rounds, speed_up(base, e) if base and base is not e else "",
                mean_std([100 * r["last_accuracy"] for r in e.runs], 1),
                mean_std([100 * r["best_accuracy"] for r in e.runs], 1),
                f"{run['p']:.2f}", f"{run['learning_rate']:g}", f"{total / 1e6:.1f}"]  # fmt: skip
        lines.append(line + ([published.get(e.key, "")] if published else []))
    notes = "".join(f"\n{i}. {note}" for i, note in enumerate(footnotes, 1))
    return markdown(head, lines) + notes + "\n"


def number(value: float | None) -> str:
    """In short; ``-`` where a partition has no such number."""
    return "-" if value is None else f"{value:g}"


def labelled(entry: Entry) -> str:
    """The algorithm, and the fields in which the entry differs from others of its key."""
    return " ".join([entry.algorithm, *(f"{name}={value}" for name, value in entry.varied)])


def rejected_notes(summaries: Sequence[Summary]) -> list[str]:
    """A footnote for each run in which replies were rejected; runs of earlier versions did not say."""
    return [f"{s['run_dir']}: {told(s['rejected'])}." for s in summaries if s.get("rejected")]


def lost_notes(summaries: Sequence[Summary]) -> list[str]:
    """A footnote for each run in which late clients had downloaded for nothing."""
    return [
        f"{s['run_dir']}: {s['bytes_lost'] / 1e6:.1f} of the MB exchanged were downloads of late clients, whose "
        f"replies did not come (straggler.rule {s['config']['straggler.rule']})."
        for s in summaries
        if s.get("bytes_lost")
    ]


def spread(cells: Sequence[Entry]) -> str:
    """How far the algorithms lie apart in each federation, with and without shared data; nothing for one algorithm.

    Last accuracy: largest minus least of the means over seeds, in points; rounds: least and most of the means.
    """
    lines = []
    for key in dict.fromkeys(e.key[:4] for e in cells):
        parts = []
        for setting in dict.fromkeys(e.setting for e in cells):
            group = [e for e in cells if e.key[:4] == key and e.setting == setting]
            if len(group) > 1:
                last = [100 * fmean(r["last_accuracy"] for r in e.runs) for e in group]
                least, most = min(e.mean_rounds for e in group), max(e.mean_rounds for e in group)
                rounds = " to ".join(f"{'>' if censored else ''}{mean:.3g}" for mean, censored in (least, most))
                parts.append(f"{setting} {max(last) - min(last):.1f} points of last accuracy, {rounds} rounds")
        if parts:
            dataset, n, c, alpha = key
            lines.append(f"- {dataset}, N = {n}, C = {c:g}, alpha = {number(alpha)}: {'; '.join(parts)}.")
    return "\nSpread between the algorithms:\n" + "\n".join(lines) + "\n" if lines else ""


def markdown(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A markdown table whose columns line up."""
    rows = [[str(v) for v in row] for row in [head, *lines]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    out = ["| " + " | ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)) + " |" for row in rows]
    out.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(out) + "\n"


def to_csv(summaries: Sequence[Summary]) -> str:
    """One line for each run, lists left out."""
    fields = [name for name, value in summaries[0].items() if not isinstance(value, list | dict)]
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(summaries)
    return text.getvalue()
