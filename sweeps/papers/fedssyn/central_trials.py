"""Training of a figure's central models (reference lines), each as a Ray task."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.errors import sentence
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import sweep
from fedcommons.tune.study import Entry

if TYPE_CHECKING:
    from fedcommons.tune.dry_run import ExtraJob
    from papers.fedssyn.central import Central

Lines = Callable[[Sequence[Entry], parse.Options], "Sequence[Central]"]
"""A function that returns the central models of a study."""


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
    lines: Lines, entries: Sequence[Entry], options: parse.Options, todo: sweep.Todo, out: Path, display: Display
) -> sweep.Outcome:
    """Run the remaining trials, then train the central models."""
    outcome, started = sweep.run_cells(todo, out, display), time.perf_counter()
    failures = {**outcome.failures, **train(lines(entries, options), out, display)}
    seconds = {**outcome.seconds, "central models": time.perf_counter() - started}
    return replace(outcome, seconds=seconds, failures=failures)


def extra_jobs(lines: Lines, entries: Sequence[Entry], options: parse.Options) -> "list[ExtraJob]":
    """Return the trainings of central models as jobs, whose duration a dry run estimates."""
    from fedcommons.tune.dry_run import ExtraJob
    from papers.fedssyn.central import seconds_of

    return [ExtraJob(line.name, "central models", partial(seconds_of, line)) for line in lines(entries, options)]
