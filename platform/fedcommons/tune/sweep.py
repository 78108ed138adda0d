"""Sweeps: run many experiments as trials of Ray Tune, and train each generator that they need once."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli.display import Display
from fedcommons.config import dotted, registry
from fedcommons.config.experiment import Experiment
from fedcommons.core.rejections import rejection_summary
from fedcommons.errors import FEW as FEW_NAMES
from fedcommons.errors import ClientError, UserError, Warned, sentence
from fedcommons.runtime import ray_cluster
from fedcommons.storage import object_store
from fedcommons.storage.artifact_store import Store, key_of
from fedcommons.tracking.environment import has_other_code
from fedcommons.tracking.run_folder import STOPPED, is_run, read_config, read_summary, require_same_data
from fedcommons.tune.continue_runs import copy, predecessors
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep_folder import LATE_S, has_come, holds_runs, open_folder, require_shared, write_plan

if TYPE_CHECKING:  # torch and Ray take seconds to import, and --help needs neither
    from fedcommons.tune.scheduler import MissingArtifact


MOST, MAX_LISTED, FEW = 10_000, 1_000, 16
"""``MOST``: largest number of trials in a sweep. ``MAX_LISTED``: largest number of trials that a dry run lists.
``FEW``: number of trials whose time a dry run measures if there are more than ``MAX_LISTED`` trials."""


def require_few(n: int) -> None:
    """Refuse a sweep of too many trials, before any trial is created.

    Raises:
        UserError: there are more than ``MOST`` trials.
    """
    if n > MOST:
        raise UserError(f"a sweep has at most {MOST:,} cells, and these values make {n:,}: give fewer values.")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep; ``name``: the name of its subfolder in the sweep's folder."""

    name: str
    config: Experiment

    @property
    def rounds(self) -> int:
        return self.config.federation.rounds

    @property
    def processes(self) -> int:
        return self.config.federation.processes

    @property
    def storage(self) -> tuple[str | None, str | None]:
        return self.config.storage, self.config.storage_name

    @property
    def seed(self) -> int:
        return self.config.seed


@dataclass(frozen=True)
class Outcome:
    """The outcome of a sweep.

    seconds: duration of each phase, by name; phases overlap. failures: error message by the name of the failed trial.
    """

    seconds: Mapping[str, float]
    generators_trained: int
    failures: Mapping[str, str]


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the sum of the outcomes of several batches of a sweep, which ran one after another."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.seconds)
    return Outcome(
        {name: sum(outcome.seconds.get(name, 0) for outcome in outcomes) for name in names},
        sum(outcome.generators_trained for outcome in outcomes),
        {name: message for outcome in outcomes for name, message in outcome.failures.items()},
    )


def cell(config: Experiment, varied: Mapping[str, str]) -> Trial:
    """Return the trial of an experiment, named after some fields and a hash of all fields that decide the result.

    varied: field -> short label in the trial's name.
    """
    fields = config.flat
    chosen = [registry.label(config.algorithm), registry.label(config.sharing.setting)]
    labels = [f"{label}{_short(fields[name])}" for name, label in varied.items() if name in fields]
    return Trial("-".join([*chosen, *labels, key_of(dotted.deciding(config))[:6]]), config)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("/", "_")


def is_done(cell: Trial, out: Path) -> bool:
    """Check whether the trial's folder holds a run of its experiment that is finished or was stopped by a scheduler."""
    folder = out / cell.name
    ended = read_summary(folder) is not None or (is_run(folder) and (folder / STOPPED).exists())
    return ended and not dotted.same_results(read_config(folder), cell.config)


@dataclass(frozen=True)
class Limits:
    """Limits of a sweep. jobs: maximum number of parallel trials, or None. until: end, by ``time.monotonic``."""

    jobs: int | None = None
    until: float = math.inf

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until


@dataclass(frozen=True)
class Todo:
    """The remaining work of a sweep: the unfinished trials, and the generators and images that the stores lack."""

    n_cells: int  # number of trials of the whole sweep
    trials: Sequence[Trial]  # the unfinished trials
    missing: "Sequence[MissingArtifact]"
    shorter: Mapping[str, Path] = field(default_factory=dict)  # new trial -> folder of the run that it continues
    data: Mapping[str, str] = field(default_factory=dict)  # trial name -> hash of the trial's data set
    limits: Limits = Limits()


