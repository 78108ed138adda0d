"""Report of Table 2 and figures A.1 and A.2 of Fedssyn, from the run folders: table, CSV and pictures."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import choose, same_results
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import Cell
from fedcommons.reports.frames import load_rounds
from fedcommons.tune import grid as grids
from fedcommons.tune import learning_rates
from fedcommons.tune.study import Report, Results, by_method, with_rate
from papers.fedssyn.published import fedssyn_table2
from papers.fedssyn.table2_presets import FIELDS, METHODS

MB = 10**6
FIGURES = {"table2": tuple(METHODS), "table2_a1": ("fedssyn", "fedgen"), "table2_a2": ("fedssyn", "feddm")}
"""Methods of each picture, by file name: Table 2 (all methods), figure A.1, figure A.2."""
VARIED = {"seed", "algorithm", "sharing.setting", "partition.alpha", "client.lr", "feddm.image_lr", "target"}
CSV = ("method", "at", "rate", "mb_to_target", "at_best_validation")


def rows(runs: Any) -> Any:
    """Return the runs with the further columns ``rate``, ``mb_to_target`` and ``at_best_validation``.

    mb_to_target: MB sent until the target, or in all rounds if the target was missed. at_best_validation: test accuracy
    after the (first) round of the best validation accuracy.
    """
    courses: Any = load_rounds(*runs["run"])
    results = [_course_results(courses[courses["run"] == run], needed)
               for run, needed in zip(runs["run"], runs["rounds_to_target"], strict=True)]  # fmt: skip
    sent, best = zip(*results, strict=True)
    return with_rate(runs.assign(mb_to_target=sent, at_best_validation=best))


def _course_results(course: Any, needed: float | None) -> tuple[float, float | None]:
    """Return MB sent until the target (all rounds if missed), and test accuracy at the best validation accuracy."""
    within = course if needed is None or needed != needed else course[course["round"] <= needed]
    best = None
    if "validation/accuracy" in course and (validated := course.dropna(subset=["validation/accuracy"])).size:
        best = validated.loc[validated["validation/accuracy"].idxmax(), "test/accuracy"]
    return within["comm/total_bytes"].max() / MB, best


def ratio(ours: Any, other: Any) -> str:
    """Return the bytes to the target of ``ours``, in % of the bytes of ``other``; ``-``: both missed the target.

    > (lower bound): a run of ``ours`` missed the target. < (upper bound): a run of ``other`` missed it.
    """
    missed, base_missed = (bool(runs["rounds_to_target"].isna().any()) for runs in (ours, other))
    if missed and base_missed:
        return "-"
    value = 100 * ours["mb_to_target"].mean() / other["mb_to_target"].mean()
    return f"{'>' * missed}{'<' * base_missed}{value:.3g} %"


def markdown(frame: Any, printed: bool, notes: Sequence[str]) -> str:
    """Return the table, and Fedssyn's bytes divided by each method's; printed: add columns of the paper's numbers."""
    paper = fedssyn_table2() if printed else {}
    head = ["alpha", "method", "rate", "seeds", "last accuracy, %", "at best validation, %", "rounds to target",
            "MB to target", "MB in all"]  # fmt: skip
    lines, ratios = [], []
    for (alpha, method), runs in by_method(frame, METHODS).items():
        cell, missed = Cell({}, runs), bool(runs["rounds_to_target"].isna().any())
        accuracies = [tables.percent(cell, name) for name in ("last_accuracy", "at_best_validation")]
        total = (runs["bytes_down"] + runs["bytes_up"] + runs["bytes_once"]).mean() / MB
        to_target = f"{'>' * missed}{runs['mb_to_target'].mean():.2f}"
        line = [columns.text(alpha), method, columns.text(runs["rate"].iloc[0]), len(runs), *accuracies,
                tables.rounds(runs), to_target, f"{total:.2f}"]  # fmt: skip
        top, rounds, memory = paper.get((runs["data.name"].iloc[0], alpha, method), ("", "", ""))
        lines.append([*line, f"{top} ({rounds or '-'})" if top else ""] if paper else line)
        fedssyn = frame[(frame["at"] == alpha) & (frame["method"] == "fedssyn")]
        if method != "fedssyn" and not fedssyn.empty:
            compared = [columns.text(alpha), method, ratio(fedssyn, runs), ratio(runs, fedssyn)]
            ratios.append([*compared, f"{memory} %" if memory else ""] if paper else compared)
    extra = ["the paper's accuracy (rounds)"] if paper else []
    text = tables.markdown([*head, *extra], lines)
    if ratios:
        against = ["alpha", "method", "M_Fedssyn / M_method", "M_method / M_Fedssyn"]
        extra = ["the paper's column"] if paper else []
        text += "\n## Bytes to the target\n\n" + tables.markdown([*against, *extra], ratios)
    return text + tables.numbered(notes)


