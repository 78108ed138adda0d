"""The trials of a sweep in Ray Tune: their resources, their work, and their removal after an interrupted sweep."""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import ray
from ray import tune
from ray.util.placement_group import PlacementGroup

from fedcommons.config import dotted, live_objects, registry
from fedcommons.config.experiment import Experiment
from fedcommons.config.schema import Federation
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.federation import hosts
from fedcommons.runtime import cpu_kind, ray_cluster, tempdirs
from fedcommons.runtime.libraries import import_libraries
from fedcommons.storage import safe_read
from fedcommons.storage.error_file import read_error
from fedcommons.tracking import wandb_tracker
from fedcommons.tracking.remote_run import name_of
from fedcommons.tracking.run_folder import read_rounds
from fedcommons.tune.progress import Progress
from fedcommons.tune.scheduler import (
    DRIVER,
    InOrder,
    MissingArtifact,
    make,
    shared_objects,
    shared_value,
    shared_values,
)
from fedcommons.tune.sweep import Limits

REMOVAL_S = 10.0
"""Seconds to wait until Ray has removed the trials of an interrupted sweep."""


@contextmanager
def tune_environment() -> Iterator[None]:
    """Set Ray Tune's environment variables for a sweep; afterwards the caller's own Tuner has its values again."""
    values = {
        "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the caller of ``run`` handles Ctrl-C
        "RAY_AIR_NEW_OUTPUT": os.environ.get("RAY_AIR_NEW_OUTPUT", "0"),
        # results are in the run folders
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": os.environ.get("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1"),
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial may have no metrics
        # With a single pending trial, Tune would drop the trial's starting actor whenever another actor is free.
        "TUNE_MAX_PENDING_TRIALS_PG": str(max(1, int(ray.cluster_resources().get("CPU", 1)))),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def run(
    cells: Mapping[str, Experiment],
    data: Mapping[str, str],
    lacking: Sequence[MissingArtifact],
    out: Path,
    progress: Progress,
    scheduler: Any,
    limits: Limits,
) -> tuple[dict[str, str], int]:
    """Run the experiments as Tune trials; return the error of each failed trial, and the number of trained generators.

    Args:
        cells: experiments with absolute paths, by trial name, which is the name of the folder in ``out``.
        data: hashes of the experiments' data sets, by trial name.
        lacking: the generators and images that the experiments need and the artifact store lacks.
        progress: the callback that Tune calls with its events.
        scheduler: a Ray Tune scheduler that may stop trials, or None.
        limits: the largest number of parallel trials, and the time at which Tune stops all trials.

    Raises:
        UserError: Ray has no resources for any trial.
        ClientError: no trial could run for a long time, as Ray had no resources for it.
    """
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # errors of trials are reported below, in one line each

    Reservation.places.clear()
    federations = {name: config.federation for name, config in cells.items()}
    first = next(iter(federations.values()))
    pin = ray_cluster.node_labels(first.gpus_per_actor)
    what = "a run of this sweep" + (f" with {first.actors} actors" if first.processes > 1 else "")
    ray_cluster.free(ray_cluster.reserve([ray_cluster.bundle(first.gpus_per_actor)] * first.processes, pin, what))
    wandb = {name: text for name, text in os.environ.items() if name in wandb_tracker.VARIABLES}
    to_all = {"wandb": wandb, "out": str(out.resolve()), "here": str(registry.base()), "cpu": pin.get(cpu_kind.CPU)}
    live = live_objects.packed({name for c in cells.values() for name in c.chosen.values()})
    values = {name: {"config": dotted.to_dict(c), "data": data.get(name), **to_all} for name, c in cells.items()}
    values[DRIVER] = hosts.facts()
    order = InOrder({name: f.processes for name, f in federations.items()}, lacking)
    trainable = tune.with_resources(trial, partial(_resources, federations, pin))
    # An idle actor keeps its resources, so actors are reused only if all trials need the same resources.
    is_reused = scheduler is None and all(f.executor == "serial" for f in federations.values())
    is_reused &= len({str(f.gpus_per_actor) for f in federations.values()}) == 1
    # Tune's record is not used, as a sweep resumes from its trials' folders.
    # The record is written to a temporary folder, so that it does not fill the disk of the trials' folders.
    # W&B writes into ``tempdir``.
    with tune_environment(), tempdirs.folder() as state, tempdirs.tempdir(), shared_values(values, live):
        tuner = tune.Tuner(
            trainable,
            tune_config=tune.TuneConfig(
                scheduler=scheduler,
                search_alg=order,
                num_samples=len(cells) + len(lacking),
                reuse_actors=is_reused,
                max_concurrent_trials=limits.jobs,
                time_budget_s=None if limits.until == math.inf else max(1.0, limits.until - time.monotonic()),
            ),
            run_config=tune.RunConfig(
                failure_config=tune.FailureConfig(max_failures=2),  # a restarted trial continues from its checkpoint
                storage_path=str(state),
                verbose=0,
                callbacks=[progress],
            ),
        )
        try:
            results = tuner.fit()
        except tune.TuneError as error:  # ``__context__`` has the cause, such as a closed pipe
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    for trace in dict.fromkeys(order.traces):  # a generator has no folder for its traceback
        progress.display.say(trace)
    failures = dict(order.failed) | ({"artifacts": order.unsent} if order.unsent else {})
    for result in results:
        params: dict[str, Any] = result.config or {}
        if "cell" not in params:
            continue
        name: str = params["cell"]
        # The run's error file is preferred to ``reason``, as the error file also names the file of the traceback.
        # An error file that does not begin with ``reason`` is from an earlier call of the sweep and is ignored.
        error_text = read_error(out / name) or ""
        if result.error is not None:
            failures[name] = error_text or sentence(result.error)
        elif reason := (result.metrics or {}).get("failed"):
            failures[name] = error_text if error_text.startswith(reason) else reason
    return failures, order.n_trained


class Reservation(tune.PlacementGroupFactory):
    """A factory that creates and records the placement group of a trial, as Tune removes no groups on Ctrl-C.

    places: all placement groups of the last sweep in this process.
    """

    places: ClassVar[list[PlacementGroup]] = []

    def to_placement_group(self) -> PlacementGroup:
        group = super().to_placement_group()
        Reservation.places.append(group)
        return group


def remove_all() -> None:
    """Remove the placement groups of all trials that this process started, which also ends the trials.

    The function waits at most ``REMOVAL_S``: if the same signal has ended Ray's processes, Ray never answers.
    """

    def remove() -> None:
        while Reservation.places:
            ray_cluster.free(Reservation.places.pop())

    removing = Thread(target=remove, daemon=True)
    removing.start()
    removing.join(REMOVAL_S)


def _resources(
    federations: Mapping[str, Federation], pin: Mapping[str, str], params: Mapping[str, Any]
) -> tune.PlacementGroupFactory:
    """Return the resources that a trial reserves, for its process or for its actors, which train the clients.

    A generator's trial gets the resources of the first experiment that needs it. federations: by trial name. pin:
    labels that the nodes must have. params: the trial's parameters.
    """
    f = federations[params["generator"]["cells"][0] if "generator" in params else params["cell"]]
    share = ray_cluster.bundle(f.gpus_per_actor)
    # If a trial has actors, its process only waits for the actors, so no core is reserved for the process.
    alone = f.executor == "serial" or "generator" in params
    bundles = [share] if alone else [{}] + [share] * f.actors
    selectors = [dict(pin) for bundle in bundles if bundle]
    return Reservation(bundles, strategy="PACK", bundle_label_selector=selectors)


def trial(params: Mapping[str, Any]) -> None:
    """Run the experiment or train the generator that ``params`` names, in a process of Ray.

    ``params`` has only names, as Tune records it. The configs come from ``shared_value``.
    """
    try:
        cpu_kind.require_this_kind()
        hosts.require_same(shared_value(DRIVER))
    except UserError as error:
        tune.report({"failed": sentence(error)})
        return
    generator = params.get("generator")
    cells = [shared_value(name) for name in (generator["cells"] if generator else [params["cell"]])]
    registry.work_in(cells[0]["here"])
    live_objects.objects.update(shared_objects())
    os.environ.update(cells[0]["wandb"])
    for variable in wandb_tracker.NAMES_OF_ONE_RUN:
        os.environ.pop(variable, None)
    import_libraries(with_wandb=generator is None and cells[0]["config"]["tracking"]["wandb"] != "off")
    from fedcommons.runs import experiment
    from fedcommons.runtime.gpu_memory import is_lost, limit_memory

    if kind := cells[0]["cpu"]:  # set again, as Ray's processes do not get the driver's environment variables
        os.environ[cpu_kind.CHOICE] = kind
    if generator:
        make(cells, generator["images"])
        return
    c = dotted.from_dict(cells[0]["config"])
    folder = Path(cells[0]["out"]) / params["cell"]
    last: dict[str, Any] = {}

    def report(number: int, metrics: Mapping[str, float | None]) -> None:
        nonlocal last
        last = {**last, "round": number, **metrics}  # a round without evaluation keeps the last evaluation's metrics
        if number < c.federation.rounds:
            tune.report(last)

    def say(text: str) -> None:
        with suppress(OSError):  # a full disk is reported by the run itself
            safe_read.write_alone(folder / "messages.log", text + "\n")

    try:
        if c.federation.executor == "serial" and ray.get_gpu_ids():
            limit_memory(ray_cluster.gpu_share(c.federation.gpus_per_actor))
        if lines := read_rounds(folder):  # so that a trial without remaining rounds also reports to Tune
            last = {name: value for line in lines for name, value in line.items()}
        # ``may_generate`` is False, as separate trials of the sweep have trained the generators before this trial.
        name = name_of(folder.parent, folder, chosen=c.storage_name)
        experiment.run(
            c, folder, resume=True, say=say, on_round=report, may_generate=False, mirrored_as=name,
            data=cells[0]["data"],
        )  # fmt: skip
    except (ClientError, UserError, LookupError) as error:
        if is_lost():  # raised, so that Tune starts a new process, which can use the GPU again
            raise
        # The error is reported, not raised, as Tune would run the trial again and the error would repeat.
        last = {**last, "failed": sentence(error)}
    if last:
        tune.report(last)  # the last statement, as a scheduler may stop a trial at its report
