"""Run one experiment as in section 4 of the Fedssyn paper: partition, sharing, federated rounds, evaluation."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from fedcommons.config import registry
from fedcommons.config.dotted import parts_of_own
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import select_arguments
from fedcommons.config.target import NotLogged
from fedcommons.core.algorithm import Algorithm, State
from fedcommons.core.client_worker import Work, module_with
from fedcommons.core.executor import Executor
from fedcommons.core.rejections import records, rejection_summary
from fedcommons.core.vmap_clients import request_training
from fedcommons.core.worker import default_device, fresh_torch
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.partition import Partitioned
from fedcommons.errors import ClientError, UserError, Warned, sentence
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.generators import image_cache
from fedcommons.privacy import salts
from fedcommons.privacy.ledger import Ledger, require_small_delta
from fedcommons.privacy.salts import IF_SECRET, SECRET
from fedcommons.runs import continuation, evaluate, load_data, model_files, run_salts
from fedcommons.runs.build import Assembled, OnStep, Prepared, assemble, joining_of, prepare, synthetic_images
from fedcommons.runs.checks import require_sources
from fedcommons.runs.early_stopping import stop_of
from fedcommons.runs.load_data import dir_option
from fedcommons.runs.worker import build_module, local_loop, noise_key, run_name
from fedcommons.sharing.stage import Shared, Stage, require_once, require_own
from fedcommons.storage.artifact_store import Store
from fedcommons.storage.atomic_files import write_json, write_text
from fedcommons.storage.error_file import leaving_errors
from fedcommons.tracking.environment import has_other_code
from fedcommons.tracking.remote_run import RunMirror, name_of
from fedcommons.tracking.run_folder import RunFolder, is_run, line_of, open_run, read_finished
from fedcommons.tracking.tracker import Tracker
from fedcommons.tracking.user_tracker import OwnTracker

OnRound = Callable[[int, Mapping[str, float | None]], None]

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
        try:
            require_sources(config)
        except UserError as error:
            say(Warned(f"{sentence(error)} This run used the code as it was, and only that code can resume it."))
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
        trackers: list[Tracker] = []
        summary = None
        try:
            start = _resume_or_begin(ready, record, resume, salt, say)
            trackers += _trackers(ready, record, say)
            end = _federate(ready, executor, start, record, mirror, trackers, on_round, say)
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
            for tracker in trackers:
                tracker.finish(summary)


def _resume_or_begin(
    ready: Assembled, record: RunFolder, resume: bool, salt: bytes, say: Callable[[str], None]
) -> Standing:
    """Return the state to start from: the last intact checkpoint with recorded rounds, or the state before round 1.

    Records of later rounds are removed, as these rounds run again. Checkpoints of another run are reported to ``say``.
    """
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


def _trackers(ready: Assembled, record: RunFolder, say: Callable[[str], None]) -> list[Tracker]:
    """Return the trackers: the run folder, W&B unless it is off, and the tracker of ``tracking.tracker``, if set.

    In a resumed run the earlier rounds are logged again to all trackers except the run folder.
    """
    others: list[Tracker] = []
    config = ready.config
    if config.tracking.wandb != "off":
        from fedcommons.tracking.wandb_media import pool_images
        from fedcommons.tracking.wandb_tracker import WandbTracker

        shown, n_real = (), len(ready.prepared.train)
        if pool := ready.data.pool:
            x, y = pool.store.x[n_real:].numpy(), pool.store.y[n_real:].numpy()
            shown = pool_images(x, y, pool.rows.flat.numpy() - n_real)
        others.append(WandbTracker(record.path, config, ready.shared.p, say, shown))
    if name := config.tracking.tracker:
        part = registry.find("tracker", name)
        offered, constants = {"folder": record.path, "config": config.flat}, config.tracking.constants

        def build() -> Tracker:
            return registry.build_part("tracker", name, lambda: part(**select_arguments(part, offered), **constants))

        others.append(OwnTracker(name, build, say))
    for line in record.rounds() if others else ():
        for tracker in others:
            tracker.log(line["round"], {name: value for name, value in line.items() if name != "round"})
    return [record, *others]


def _require_earned(stage: Stage, shared: Shared, delta: float, before: Ledger, now: Ledger) -> None:
    """Check after a round that the privacy ledger's epsilon is valid, as the round adds entries (releases) to it.

    delta: the delta of the (epsilon, delta) guarantee. before: the ledger at the start or resume of the run. now: the
    ledger after the round.

    Raises:
        UserError: delta is too large, or a private release used training data that contain a real example twice.
    """
    require_small_delta(now, delta, shared.data.real.sizes)
    if now.updates.covered or now.commons.covered != before.commons.covered:
        require_once(stage, shared)


def _federate(
    ready: Assembled,
    executor: Executor,
    start: Standing,
    record: RunFolder,
    mirror: RunMirror | None,
    trackers: Sequence[Tracker],
    on_round: OnRound | None,
    say: Callable[[str], None],
) -> Standing:
    """Run, evaluate and record the rounds after ``start``; return the state after the last round."""
    config, f = ready.config, ready.config.federation
    courses = rounds.run(ready.algorithm, executor, ready.plan, start)
    stop = stop_of(config)
    if stop.reason_to_stop(record.rounds()):
        courses = ()
    if not record.rounds():  # round 0, the untrained model, must be recorded first
        courses = chain([(start, {"comm/once_bytes": start.traffic.once})], courses)
    model_files.Best.rewind(record.path, start.round if record.rounds() else -1)
    best = model_files.Best(record.rounds(), (stop.watched, stop.way) if stop.rule == "patience" else None)
    build = partial(build_module, config, ready.facts)
    last, clock, lost = start, time.perf_counter(), set()
    try:
        for now, facts in courses:
            trained = time.perf_counter()
            _require_earned(ready.prepared.stage, ready.shared, config.dp.delta, start.ledger, now.ledger)
            metrics, clients = _observed(ready, executor, now, facts, f.rounds)
            is_over = (
                stop.rule != "never"
                and stop.reason_to_stop([*record.rounds(), line_of(now.round, metrics)]) is not None
            )
            if is_over:  # the run ends here, so the metrics that are due in the last round are added
                metrics, clients = _observed(ready, executor, now, facts, now.round, metrics, clients)
            if clients:
                record.log_clients(now.round, clients)
            stop.require_logged(now.round, metrics)
            for tracker in trackers:
                tracker.log(now.round, {**metrics, **(_late(now) if "stragglers" in facts else {})})
            best.see(now, metrics, is_extra=now.round % config.evaluate.every != 0)
            record.log_times(now.round, {"train": trained - clock, "observe": time.perf_counter() - trained})
            if is_saved := now.round % f.checkpoint_every == 0 or now.round == f.rounds or is_over:
                best.write(record.path, build, ready.facts)
                checkpoint.save(record.checkpoints, now, record.digest())
            if now.rejected and not last.rejected:
                message = (
                    f"round {now.round}: {rejection_summary(records(now.rejected))}; later rejections are only counted"
                )
                say(Warned(message))
            if new := {name for name, value in metrics.items() if value is not None and not isfinite(value)} - lost:
                message = f"round {now.round}: not finite, so recorded as null: {', '.join(sorted(new))}; diverged?"
                say(Warned(message))
                lost |= new
            if on_round:
                on_round(now.round, metrics)
            last = now
            if mirror and is_saved:
                mirror.upload()
            clock = time.perf_counter()
            if is_over:
                break
    except ClientError:
        best.write(record.path, build, ready.facts)
        checkpoint.save(record.checkpoints, last, record.digest())  # so that only the failed round runs again
        raise
    return last


def _observed(
    ready: Assembled, executor: Executor, now: Standing, facts: Mapping[str, float], last: int, *before: Any
) -> tuple[dict[str, float | None], Mapping[str, Sequence[float]]]:
    """Return the metrics after a round, and the metrics of each client; last: number of the run's last round.

    facts: the metrics of the round's training. before: the result of an earlier call for this round, made before the
    decision that the run ends here. The result is returned unchanged if it already has all metrics.
    """
    config = ready.config
    if before and not any(every and now.round % every for every in (config.evaluate.every, config.measure.every)):
        return before[0], before[1]
    metrics: dict[str, float | None] = {**facts, "comm/total_bytes": now.traffic.total}
    metrics |= evaluate.observe(ready, executor, now, last)
    clients, of_all = evaluate.of_clients(ready, executor, now, last)
    metrics |= of_all
    if config.dp.local:
        spent = now.ledger.largest_epsilon_of_rounds(config.dp.delta)
        metrics[EPSILON + IF_SECRET * (config.dp.noise != SECRET)] = spent
    return metrics, clients


def _late(now: Standing) -> dict[str, list[int]]:
    """Return the round's lists ``late`` (all stragglers) and ``partial`` (stragglers whose partial work arrived)."""
    return {"late": list(now.stragglers), "partial": [i for i, share in now.stragglers.items() if share]}


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
