"""The rounds of an experiment: begin or resume, run and evaluate each round, call the callbacks, conclude."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from fedcommons.core.client_worker import module_with
from fedcommons.core.executor import Executor
from fedcommons.core.rejections import rejection_summary
from fedcommons.errors import ClientError
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.privacy.ledger import Ledger, require_small_delta
from fedcommons.privacy.salts import IF_SECRET
from fedcommons.runs import evaluate, model_files
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.callbacks import Callback, Lines, RoundResult
from fedcommons.runs.worker import run_name
from fedcommons.sharing import disclosure
from fedcommons.sharing.exchange import Shared
from fedcommons.sharing.stage import Stage
from fedcommons.tracking.run_folder import RunFolder, line_of, read_rounds

EPSILON = "privacy/epsilon_local_training"


def resume_or_begin(
    ready: Assembled, record: RunFolder, resume: bool, salt: bytes, say: Callable[[str], None]
) -> Standing:
    """Return the last intact checkpoint, or the state before round 1; remove the records of later rounds."""
    spec = ready.spec
    run = run_name(spec.noise_key, spec.dataset.digest, salt)
    memory = ClientMemory(cap_bytes=spec.memory_bytes, folder=record.path / "memory", run=run)
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


def federate(
    ready: Assembled, executor: Executor, start: Standing, lines: Lines, callbacks: Sequence[Callback]
) -> Standing:
    """Run the rounds after ``start``, evaluate them and call the callbacks; return the state after the last round."""
    spec, planned = ready.spec, ready.plan.facts.rounds
    intervals = spec.evaluation.every, spec.evaluation.measure_every
    for callback in callbacks:
        callback.on_begin(start, lines)
    if spec.stop.reason_to_stop(lines):
        return start
    courses = rounds.run(ready.algorithm, executor, ready.plan, start)
    if not lines:  # a new run first records round 0, the untrained model
        courses = chain([(start, {"comm/once_bytes": start.traffic.once})], courses)
    lines, last, began = spec.stop.needed(lines), start, time.perf_counter()
    try:
        for now, facts in courses:
            trained = time.perf_counter()
            _require_earned(spec.stage, ready.shared, spec.delta, start.ledger, now.ledger)
            metrics, clients = _observed(ready, executor, callbacks, now, facts, planned)
            lines = [*lines, line_of(now.round, metrics)]
            is_over = spec.stop.reason_to_stop(lines) is not None
            lines = spec.stop.needed(lines)
            if is_over and any(every and now.round % every for every in intervals):
                metrics, clients = _observed(ready, executor, callbacks, now, facts, now.round)
            if is_over or now.round == planned:
                metrics |= evaluate.of_new_clients(ready, executor, now)
            is_saved = is_over or now.round % spec.checkpoint_every == 0 or now.round == planned
            for callback in callbacks:
                callback.on_round(RoundResult(now, metrics, clients, began, trained, is_saved))
            if is_over:
                return now
            last, began = now, time.perf_counter()
    except ClientError:
        with ExitStack() as saving:  # each is called, also after an error of another
            for callback in reversed(callbacks):
                saving.callback(callback.on_error)
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
    """Return the metrics after a round, with the training metrics ``facts``, and the metrics of each client."""
    spec = ready.spec
    metrics: dict[str, float | None] = {**facts, "comm/total_bytes": now.traffic.total}
    metrics |= evaluate.observe(ready, executor, now, last)
    for callback in callbacks:
        metrics |= callback.measure(now, last)
    clients, of_all = evaluate.of_clients(ready, executor, now, last)
    metrics |= of_all
    if spec.local.dp:
        spent = now.ledger.largest_epsilon_of_rounds(spec.delta)
        metrics[EPSILON + IF_SECRET * (not spec.is_secret)] = spent
    return metrics, clients


def _require_earned(stage: Stage, shared: Shared, delta: float, before: Ledger, now: Ledger) -> None:
    """Raise a ``UserError`` if delta is too large, or a private release used data that contain a real example twice."""
    require_small_delta(now, delta, shared.data.real.sizes)
    if now.updates.covered or now.commons.covered != before.commons.covered:
        disclosure.require_once(stage, shared.data)


def conclude(ready: Assembled, record: RunFolder, end: Standing, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the server model of the last round, report unused updates, and return the summary of the run."""
    record.require_rounds(end.round)
    if end.has_model:
        module = module_with(ready.module(), end.model, end.buffers)
        model_files.write(record.path / model_files.LAST, module, end.round, ready.spec.facts)
    lines, rule = read_rounds(record.path), ready.plan.aggregation
    if rule and (n := sum(line.get("skipped", 0) for line in lines)):
        say(
            f"federation.aggregation {rule.text} used no reply in {n} of {end.round} rounds, as fewer than "
            f"{rule.least} were accepted (skipped in rounds.jsonl)."
        )
    summary = evaluate.summarise(ready, lines, end)
    if summary["rejected"]:
        say(f"{rejection_summary(summary['rejected'])}, see rejected in {record.path / 'summary.json'}")
    return summary
