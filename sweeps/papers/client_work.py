"""Seconds of the clients' work in a run: the training of the clients, and the work of their generators."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcommons.cli.display import Display
from fedcommons.config.experiment import Experiment
from fedcommons.core.worker import fresh_torch
from fedcommons.generators.image_cache import Job
from fedcommons.runs import assemble, build
from fedcommons.storage.atomic_files import write_json
from fedcommons.tune import cost, dry_run
from fedcommons.tune.work_counts import Amounts, count_work


def of_runs(configs: Mapping[str, Experiment], out: Path, display: Display) -> dict[str, list[float]]:
    """Return ``client_seconds`` of each run, and cache them in ``out/client_work.json``; configs: by the run's name.

    A cache of an earlier version has only the sum of both numbers, which is then returned as a list of one number.
    """
    file, prices = out / "client_work.json", dict[tuple, Any]()
    cached: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for number, (name, config) in enumerate(configs.items(), 1):
        if name not in cached:
            display.step("pricing client work", number, len(configs), name)
            cached[name] = client_seconds(config, prices)
            write_json(file, cached)
    return {name: seconds if isinstance(seconds, list) else [seconds] for name, seconds in cached.items()}


@fresh_torch()
def client_seconds(config: Experiment, prices: dict[tuple, Any]) -> list[float]:
    """Return the seconds of all clients' local training in all rounds, and the seconds of all clients' generators.

    The seconds are those of one core of this machine at its current speed: the number of steps times the measured
    seconds of a step, as in ``--dry-run``. The seconds of a run would also include the server's work and other load of
    the machine. prices: measured seconds. The function adds new measurements, so that nothing is measured twice; the
    price of a training example is measured for one alpha and used for all.
    """
    prepared = build.build(config)
    contributed, _ = cost.contribute(prepared, [cost.stand_in(need) for need in prepared.requests])
    ready = assemble.assemble_contributed(prepared, contributed)
    counts, alpha = count_work(ready), ("partition.alpha", config.flat.get("partition.alpha"))
    shape = tuple(pair for pair in cost.shape_of(ready) if pair != alpha)
    if counts.trainings and shape not in prices:
        prices[shape] = cost.measure(ready).seconds
    of_clients = Amounts(trainings=counts.trainings, examples=counts.examples).seconds(prices.get(shape, Amounts()))
    return [of_clients, dry_run.generators((Job([need], {}) for need in prepared.requests), prices)]
