"""Dry run: estimate the time, memory and disk space that a sweep would need, for each trial and in total.

A trial's time is the sum over all kinds of work: number of units times measured seconds of a unit. The total is
computed as if all generators were trained first, and then all experiments run, each as soon as a process is free. A
real sweep mixes generators and experiments, and takes almost the same time. Other programs make all times longer.
"""

import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedcommons.cli.display import Display, duration
from fedcommons.generators.image_cache import Job, missing
from fedcommons.runs import assemble, build
from fedcommons.runs.spec import RunSpec
from fedcommons.runtime import ray_cluster
from fedcommons.storage.artifact_store import Store
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import cost, sweep
from fedcommons.tune.cost import GeneratorPrices, Prices
from fedcommons.tune.work_counts import count_work, generator_work

RAY_S = 6.0
"""Seconds that Ray and Ray Tune take to start."""

LINE = 500
"""Assumed bytes per round in rounds.jsonl and timing.jsonl together."""


@dataclass
class Bill:
    """The cost of a sweep's remaining work: seconds of each generator, trial (``cells``) and further job, and bytes.

    times: number of trials in the sweep divided by the number of trials in this bill, which may be a sample.
    prices, of_generators: measured prices, by the fields on which they depend.
    """

    times: float = 1.0

    generators: list[float] = field(default_factory=list)
    cells: list[float] = field(default_factory=list)
    extra: dict[str, list[float]] = field(default_factory=dict)
    first: float = 0.0  # additional seconds of the first run in a process
    memory: int = 0  # bytes: the largest memory of a process
    runs: int = 0  # bytes of run folders on disk
    artifacts: int = 0  # bytes of artifacts on disk
    prices: dict[tuple, Prices] = field(default_factory=dict)
    of_generators: dict[tuple, GeneratorPrices] = field(default_factory=dict)

    def seconds(self, places: int, in_ray: bool = True) -> float:
        """Return the total seconds: with ``places`` parallel processes if ``in_ray``, else in this process alone."""
        if not in_ray:
            return cost.start_up() + self.first + self.times * (sum(self.generators) + sum(self.cells))
        stages = [stage for stage in (self.generators, self.cells, *self.extra.values()) if stage]
        starting = RAY_S + (1 + len(stages)) * cost.start_up() + self.first  # each phase starts new processes
        return starting + sum(self.span(stage, places) for stage in stages)

    def span(self, stage: Sequence[float], places: int) -> float:
        """Return the seconds of a phase, given the seconds of its jobs, with ``places`` parallel processes.

        If trials are extrapolated from a sample, all processes are assumed to be busy until the end.
        """
        return makespan(stage, places) if self.times == 1 else self.times * sum(stage) / places


@dataclass(frozen=True)
class ExtraJob:
    """A job of a sweep that is not a run, such as central training. kind: name of such jobs in the dry run's total.

    seconds: a function that measures a step of the job, and returns the seconds of the whole job.
    """

    name: str
    kind: str
    seconds: Callable[[], float]


def makespan(seconds: Iterable[float], places: int) -> float:
    """Return the seconds until the last job ends, if jobs start in the given order, each as soon as a process is free.

    seconds: duration of each job. places: number of parallel processes.
    """
    free = [0.0] * places
    for job_seconds in seconds:
        heapq.heappush(free, heapq.heappop(free) + job_seconds)
    return max(free)


def print_costs(
    cells: Sequence[sweep.Trial], out: Path, display: Display, on_cores: int | None = None,
    extra: Sequence[ExtraJob] = (), in_ray: bool = True, total: int | None = None,
) -> None:  # fmt: skip
    """Print which trials would run and their cost.

    Args:
        on_cores: also print the time on another machine with this number of cores.
        extra: further jobs of the sweep.
        in_ray: whether trials run as parallel processes of Ray; else in this process.
        total: number of trials in the sweep, if ``cells`` is only a sample of them.

    Raises:
        UserError: a trial cannot be run.
    """
    display.say("Timing short rounds ...")
    bill, wanted, torch_threads = Bill((total or len(cells)) / max(1, len(cells))), [], torch.get_num_threads()
    notes: dict[str, None] = {}
    for c in cells:
        ready = build.build(c.config)
        notes |= dict.fromkeys(ready.notes)
        store = Store(ready.artifacts, display.say)
        n_missing = sum(len(job.requests) for job in missing(store, ready.requests))
        images_note = f", {len(ready.requests) - n_missing} of {len(ready.requests)} clients' synthetic images exist"
        images_note = images_note if ready.requests else ""
        if sweep.is_done(c, out):
            display.say(f"{c.name}: done{images_note}")
            continue
        wanted += [(store.folder, need) for need in ready.requests]
        display.say(f"{c.name}: to run{images_note}; {add_trial(ready, bill)}")
    for folder in dict.fromkeys(folder for folder, _ in wanted):
        store = Store(folder, display.say)
        for job in missing(store, [need for f, need in wanted if f == folder]):
            add_generator(job, bill)
    for job in extra:
        if read_summary(out / job.name) is not None:
            display.say(f"{job.name}: done")
            continue
        seconds = job.seconds()
        bill.extra.setdefault(job.kind, []).append(seconds)
        display.say(f"{job.name}: to run; {duration(seconds)}")
    for note in notes:
        display.say(note)
    torch.set_num_threads(torch_threads)
    display.say(_in_all(len(cells), bill, cells[0].processes if cells else None, on_cores, in_ray))


