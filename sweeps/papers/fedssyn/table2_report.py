"""Table 2 and figures A.1 and A.2: what stands in them, from the run folders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import presets
from fedcommons.config.dotted import choose, same_results
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import Cell
from fedcommons.reports.frames import load_rounds
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.tune import grid as grids
from fedcommons.tune import sweep
from papers.fedssyn.published import fedssyn_table2
from papers.fedssyn.table2_presets import FIELDS, METHODS

MB = 10**6
FIGURES = {"table2": tuple(METHODS), "table2_a1": ("fedssyn", "fedgen"), "table2_a2": ("fedssyn", "feddm")}
"""What is drawn in which picture: all, figure A.1, figure A.2."""
VARIED = {"seed", "algorithm", "sharing.setting", "partition.alpha", "client.lr", "feddm.image_lr", "target"}
CSV = ("method", "at", "rate", "chosen", "mb_to_target", "at_best_validation")


@dataclass(frozen=True)
class Entry:
    """A row's run: a method at an alpha and a rate (of FedDM the pixels', of others the clients'), with one seed."""

    method: str
    alpha: float
    rate: float
    cell: sweep.Trial


def rows(found: Sequence[Entry], out: Path, say: Callable[[str], None]) -> Any:
    """A frame, a row for each finished run: method, at (alpha), rate, chosen, and what its course tells.

    chosen: at the rate of the best validation accuracy. mb_to_target: MB that were sent until the target was reached,
    or in all rounds; at_best_validation: test accuracy after the round of the best validation accuracy, the first of
    several.
    """
    import pandas as pd

    runs: Any = grids.finished([e.cell for e in found], out, say)
    if runs.empty:
        return runs
    stands = {e.cell.name: e for e in found}
    mine = [stands[Path(run).name] for run in runs["run"]]
    courses: Any = load_rounds(*runs["run"])
    told = [_told(courses[courses["run"] == run], needed)
            for run, needed in zip(runs["run"], runs["rounds_to_target"], strict=True)]  # fmt: skip
    runs = runs.assign(
        method=[e.method for e in mine], at=[e.alpha for e in mine], rate=[e.rate for e in mine],
        mb_to_target=[sent for sent, _ in told], at_best_validation=[best for _, best in told],
    )  # fmt: skip
    kept = [tables.at_best_rate(of, "rate").index for _, of in runs.groupby(["at", "method"])]
    return pd.DataFrame(runs.assign(chosen=runs.index.isin([i for index in kept for i in index])))


def _told(course: Any, needed: float | None) -> tuple[float, float | None]:
    """MB until the target, and test accuracy at the best validation accuracy, of one run's rounds."""
    within = course if needed is None or needed != needed else course[course["round"] <= needed]
    best = None
    if "validation/accuracy" in course and (validated := course.dropna(subset=["validation/accuracy"])).size:
        best = validated.loc[validated["validation/accuracy"].idxmax(), "test/accuracy"]
    return within["comm/total_bytes"].max() / MB, best


def ratio(of: Any, other: Any) -> str:
    """100 M_of / M_other until the target, means over seeds; a bound where one missed it, ``-`` where both did."""
    missed, base_missed = (bool(runs["rounds_to_target"].isna().any()) for runs in (of, other))
    if missed and base_missed:
        return "-"
    value = 100 * of["mb_to_target"].mean() / other["mb_to_target"].mean()
    return f"{'>' * missed}{'<' * base_missed}{value:.3g} %"


def markdown(frame: Any, printed: bool, notes: Sequence[str]) -> str:
    """The table, and how Fedssyn's bytes compare with each method's; printed: whether the paper's numbers stand by."""
    paper = fedssyn_table2() if printed else {}
    head = ["alpha", "method", "rate", "seeds", "last accuracy, %", "at best validation, %", "rounds to target",
            "MB to target", "MB in all"]  # fmt: skip
    lines, ratios = [], []
    for (alpha, method), runs in _groups(frame):
        of, missed = Cell({}, runs), bool(runs["rounds_to_target"].isna().any())
        accuracies = [tables.percent(of, name) for name in ("last_accuracy", "at_best_validation")]
        total = (runs["bytes_down"] + runs["bytes_up"] + runs["bytes_once"]).mean() / MB
        to_target = f"{'>' * missed}{runs['mb_to_target'].mean():.2f}"
        line = [columns.text(alpha), method, columns.text(runs["rate"].iloc[0]), len(runs), *accuracies,
                tables.rounds(runs), to_target, f"{total:.2f}"]  # fmt: skip
        top, rounds, memory = paper.get((runs["data.name"].iloc[0], alpha, method), ("", "", ""))
        lines.append([*line, f"{top} ({rounds or '-'})" if top else ""] if paper else line)
        own = frame[frame["chosen"] & (frame["at"] == alpha) & (frame["method"] == "fedssyn")]
        if method != "fedssyn" and not own.empty:
            compared = [columns.text(alpha), method, ratio(own, runs), ratio(runs, own)]
            ratios.append([*compared, f"{memory} %" if memory else ""] if paper else compared)
    extra = ["the paper's accuracy (rounds)"] if paper else []
    text = tables.markdown([*head, *extra], lines)
    if ratios:
        against = ["alpha", "method", "M_Fedssyn / M_method", "M_method / M_Fedssyn"]
        extra = ["the paper's column"] if paper else []
        text += "\n## Bytes to the target\n\n" + tables.markdown([*against, *extra], ratios)
    return text + tables.numbered(notes)


