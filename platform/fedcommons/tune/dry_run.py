"""Dry run: estimate the time, memory and disk space that a sweep would need, for each trial and in total.

A trial's time is the sum over all kinds of work: number of units times measured seconds of a unit. The total is
computed as if all generators were trained first, and then all experiments run, each as soon as a process is free. A
real sweep mixes generators and experiments, and takes almost the same time. Other programs make all times longer.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedcommons.cli.display import Display, duration
from fedcommons.generators.image_cache import Job, missing
from fedcommons.generators.requests import GenerationRequest
from fedcommons.runs import assemble, build
from fedcommons.runs.spec import RunSpec
from fedcommons.runtime import allocation
from fedcommons.storage.artifact_store import Store
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import cost, sweep
from fedcommons.tune.cost import GeneratorPrices, Prices
from fedcommons.tune.work_counts import count_work, generator_work, work_fields

RAY_S = 6.0
"""Seconds that Ray and Ray Tune take to start."""

LINE = 500
"""Assumed bytes per round in rounds.jsonl and timing.jsonl together."""


@dataclass
class Bill:
    """The cost of a sweep's remaining work.

    times: number of trials in the sweep divided by the number of trials in this bill, which may be a sample. phases:
    seconds of each job, by kind of job; each kind starts when the jobs of the kind before it have ended.
    trials, prices, of_generators: measured costs and prices, by the fields on which they depend.
    """

    times: float = 1.0
    phases: dict[str, list[float]] = field(default_factory=lambda: {"generators": [], "cells": []})
    first: float = 0.0  # additional seconds of the first run in a process
    memory: int = 0  # bytes: the largest memory of a process
    runs: float = 0  # bytes of run folders on disk
    artifacts: int = 0  # bytes of artifacts on disk
    trials: dict[tuple, tuple[float, int, float]] = field(default_factory=dict)
    prices: dict[tuple, Prices] = field(default_factory=dict)
    of_generators: dict[tuple, GeneratorPrices] = field(default_factory=dict)

    def seconds(self, places: int, in_ray: bool = True) -> float:
        """Return the total seconds: with ``places`` parallel processes if ``in_ray``, else in this process alone."""
        if not in_ray:
            return cost.start_up() + self.first + self.times * sum(map(sum, self.phases.values()))
        spans = [self.span(phase, places) for phase in self.phases.values() if phase]
        return RAY_S + (1 + len(spans)) * cost.start_up() + self.first + sum(spans)  # each phase starts new processes

    def span(self, phase: Sequence[float], places: int) -> float:
        """Return the seconds of a phase with ``places`` parallel processes, from the seconds of its jobs.

        If trials are extrapolated from a sample, all processes are assumed to be busy until the end.
        """
        return makespan(phase, places) if self.times == 1 else self.times * sum(phase) / places


@dataclass(frozen=True)
class ExtraJob:
    """A job of a sweep that is not a run, such as central training. kind: name of such jobs in the dry run's total.

    seconds: a function that measures a step of the job, and returns the seconds of the whole job.
    """

    name: str
    kind: str
    seconds: Callable[[], float]


def makespan(seconds: Iterable[float], places: int) -> float:
    """Return the seconds until the last job ends, if jobs start in this order, each as soon as a process is free.

    seconds: duration of each job. places: number of parallel processes.
    """
    free = [0.0] * places
    for job_seconds in seconds:
        heapq.heappush(free, heapq.heappop(free) + job_seconds)
    return max(free)


def print_costs(
    cells: Sequence[sweep.Trial], out: Path, display: Display, on_cores: int | None = None,
    extra: Sequence[ExtraJob] = (), in_ray: bool = True, total: int | None = None, jobs: int | None = None,
) -> None:  # fmt: skip
    """Print which trials would run and their cost.

    Args:
        on_cores: also print the time on another machine with this number of cores.
        extra: further jobs of the sweep.
        in_ray: whether trials run as parallel processes of Ray; else in this process.
        total: number of trials in the sweep, if ``cells`` is only a sample of them.
        jobs: largest number of parallel trials; None: no limit.

    Raises:
        UserError: a trial cannot be run.
    """
    display.say("Timing short rounds ...")
    bill = Bill((total or len(cells)) / max(1, len(cells)))
    wanted: dict[Path, list[GenerationRequest]] = {}
    notes: dict[str, None] = {}
    for c in cells:
        ready = build.build(c.config)
        notes |= dict.fromkeys(ready.notes)
        images_note = ""
        if n := len(ready.requests):
            lacking = sum(len(job.requests) for job in missing(Store(ready.artifacts, display.say), ready.requests))
            images_note = f", {n - lacking} of {n} clients' synthetic images exist"
        if sweep.is_done(c, out):
            display.say(f"{c.name}: done{images_note}")
            continue
        wanted.setdefault(ready.artifacts, []).extend(ready.requests)
        display.say(f"{c.name}: to run{images_note}; {add_trial(ready, bill)}")
    for folder, requests in wanted.items():
        for job in missing(Store(folder, display.say), requests):
            add_generator(job, bill)
    for job in extra:
        if read_summary(out / job.name) is not None:
            display.say(f"{job.name}: done")
            continue
        bill.phases.setdefault(job.kind, []).append(seconds := job.seconds())
        display.say(f"{job.name}: to run; {duration(seconds)}")
    for note in notes:
        display.say(note)
    display.say(_in_all(len(cells), bill, cells[0].processes if cells else None, on_cores, in_ray, jobs))


def add_trial(ready: RunSpec, bill: Bill) -> str:
    """Add the trial's cost to the bill, and return it as text. Of trials with equal ``work_fields``, one is timed."""
    key = work_fields(ready.record)
    if key not in bill.trials:
        bill.trials[key] = _measure_trial(ready, bill)
    seconds, memory, disk = bill.trials[key]
    bill.phases["cells"].append(seconds)
    bill.memory, bill.runs = max(bill.memory, memory), bill.runs + disk
    return f"{duration(seconds)}, {amount(memory)} of memory, {amount(disk)} on disk"


