"""Seconds of client work, computed as the number of steps times the measured seconds of a step, as in ``--dry-run``.

The seconds of a run would also include the server's work and other load of the machine. Client work is the training
of the clients, and the training and sampling of their generators.
"""

from fedcommons.config.experiment import Experiment
from fedcommons.core.worker import fresh_torch
from fedcommons.generators.image_cache import Job
from fedcommons.runs import assemble, build
from fedcommons.tune import cost, dry_run
from fedcommons.tune.work_counts import Amounts, count_work


@fresh_torch()
def client_seconds(config: Experiment, prices: dict[tuple, cost.GeneratorPrices]) -> float:
    """Return the seconds of work of all clients together, on one core of this machine at its current speed.

    prices: measured seconds of generators. The function adds new measurements, so that a generator is measured once.
    """
    prepared = build.build(config)
    contributed, _ = cost.contribute(prepared, [cost.stand_in(need) for need in prepared.requests])
    ready = assemble.assemble_contributed(prepared, contributed)
    counts = count_work(ready)
    of_clients = Amounts(trainings=counts.trainings, examples=counts.examples)
    of_generators = dry_run.generators((Job([need], {}) for need in prepared.requests), prices)
    return of_clients.seconds(cost.measure(ready).seconds) + of_generators
