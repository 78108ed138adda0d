"""Many experiments at once, as Ray Tune trials; so are the generators that they need, each trained once."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.artifacts import Store, key_of
from fedcommons.config import flat, parts
from fedcommons.config.experiment import Experiment
from fedcommons.config.sections import Federation
from fedcommons.errors import ClientError, UserError, left_in, sentence
from fedcommons.federation import cluster, kinds, scratch
from fedcommons.federation.rejections import told
from fedcommons.files import remote, stored
from fedcommons.sweeping import handed
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.folders import holds_runs, open_folder
from fedcommons.sweeping.predecessors import copy, predecessors
from fedcommons.sweeping.sweep_mirror import SweepMirror
from fedcommons.tracking.run_folder import (
    STOPPED,
    is_run,
    read_config,
    read_rounds,
    read_summary,
    require_same_data,
)
from fedcommons.tracking.run_mirror import name_of

if TYPE_CHECKING:  # torch and Ray take seconds to import, and --help needs neither
    from fedcommons.sweeping.order import Lacking
    from fedcommons.sweeping.progress import Progress


MOST, TOLD, FEW = 10_000, 1_000, 16
"""Cells of a sweep, at most; cells that a dry run tells one by one; cells that it times where there are more."""


def require_few(n: int) -> None:
    """Refuse a sweep of too many cells, before any of them is put together.

    Raises:
        UserError: there are more than ``MOST``.
    """
    if n > MOST:
        raise UserError(f"a sweep has at most {MOST:,} cells, and these lists make {n:,}: give fewer values.")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep; ``name`` is its folder in the sweep's."""

    name: str
    config: Experiment


@dataclass(frozen=True)
class Outcome:
    """How a sweep went: seconds of its parts, which overlap, how many generators it trained, and who failed."""

    seconds: Mapping[str, float]
    generators_trained: int
    failures: Mapping[str, str]


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """How several batches of a sweep went, one after another."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.seconds)
    return Outcome(
        {name: sum(outcome.seconds.get(name, 0) for outcome in outcomes) for name in names},
        sum(outcome.generators_trained for outcome in outcomes),
        {name: said for outcome in outcomes for name, said in outcome.failures.items()},
    )


def cell(config: Experiment, varied: Mapping[str, str]) -> Trial:
    """A cell named after some fields (name to label) and a hash of all that decides its result."""
    fields = config.flat
    chosen = [parts.label(config.algorithm), parts.label(config.sharing.setting)]
    labels = [f"{label}{_short(fields[name])}" for name, label in varied.items() if name in fields]
    return Trial("-".join([*chosen, *labels, key_of(flat.deciding(config))[:6]]), config)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("/", "_")


def is_done(cell: Trial, out: Path) -> bool:
    """Whether the cell's folder holds its finished run, or one that a scheduler stopped."""
    folder = out / cell.name
    ended = read_summary(folder) is not None or (is_run(folder) and (folder / STOPPED).exists())
    return ended and not flat.same_results(read_config(folder), cell.config)


@dataclass(frozen=True)
class Todo:
    """What is left to do of a sweep: its cells that are not done, prepared, and what the stores of artifacts lack."""

    n_cells: int  # of the whole sweep
    cells: Sequence[Trial]
    lacking: "Sequence[Lacking]"
    shorter: Mapping[str, Path] = field(default_factory=dict)  # of a cell that is new: a run that it goes on from


def todo(cells: Sequence[Trial], out: Path, display: Display) -> Todo:
    """What is left to do of these cells.

    Raises:
        UserError: something that cannot be met: it is refused before any work and before anything is written.
    """
    display.say("Loading torch and the data ...")
    from fedcommons.runs.build import prepare
    from fedcommons.runs.extended import may_continue
    from fedcommons.sharing.synthetic_pool import missing
    from fedcommons.sweeping.order import Lacking

    left = [c for c in cells if not is_done(c, out)]
    shorter = predecessors(out, [(c.name, c.config) for c in left])
    wanted, digests, notes = [], {}, {}
    for c in left:
        ready = prepare(c.config)
        notes |= dict.fromkeys(ready.notes)
        if c.name in shorter and not may_continue(ready, shorter[c.name]):
            del shorter[c.name]
        wanted += [(c, need) for need in ready.needs]
        digests[c.config.data, c.config.source.get("data")] = ready.dataset.digest
    for note in notes:
        display.say(note)
    for c in cells:  # those that are done too: the runs of a table are on the same data
        if digest := digests.get((c.config.data, c.config.source.get("data"))):
            require_same_data(out / c.name, c.config.data.name, digest)
    users: dict[str, list[str]] = {}
    for c, need in wanted:
        users.setdefault(key_of(need.images_facts), []).append(c.name)
    lacking = []
    for folder, storage in dict.fromkeys((c.config.artifacts, c.config.storage) for c, _ in wanted):
        store = Store(Path(folder), display.say, storage)
        of_store = [need for c, need in wanted if (c.config.artifacts, c.config.storage) == (folder, storage)]
        jobs = missing(store, of_store)
        store.send()  # trials on other machines find them there
        if jobs:
            store.require_writable()
        for job in jobs:
            images = [key_of(need.images_facts) for need in job.needs]
            names = dict.fromkeys(name for key in images for name in users[key])
            told_by = dict.fromkeys(users[key][0] for key in images)
            lacking.append(Lacking(job.needs[0].client, images, list(names), list(told_by)))
    return Todo(len(cells), left, lacking, shorter)


