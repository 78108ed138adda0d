"""Sweep any fields of an experiment with Ray Tune; generators are trained once for all learning rates and all p.

python sweeps/tune.py --space alpha=0.01,0.1 --space "p=uniform(0,0.5)" --samples 10 --metric rounds_to_target
python sweeps/tune.py --config FILE.yaml --space "lr=loguniform(0.01,0.1)" --scheduler asha --metric best_accuracy
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcommons.config import cli, presets, search_space
from fedcommons.config.flat import SHORT_NAMES, choose, flat_dict
from fedcommons.errors import UserError, unknown
from fedcommons.files import write_json, write_text
from fedcommons.reports.tables import markdown, to_csv
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display
from fedcommons.tracking.run_folder import read_rounds, read_summary

MOST_SAMPLES = 10_000
METRICS = {"rounds_to_target": "min", "best_accuracy": "max", "last_accuracy": "max", "validation_accuracy": "max"}


def arguments(argv: Sequence[str]):
    """Options of the sweep on top of every field of the experiment."""
    preset, dataset = cli.early(argv, "preset", "small"), cli.early(argv, "data.name", "digits")
    defaults = {**presets.preset(preset, dataset), "sharing.setting": "shuffled_synthetic"}
    parser = cli.parser((__doc__ or "").partition("\n")[0], argv, defaults)
    parser.add_argument("--preset", type=str, default="small", help=", ".join(presets.PRESETS))
    parser.add_argument(
        "--space", action="append", type=str, default=[],
        help="NAME=V1,V2,... or NAME=uniform(LOW,HIGH), loguniform, randint; may stand several times; "
        f"NAME: a field or {', '.join(SHORT_NAMES)}",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=str | None, default=None, help="seeds, separated by commas: each point for each"
    )
    parser.add_argument("--samples", type=int, default=10, help="draws of the distributions for each grid point")
    parser.add_argument("--scheduler", type=str, default="fifo", help="fifo, or asha: stop the worse runs early")
    parser.add_argument("--metric", type=str, default="rounds_to_target", help=", ".join(METRICS))
    parser.add_argument("--out", type=str, default="runs/tune", help="folder of the sweep")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    cli.add_dry_run(parser)
    options = cli.parse(parser, argv)
    if options.metric not in METRICS:
        raise unknown("metric", options.metric, METRICS)
    if options.scheduler not in ("fifo", "asha"):
        raise unknown("scheduler", options.scheduler, ("fifo", "asha"))
    if not 1 <= options.samples <= MOST_SAMPLES:
        raise UserError(f"--samples must lie in [1, {MOST_SAMPLES}], got {options.samples}.")
    if not options.space:
        raise UserError("--space is missing: name at least one field to sweep, such as --space alpha=0.01,0.1.")
    return options


def cells(options) -> tuple[list[sweep.Cell], list[str]]:
    """The runs of the sweep and the fields that vary."""
    base = sweep.tracked(cli.flat(options), Path(options.out))
    space = search_space.parse(options.space, options.fields, options.chosen)
    cli.refuse_fields(options, dict.fromkeys(space, "space"))
    if options.seeds is not None:
        if "seed" in space:
            raise UserError("--seeds and --space seed both name the seeds; use one of them.")
        cli.refuse_fields(options, {"seed": "seeds"})
        space = {**space, "seed": list(cli.split("--seeds", options.seeds, int))}
    points = search_space.points(space, options.samples, options.seed)
    labels = {name: name.rpartition(".")[2] for name in space}
    if not options.dp.local and any(name.startswith("dp.") for name in space):
        raise UserError("sigma and the other dp fields change nothing without --dp.local true.")
    asked = {*options.asked, *space}
    found = [choose({**base, **point}, options.fields) for point in points]
    made = [sweep.cell(presets.settled(options.preset, one, asked), labels) for one in found]
    return list({c.name: c for c in made}.values()), list(space)


def scheduler(options, rounds: int):
    """ASHA on the accuracy so far (rounds-to-target is not known half-way), or None for first in, first out."""
    if options.scheduler == "fifo":
        return None
    from ray.tune.schedulers import ASHAScheduler

    return ASHAScheduler(
        time_attr="round", max_t=rounds, grace_period=max(1, rounds // 5), reduction_factor=3, stop_last_trials=False
    )


def results(cells: Sequence[sweep.Cell], fields: Sequence[str], out: Path, metric: str) -> list[dict[str, Any]]:
    """One record for each run that has rounds, the best first; ``status``: finished or stopped (by the scheduler)."""
    records = []
    for c in cells:
        folder = out / c.name
        lines = [line for line in read_rounds(folder) if line["round"] > 0]
        if not lines:
            continue
        summary = read_summary(folder)
        accuracies = [line["test/accuracy"] for line in lines]
        reached = [line["round"] for line in lines if line["test/accuracy"] >= c.config.target]
        records.append({
            **{name: flat_dict(c.config).get(name) for name in fields},
            "rounds_to_target": reached[0] if reached else None,
            "best_accuracy": max(accuracies), "last_accuracy": accuracies[-1],
            "validation_accuracy": lines[-1].get("validation/accuracy"), "rounds": len(lines),
            "p_share": summary["p"] if summary else None,
            "status": "finished" if summary else "stopped", "run_dir": c.name,
        })  # fmt: skip

    def worst_last(record: dict[str, Any]) -> float:
        value = record[metric]
        return float("inf") if value is None else value if METRICS[metric] == "min" else -value

    return sorted(records, key=worst_last)


def short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def report(
    cells: Sequence[sweep.Cell], fields: Sequence[str], outcome: sweep.Outcome, started: float, out: Path, options,
    display: Display,
) -> int:  # fmt: skip
    """Write the tables, the picture and the summary, and show them; the exit code."""
    from fedcommons.reports.plots import metric_against_fields

    records = results(cells, fields, out, options.metric)
    for name, message in outcome.failures.items():
        display.say(f"failed: {name}: {message}")
    if not records:
        return 1
    head = [*fields, "rounds_to_target", "best_accuracy", "last_accuracy", "rounds", "status"]
    show = {None: f">{cells[0].config.federation.rounds}"}
    table = markdown(head, [[show.get(r[n], short(r[n])) for n in head] for r in records])
    write_json(out / "summary.json", {"name": out.name, "metric": options.metric, "cells": records})
    write_text(out / "tune.md", table)
    write_text(out / "tune.csv", to_csv(records))
    metric_against_fields(records, fields, options.metric, out / "tune.png")
    display.say(f"\n{table}\nBest {options.metric}: {out / records[0]['run_dir']}")
    display.say(f"Time: {time.perf_counter() - started:.0f} s ({outcome.generators_trained} generators trained).")
    display.say(f"All in {out}: tune.md, tune.csv, tune.png, summary.json, and a folder for each run.")
    return 1 if outcome.failures else 0


def tune(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    out, (todo, fields) = Path(options.out), cells(options)
    rounds = todo[0].config.federation.rounds
    with Display() as display:
        if options.dry_run:
            grids.dry_run(todo, out, display, options.on_cores)
            return 0
        left = sweep.todo(todo, out, display)
        with sweep.open_sweep(out, options.resume):
            outcome = sweep.run_cells(left, out, display, scheduler=scheduler(options, rounds), metric="best_accuracy")
            return report(todo, fields, outcome, started, out, options, display)


if __name__ == "__main__":
    cli.main(tune)