def todo(cells: Sequence[Trial], out: Path, display: Display) -> Todo:
    """Check every unfinished trial, load its data, and return the remaining work of the sweep.

    Raises:
        UserError: a trial cannot be run. Nothing has been run or written in this case.
    """
    display.load_libraries()
    from fedcommons.generators.image_cache import missing
    from fedcommons.runs.build import build, data_fields, split_seed
    from fedcommons.runs.continuation import may_continue
    from fedcommons.tune.scheduler import MissingArtifact

    remaining = [c for c in cells if not is_done(c, out)]
    if others := [c.name for c in cells if has_other_code(out / c.name)]:
        listed = ", ".join(others[:FEW_NAMES]) + (" ..." if len(others) > FEW_NAMES else "")
        computed = (
            f"{len(others)} of {len(cells)} runs in {out} were computed, at least in part, with other source files"
        )
        display.say(Warned(f"{computed} than the present ones, and all runs are in one table: {listed}."))
    shorter = predecessors(out, [(c.name, c.config) for c in remaining])
    digests, data, notes = {}, {}, {}
    stores: dict[tuple[str, str | None], Store] = {}
    users: dict[tuple[Store, str], list[str]] = {}  # (store, key of images) -> names of the trials that need them
    lacking: dict[tuple[Store, str], tuple[int, list[str]]] = {}  # (store, key of training) -> client, keys of images
    groups: dict[str, list[Trial]] = {}  # trials with equal data, which are partitioned once
    for c in remaining:
        groups.setdefault(data_fields(c.config), []).append(c)
    for group in groups.values():
        ready, needed = None, dict[tuple, list[tuple[Store, str]]]()
        for c in group:
            ready = build(c.config, ready)
            notes |= dict.fromkeys(ready.notes)
            if c.name in shorter and not may_continue(ready, shorter[c.name]):
                del shorter[c.name]
            data[c.name] = digests[repr(c.config.data), c.config.source.get("data"), split_seed(c.config)] = (
                ready.dataset.digest
            )
            of_images = dotted.values_of(c.config, ("artifacts", "storage", "sharing.", "generator.", "dp."))
            if of_images not in needed:
                place, requests = (c.config.artifacts, c.config.storage), ready.requests
                store = stores.setdefault(place, Store(Path(place[0]), display.say, place[1]))
                wanted = {(store, need.images_key): need for need in requests}
                for job in missing(store, [need for key, need in wanted.items() if key not in users]):
                    first, keys = job.requests[0], [need.images_key for need in job.requests]
                    lacking.setdefault((store, key_of(first.course_facts)), (first.client, []))[1].extend(keys)
                needed[of_images] = list(wanted)
            for key in needed[of_images]:
                users.setdefault(key, []).append(c.name)
    for note in notes:
        display.say(note)
    for c in cells:  # all runs of a table must use the same data, also finished runs
        if digest := digests.get((repr(c.config.data), c.config.source.get("data"), split_seed(c.config))):
            require_same_data(out / c.name, c.config.data.name, digest)
    for store in stores.values():
        store.upload()  # so that trials on other machines find the artifacts in the storage
    missing_artifacts = []
    for (store, _), (client, images) in lacking.items():
        store.require_writable()
        names = dict.fromkeys(name for key in images for name in users[store, key])
        described_by = dict.fromkeys(users[store, key][0] for key in images)
        missing_artifacts.append(MissingArtifact(client, images, names, list(described_by)))
    return Todo(len(cells), remaining, missing_artifacts, shorter, data)