def add_trial(ready: RunSpec, bill: Bill) -> str:
    """Measure the trial's cost, add it to the bill, and return it as text for the user."""
    contributed, sharing = cost.contribute(ready, [cost.stand_in(need) for need in ready.requests])
    assembled = assemble.assemble_contributed(ready, contributed)
    counts, shape = count_work(assembled), cost.shape_of(assembled)
    if shape not in bill.prices:
        bill.prices[shape] = cost.measure(assembled)
    price = bill.prices[shape]
    first, later, size = cost.overhead("off" if ready.wandb == "off" else "offline")
    run_seconds = counts.seconds(price.seconds) / (ready.actors or 1)
    seconds, bill.first = sharing + run_seconds + later, max(0.0, first - later)
    state_bytes = price.state + price.memory_bytes * len(assembled.data.clients)
    disk = size + 2 * state_bytes + LINE * ready.plan.facts.rounds
    bill.cells.append(seconds)
    bill.memory, bill.runs = max(bill.memory, price.memory), bill.runs + disk
    return f"{duration(seconds)}, {amount(price.memory)} of memory, {amount(disk)} on disk"


def add_generator(job: Job, bill: Bill) -> None:
    need = job.requests[0]
    recipe, batch = need.recipe, getattr(need.recipe.generator, "batch_size", len(need.examples))
    shape = (str(recipe.facts(("epochs", "lr"))), need.examples.x.shape[1:], min(len(need.examples), 2 * batch) // 8)
    if shape not in bill.of_generators:
        bill.of_generators[shape] = cost.measure_generator(need)
    price, (steps, sampling) = bill.of_generators[shape], generator_work(job)
    bill.generators.append(price.start + price.step * steps + price.image * sampling)
    images = sum(len(n.labels) * (n.examples.x[0].nbytes + 8) for n in job.requests)
    bill.artifacts += images + price.weights * len(job.epochs)
    bill.memory = max(bill.memory, price.memory)


def generators(jobs: Iterable[Job], prices: dict[tuple, GeneratorPrices] | None = None) -> float:
    """Return the seconds that the generator jobs take one after another on one core.

    prices: prices that earlier calls measured, by the facts on which they depend. Prices that this call measures are
    added.
    """
    bill, torch_threads = Bill(of_generators={} if prices is None else prices), torch.get_num_threads()
    for job in jobs:
        add_generator(job, bill)
    torch.set_num_threads(torch_threads)
    return sum(bill.generators)


def _in_all(n_cells: int, bill: Bill, actors: int | None, on_cores: int | None, in_ray: bool) -> str:
    """Return the last line of the dry run: total time, memory and disk."""
    if actors is None or not (bill.cells or bill.extra):
        return f"{n_cells} cells. All are done."
    few = "" if bill.times == 1 else f" (as {n_cells} of them, drawn at random)"
    total = round(n_cells * bill.times)
    n_cores = ray_cluster.cores() or os.cpu_count() or 1
    places = max(1, n_cores // actors) if in_ray else 1
    n = f"{total} cells{few}, {round(len(bill.generators) * bill.times)} generators to make"
    where = f"with {n_cores} cores" if in_ray else "in one process" if actors == 1 else f"with {actors} actors"
    stages = {"generators": bill.generators, "cells": bill.cells, **bill.extra}
    details = ", ".join(f"{name} {duration(bill.span(each, places))}" for name, each in stages.items() if each)
    time = f"In all about {duration(bill.seconds(places, in_ray))} here {where} ({details})"
    if on_cores is not None:
        time += f"; with {on_cores}: {duration(bill.seconds(max(1, on_cores // actors), in_ray))}"
    at_once = min(places, len(bill.cells) or 1) * actors
    several = f" in each of {at_once} processes" if at_once > 1 else ""
    artifacts = f", artifacts {amount(bill.times * bill.artifacts)}" if bill.artifacts else ""
    disk = f"Disk: {amount(bill.times * bill.runs)}{artifacts}"
    return f"{n}. {time}. Memory: up to {amount(bill.memory)}{several}. {disk}."


def amount(nbytes: float) -> str:
    """Return a number of bytes as text in the largest unit (B, kB, MB or GB) in which it is at least 1."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2g} {unit}" if nbytes < 10 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} B"
