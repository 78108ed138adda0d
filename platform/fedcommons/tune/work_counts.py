"""Count the work of a run before it runs: numbers of local steps, evaluated examples and sampled images.

B: batch size;  n: number of a client's training examples;  E': local epochs, which ``client.equal_work`` reduces
for a client with shared examples. In a round a client makes E' floor(n/B) steps of B examples. If B does not divide n,
the client also makes E' steps of n mod B examples, unless ``client.drop_last`` is set and n > B.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from fedcommons.convergence.estimators import BATCH, PARTS
from fedcommons.core.algorithm import Personal, State
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.work_units import pieces_of
from fedcommons.data.clients import Clients
from fedcommons.federation import rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.flat_tensors import EMPTY
from fedcommons.generators.image_cache import Job
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.evaluate import due

PRODUCTS = 40
"""Assumed number of Hessian-vector products per smoothness estimate by Lanczos' iteration, which makes at most 100."""

MOST_ROUNDS = 1000
"""Largest number of rounds for which participants are sampled; the work of longer runs is extrapolated."""


@dataclass(frozen=True)
class Counts:
    """The work of a run. B: batch size. Beyond ``MOST_ROUNDS`` rounds, numbers are extrapolated and not whole."""

    rounds: int
    trainings: float = 0  # number of local trainings: one per client and round
    full: float = 0  # number of local steps on B examples
    rest: float = 0  # number of local steps on fewer than B examples
    rest_examples: float = 0  # number of examples in all steps counted in ``rest``
    evaluated: int = 0  # number of evaluated examples, summed over models and evaluations
    gradients: int = 0  # number of batches of ``BATCH`` examples whose per-sample gradients are computed
    products: int = 0  # number of Hessian-vector products on ``BATCH`` examples
    checkpoints: int = 0
    pieces: Mapping[str, float] = field(default_factory=dict)  # units of the method's work outside local steps, by name


def local_steps(loop: LocalSGD, n: int, n_own: float) -> tuple[int, int]:
    """Return a client's (local steps of B examples, local steps of fewer examples) in a round.

    B: batch size; under DP-SGD it is the mean size of sampled batches. n: number of the client's training examples.
    n_own: number of these examples that the client did not receive from others.
    """
    epochs, b = loop.epochs_for(n, n_own), loop.batch_size
    if loop.dp:
        steps = epochs * loop.dp.steps(n, b)
        return (steps, 0) if n >= b else (0, steps)
    full, remainder = divmod(n, b)
    has_rest = remainder > 0 and not (loop.drop_last and full)
    return epochs * full, epochs * has_rest


def count_work(ready: Assembled) -> Counts:
    """Return the work of a run from its first round to its last round.

    A method that chooses its clients is assumed to choose as in the state before round 1. If a method waits for an
    entry of the server state (``waits_for``), the first round with replies is assumed to create this entry.
    """
    spec, e, data, last = ready.spec, ready.spec.evaluation, ready.data, ready.plan.facts.rounds
    start = ready.start(ClientMemory())
    played = min(last, MOST_ROUNDS)
    method, plan, loop = ready.algorithm, ready.plan, spec.local
    capabilities = capabilities_of(method)
    facts = replace(plan.facts, counts=plan.facts.counts and cache(plan.facts.counts))  # counted once for all rounds
    more, b = last / played, loop.batch_size
    joins, pieces = Counter[int](), dict[str, float]()
    state: State = start.state
    for number in range(1, played + 1):
        joined, replying = rounds.answering(method, plan, state, number)
        joins.update(replying)
        if replying or not joined:  # a round in which no sampled client replies has no such work
            for name, n in pieces_of(method, facts, loop, number, replying).items():
                pieces[name] = pieces.get(name, 0) + more * n
        if replying and (awaited := capabilities.waits_for):
            state = {**state, awaited: EMPTY}
    sizes, n_own = data.clients.rows.sizes, data.clients.n_own
    each = {i: local_steps(loop, int(sizes[i]), float(n_own[i])) for i in joins}
    if not capabilities.trains_locally:
        each = dict.fromkeys(joins, (0, 0))
    n_models = sum(name.startswith("model/") for name in start.state)
    n_test, n_validation = (len(data.sets[name]) for name in ("test", "validation"))
    evaluated = n_test * (start.has_model + n_models) + n_validation * start.has_model
    if e.of_clients or e.on_training:
        evaluated_clients = data.real if e.on_training or data.tests is None else data.tests
        is_personal = e.of_clients and isinstance(method, Personal)
        evaluated += int(evaluated_clients.rows.sizes.sum()) * (start.has_model + is_personal)
    evaluations = sum(due(r, e.every, last) for r in range(last + 1))
    measured = sum(due(r, e.measure_every, last) for r in range(last + 1)) if e.measure_every else 0
    gradients, products = _measuring(ready)
    return Counts(
        rounds=last,
        trainings=more * joins.total(),
        full=more * sum(k * each[i][0] for i, k in joins.items()),
        rest=more * sum(k * each[i][1] for i, k in joins.items()),
        rest_examples=more * sum(k * each[i][1] * (int(sizes[i]) % b) for i, k in joins.items()),
        evaluated=evaluations * evaluated,
        gradients=measured * gradients,
        products=measured * products if e.smoothness else 0,
        checkpoints=-(-last // spec.checkpoint_every),
        pieces=pieces,
    )


def _measuring(ready: Assembled) -> tuple[int, int]:
    """Return the numbers of batches for per-sample gradients, and for Hessian-vector products, in a measurement.

    A measurement estimates the convergence parameters at one model (``Laboratory``).
    """
    data, samples = ready.data, ready.spec.evaluation.samples
    populations = [
        data.real,
        *([] if data.clients is data.real else [data.clients]),
        *([data.pool] if data.pool else []),
    ]
    if samples is None or all(samples >= clients.rows.sizes.max() for clients in populations):
        once = sum(_batches(clients.sizes) for clients in populations)
        return once, PRODUCTS * once
    parts = [n for clients in populations for size in clients.sizes for n in _parts(min(samples, size), size)]
    return _batches(parts), PRODUCTS * sum(_batches(_measured(clients, samples)) for clients in populations)


def _parts(m: int, n: int) -> list[int]:
    """Return the numbers of examples in the ``PARTS`` samples of a measurement (``estimators.Part``).

    n: number of all examples. m: number of sampled examples, which are divided among the samples. If m is below
    2 ``PARTS``, each sample has all n examples instead.
    """
    if m < 2 * PARTS:
        return [n] * PARTS
    return [m * (k + 1) // PARTS - m * k // PARTS for k in range(PARTS)]


def _measured(clients: Clients, samples: int) -> list[int]:
    return [n if min(samples, n) < 2 * PARTS else min(samples, n) for n in clients.sizes]


def _batches(sizes: Iterable[int]) -> int:
    return sum(-(-n // BATCH) for n in sizes)


def generator_work(job: Job) -> tuple[int, int]:
    """Return (training steps, sampling steps summed over images) of a job that trains or samples a generator."""
    first = job.requests[0]
    n, generator = len(first.examples), first.recipe.generator
    steps = max(job.epochs, default=0) * -(-n // getattr(generator, "batch_size", n))
    sampling = sum(len(need.labels) * getattr(need.recipe.generator, "sampling_steps", 1) for need in job.requests)
    return steps, sampling
