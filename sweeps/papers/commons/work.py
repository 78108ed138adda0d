"""Seconds of client work, computed as the number of steps times the measured seconds of a step, as in ``--dry-run``.

The seconds of a run would also include the server's work and other load of the machine. Client work is the local steps
of the clients, their method-specific work (``OF_CLIENTS``), and the training and sampling of their generators.
"""

from fedcommons.config.experiment import Experiment
from fedcommons.core.work_units import in_seconds
from fedcommons.core.worker import fresh_torch
from fedcommons.generators.image_cache import Job
from fedcommons.runs import assemble, build
from fedcommons.tune import cost, dry_run
from fedcommons.tune.work_counts import count_work

OF_CLIENTS = {
    "feddm": ("steps", "real", "synthetic"), "dense": ("local_examples",), "coboosting": ("local_examples",),
    "fedcvae": ("local_steps", "local_images"),
}  # fmt: skip
"""Method-specific units of work that clients do, by method; the server does all other units."""


@fresh_torch()
def client_seconds(config: Experiment, prices: dict[tuple, cost.GeneratorPrices]) -> float:
    """Return the seconds of work of all clients together, on one core of this machine at its current speed.

    prices: measured seconds of generators. The function adds new measurements, so that a generator is measured once.
    """
    prepared = build.build(config)
    contributed, _ = cost.contribute(prepared, [cost.stand_in(need) for need in prepared.requests])
    ready = assemble.assemble_contributed(prepared, contributed)
    n, price = count_work(ready), cost.measure(ready)
    client_pieces = {name: pieces for name, pieces in n.pieces.items() if name in OF_CLIENTS.get(config.algorithm, ())}
    batch, half = config.client.batch_size, cost.half(config.client.batch_size)
    slope = (price.step - price.half) / (batch - half) if batch > half else 0.0
    rest = n.rest * price.half + slope * (n.rest_examples - n.rest * half)
    local = n.full * price.step + max(rest, 0.0) + n.trainings * price.training
    of_generators = dry_run.generators((Job([need], {}) for need in prepared.requests), prices)
    return local + in_seconds(client_pieces, price.pieces) + of_generators