def _groups(frame: Any) -> list[tuple[tuple[float, str], Any]]:
    """The chosen runs by alpha and method, in the table's order."""
    chosen = frame[frame["chosen"]]
    pairs = product(dict.fromkeys(frame["at"]), METHODS)
    cells = [((a, m), chosen[(chosen["at"] == a) & (chosen["method"] == m)]) for a, m in pairs]
    return [(pair, runs) for pair, runs in cells if not runs.empty]


def notes(found: Sequence[Entry], frame: Any, options: parse.Options) -> list[str]:
    """What a reader must know to read the numbers."""
    configs = [e.cell.config for e in found]
    return [
        f"Target: {grids.title(configs)}. Rounds: the first whose server model has it; >R: not within R rounds.",
        "MB: 10^6 bytes over all clients, counted, the exchange before round 1 included; a seed that missed the "
        "target counts with all its rounds, and the mean has >.",
        "Bytes to the target: the paper's column is headed M_Fedssyn / M_FedGEN and prints that; the formula in its "
        "text, (2 Mc + Mg) R_g / (2 Mc R + 2 Ms), is the inverse. Both stand here. > and < are bounds.",
        "Rate: of feddm the pixels' (feddm.image_lr), of others client.lr; where several were tried, the one of the "
        "best validation accuracy after the last round, the mean over seeds, ties to the smaller. Test data had no "
        "part in it.",
        "At best validation: test accuracy after the round of the best validation accuracy.",
        grids.work_note(configs),
        f"Seeds: {options.seeds}; ± is the sample standard deviation.",
        *tables.rejected_notes(frame),
    ]  # fmt: skip


def is_papers(found: Sequence[Entry], options: parse.Options) -> bool:
    """Whether all fields but those of the grid are the preset's."""
    if options.preset != "paper":
        return False
    configs, preset = [e.cell.config for e in found], {**presets.preset("paper", options.data.name), **FIELDS["paper"]}
    papers = [choose({**preset, **{name: c.flat[name] for name in c.flat if name in VARIED}}) for c in configs]
    return not any(set(same_results(one, c)) - VARIED for one, c in zip(papers, configs, strict=True))


def report(found: Sequence[Entry], options: parse.Options, out: Path, display: Display) -> None:
    """Write table, CSV and figures from the run folders, and show the table."""
    frame = rows(found, out, display.say)
    if frame.empty:
        return
    text = grids.stamped(markdown(frame, is_papers(found, options), notes(found, frame, options)), options)
    write_text(out / "table2.md", text)
    records = tables.records(frame, (*CSV, *tables.RUN))
    write_text(out / "table2.csv", tables.to_csv(records))
    write_json(out / "summary.json", {"name": out.name, "preset": options.preset, "cells": records})
    title = grids.title([e.cell.config for e in found])
    for name, methods in FIGURES.items():
        draw(frame[frame["method"].isin(methods)], out / f"{name}.png", title, options)
    display.say("\n" + text)


def draw(frame: Any, path: Path, title: str, options: parse.Options) -> None:
    """Accuracy over rounds and over MB, a column for each alpha; means over seeds, bands from least to most."""
    from fedcommons.reports import plots, series

    if frame.empty:
        return
    alphas, methods = list(dict.fromkeys(frame["at"])), [m for m in METHODS if m in set(frame["method"])]
    figure, grid = plots.panels(2, len(alphas), (4.2 * len(alphas), 6), sharey=True)
    for (j, alpha), (method, colour) in product(enumerate(alphas), zip(methods, series.COLOURS, strict=False)):
        runs = frame[frame["chosen"] & (frame["at"] == alpha) & (frame["method"] == method)]
        if runs.empty:
            continue
        of_round: Any = load_rounds(*runs["run"]).groupby("round")
        accuracy, sent = 100 * of_round["test/accuracy"].mean(), of_round["comm/total_bytes"].mean() / MB
        low, high = 100 * of_round["test/accuracy"].min(), 100 * of_round["test/accuracy"].max()
        for axes, x in ((grid[0][j], accuracy.index), (grid[1][j], sent)):
            axes.plot(x, accuracy, color=colour, label=method)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        grid[0][j].set(title=f"alpha {alpha:g}", xlabel="round")
        grid[0][j].locator_params("x", integer=True)
        grid[1][j].set(xlabel="MB sent so far, all clients, both ways", xscale="symlog")
    for row in grid:
        row[0].set_ylabel("test accuracy, %")
    grid[0][-1].legend(fontsize=7)
    several = bool((frame.groupby(["at", "method"])["seed"].nunique() > 1).any())
    figure.suptitle(f"{title}{'; line: mean, band: least to most of the seeds' * several}", fontsize=10)
    plots.save(figure, path, 110, grids.is_smoke(options))