def _measure_trial(ready: RunSpec, bill: Bill) -> tuple[float, int, float]:
    """Return the seconds of a trial, its largest memory and the size of its folder, both in bytes."""
    contributed, sharing = cost.contribute(ready, [cost.stand_in(need) for need in ready.requests])
    sharing += cost.audit(ready, contributed)
    assembled = assemble.assemble_contributed(replace(ready, is_audited=False), contributed)
    counts, shape = count_work(assembled), cost.shape_of(assembled)
    if shape not in bill.prices:
        bill.prices[shape] = cost.measure(assembled)
    price = bill.prices[shape]
    first, later, size = cost.overhead("off" if ready.wandb == "off" else "offline")
    bill.first = max(0.0, first - later)
    seconds = sharing + counts.seconds(price.seconds) / (ready.actors or 1) + later
    state_bytes = price.state + price.memory_bytes * len(assembled.data.clients)
    return seconds, price.memory, size + 2 * state_bytes + LINE * ready.plan.facts.rounds


def add_generator(job: Job, bill: Bill) -> None:
    need = job.requests[0]
    recipe, batch = need.recipe, getattr(need.recipe.generator, "batch_size", len(need.examples))
    shape = (str(recipe.facts(("epochs", "lr"))), need.examples.x.shape[1:], min(len(need.examples), 2 * batch) // 8)
    if shape not in bill.of_generators:
        bill.of_generators[shape] = cost.measure_generator(need)
    price, (steps, sampling) = bill.of_generators[shape], generator_work(job)
    bill.phases["generators"].append(price.start + price.step * steps + price.image * sampling)
    images = sum(len(n.labels) * (n.examples.x[0].nbytes + 8) for n in job.requests)
    bill.artifacts += images + price.weights * len(job.epochs)
    bill.memory = max(bill.memory, price.memory)


def generators(jobs: Iterable[Job], prices: dict[tuple, GeneratorPrices] | None = None) -> float:
    """Return the seconds that the generator jobs take one after another on one core.

    prices: prices that earlier calls measured, by the facts on which they depend. Prices that this call measures are
    added.
    """
    bill = Bill(of_generators={} if prices is None else prices)
    for job in jobs:
        add_generator(job, bill)
    return sum(bill.phases["generators"])


def _in_all(
    n_cells: int, bill: Bill, actors: int | None, on_cores: int | None, in_ray: bool, jobs: int | None
) -> str:  # fmt: skip
    """Return the last line of the dry run: total time, memory and disk."""
    phases = {name: phase for name, phase in bill.phases.items() if phase}
    if actors is None or not phases.keys() - {"generators"}:
        return f"{n_cells} cells. All are done."
    few = "" if bill.times == 1 else f" (as {n_cells} of them, drawn at random)"
    total, n_generators = round(n_cells * bill.times), round(len(bill.phases["generators"]) * bill.times)
    n_cores = allocation.cores() or os.cpu_count() or 1
    places = min(max(1, n_cores // actors), jobs or n_cores) if in_ray else 1
    where = f"with {n_cores} cores" if in_ray else "in one process" if actors == 1 else f"with {actors} actors"
    details = ", ".join(f"{name} {duration(bill.span(phase, places))}" for name, phase in phases.items())
    time = f"In all about {duration(bill.seconds(places, in_ray))} here {where} ({details})"
    if on_cores is not None:
        elsewhere = min(max(1, on_cores // actors), jobs or on_cores)
        time += f"; with {on_cores}: {duration(bill.seconds(elsewhere, in_ray))}"
    at_once = min(places, len(bill.phases["cells"]) or 1) * actors
    several = f" in each of {at_once} processes" if at_once > 1 else ""
    disk, artifacts = (amount(bill.times * size) for size in (bill.runs, bill.artifacts))
    disk += f", artifacts {artifacts}" if bill.artifacts else ""
    todo = f"{total} cells{few}, {n_generators} generators to make"
    return f"{todo}. {time}. Memory: up to {amount(bill.memory)}{several}. Disk: {disk}."


def amount(nbytes: float) -> str:
    """Return a number of bytes as text in the largest unit (B, kB, MB or GB) in which it is at least 1."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2g} {unit}" if nbytes < 10 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} B"
