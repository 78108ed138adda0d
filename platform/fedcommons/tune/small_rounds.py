"""Two short rounds of an experiment, whose seconds ``--dry-run`` measures."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedcommons.core.algorithm import Algorithm, ChoosesClients, repeats_of
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.executor import Executor, J, R, S
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients
from fedcommons.federation import rounds
from fedcommons.federation.client_block import train_block
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.flat_tensors import data as data_of
from fedcommons.privacy.noise import SEED_ALONE
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.worker import build_worker

TRAINING = train_block.__name__
"""Name of the jobs that train clients."""

RATE = 1e-6
"""Largest learning rate in timed rounds, so that the loss cannot diverge; no time depends on the learning rate."""

Seconds = Counter[tuple[str, str]]
"""Seconds by kind of round ("replies": clients reply, "none": no client takes part) and job ("": outside of jobs)."""


@dataclass
class Clocked:
    """An executor that adds up the seconds of its jobs, by the name of the job's function."""

    executor: Executor
    seconds: Counter[str] = field(default_factory=Counter)

    def map(self, function: Callable[[Worker, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        started = time.perf_counter()
        results = self.executor.map(function, shared, jobs)
        job: Any = function.args[0] if isinstance(function, partial) else function  # a job of the server
        self.seconds.update({getattr(job, "__name__", type(job).__name__): time.perf_counter() - started})
        return results

    def close(self) -> None:
        self.executor.close()


class SmallRounds:
    """Two short rounds: the first two of the run; the last two, if the method has ``waits_for`` or ``needs_pool``.

    n_clients, n_examples: number of clients, and of their training examples, in a round that is timed.
    repeats: largest number of repetitions of local epochs, and of other work that the method repeats. rows: largest
    number of training examples per client; None: no limit. clients: number of clients, unless the method chooses them.
    lr: largest learning rate.
    """

    def __init__(self, ready: Assembled, repeats: int, rows: int | None, clients: int, lr: float = RATE) -> None:
        spec, plan, before = ready.spec, ready.plan, ready.data.clients
        method: Any = ready.algorithm
        capabilities, numbers = capabilities_of(method), repetitions(method, spec.local.epochs)
        constants = repeats_of(method)
        if constants:
            method = replace(method, **{name: min(numbers[job], repeats) for job, name in constants.items()})
        sizes = before.rows.sizes if rows is None else np.minimum(before.rows.sizes, rows)
        few = replace(before.rows, sizes=sizes, totals=np.zeros(0))
        data = replace(ready.data, clients=Clients(before.store, few, commons=before.commons))
        loop = replace(spec.local, epochs=min(spec.local.epochs, repeats), equal_work=False)
        if loop.dp:  # so that no noise multiplier is computed for a target epsilon
            loop = replace(loop, dp=replace(loop.dp, target=None))

        module = partial(spec.module, spec.facts, lr=min(spec.lr, lr))

        def build(data: RunData) -> Worker:
            return build_worker(module, loop, plan.facts.weighting, SEED_ALONE, method, data)

        facts = replace(plan.facts, sizes=few.totals.tolist(), rounds=max(2, plan.facts.rounds))
        part = min(1.0, clients / len(sizes))
        # So few clients may be too few for the aggregation rule, whose time is not measured.
        no_rules = {"straggler_rule": None, "aggregation": None, "attack": None}
        self.plan = replace(plan, facts=facts, participation=part, **no_rules)
        self.method, self.executor = method, Clocked(Serial(build, data))
        is_late = capabilities.waits_for is not None or capabilities.needs_pool
        start = replace(ready.on(data), plan=self.plan).start(ClientMemory())
        self.start = replace(start, round=facts.rounds - 2 if is_late else 0)
        self.last = self.start.round + 2
        counted = self.start.round + (1 if isinstance(ready.algorithm, ChoosesClients) else 2)
        joined, _ = rounds.sample_clients(method, self.plan, self.start.state, counted)
        self.n_clients, self.n_examples = max(1, len(joined)), max(1, int(sizes[joined].sum()))
        server = max([1, *(n for job, n in numbers.items() if job != TRAINING)])
        self.growth = plan.facts.rounds / 2 * server / min(server, repeats)

    def play(self, enough: float = math.inf) -> tuple[Standing, Seconds]:
        """Run both rounds; return the state after them, and their seconds by kind of round and job.

        If both rounds are of one kind, later calls run only the second. enough: no round follows a round that took more
        seconds.
        """
        now, times = self.start, self.executor.seconds
        seconds: Seconds = Counter()
        while now.round < self.last and seconds.total() <= enough:
            before = self._halfway(now) if seconds else now
            times.clear()
            started = time.perf_counter()
            now = next(rounds.run(self.method, self.executor, self.plan, before))[0]
            rest = time.perf_counter() - started - times.total()
            kind = "replies" if TRAINING in times else "none"
            if (kind, "") in seconds:  # only the second round counts, as a first round may lack work of later rounds
                self.start = before
                seconds.clear()
            seconds.update({(kind, ""): rest} | {(kind, job): n for job, n in times.items()})
        return now, seconds

    def _halfway(self, now: Standing) -> Standing:
        """Return a copy of the state in which entries that grow in each round have their mean size over the run."""
        state = {**now.state}
        for name, dimension in capabilities_of(self.method).grows.items():
            if name in state:
                entry = data_of(state[name])
                n = entry.shape[dimension]
                state[name] = entry.index_select(dimension, torch.arange(max(n, round(n * self.growth))) % n)
        return replace(now, state=state)


def repetitions(algorithm: Algorithm, epochs: int) -> dict[str, int]:
    """Return how often each job (function name) repeats its work in a round; ``epochs``: repeats of client training."""
    numbers = {job: getattr(algorithm, name) for job, name in repeats_of(algorithm).items()}
    return {TRAINING: epochs} | {job: epochs if n is None else n for job, n in numbers.items()}