@contextmanager
def open_sweep(out: Path, resume: bool, say: Callable[[str], None] = print) -> Iterator[None]:
    """Make the sweep's folder and hold it, until its tables are written; ``say`` is told if there is none to resume.

    Raises:
        UserError: it cannot be written, another process holds it, it has what no sweep wrote, or it holds a sweep and
            ``resume`` was not asked for.
    """
    with open_folder(out):
        if holds_runs(out) and not resume:
            raise UserError(f"--out: {out} holds a sweep already; add --resume to continue it or name another folder.")
        if resume and not holds_runs(out):
            say(f"{out} holds no run to resume: the sweep starts from its beginning.")
        yield


def run_cells(
    left: Todo, out: Path, display: Display, *, scheduler: Any = None, on_end: Callable[[], None] = lambda: None
) -> Outcome:
    """Run every cell that is left, each in ``out/NAME``; a cell that fails does not take the others with it.

    They start in their order, each when it has its generators. ``out`` must be open; ``scheduler``: a Ray Tune
    scheduler with its metric, told those of every round; ``on_end`` is called whenever a cell has ended.
    """
    if len(left.cells) < left.n_cells:
        display.say(f"{left.n_cells - len(left.cells)} of {left.n_cells} cells are done already.")
    for name, run in left.shorter.items():
        display.say(f"{name} goes on from a copy of {run.name}, which has fewer rounds.")
        copy(run, out / name)
    started = time.perf_counter()
    failures: dict[str, str] = {}
    mirror = SweepMirror(left.cells, out, display.say)
    trained, ready = 0, started
    if left.cells:
        display.say("Starting Ray ...")
        cluster.connect()
        left = _sharing_gpus(left)
        f = left.cells[0].config.federation
        cluster.require_actors(f.processes, f.gpus_per_actor)
        display.say(f"{len(left.cells)} cells to run on {cluster.describe(f.gpus_per_actor)}.")
        if left.lacking:
            settings = ", ".join(dict.fromkeys(c.config.sharing.setting for c in left.cells if c.config.generator))
            display.say(f"{len(left.lacking)} generators are trained first, for setting {settings}; real needs none.")
        if not left.lacking and any(c.config.generator for c in left.cells):
            display.say("All generators are in the store: none had to be trained.")
        from fedcommons.sweeping.progress import Progress

        rounds = {c.name: c.config.federation.rounds for c in left.cells}
        progress = Progress(display, rounds, len(left.lacking), on_end, bring=mirror.bring)
        failures, trained = _run_trials(left, out, progress, scheduler)
        ready = max(progress.ready, started)
    for c in left.cells:
        try:
            mirror.bring(c.name)
            if scheduler is not None and c.name not in failures and read_summary(out / c.name) is None:
                (out / c.name / STOPPED).touch()
                mirror.send(c.name)
        except (UserError, ClientError, OSError) as error:
            failures.setdefault(c.name, sentence(error))
        if (summary := read_summary(out / c.name)) and summary.get("rejected"):
            display.say(f"{c.name}: {told(summary['rejected'])}, see rejected in {out / c.name / 'summary.json'}")
    return Outcome({"generators": ready - started, "cells": time.perf_counter() - started}, trained, failures)


def _sharing_gpus(left: Todo) -> Todo:
    """The same cells, so many of which share a GPU at a time as there are cores, where they leave that to us."""
    import ray

    from fedcommons.runs.gpu_need import with_share

    configs = with_share([c.config for c in left.cells], int(ray.cluster_resources().get("CPU", 1)))
    return replace(left, cells=[replace(c, config=config) for c, config in zip(left.cells, configs, strict=True)])


