"""Training of a figure's central models (reference lines), each as a Ray task."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.cli import parse
from fedcommons.cli.display import Display
from fedcommons.config import registry
from fedcommons.config.dotted import override
from fedcommons.errors import UserError, sentence
from fedcommons.reports import tables
from fedcommons.reports.cells import Cell
from fedcommons.reports.frames import load_central
from fedcommons.reports.series import value
from fedcommons.tracking.run_folder import read_summary
from fedcommons.tune import grid, learning_rates, sweep
from fedcommons.tune.study import Entry

if TYPE_CHECKING:
    from fedcommons.tune.dry_run import ExtraJob
    from papers.fedssyn.central import Central

LR = "client.lr"
"""Name of the field of the learning rate."""

Lines = Callable[[Sequence[Entry], parse.Options], "Sequence[Central]"]
"""A function that returns the central models of a study."""


def lines(
    entries: Sequence[Entry], options: parse.Options, sources: Sequence[str] = ("central_real",),
    epochs: Callable[[int], int] | None = None,
) -> "list[Central]":  # fmt: skip
    """Return the central models of the trials: one on the real images per seed, and one on each trial's pool.

    A study with ``--lrs`` has a model for each learning rate and tuning seed; the reported seeds have the first rate,
    which ``plan`` replaces. Without ``--lrs``, all models have the rate of the first trial. Trials of another network
    have no central model. sources: the images of the models, see ``Central``. epochs: returns the epochs of a model
    from federation.rounds; None: federation.rounds times client.epochs, as many as a client makes that takes part in
    every round.
    """
    from papers.fedssyn.central import Central

    result = list[Central]()
    rates = grid.values(options, "lrs", float) if options.get("lrs") else (entries[0].cell.config.client.lr,)
    of_model = [e for e in entries if e.cell.config.model.name == options.model.name]
    # preset authors has two numbers of local epochs: the larger one, so that a seed has one model
    local_epochs = max((e.cell.config.client.epochs for e in of_model), default=1)
    pairs = [(e, rate) for e in of_model for rate in (rates if e.is_tuning else rates[:1])]
    for e, rate in pairs:
        fields = {LR: rate, "client.epochs": local_epochs}
        config = sweep.with_absolute_paths(override(e.cell.config, fields))
        rounds = config.federation.rounds
        n = epochs(rounds) if epochs else rounds * local_epochs
        of_trial = sources if config.generator is not None else ("central_real",)
        result += [Central(source, config, n) for source in of_trial]
    return list({line.name: line for line in result}.values())  # trials that share a central model give one line


@dataclass(frozen=True)
class Chosen:
    """The central model at its best learning rate: its configuration, or no ``cells`` if a model is missing.

    about: how the learning rate was chosen, or why there is no configuration; empty if a study has no central model.
    """

    cells: Sequence[Cell] = ()
    about: str = ""


NO_MODEL = Chosen()


def plan(models: "Sequence[Central]", entries: Sequence[Entry], out: Path) -> "list[Central]":
    """Return the models of the tuning seeds, then those of the reported seeds at the rate that the former choose.

    The best learning rate for the same images has the highest mean validation accuracy over the tuning seeds. While it
    is at an edge of the rates tried, the tuning seeds have models at values beyond the edge, as in ``learning_rates``.
    As long as the model of any rate and tuning seed is missing in ``out``, the reported seeds have no model. Without
    tuning seeds, all models are returned.
    """
    seeds, groups = {e.cell.config.seed for e in entries if e.is_tuning}, dict[str, "list[Central]"]()
    for line in models:
        same = {name: fact for name, fact in line.facts.items() if name not in ("seed", LR)}
        groups.setdefault(repr(same), []).append(line)
    return [line for group in groups.values() for line in _plan(group, seeds, out)]


def _plan(models: "Sequence[Central]", seeds: Collection[int], out: Path) -> "list[Central]":
    from fedcommons.runs.build import check

    tuning = [line for line in models if line.config.seed in seeds]
    reported = [line for line in models if line.config.seed not in seeds]
    n_added = Counter[bool]()
    while tuning:
        runs = load_central(*(out / line.name for line in tuning))
        if len(runs) < len(tuning):
            return tuning
        best, n_tuning = float(tables.at_best_rate(runs)["lr"].iloc[0]), len(tuning)
        tried = {((LR, line.config.client.lr),) for line in tuning}
        for _, is_largest, rates in learning_rates.edges(tried, ((LR, best),)):
            n_added[is_largest] += 1
            if n_added[is_largest] <= learning_rates.MOST_ADDED:
                with suppress(UserError):  # a value out of the field's range is not tried
                    added = [_at(line, dict(rates)[LR]) for line in tuning if line.config.client.lr == best]
                    check(added[0].config)
                    tuning += added
        if len(tuning) == n_tuning:
            return [*tuning, *(_at(line, best) for line in reported)]
    return reported


def _at(line: "Central", rate: float) -> "Central":
    return replace(line, config=sweep.with_absolute_paths(override(line.config, {LR: rate})))


def at_best_rate(models: "Sequence[Central]", entries: Sequence[Entry], out: Path) -> Chosen:
    """Return the configuration of the finished models of the reported seeds, see ``plan``."""
    seeds = {e.cell.config.seed for e in entries if e.is_tuning}
    planned = plan(models, entries, out)
    reported = [line for line in planned if line.config.seed not in seeds]
    runs = load_central(*(out / line.name for line in reported))
    if runs.empty:
        which = "has failed or has not ended"
        kind = "a central model of the tuning seeds" if planned and not reported else "the training of central models"
        return Chosen(about=f"{kind} {which}" * bool(models))
    cells = [Cell({}, runs.sort_values("seed"))]
    rate, tried = value(cells[0], "lr"), sorted({line.config.client.lr for line in planned if line not in reported})
    few = f"; {len(runs)} of {len(reported)} seeds are finished" * (len(runs) < len(reported))
    if len(tried) < 2:
        return Chosen(cells, f"learning rate {rate:g}, not chosen by accuracy{few}")
    edge = " (at an edge of the values tried, so that another may be better)" * (rate in (tried[0], tried[-1]))
    values = ", ".join(f"{lr:g}" for lr in tried)
    return Chosen(
        cells, f"learning rate {rate:g}{edge}, the best of {values} by validation accuracy on the tuning seeds{few}"
    )


def _train(base_folder: str, central: "Central", folder: Path) -> None:
    from papers.fedssyn.central import run

    registry.work_in(base_folder)
    run(central, folder)


def train(centrals: "Sequence[Central]", out: Path, display: Display) -> dict[str, str]:
    """Train each unfinished central model in ``out/NAME`` as a Ray task; return NAME -> error message of each failure.

    The folders in the configs must be absolute, as a task may run on another machine.
    """
    import ray
    from ray.exceptions import RayError

    from fedcommons.federation import hosts
    from fedcommons.runtime import ray_cluster

    todo = [c for c in centrals if read_summary(out / c.name) is None]
    if not todo:
        return {}
    ray_cluster.connect()
    gpus = todo[0].config.federation.gpus_per_actor
    share, pin = ray_cluster.gpu_share(gpus), ray_cluster.node_labels(gpus)
    ray_cluster.free(ray_cluster.reserve([ray_cluster.bundle(gpus)], pin, "a central model"))
    task: Any = ray.remote(num_cpus=1, num_gpus=share, label_selector=pin)(hosts.run_if_same)
    driver, base_folder = hosts.facts(), str(registry.base())
    pending = {task.remote(driver, _train, base_folder, c, (out / c.name).resolve()): c for c in todo}
    failures = {}
    while pending:
        (ready, *_), _ = ray.wait(list(pending))
        name = pending.pop(ready).name
        try:
            ray.get(ready)
        except RayError as error:
            failures[name] = sentence(error)
        display.step("central models", len(todo) - len(pending), len(todo), "trained")
    display.drop("central models")
    return failures


def play(
    lines: Lines, entries: Sequence[Entry], options: parse.Options, todo: sweep.Todo, out: Path, display: Display,
    run: Callable[..., sweep.Outcome] | None = None,
) -> sweep.Outcome:  # fmt: skip
    """Run the remaining trials, by ``run`` (see ``Study.play``) if it is a function, then train the central models."""
    outcome = run(entries, options, todo, out, display) if run else sweep.run_cells(todo, out, display)
    started, models = time.perf_counter(), lines(entries, options)
    if not models:
        return outcome
    failures, tried = dict(outcome.failures), set[str]()
    while new := [line for line in plan(models, entries, out) if line.name not in tried]:
        failures |= train(new, out, display)
        tried |= {line.name for line in new}
    seconds = {**outcome.seconds, "central models": time.perf_counter() - started}
    return replace(outcome, seconds=seconds, failures=failures)


def extra_jobs(lines: Lines, entries: Sequence[Entry], options: parse.Options) -> "list[ExtraJob]":
    """Return the trainings of central models as jobs, whose duration a dry run estimates."""
    from fedcommons.tune.dry_run import ExtraJob
    from papers.fedssyn.central import seconds_of

    prices: dict[tuple, tuple[float, float]] = {}
    return [
        ExtraJob(line.name, "central models", partial(seconds_of, line, prices)) for line in lines(entries, options)
    ]
