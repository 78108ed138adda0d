"""Count the work of a run before it runs: rounds, examples in local training, in evaluation and in measurements."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcommons.config.dotted import values_of
from fedcommons.config.experiment import Experiment
from fedcommons.convergence.estimators import BATCH, PARTS
from fedcommons.core.algorithm import Personal, State, repeats_of
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.worker import RunData
from fedcommons.federation import rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.flat_tensors import EMPTY
from fedcommons.generators.image_cache import Job
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.evaluate import due

MOST_ROUNDS = 1000
"""Largest number of rounds for which participants are sampled; the work of longer runs is extrapolated."""


@dataclass(frozen=True)
class Amounts:
    """The number of units of each kind of work in a run, or the seconds per unit of each kind."""

    rounds: float = 0  # rounds in which clients reply; local trainings are counted separately
    once: float = 0  # 1 if clients reply in a single round (``waits_for``): the server's work of this round
    alone: float = 0  # rounds in which no client takes part
    trainings: float = 0  # local trainings, one per client and round
    examples: float = 0  # examples in local training, counted once per epoch, or per repetition of other client work
    evaluated: float = 0  # evaluated examples, summed over models and evaluations
    untrained: float = 0  # batches of ``BATCH`` examples in a measurement of the convergence parameters before round 1
    measured: float = 0  # batches of ``BATCH`` examples in all measurements of the convergence parameters after rounds
    checkpoints: float = 0

    def seconds(self, prices: "Amounts") -> float:
        """Return the seconds of these numbers of units; prices: seconds per unit."""
        return sum(n * getattr(prices, kind) for kind, n in vars(self).items())


def work_fields(config: Experiment) -> tuple[tuple[str, Any], ...]:
    """Return (dotted name, value) of the fields that may change a run's work: not the seed and learning rates."""
    return tuple(pair for pair in values_of(config) if not re.search(r"^seed$|[._]lr$", pair[0]))


def count_work(ready: Assembled) -> Amounts:
    """Return the work of a run from its first round to its last round.

    A method that chooses its clients is assumed to choose as in the state before round 1. If a method waits for an
    entry of the server state (``waits_for``), the first round with replies is assumed to create this entry.
    """
    spec, e, data, last = ready.spec, ready.spec.evaluation, ready.data, ready.plan.facts.rounds
    start = ready.start(ClientMemory())
    played = min(last, MOST_ROUNDS)
    method, plan, loop = ready.algorithm, ready.plan, spec.local
    awaited, constant = capabilities_of(method).waits_for, repeats_of(method).get("train_block")
    repeats: int | None = None if constant is None else getattr(method, constant)
    sizes, n_own = data.clients.rows.sizes, data.clients.n_own
    state: State = start.state
    n_rounds, n_alone, trainings, examples, final = 0, 0, 0, 0, 0

    def in_epochs(replying: dict[int, float], repeats: int | None) -> int:
        total = 0
        for i, share in replying.items():
            n = int(sizes[i])
            total += n * (loop.epochs_for(n, float(n_own[i]), share) if repeats is None else max(1, repeats))
        return total

    for number in range(1, played + 1):
        joined, late = rounds.sample_clients(method, plan, state, number)
        if replying := {i: share for i in joined if (share := late.get(i, 1.0))}:
            n_rounds, trainings = n_rounds + 1, trainings + len(replying)
            now = in_epochs(replying, None if awaited else repeats)
            examples, final = examples + now, in_epochs(replying, repeats) - now
            state = {**state, awaited: EMPTY} if awaited else state
        n_alone += not joined
    more = last / played
    n_models = sum(name.startswith("model/") for name in start.state)
    n_test, n_validation = (len(data.sets[name]) for name in ("test", "validation"))
    evaluated = n_test * (start.has_model + n_models) + n_validation * start.has_model
    if e.of_clients or e.on_training:
        evaluated_clients = data.real if e.on_training or data.tests is None else data.tests
        is_personal = e.of_clients and isinstance(method, Personal)
        evaluated += int(evaluated_clients.rows.sizes.sum()) * (start.has_model + is_personal)
    adapted, tested = 0, 0
    if new := spec.new_clients:
        adapted, tested = e.adapt_epochs * sum(new.clients.sizes), sum(new.tests.sizes) * (1 + (e.adapt_epochs > 0))
    n_batches, n_measured = batches_measured(data, e.samples), _times_due(e.measure_every, last)
    return Amounts(
        rounds=more * n_rounds,
        once=bool(awaited and n_rounds),
        alone=more * n_alone,
        trainings=more * trainings,
        examples=more * examples + final + adapted,
        evaluated=evaluated * _times_due(e.every, last) + tested,
        untrained=n_batches if n_measured else 0,
        measured=n_batches * max(0, n_measured - 1),
        checkpoints=-(-last // spec.checkpoint_every),
    )


def _times_due(every: int, last: int) -> int:
    return sum(due(r, every, last) for r in range(last + 1)) if every else 0


def batches_measured(data: RunData, samples: int | None) -> int:
    """Return the number of batches of ``BATCH`` examples in a measurement of the convergence parameters.

    samples: number of examples that are measured per client; None: all. If below 2 * ``PARTS``, all are measured.
    """
    populations = [data.real, None if data.clients is data.real else data.clients, data.pool]
    sizes = np.concatenate([clients.rows.sizes for clients in populations if clients is not None])
    some = sizes if samples is None else np.minimum(sizes, samples)
    return int(np.ceil(np.where(some < 2 * PARTS, sizes, some) / BATCH).sum())


def generator_work(job: Job) -> tuple[int, int]:
    """Return (training steps, sampling steps summed over images) of a job that trains or samples a generator."""
    first = job.requests[0]
    n, generator = len(first.examples), first.recipe.generator
    steps = max(job.epochs, default=0) * -(-n // getattr(generator, "batch_size", n))
    sampling = sum(len(need.labels) * getattr(need.recipe.generator, "sampling_steps", 1) for need in job.requests)
    return steps, sampling