@contextmanager
def open_sweep(out: Path, resume: bool, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Create the sweep's folder and lock it while the context is open; say if there is no run to resume.

    Raises:
        UserError: the folder cannot be written, another process has locked it, or it has files that belong to no sweep.
            The error is also raised if the folder holds a sweep and ``resume`` is False.
    """
    with open_folder(out):
        if holds_runs(out) and not resume:
            raise UserError(f"--out: {out} holds a sweep already; add --resume to continue it or name another folder.")
        if resume and not holds_runs(out):
            say(f"Nothing to resume in {out}: the sweep starts from the beginning.")
        yield


def run_cells(
    todo: Todo, out: Path, display: Display, *, scheduler: Any = None, on_end: Callable[[], None] = lambda: None
) -> Outcome:
    """Run every unfinished trial in the folder ``out/NAME``; after a failed trial the sweep continues.

    At the time ``todo.limits.until`` all running trials are stopped; a resumed sweep continues them.

    Trials start in their order, each after its generators are trained. The caller must have opened ``out`` by
    ``open_sweep``. scheduler: a Ray Tune scheduler, which gets the metrics of every round and may stop trials; None: no
    trial is stopped. on_end: called after each trial.
    """
    if len(todo.trials) < todo.n_cells:
        display.say(f"{todo.n_cells - len(todo.trials)} of {todo.n_cells} cells are done already.")
    for name, run in todo.shorter.items():
        display.say(f"{name} continues a copy of {run.name}, which has fewer rounds.")
        copy(run, out / name)
    started = time.perf_counter()
    failures: dict[str, str] = {}
    mirror = SweepMirror(todo.trials, out, display.say)
    trained, ready, ended = 0, started, set[str]()
    if todo.trials and not todo.limits.is_over:
        rounds = {c.name: c.rounds for c in todo.trials}
        display.say("Starting Ray ...")
        ray_cluster.connect()
        import ray

        from fedcommons.tune import trials
        from fedcommons.tune.gpu_share import with_share
        from fedcommons.tune.progress import Progress

        pin = ray_cluster.node_labels(todo.trials[0].config.federation.gpus_per_actor)
        configs = [c.config for c in todo.trials]
        artifacts = [config.artifacts for config in configs if config.storage is None and config.generator]
        online = any(config.tracking.wandb == "online" for config in configs)
        storages = [config.storage for config in configs]
        for note in require_shared(pin, storages, artifacts, out, bool(todo.missing), online):
            display.say(note)
        at_once = max(sum(config.federation.processes for config in configs), len(todo.missing))
        at_once = min(at_once, int(ray.cluster_resources().get("CPU", 1)), todo.limits.jobs or at_once)
        configs = with_share(configs, at_once)
        federations = list(dict.fromkeys(config.federation for config in configs))
        for f in federations:
            ray_cluster.require_actors(f.processes, f.gpus_per_actor)
        write_plan(out, rounds)
        display.say(f"{len(todo.trials)} cells to run on {ray_cluster.describe(federations[0].gpus_per_actor)}.")
        if todo.missing:
            settings = ", ".join(dict.fromkeys(config.sharing.setting for config in configs if config.generator))
            display.say(f"{len(todo.missing)} generators are trained first, for sharing.setting {settings}.")
        elif any(config.generator for config in configs):
            display.say("All generators are in the store: none had to be trained.")
        progress = Progress(display, rounds, len(todo.missing), on_end, fetch=mirror.fetch)
        absolute = {c.name: with_absolute_paths(config) for c, config in zip(todo.trials, configs, strict=True)}
        failures, trained = trials.run(absolute, todo.data, todo.missing, out, progress, scheduler, todo.limits)
        ready, ended = max(progress.ready, started), progress.ended
    ended |= failures.keys() if todo.limits.is_over else {c.name for c in todo.trials}
    if unended := sum(c.name not in ended for c in todo.trials):
        display.say(Warned(f"The time budget is over: {unended} of {todo.n_cells} runs go on with --resume."))
    deadline = time.monotonic() + LATE_S
    for c in (c for c in todo.trials if c.name in ended):
        try:
            mirror.fetch(c.name)
            if c.name not in failures and not has_come(out / c.name, scheduler is not None, deadline):
                raise ClientError(
                    f"another host finished this run, and its results are not in {out}: let all hosts share --out."
                )
            if scheduler is not None and c.name not in failures and read_summary(out / c.name) is None:
                (out / c.name / STOPPED).touch()
                mirror.upload(c.name)
        except (UserError, ClientError, OSError) as error:
            failures.setdefault(c.name, sentence(error))
        if (summary := read_summary(out / c.name)) and summary.get("rejected"):
            display.say(
                f"{c.name}: {rejection_summary(summary['rejected'])}, see rejected in {out / c.name / 'summary.json'}"
            )
    return Outcome({"generators": ready - started, "cells": time.perf_counter() - started}, trained, failures)


def with_absolute_paths(config: Experiment) -> Experiment:
    """Return the config with absolute paths, as Ray Tune gives each trial a separate working folder."""
    from fedcommons.data.datasets import data_folder

    folders = {"artifacts": config.artifacts, "data.dir": data_folder(config.data.dir)}
    if config.storage is not None and not object_store.is_url(config.storage):
        folders["storage"] = config.storage
    absolute = {name: str(Path(folder).resolve()) for name, folder in folders.items()}
    return replace(config, data=replace(config.data, dir=absolute.pop("data.dir")), **absolute)


def tracked(fields: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Return the fields with W&B options for a sweep: its name as default group, offline without a valid login."""
    from fedcommons.tracking.wandb_tracker import flaw_of_login, wandb_mode

    mode = wandb_mode(fields["tracking.wandb"])
    if mode == "online" and (flaw := flaw_of_login()[0]):
        print(f"W&B: {flaw}, so the runs are kept offline; `fedcommons wandb` can send them later.")
        mode = "offline"
    group = fields["tracking.group"] or os.environ.get("WANDB_RUN_GROUP") or out.name
    return {**fields, "tracking.wandb": mode, "tracking.group": group}
