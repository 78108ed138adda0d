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
from fedcommons.reports.series import value
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import grid, sweep
from fedcommons.tune.study import Entry

if TYPE_CHECKING:
    from fedcommons.tune.dry_run import ExtraJob
    from papers.fedssyn.central import Central

Lines = Callable[[Sequence[Entry], parse.Options], "Sequence[Central]"]
"""A function that returns the central models of a study."""


def lines(
    entries: Sequence[Entry], options: parse.Options, sources: Sequence[str] = ("central_real",),
    epochs: Callable[[int], int] | None = None,
) -> "list[Central]":  # fmt: skip
    """Return the central models of the trials: one on the real images per seed, and one on each trial's pool.

    A study with ``--lrs`` has a model for each learning rate; without, all models have that of the first trial. Trials
    of another network have no central model. sources: the images of the models, see ``Central``. epochs: returns the
    epochs of a model from federation.rounds; None: federation.rounds times client.epochs, as many as a client makes
    that takes part in every round.
    """
    from papers.fedssyn.central import Central

    result = list[Central]()
    rates = grid.values(options, "lrs", float) if options.get("lrs") else (entries[0].cell.config.client.lr,)
    of_model = [e for e in entries if e.cell.config.model.name == options.model.name]
    # preset authors has two numbers of local epochs: the larger one, so that a seed has one model
    local_epochs = max((e.cell.config.client.epochs for e in of_model), default=1)
    for e, rate in product(of_model, rates):
        fields = {"client.lr": rate, "client.epochs": local_epochs}
        config = sweep.with_absolute_paths(override(e.cell.config, fields))
        rounds = config.federation.rounds
        n = epochs(rounds) if epochs else rounds * local_epochs
        of_trial = sources if config.generator is not None else ("central_real",)
        result += [Central(source, config, n) for source in of_trial]
    return list({line.name: line for line in result}.values())  # trials that share a central model give one line


def at_best_rate(models: "Sequence[Central]", entries: Sequence[Entry], out: Path) -> list[Cell]:
    """Return the configuration of the finished models at their best learning rate; empty if no model is finished.

    Of several rates, the best has the highest mean validation accuracy over the tuning seeds. As long as the model of
    any rate and tuning seed is missing, no rate is chosen, and the list is empty.
    """
    seeds = {e.cell.config.seed for e in entries if e.is_tuning}
    tuning = [line for line in models if line.config.seed in seeds]
    reported = [line for line in models if line.config.seed not in seeds]
    if len({line.config.client.lr for line in models}) > 1:
        runs = load_central(*(out / line.name for line in tuning))
        if runs.empty or len(runs) < len(tuning):
            return []
        best = tables.at_best_rate(runs)["lr"].iloc[0]
        reported = [line for line in reported if line.config.client.lr == best]
    chosen = load_central(*(out / line.name for line in reported))
    return [] if chosen.empty else [Cell({}, chosen.sort_values("seed"))]


def rate_note(cell: Cell, options: parse.Options) -> str:
    """Return the learning rate of the central model's row as text, and how it was chosen."""
    rate, listed = value(cell, "lr"), grid.listed(options, "lrs", float) if "lrs" in options else ()
    if len(set(listed)) < 2:
        return f"learning rate {rate:g}, not chosen by accuracy"
    is_at_edge = rate in (min(listed), max(listed))
    edge = " (at an edge of the list, so that another may be better)" * is_at_edge
    return f"learning rate {rate:g}{edge}, the best of {options.lrs} by validation accuracy on the tuning seeds"


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