def _run_trials(left: Todo, out: Path, progress: "Progress", scheduler: Any) -> tuple[dict[str, str], int]:
    """Run the cells as Tune trials; what stopped each that failed, in a line, and how many generators were trained."""
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Ctrl-C is ours to handle
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the run folders are the record
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"  # a trial that fails may have measured nothing
    import ray
    from ray import tune

    from fedcommons.sweeping.order import InOrder

    # as many may wait as there are cores: with one, the actor that starts for it is given up whenever another is free
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, int(ray.cluster_resources().get("CPU", 1))))
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what stops a trial is said below, in a line

    cells = left.cells
    f = cells[0].config.federation
    pin = cluster.pinned(f.gpus_per_actor)
    to_all = {"out": str(out.resolve()), "here": str(parts.base()), "cpu": pin.get(kinds.CPU)}
    configs = {c.name: {"config": flat.to_dict(with_absolute_paths(c.config)), **to_all} for c in cells}
    serial = f.executor == "serial"
    order = InOrder(list(configs), left.lacking, 1 if serial else f.actors)
    trainable = tune.with_resources(_trial, partial(_resources, f, pin))
    # Tune's own record is not used, as a sweep resumes by its cells' folders, and must not share a full disk with them.
    with scratch.folder() as state, scratch.tempdir(), handed.by_name(configs):  # Tune imports W&B
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                scheduler=scheduler,
                search_alg=order,
                num_samples=len(cells) + len(left.lacking),
                reuse_actors=scheduler is None and serial,  # an idle one keeps its place: only where all need the same
            ),
            run_config=tune.RunConfig(
                failure_config=tune.FailureConfig(max_failures=2),  # a trial goes on from its checkpoint
                storage_path=str(state),
                verbose=0,
                callbacks=[progress],
            ),
        )
        try:
            results = tuner.fit()
        except tune.TuneError as error:  # has only the text of what broke off Tune's own work, such as a closed pipe
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    for trace in dict.fromkeys(order.traces):  # a cell's own is in its folder; a generator has none
        progress.display.say(trace)
    failures = dict(order.failed) | ({"artifacts": order.unsent} if order.unsent else {})
    for result in results:
        given: dict[str, Any] = result.config or {}
        if "cell" not in given:
            continue
        name: str = given["cell"]
        # names the traceback too; of a run that was refused it may be an old one
        told_there = left_in(out / name) or ""
        if result.error is not None:
            failures[name] = told_there or sentence(result.error)
        elif said := (result.metrics or {}).get("failed"):
            failures[name] = told_there if told_there.startswith(said) else said
    return failures, order.trained


def with_absolute_paths(config: Experiment) -> Experiment:
    """A trial's working folder is not ours: Tune gives each its own."""
    from fedcommons.data.datasets import data_folder

    folders = {"artifacts": config.artifacts, "data.dir": data_folder(config.data.dir)}
    if config.storage is not None and not remote.is_url(config.storage):
        folders["storage"] = config.storage
    found = flat.override(config, {name: str(Path(folder).resolve()) for name, folder in folders.items()})
    return replace(found, source=config.source)  # what the cell is named after, though a file may have changed since


def _resources(f: Federation, pin: Mapping[str, str], params: Mapping[str, Any]):
    """What one trial reserves on nodes with these labels: itself, or the client actors it has."""
    from ray import tune

    share = cluster.bundle(f.gpus_per_actor)
    # A trial with actors only waits for them: it reserves no core of its own.
    alone = f.executor == "serial" or "generator" in params
    bundles = [share] if alone else [{}] + [share] * f.actors
    selectors = [dict(pin) for bundle in bundles if bundle]
    return tune.PlacementGroupFactory(bundles, strategy="PACK", bundle_label_selector=selectors)


def _trial(params: Mapping[str, Any]) -> None:
    """One cell, or one generator, which ``params`` name: Tune writes them down."""
    import ray
    from ray import tune

    from fedcommons.core.gpu_memory import bound, is_lost

    asked = params.get("generator")
    cells = [handed.value(name) for name in (asked["cells"] if asked else [params["cell"]])]
    os.environ[parts.HERE] = cells[0]["here"]
    if kind := cells[0]["cpu"]:  # a node's processes do not have their driver's variables
        os.environ[kinds.CHOICE] = kind
    if asked:
        from fedcommons.sweeping.order import make

        kinds.require_true()
        make([cell["config"] for cell in cells], asked["images"])
        return
    from fedcommons.runs import experiment

    c = flat.from_dict(cells[0]["config"])
    folder = Path(cells[0]["out"]) / params["cell"]
    last: dict[str, Any] = {}

    def report(number: int, metrics: Mapping[str, float | None]) -> None:
        nonlocal last
        last = {**last, "round": number, **metrics}  # where few rounds are evaluated, a scheduler sees the last of them
        if number < c.federation.rounds:
            tune.report(last)

    def say(text: str) -> None:
        with suppress(OSError):  # a full disk stops the run elsewhere
            stored.write_alone(folder / "messages.log", text + "\n")

    try:
        kinds.require_true()
        if c.federation.executor == "serial" and ray.get_gpu_ids():
            bound(cluster.gpu_share(c.federation.gpus_per_actor))
        if lines := read_rounds(folder):  # Tune is told also of a trial that has no round left to play
            last = {name: value for line in lines for name, value in line.items()}
        # A trial never trains a generator: it would hold its cores for work that other trials may do too.
        name = name_of(folder.parent, folder)
        experiment.run(c, folder, resume=True, say=say, on_round=report, may_generate=False, mirrored_as=name)
    except (ClientError, UserError, LookupError) as error:
        if is_lost():  # the next cell needs another process, which Tune starts after an error
            raise
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
