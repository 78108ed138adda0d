"""Run one experiment as in section 4 of the Fedssyn paper: partition, sharing, federated rounds, evaluation."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fedcommons.config.dotted import parts_of_own
from fedcommons.config.experiment import Experiment
from fedcommons.config.target import NotLogged
from fedcommons.core.algorithm import Algorithm, State
from fedcommons.core.client_worker import Work, module_with
from fedcommons.core.executor import Executor
from fedcommons.core.rejections import rejection_summary
from fedcommons.core.vmap_clients import request_training
from fedcommons.core.worker import default_device, fresh_torch
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.partition import Partitioned
from fedcommons.errors import ClientError, Warned
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.generators import image_cache
from fedcommons.privacy import salts
from fedcommons.privacy.ledger import Ledger, require_small_delta
from fedcommons.privacy.salts import IF_SECRET, SECRET
from fedcommons.runs import continuation, evaluate, load_data, model_files, run_salts
from fedcommons.runs.build import Assembled, OnStep, Prepared, assemble, joining_of, prepare, synthetic_images
from fedcommons.runs.build_callbacks import callbacks_of
from fedcommons.runs.callbacks import Callback, OnRound, RoundResult
from fedcommons.runs.load_data import dir_option
from fedcommons.runs.worker import build_module, local_loop, noise_key, run_name
from fedcommons.sharing.stage import Shared, Stage, require_once, require_own
from fedcommons.storage.artifact_store import Store
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.storage.error_file import leaving_errors
from fedcommons.tracking.environment import has_other_code
from fedcommons.tracking.remote_run import RunMirror, name_of
from fedcommons.tracking.run_folder import RunFolder, is_run, line_of, open_run, read_finished

EPSILON = "privacy/epsilon_local_training"

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
        mirrored_as: the run's name in the storage, if the config has a storage; default: the folder's name. A failed
            upload to the storage is an error only when the run has ended.
        data: the hash that the data set must have; None: any data set is accepted.
        with_share: called with (experiments, number of processes); replaces ``gpus_per_actor auto`` in the experiments
            by a share of a GPU; see ``tune.gpu_share``.
    """
    prepared = prepare(config)
    load_data.require_same(prepared.dataset, data)
    data, patience, mirror = prepared.dataset.digest, 0 if may_generate else PATIENCE, None
    if config.storage is not None:
        mirror = RunMirror(config.storage, mirrored_as or name_of(folder), folder, say)
        mirror.fetch(resume, patience)
    if resume and (finished := read_finished(folder, config, data)):
        say(f"{folder} holds this run, which is finished: there is nothing to do.")
        if mirror:
            mirror.end()
        return finished
    if resume:
        continuation.require_same_rounds(prepared, folder)
    store = Store(Path(config.artifacts), say, config.storage)
    if jobs := image_cache.missing(store, prepared.requests) if may_generate else []:
        store.require_writable()
    if config.federation.executor == "ray_actors":
        from fedcommons.runtime import ray_cluster

        ray_cluster.connect()
        if with_share is not None:
            (config,) = with_share([config], config.federation.processes)
        prepared = replace(prepared, config=config)
        ray_cluster.require_actors(config.federation.processes, config.federation.gpus_per_actor)
    begins = not is_run(folder)
    if resume and has_other_code(folder):
        say(Warned(f"{folder} was begun with other source files than the present ones; its finished rounds are kept."))
    with open_run(folder, config, resume, say, patience, data) as record:
        try:
            summary = _run(prepared, store, jobs, record, mirror, resume, say, on_round, on_step)
        except NotLogged:
            if begins and config.dp.noise != SECRET:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except ClientError:
            if mirror and not mirror.has_lost:
                mirror.upload()
            raise
        if mirror:
            mirror.end(store.upload() if may_generate else "")
        return summary


