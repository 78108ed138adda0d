"""Training of a figure's central models (reference lines), each as a Ray task."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.config.dotted import override
from fedcommons.errors import sentence
from fedcommons.reports import tables
from fedcommons.reports.cells import Cell
from fedcommons.reports.frames import load_central
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry

if TYPE_CHECKING:
    from fedcommons.tune.dry_run import ExtraJob
    from papers.fedssyn.central import Central

Lines = Callable[[Sequence[Entry], parse.Options], "Sequence[Central]"]
"""A function that returns the central models of a study."""


def lines(
    entries: Sequence[Entry], options: parse.Options, sources: Sequence[str] = ("central_real",), epochs: str = ""
) -> "list[Central]":
    """Return the central models of the trials: one on the real images per seed, and one on each trial's pool.

    A study with ``--lrs`` has a model for each learning rate. Trials of another network have no central model. sources:
    the images of the models, see ``Central``. A model trains for ``--central-epochs`` epochs, or federation.rounds,
    times the field that ``epochs`` names.
    """
    from papers.fedssyn.central import Central

    result, rates = (
        [],
        grid.values(options, "lrs", float) if options.get("lrs") else (entries[0].cell.config.client.lr,),
    )
    for e, rate in product((e for e in entries if e.cell.config.model.name == options.model.name), rates):
        config = sweep.with_absolute_paths(override(e.cell.config, {"client.lr": rate}))
        n = (options.get("central_epochs") or config.federation.rounds) * config.flat.get(epochs, 1)
        of_trial = sources if config.generator is not None else ("central_real",)
        result += [Central(source, config, n) for source in of_trial]
    return list({line.name: line for line in result}.values())  # trials that share a central model give one line


def at_best_rate(models: "Sequence[Central]", entries: Sequence[Entry], out: Path) -> list[Cell]:
    """Return the configuration of the finished models at their best learning rate; empty if no model is finished.

    The best rate has the highest validation accuracy on the seeds of the tuning, or on all seeds without a tuning.
    """
    runs = load_central(*(out / line.name for line in models))
    if runs.empty:
        return []
    tuning = runs["seed"].isin([e.cell.config.seed for e in entries if e.labels.get("tuning")])
    best = tables.at_best_rate(runs.loc[tuning == tuning.any(), :])["lr"].iloc[0]
    chosen = runs.loc[(runs["lr"] == best) & ~tuning, :].sort_values("seed")
    return [] if chosen.empty else [Cell({}, chosen)]


def _train(base_folder: str, central: "Central", folder: Path) -> None:
    from papers.fedssyn.central import run

    registry.work_in(base_folder)
    run(central, folder)


def train(centrals: "Sequence[Central]", out: Path, display: Display) -> dict[str, str]:
    """Train each unfinished central model in ``out/NAME`` as a Ray task; return NAME -> error message of each failure.

    The folders in the configs must be absolute, as a task may run on another machine.
    """
    import ray
    from ray.exceptions import RayError

    from fedcommons.federation import hosts
    from fedcommons.runtime import ray_cluster

    todo = [c for c in centrals if read_summary(out / c.name) is None]
    if not todo:
        return {}
    ray_cluster.connect()
    gpus = todo[0].config.federation.gpus_per_actor
    share, pin = ray_cluster.gpu_share(gpus), ray_cluster.node_labels(gpus)
    ray_cluster.free(ray_cluster.reserve([ray_cluster.bundle(gpus)], pin, "a central model"))
    task: Any = ray.remote(num_cpus=1, num_gpus=share, label_selector=pin)(hosts.run_if_same)
    driver, base_folder = hosts.facts(), str(registry.base())
    pending = {task.remote(driver, _train, base_folder, c, (out / c.name).resolve()): c for c in todo}
    failures = {}
    while pending:
        (ready, *_), _ = ray.wait(list(pending))
        name = pending.pop(ready).name
        try:
            ray.get(ready)
        except RayError as error:
            failures[name] = sentence(error)
        display.step("central models", len(todo) - len(pending), len(todo), "trained")
    display.drop("central models")
    return failures


def play(
    lines: Lines, entries: Sequence[Entry], options: parse.Options, todo: sweep.Todo, out: Path, display: Display,
    run: Callable[..., sweep.Outcome] | None = None,
) -> sweep.Outcome:  # fmt: skip
    """Run the remaining trials, by ``run`` (see ``Study.play``) if it is a function, then train the central models."""
    outcome = run(entries, options, todo, out, display) if run else sweep.run_cells(todo, out, display)
    started, models = time.perf_counter(), lines(entries, options)
    if not models:
        return outcome
    failures = {**outcome.failures, **train(models, out, display)}
    seconds = {**outcome.seconds, "central models": time.perf_counter() - started}
    return replace(outcome, seconds=seconds, failures=failures)


def extra_jobs(lines: Lines, entries: Sequence[Entry], options: parse.Options) -> "list[ExtraJob]":
    """Return the trainings of central models as jobs, whose duration a dry run estimates."""
    from fedcommons.tune.dry_run import ExtraJob
    from papers.fedssyn.central import seconds_of

    return [ExtraJob(line.name, "central models", partial(seconds_of, line)) for line in lines(entries, options)]
