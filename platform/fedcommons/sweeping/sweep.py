"""Many experiments at once: first the generators, each once; then the cells as Ray Tune trials."""

import logging
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fedcommons.artifacts import Store
from fedcommons.config import flat, parts
from fedcommons.config.experiment import Experiment
from fedcommons.errors import ClientError, UserError, left_in, sentence
from fedcommons.federation import cluster
from fedcommons.federation.rejections import told
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.folders import holds_runs, open_folder
from fedcommons.tracking.run_folder import is_run, read_config, read_rounds, read_summary

if TYPE_CHECKING:  # torch and Ray take seconds to import, and --help needs neither
    from fedcommons.sharing import synthetic_pool


@dataclass(frozen=True)
class Cell:
    """One run of a sweep; ``name`` is its folder in the sweep's."""

    name: str
    config: Experiment


STOPPED = "stopped-by-scheduler"
"""A file in the folder of a run that the sweep's scheduler gave up: it is not run again on resumption."""


@dataclass(frozen=True)
class Outcome:
    """How a sweep went: seconds of its parts, how many generators it trained, and the cells that failed."""

    seconds: Mapping[str, float]
    generators_trained: int
    failures: Mapping[str, str]


def cell(config: Experiment, varied: Mapping[str, str]) -> Cell:
    """A cell named after some fields (name to label) and a hash of all that decides its result."""
    from fedcommons.artifacts import key_of

    fields = flat.flat_dict(config)
    chosen = [parts.label(config.algorithm), parts.label(config.sharing.setting)]
    labels = [f"{label}{_short(fields[name])}" for name, label in varied.items() if name in fields]
    return Cell("-".join([*chosen, *labels, key_of(flat.deciding(config))[:6]]), config)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("/", "_")


def is_done(cell: Cell, out: Path) -> bool:
    """Whether the cell's folder holds its finished run, or one that a scheduler stopped."""
    folder = out / cell.name
    ended = read_summary(folder) is not None or (is_run(folder) and (folder / STOPPED).exists())
    return ended and not flat.same_results(read_config(folder), cell.config)


@dataclass(frozen=True)
class Todo:
    """What is left to do of a sweep: its cells that are not done, prepared, and what the stores of artifacts lack."""

    n_cells: int  # of the whole sweep
    cells: Sequence[Cell]
    lacking: "Sequence[tuple[Store, Sequence[synthetic_pool.Job]]]"


def todo(cells: Sequence[Cell], out: Path, display: Display) -> Todo:
    """What is left to do of these cells.

    Raises:
        UserError: something that cannot be met: it is refused before any work and before anything is written.
    """
    display.say("Loading torch and the data ...")
    from fedcommons.runs.build import prepare
    from fedcommons.sharing.synthetic_pool import missing

    left = [c for c in cells if not is_done(c, out)]
    wanted = [(c.config.artifacts, need) for c in left for need in prepare(c.config).needs]
    stores = [Store(Path(folder), display.say) for folder in dict.fromkeys(folder for folder, _ in wanted)]
    lacking = [(s, missing(s, [need for f, need in wanted if Path(f) == s.folder])) for s in stores]
    for store, jobs in lacking:
        if jobs:
            store.require_writable()
    return Todo(len(cells), left, lacking)


@contextmanager
def open_sweep(out: Path, resume: bool) -> Iterator[None]:
    """Make the sweep's folder and hold it, until its tables are written.

    Raises:
        UserError: it cannot be written, another process holds it, it has what no sweep wrote, or it holds a sweep and
            ``resume`` was not asked for.
    """
    with open_folder(out):
        if holds_runs(out) and not resume:
            raise UserError(f"--out: {out} holds a sweep already; add --resume to continue it or name another folder.")
        yield