def _run(
    prepared: Prepared,
    store: Store,
    jobs: Sequence[image_cache.Job],
    record: RunFolder,
    mirror: RunMirror | None,
    resume: bool,
    say: Callable[[str], None],
    on_round: OnRound | None,
    on_step: OnStep | None,
) -> dict[str, Any]:
    config, folder = prepared.config, record.path
    with leaving_errors(folder, [*parts_of_own(config), *dir_option(config.data.dir)]):
        salt = b""
        if config.dp.noise == SECRET:
            salt = run_salts.begin_salt(folder, prepared.salts)
        _write_partition(folder, prepared.partition, prepared.tests, prepared.dataset.digest, salt)
        for sentence in prepared.notes_for_user:
            say(sentence)
        images = synthetic_images(prepared, store, jobs, say, on_step)
        require_own(prepared.stage, prepared.client_data, prepared.requests, images)
        ready = assemble(prepared, images)
        for note in ready.shared.notes:
            say(note)
        if config.dp.local or any(event.covered for event in ready.shared.releases):
            for what, reason in ready.plan.leaks.items():
                say(Warned(f"no epsilon covers this run: {what}: {reason}"))
        if ready.audited:
            ready.audited.write(folder)
            say(ready.audited.text)
        elif config.sharing.is_audited:
            say(f"no audit: with sharing.setting {config.sharing.setting} no generator makes images.")
        if config.client.batched:
            work = Work(build_module(config, ready.facts), torch.device("cpu"), local_loop(config, ready.facts.augment))
            state, rows = ready.start(ClientMemory()).state, ready.data.clients[0]
            if reason := _trains_alone(ready.plan, ready.algorithm, work, state, rows, config.seed):
                say(f"client.batched changes nothing: {reason}.")
        if config.client.graphs and config.federation.executor == "serial" and default_device().type == "cpu":
            say("client.graphs changes nothing: this process sees no GPU.")
        executor = ready.executor(salt)
        callbacks: list[Callback] = []
        summary = None
        try:
            start = _resume_or_begin(ready, record, resume, salt, say)
            callbacks += callbacks_of(ready, executor, record, mirror, on_round, say)
            end = _federate(ready, executor, start, record.rounds(), callbacks)
            record.require_rounds(end.round)
            if "model" in end.state:
                module = module_with(build_module(config, ready.facts), end.model, end.buffers)
                model_files.write(folder / model_files.LAST, module, end.round, ready.facts)
            summary = evaluate.summarise(ready, record.rounds(), end, is_secret=bool(salt))
            if summary["rejected"]:
                say(f"{rejection_summary(summary['rejected'])}, see rejected in {folder / 'summary.json'}")
            return summary
        finally:
            executor.close()
            for callback in callbacks:
                callback.on_end(summary)


def _resume_or_begin(
    ready: Assembled, record: RunFolder, resume: bool, salt: bytes, say: Callable[[str], None]
) -> Standing:
    """Return the last intact checkpoint, or the state before round 1; remove the records of the rounds after it."""
    bound = ready.config.federation.memory_mb * 1e6
    run = run_name(noise_key(ready.config), ready.prepared.dataset.digest, salt)
    memory = ClientMemory(cap_bytes=bound, folder=record.path / "memory", run=run)
    start = rounds.with_counts(ready.start(memory), ready.plan.facts)
    saved = None
    if resume:
        whole, layout = record.whole(), start.layout
        saved = checkpoint.load_latest(record.checkpoints, memory, whole, layout, record.digest, say)
    last = saved.round if saved else -1
    record.rewind(last)
    checkpoint.remove_after(record.checkpoints, last)
    now = saved or start
    checkpoint.prune(record.checkpoints, now.memory)  # a killed run may have left old files
    return now


def _require_earned(stage: Stage, shared: Shared, delta: float, before: Ledger, now: Ledger) -> None:
    """Raise a ``UserError`` if delta is too large, or a private release used data that contain a real example twice."""
    require_small_delta(now, delta, shared.data.real.sizes)
    if now.updates.covered or now.commons.covered != before.commons.covered:
        require_once(stage, shared)


