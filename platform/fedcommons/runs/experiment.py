"""Run one experiment as in section 4 of the Fedssyn paper: partition, sharing, federated rounds, evaluation."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedcommons.config.experiment import Experiment
from fedcommons.config.target import NotLogged
from fedcommons.core.worker import fresh_torch
from fedcommons.errors import ClientError, Warned
from fedcommons.generators import image_cache
from fedcommons.runs import continuation, load_data, run_salts
from fedcommons.runs.assemble import OnStep, assemble_own
from fedcommons.runs.build import build, changed_sources, own_options, with_gpus
from fedcommons.runs.build_callbacks import OnRound, callbacks_of
from fedcommons.runs.federate import conclude, federate, resume_or_begin
from fedcommons.runs.notes import say_before_rounds
from fedcommons.runs.spec import RunSpec
from fedcommons.storage.artifact_store import Store
from fedcommons.storage.error_file import leaving_errors
from fedcommons.tracking.environment import has_other_code
from fedcommons.tracking.remote_run import COPY, RunMirror, name_of
from fedcommons.tracking.run_folder import RunFolder, is_run, open_run, read_finished, read_rounds

PATIENCE = 60
"""Seconds that a trial waits for its run folder's lock, as a killed sweep's trials hold locks for some more seconds."""


@fresh_torch()
def run(
    config: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = print,
    on_round: OnRound | None = None,
    on_step: OnStep | None = None,
    may_generate: bool = True,
    mirrored_as: str | None = None,
    data: str | None = None,
    with_share: Callable[[Sequence[Experiment], int], list[Experiment]] | None = None,
) -> dict[str, Any]:
    """Run the experiment in ``folder`` and return its summary, which is also ``folder/summary.json``.

    Rounds are counted from 1 and evaluated after aggregation; round 0 is the untrained model. With ``resume``, an
    interrupted run continues from its last checkpoint and ends as if it had not been interrupted. A finished run is
    only read. A run that was planned with another number of rounds continues with the new number (see
    ``continuation``). The error that stops a run is written to ``folder/error.txt``. If a client fails, the last
    finished round is also saved as a checkpoint. If the target or the stopping rule names a metric that is never
    logged, the folder is removed, unless the noise is secret.

    Args:
        say: called with each message to the user.
        on_round: called after each round with its number and metrics.
        on_step: called with the progress of a generator while it is trained or sampled.
        may_generate: train the generators that the store lacks; if False, a missing generator is a ``LookupError``.
        mirrored_as: the run's name in the storage, if the config has a storage; default: its
            storage_name. A failed upload to the storage is an error only when the run has ended.
        data: the hash that the data set must have; None: any data set is accepted.
        with_share: called with (experiments, number of processes); replaces ``gpus_per_actor auto`` in the experiments
            by a share of a GPU; see ``tune.gpu_share``.
    """
    for message in continuation.never(config.source, config.chosen, folder):
        say(Warned(message))
    spec = build(config)
    load_data.require_same(spec.dataset, data)
    data, patience, mirror = spec.dataset.digest, 0 if may_generate else PATIENCE, None
    if spec.storage is not None:
        mirror = RunMirror(spec.storage, mirrored_as or name_of(folder, chosen=spec.storage_name), folder, say)
        mirror.fetch(resume, patience)
    if resume and (finished := read_finished(folder, config, data)):
        say(f"{folder} holds this run, which is finished: there is nothing to do.")
        if mirror:
            mirror.end()
        return finished
    if resume:
        continuation.require_same_rounds(spec, folder)
    store = Store(spec.artifacts, say, spec.storage)
    if jobs := image_cache.missing(store, spec.requests) if may_generate else []:
        store.require_writable()
    if spec.actors:
        from fedcommons.runtime import ray_cluster

        ray_cluster.connect()
        if with_share is not None:
            spec = with_gpus(spec, *with_share([config], spec.actors))
        ray_cluster.require_actors(spec.actors, spec.gpus_per_actor)
    begins = not is_run(folder)
    if resume and has_other_code(folder):
        say(Warned(f"{folder} was begun with other source files than the present ones; its finished rounds are kept."))
    with open_run(folder, spec.record, resume, say, patience, data) as record:
        shutil.rmtree(folder / COPY, ignore_errors=True)  # a killed process may have left it
        try:
            summary = _run(spec, store, jobs, record, mirror, resume, say, on_round, on_step)
        except NotLogged:
            if begins and not spec.is_secret:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except ClientError:
            if mirror and not mirror.has_lost:
                mirror.upload()
            raise
        if mirror:
            mirror.end(store.upload() if may_generate else "")
        if changed := changed_sources(config):
            say(Warned(f"{changed} This run used the code from before the change; restore that code to resume."))
        return summary


def _run(
    spec: RunSpec,
    store: Store,
    jobs: Sequence[image_cache.Job],
    record: RunFolder,
    mirror: RunMirror | None,
    resume: bool,
    say: Callable[[str], None],
    on_round: OnRound | None,
    on_step: OnStep | None,
) -> dict[str, Any]:
    folder = record.path
    with leaving_errors(folder, own_options(spec.record)):
        salt = run_salts.begin_salt(folder, spec.salts) if spec.is_secret else b""
        numbers = (spec.dataset.digest, salt, spec.new_clients, spec.plan.attack)
        load_data.write_partition(folder, spec.partition, spec.tests, *numbers)
        for note in spec.notes_for_user:
            say(note)
        ready = assemble_own(spec, store, jobs, say, on_step).keyed(salt)
        say_before_rounds(ready, folder, say)
        executor = ready.executor(salt)
        callbacks, summary = [], None
        try:
            start = resume_or_begin(ready, record, resume, salt, say)
            callbacks += callbacks_of(ready, executor, record, mirror, on_round, say)
            end = federate(ready, executor, start, read_rounds(folder), callbacks)
            summary = conclude(ready, record, end, say)
            return summary
        finally:
            with ExitStack() as ends:  # each is called, also after an error of another
                for callback in reversed(callbacks):
                    ends.callback(callback.on_end, summary)
                ends.callback(executor.close)  # first, as the last that was added