def notes(results: Results) -> list[str]:
    configs, options = results.configs, results.options
    return [
        f"Target: {grids.title(configs)}. Rounds: the first round whose server model reaches it.",
        "MB: 10^6 bytes over all clients, as counted, with the exchange before round 1; a seed that missed the target "
        "counts with all its rounds, and the mean is marked with >.",
        "Bytes to the target: the paper's column is headed M_Fedssyn / M_FedGEN and prints that; the formula in its "
        "text, (2 Mc + Mg) R_g / (2 Mc R + 2 Ms), is the inverse. This table has both. > and < are bounds.",
        "Rate: learning rate, for feddm of the pixels (feddm.image_lr), for other methods client.lr.",
        learning_rates.choice_note(results.entries), *learning_rates.notes(results.entries),
        "At best validation: test accuracy after the round of the best validation accuracy.",
        grids.work_note(configs),
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
        *tables.rejected_notes(results.reported),
    ]  # fmt: skip


def is_papers(results: Results) -> bool:
    """Return whether all runs are the paper's: only fields of the table's grid differ from preset paper."""
    configs, options = results.configs, results.options
    if options.preset != "paper":
        return False
    preset = {**presets.preset("paper", options.data.name), **FIELDS["paper"]}
    papers = [choose({**preset, **{name: c.flat[name] for name in c.flat if name in VARIED}}) for c in configs]
    return not any(set(same_results(expected, c)) - VARIED for expected, c in zip(papers, configs, strict=True))


def report(results: Results) -> Report:
    frame, title, options = rows(results.reported), grids.title(results.configs), results.options
    records = tables.records(frame, (*CSV, *tables.RUN))

    def picture(methods: Sequence[str], path: Path) -> None:
        draw(frame[frame["method"].isin(methods)], path, title, options)

    return Report(
        markdown(frame, is_papers(results), notes(results)), records, {"preset": options.preset, "cells": records},
        {f"{name}.png": partial(picture, methods) for name, methods in FIGURES.items()},
    )  # fmt: skip


def draw(frame: Any, path: Path, title: str, options: parse.Options) -> None:
    """Draw test accuracy over rounds and over MB, with a column for each alpha."""
    from fedcommons.reports import plots
    from papers.curves import SENT, accuracy_curves

    if frame.empty:
        return
    methods = [m for m in METHODS if m in set(frame["method"])]
    words, size = {"round": "round", SENT: "MB sent so far, all clients, both ways"}, (4.2 * frame["at"].nunique(), 6.4)
    figure, grid = accuracy_curves(frame, methods, words, size)
    for axes in grid[0]:
        axes.locator_params("x", integer=True)
    several = bool((frame.groupby(["at", "method"])["seed"].nunique() > 1).any())
    spread = "\nline: mean, band: minimum to maximum over seeds" * several
    plots.finish(figure, f"Accuracy over rounds and over MB; {title}{spread}")
    plots.save(figure, path, 110, grids.is_smoke(options))