def _federate(
    ready: Assembled, executor: Executor, start: Standing, lines: list[dict[str, Any]], callbacks: Sequence[Callback]
) -> Standing:
    """Run the rounds after ``start``, evaluate them and call the callbacks; return the state after the last round."""
    c, planned = ready.config, ready.plan.facts.rounds
    for callback in callbacks:
        callback.on_begin(start, lines)
    if any(callback.is_last(lines) for callback in callbacks):
        return start
    courses = rounds.run(ready.algorithm, executor, ready.plan, start)
    if not lines:  # round 0, the untrained model, must be recorded first
        courses = chain([(start, {"comm/once_bytes": start.traffic.once})], courses)
    last, began = start, time.perf_counter()
    try:
        for now, facts in courses:
            trained = time.perf_counter()
            _require_earned(ready.prepared.stage, ready.shared, c.dp.delta, start.ledger, now.ledger)
            metrics, clients = _observed(ready, executor, callbacks, now, facts, planned)
            lines.append(line_of(now.round, metrics))
            is_over = any(callback.is_last(lines) for callback in callbacks)
            if is_over and any(every and now.round % every for every in (c.evaluate.every, c.measure.every)):
                metrics, clients = _observed(ready, executor, callbacks, now, facts, now.round)
            is_saved = is_over or now.round % c.federation.checkpoint_every == 0 or now.round == planned
            for callback in callbacks:
                callback.on_round(RoundResult(now, metrics, clients, began, trained, is_saved))
            if is_over:
                return now
            last, began = now, time.perf_counter()
    except ClientError:
        for callback in callbacks:
            callback.on_error()
        raise
    return last


def _observed(
    ready: Assembled,
    executor: Executor,
    callbacks: Sequence[Callback],
    now: Standing,
    facts: Mapping[str, float],
    last: int,
) -> tuple[dict[str, float | None], Mapping[str, Sequence[float]]]:
    """Return the metrics after a round, with ``facts`` (those of training), and the metrics of each client."""
    config = ready.config
    metrics: dict[str, float | None] = {**facts, "comm/total_bytes": now.traffic.total}
    metrics |= evaluate.observe(ready, executor, now, last)
    for callback in callbacks:
        metrics |= callback.measure(now, last)
    clients, of_all = evaluate.of_clients(ready, executor, now, last)
    metrics |= of_all
    if config.dp.local:
        spent = now.ledger.largest_epsilon_of_rounds(config.dp.delta)
        metrics[EPSILON + IF_SECRET * (config.dp.noise != SECRET)] = spent
    return metrics, clients


def _write_partition(folder: Path, partition: Partitioned, tests: Clients | None, data: str, salt: bytes) -> None:
    """Write ``partition.json``; data: hash of the data set; salt: the run's salt, of which only the hash is written."""
    facts = {
        "data": data,
        "fingerprint": partition.fingerprint,
        "sizes": [len(rows) for rows in partition.rows],
        **({} if partition.class_counts is None else {"class_counts": partition.class_counts.tolist()}),
        **({} if tests is None else {"test_sizes": tests.sizes}),
        **({"noise": salts.name_of(salt)} if salt else {}),
    }
    if len(partition.rows) <= 10_000:
        write_json(folder / "partition.json", facts)
    else:  # indented JSON takes seconds for 10^5 clients
        write_text(folder / "partition.json", json.dumps(facts))


def _trains_alone(plan: Plan, algorithm: Algorithm, work: Work, state: State, rows: ClientData, seed: int) -> str:
    """Return why ``client.batched`` has no effect; "" if clients can be trained together, judged by the first client.

    Args:
        work: the module, device and local training of a worker process.
        state: the server's state before round 1.
        rows: the examples of the first client.
    """
    joined = joining_of(algorithm, plan.facts.n_clients, plan.participation)
    if joined is not None and joined <= plan.blocks:
        fewer = f"{joined} clients of a round are in a block each; lower federation.blocks below {joined}"
        return fewer if joined > 1 else "a round has one client"
    work.begin(1, rows)

    def play() -> None:
        algorithm.client(work, algorithm.down(state, 1, 0), {}, rows, 1, seed)

    return "the method changes the loss, learning rate or gradient" if request_training(work, play) is None else ""