def run_cells(
    left: Todo, out: Path, display: Display, *, scheduler: Any = None, metric: str = "test/accuracy"
) -> Outcome:
    """Run every cell that is left, each in ``out/NAME``; a cell that fails does not take the others with it.

    ``out`` must be open; ``scheduler``: a Ray Tune scheduler, told ``metric`` after every round.
    """
    if len(left.cells) < left.n_cells:
        display.say(f"{left.n_cells - len(left.cells)} of {left.n_cells} cells are done already.")
    started = time.perf_counter()
    trained, ready = 0, started
    failures: dict[str, str] = {}
    if left.cells:
        display.say("Starting Ray ...")
        cluster.connect()
        cluster.require_actors(left.cells[0].config)
        display.say(f"{len(left.cells)} cells to run on {cluster.describe()}.")
        trained = _make_generators(left, display)
        ready = time.perf_counter()
        failures = _run_trials(left.cells, out, display, scheduler, metric)
    for c in left.cells:
        if (summary := read_summary(out / c.name)) and summary.get("rejected"):
            display.say(f"{c.name}: {told(summary['rejected'])}, see rejected in {out / c.name / 'summary.json'}")
    end = time.perf_counter()
    return Outcome({"generators": ready - started, "cells": end - ready}, trained, failures)


def _make_generators(left: Todo, display: Display) -> int:
    """Train, in parallel as Ray tasks, each generator that any of the experiments needs and the store lacks."""
    import ray
    from ray.exceptions import RayError

    from fedcommons.sharing import synthetic_pool

    if not left.lacking:
        return 0
    trained, done = 0, 0
    gpus = cluster.gpu_share(left.cells[0].config.federation.gpus_per_actor)
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=2)(_make)
    for store, jobs in left.lacking:
        if jobs:
            display.say("Making generators ...")
        trained += sum(bool(job.epochs) for job in jobs)
        here = str(parts.base())
        pending = {task.remote(here, job.needs[0].recipe.name, pickle.dumps(job)): job for job in jobs}
        while pending:
            (ready, *_), _ = ray.wait(list(pending))
            job = pending.pop(ready)
            try:
                synthetic_pool.keep(store, job, ray.get(ready))
            except RayError as error:
                said = f"the generator of client {job.needs[0].client} failed: {sentence(error)}"
                raise ClientError(said, trace=f"{error}\n") from error
            done += 1
            display.step("generators", done, len(jobs), "trained and sampled")
    display.drop("generators")
    display.say(
        f"{trained} generators trained." if trained else "All generators are in the store: none had to be trained."
    )
    return trained


def _make(here: str, generator: str, job: bytes) -> "synthetic_pool.Made":
    """What a job makes; the module of the generator's class must be there before the job can be unpickled."""
    import torch

    from fedcommons.sharing import synthetic_pool

    os.environ[parts.HERE] = here
    parts.find("generator", generator)
    torch.set_num_threads(1)
    return synthetic_pool.make(pickle.loads(job))


