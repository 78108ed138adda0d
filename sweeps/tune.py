"""Sweep any fields of an experiment with Ray Tune; generators are trained once for all learning rates and all p.

python sweeps/tune.py --space alpha=0.01,0.1 --space "p=uniform(0,0.5)" --samples 10 --seeds 0,1,2
python sweeps/tune.py --config FILE.yaml --space "lr=loguniform(0.01,0.1)" --scheduler asha
python sweeps/tune.py --space "lr=loguniform(0.01,0.1)" --space p=0.1,0.5 --metric zeta_hat_sq --search optuna
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcommons.config import cli, presets, search_space
from fedcommons.config.flat import SHORT_NAMES, choose, flat_dict
from fedcommons.errors import UserError, nearest, unknown
from fedcommons.files import write_json, write_text
from fedcommons.reports import metrics, ranking, series
from fedcommons.reports.cells import ENVIRONMENT, counted
from fedcommons.reports.frames import load_runs
from fedcommons.seeds import seed_for
from fedcommons.sweeping import grids, sweep
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.search import Optuna, proposed, require_optuna
from fedcommons.tracking.run_folder import is_run

if TYPE_CHECKING:  # pandas takes a second to import, and --help needs none
    import pandas as pd

MOST_SAMPLES = 10_000
CHOICES = {"scheduler": ("fifo", "asha"), "search": ("random", "optuna"), "mode": ("min", "max")}
CSV = ("status", "rounds", *metrics.KNOWN, "train/loss", "alpha", "p", "rho", "sigma", "lr")
"""Columns of tune.csv behind the swept fields, where some run has them."""


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
    parser.add_argument("--samples", type=int, default=10, help="draws of the distributions for each grid point; with "
                        "optuna: points in each environment")  # fmt: skip
    parser.add_argument("--search", type=str, default="random",
                        help="random: grids and draws; optuna: points that follow from the results so far")  # fmt: skip
    parser.add_argument("--scheduler", type=str, default="fifo",
                        help="fifo, or asha: stop the runs of low validation accuracy early")  # fmt: skip
    parser.add_argument("--metric", type=str, default="validation_accuracy",
                        help="what is best: MB, epsilon, rounds_to_target, ..., a convergence parameter such as "
                        "zeta_hat_sq, or its mean over rounds, zeta_hat_sq_mean")  # fmt: skip
    parser.add_argument("--mode", type=str | None, default=None,
                        help="max or min; default: max for accuracies, min for losses, bytes, epsilons and convergence "
                        "parameters; needed for metrics of your own")  # fmt: skip
    parser.add_argument("--out", type=str, default="runs/tune", help="folder of the sweep")
    parser.add_argument("--resume", action="store_true", help="continue the sweep in that folder")
    cli.add_dry_run(parser)
    options = cli.parse(parser, argv)
    options.mode = metrics.mode(options.metric) if options.mode is None else options.mode
    for name, known in CHOICES.items():
        if options[name] not in known:
            raise unknown(name, options[name], known)
    if not 1 <= options.samples <= MOST_SAMPLES:
        raise UserError(f"--samples must lie in [1, {MOST_SAMPLES}], got {options.samples}.")
    if not options.space:
        raise UserError("--space is missing: name at least one field to sweep, such as --space alpha=0.01,0.1.")
    if options.search == "optuna":
        if options.scheduler == "asha":
            raise UserError("--search optuna needs --scheduler fifo: it learns from finished runs only.")
        require_optuna()
    options.base = sweep.tracked(cli.flat(options), Path(options.out))
    return options


def space(options) -> dict[str, Any]:
    """What is swept, seeds included.

    Raises:
        UserError: a field that cannot be swept.
    """
    found = dict(search_space.parse(options.space, options.fields, options.chosen))
    cli.refuse_fields(options, dict.fromkeys(found, "space"))
    if options.seeds is not None:
        if "seed" in found:
            raise UserError("--seeds and --space seed both name the seeds; use one of them.")
        cli.refuse_fields(options, {"seed": "seeds"})
        found = {**found, "seed": list(cli.split("--seeds", options.seeds, int))}
    if not options.dp.local and any(name.startswith("dp.") for name in found):
        raise UserError("sigma and the other dp fields change nothing without --dp.local true.")
    drawn = [n for n, values in around(found).items() if not isinstance(values, list)]
    if drawn and (options.search == "optuna" or options.scheduler == "asha"):
        way = "--search optuna" if options.search == "optuna" else "--scheduler asha"
        raise UserError(f"--space {drawn[0]} needs a list of values with {way}, which compares like with like.")
    return found


def around(space: search_space.SearchSpace) -> dict[str, Any]:
    """Those of the space that describe the environment, seeds included: points are not compared across them."""
    return {n: values for n, values in space.items() if n == "seed" or n.startswith(ENVIRONMENT)}


def made(points: Sequence[Mapping[str, Any]], options) -> list[sweep.Cell]:
    """The cells of these points."""
    asked = {*options.asked, *points[0]}
    labels = {name: name.rpartition(".")[2] for name in points[0]}
    found = [choose({**options.base, **point}, options.fields) for point in points]
    made = [sweep.cell(presets.settled(options.preset, one, asked), labels) for one in found]
    return list({c.name: c for c in made}.values())


def cells(options) -> tuple[list[sweep.Cell], list[str]]:
    """The runs of a random search, or the ends of Optuna's space; and the fields that vary.

    Raises:
        UserError: a field, a value or a metric that the runs cannot have.
    """
    swept = space(options)
    points = search_space.points(swept, options.samples, options.seed)
    found = made(search_space.ends(swept) if options.search == "optuna" else points, options)
    metrics.require(options.metric, [c.config for c in found])
    if options.scheduler == "asha" and not all(c.config.data.validation > 0 for c in found):
        raise UserError("--scheduler asha stops runs by validation accuracy: --data.validation must be above 0.")
    return found, list(swept)


def batches(options, out: Path) -> Iterator[list[sweep.Cell]]:
    """What runs side by side: all cells; with ASHA those of an environment; with Optuna its next points."""
    fixed = around(space(options))
    seeds = fixed.pop("seed", [options.seed])
    if options.search == "optuna":
        searched = {n: values for n, values in space(options).items() if n not in (*fixed, "seed")}
        environments = search_space.points(fixed, 1, options.seed)
        searches = [(e, Optuna(searched, options.mode, seed_for(options.seed, str(e)))) for e in environments]
        yield from proposed(
            searches, options.samples, lambda point: made([{**point, "seed": seed} for seed in seeds], options),
            lambda cells: mean(cells, out, options.metric),
        )  # fmt: skip
        return
    groups: dict[str, list[sweep.Cell]] = {}
    for c in cells(options)[0]:
        fields = flat_dict(c.config)
        key = str([fields.get(name) for name in fixed]) if options.scheduler == "asha" else ""
        groups.setdefault(key, []).append(c)
    yield from groups.values()


def scheduler(options, cells: Sequence[sweep.Cell]):
    """ASHA on the validation accuracy of each round, or None for first in, first out."""
    if options.scheduler == "fifo":
        return None
    from ray.tune.schedulers import ASHAScheduler

    rounds = max(c.config.federation.rounds for c in cells)
    return ASHAScheduler(
        time_attr="round", metric="validation/accuracy", mode="max", max_t=rounds, grace_period=max(1, rounds // 5),
        reduction_factor=3, stop_last_trials=False,
    )  # fmt: skip


def frame(cells: Sequence[sweep.Cell], out: Path, metric: str, say: Callable[[str], None]) -> "pd.DataFrame":
    """The runs of these cells that have rounds.

    Raises:
        UserError: none of them has the metric.
    """
    import pandas as pd

    folders = [out / c.name for c in cells if is_run(out / c.name)]
    runs = load_runs(*folders, say=say) if folders else pd.DataFrame()
    if len(runs) and metric not in runs:
        known = runs.select_dtypes("number").columns
        raise UserError(f"no run has {metric}{nearest(metric, known)} Name another metric and add --resume.")
    return runs


def mean(cells: Sequence[sweep.Cell], out: Path, metric: str) -> float | None:
    """The mean over the seeds of a point; None where a run is not finished or has no such number."""
    runs = frame(cells, out, metric, lambda text: None)
    if len(runs) < len(cells) or set(runs["status"]) != {"finished"}:
        return None
    values, _ = counted(runs, metric)
    return fmean(values) if len(values) == len(cells) else None


def report(
    cells: Sequence[sweep.Cell], fields: Sequence[str], outcomes: Sequence[sweep.Outcome], started: float, out: Path,
    options, display: Display,
) -> int:  # fmt: skip
    """Write the tables, the picture and the summary, and show them; the exit code."""
    import pandas as pd

    failures = {name: said for outcome in outcomes for name, said in outcome.failures.items()}
    for name, message in failures.items():
        display.say(f"failed: {name}: {message}")
    runs, metric = frame(cells, out, options.metric, display.say), options.metric
    if runs.empty:
        return 1
    groups = ranking.ranked(runs, metric, options.mode)
    table = grids.stamped(ranking.table(groups, fields, metric, options.mode), options)
    swept = [name for name in dict.fromkeys(("seed", *fields, metric, *CSV)) if name in runs]
    ordered = pd.concat([point.runs for group in groups for point in group.points])
    rows = ordered[swept].assign(run_dir=[Path(run).name for run in ordered["run"]])
    write_text(out / "tune.md", table)
    write_text(out / "tune.csv", rows.to_csv(index=False, lineterminator="\n"))
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    write_json(out / "summary.json", {"name": out.name, "metric": metric, "mode": options.mode, "cells": records})
    drawn, colours = ranking.panels(groups, fields, metric)
    series.draw(out / "tune.png", drawn, metric, colours, series.title(runs), grids.is_smoke(options))
    display.say(f"\n{table}")
    for group in groups:
        best = ", ".join(str(out / Path(run).name) for run in group.points[0].runs["run"])
        where = ", ".join(f"{name} {series.label(value)}" for name, value in group.environment.items())
        display.say(f"Best {metric}{where and f' with {where}'}: {best}")
    trained = sum(outcome.generators_trained for outcome in outcomes)
    display.say(f"Time: {time.perf_counter() - started:.0f} s ({trained} generators trained).")
    display.say(f"All in {out}: tune.md, tune.csv, tune.png, summary.json, and a folder for each run.")
    return 1 if failures else 0


def tune(argv: Sequence[str]) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    out, (known, fields) = Path(options.out), cells(options)
    with Display() as display:
        if options.dry_run:
            grids.dry_run(known, out, display, options.on_cores)
            if options.search == "optuna":
                display.say(f"These are the ends of the space; {options.samples} points follow from the results.")
            return 0
        if options.search == "optuna" or options.scheduler == "asha":
            sweep.todo(known, out, display)  # refuses now what later batches cannot meet
        with sweep.open_sweep(out, options.resume):
            outcomes, tried = [], {}
            for batch in batches(options, out):
                left = sweep.todo(batch, out, display)
                outcomes.append(sweep.run_cells(left, out, display, scheduler=scheduler(options, batch)))
                tried |= {c.name: c for c in batch}
            return report(list(tried.values()), fields, outcomes, started, out, options, display)


if __name__ == "__main__":
    cli.main(tune)