def _run_trials(cells: Sequence[Cell], out: Path, display: Display, scheduler: Any, metric: str) -> dict[str, str]:
    """Run the cells as Tune trials; what stopped each that failed, in one line."""
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Ctrl-C is ours to handle
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the run folders are the record
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # a trial that fails may have measured nothing
    from ray import tune

    from fedcommons.sweeping.progress import Progress

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what stops a trial is said below, in a line

    here = str(parts.base())
    configs = [flat.to_dict(with_absolute_paths(c.config)) for c in cells]
    trials = [
        {"name": c.name, "out": str(out.resolve()), "here": here, "config": config}
        for c, config in zip(cells, configs, strict=True)
    ]
    trainable = tune.with_resources(_trial, _resources(cells[0].config))
    # Tune's own record is not used, as a sweep resumes by its cells' folders, and must not share a full disk with them.
    with TemporaryDirectory(prefix="fedcommons-tune-", ignore_cleanup_errors=True) as state:
        tuner = tune.Tuner(
            trainable,
            param_space={"cell": tune.grid_search(trials)},
            tune_config=tune.TuneConfig(metric=metric, mode="max", scheduler=scheduler, reuse_actors=scheduler is None),
            run_config=tune.RunConfig(
                failure_config=tune.FailureConfig(max_failures=2),  # a trial goes on from its checkpoint
                storage_path=state,
                verbose=0,
                callbacks=[Progress(display, len(cells))],
            ),
        )
        try:
            results = tuner.fit()
        except tune.TuneError as error:  # has only the text of what broke off Tune's own work, such as a closed pipe
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    failures: dict[str, str] = {}
    for result in results:
        name: str = result.config["cell"]["name"]  # pyright: ignore[reportOptionalSubscript]
        left = left_in(out / name) or ""  # names the traceback too; of a run that was refused it may be an old one
        if result.error is not None:
            failures[name] = left or sentence(result.error)
        elif said := (result.metrics or {}).get("failed"):
            failures[name] = left if left.startswith(said) else said
    for c in cells:
        if scheduler is not None and c.name not in failures and read_summary(out / c.name) is None:
            (out / c.name / STOPPED).touch()
    return failures


def with_absolute_paths(config: Experiment) -> Experiment:
    """A trial's working folder is not ours: Tune gives each its own."""
    from fedcommons.data.datasets import data_folder

    folders = {"artifacts": config.artifacts, "data.dir": data_folder(config.data)}
    return flat.override(config, {name: str(Path(folder).resolve()) for name, folder in folders.items()})


def _resources(config_: Experiment):
    """What one trial reserves: itself, or the client actors it has."""
    from ray import tune

    share = cluster.bundle(config_.federation.gpus_per_actor)
    # A trial with actors only waits for them: it reserves no core of its own.
    bundles = [share] if config_.federation.executor == "serial" else [{}] + [share] * config_.federation.actors
    return tune.PlacementGroupFactory(bundles, strategy="PACK")


def _trial(params: Mapping[str, Any]) -> None:
    from ray import tune

    from fedcommons.runs import experiment

    given = params["cell"]
    os.environ[parts.HERE] = given["here"]
    c = flat.from_dict(given["config"])

    folder = Path(given["out"]) / given["name"]
    best, last = 0.0, {}

    def report(number: int, metrics: Mapping[str, float | None]) -> None:
        nonlocal best, last
        best = max(best, metrics["test/accuracy"] or 0.0) if number else best
        last = {"round": number, "best_accuracy": best, **metrics}
        if number < c.federation.rounds:
            tune.report(last)

    def say(text: str) -> None:
        with suppress(OSError), open(folder / "messages.log", "a") as file:  # a full disk stops the run elsewhere
            file.write(text + "\n")

    try:
        if lines := read_rounds(folder):  # Tune is told also of a trial that has no round left to play
            best = max((line["test/accuracy"] for line in lines if line["round"] > 0), default=0.0)
            last = {"best_accuracy": best, **lines[-1]}
        # A trial never trains a generator: it would hold its cores for work that other trials may do too.
        experiment.run(c, folder, resume=True, say=say, on_round=report, may_generate=False)
    except (ClientError, UserError, LookupError) as error:
        # Not raised, as Tune would try again, and the same would happen again.
        last = {**last, "failed": sentence(error)}
    if last:
        tune.report(last)  # only now: a scheduler that stops a trial at its last round must not cost it its summary


def tracked(fields: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """The fields with the sweep's name as W&B group, unless they name one; offline where there is no login."""
    from fedcommons.tracking.wandb_tracker import logged_in

    mode = fields["tracking.wandb"]
    if mode == "online" and not logged_in():
        print("W&B: no login found (set WANDB_API_KEY or run `wandb login`), so the runs are kept offline.")
        mode = "offline"
    return {**fields, "tracking.wandb": mode, "tracking.group": fields["tracking.group"] or out.name}
