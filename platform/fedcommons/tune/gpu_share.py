"""``federation.gpus_per_actor auto``: measure, before any work, which share of a GPU a training process needs."""

from collections.abc import Sequence
from dataclasses import replace
from math import floor
from typing import Any

import torch

from fedcommons.config import dotted, registry
from fedcommons.config.experiment import Experiment
from fedcommons.core.worker import default_device, fresh_torch
from fedcommons.federation import hosts
from fedcommons.federation.client_sampling import joining
from fedcommons.runs import assemble, build
from fedcommons.runtime import cpu_kind, ray_cluster
from fedcommons.runtime.gpu_memory import CONTEXT, is_full
from fedcommons.runtime.torch_settings import has_gpu
from fedcommons.tune import cost, sweep
from fedcommons.tune.small_rounds import SmallRounds

SHAPE = (
    "algorithm", "model.", "data.name", "data.augment", "dp.local", "dp.at_once", "client.batch_size", "client.batched",
    "client.optimizer", "client.momentum", "client.weight_decay", "client.onednn", "federation.buffers", "generator.",
)  # fmt: skip
"""Fields, or prefixes of fields, on which the memory of a training process depends."""


MARGIN = 1.1
"""Factor on the measured memory, because memory is fragmented over many rounds, and the measured round is short."""


def share(need: int, total: int, processes: int, gpus: int) -> float:
    """Return the share of a GPU for each of ``processes`` processes: 1/min(ceil(processes/gpus), total // need).

    So the processes spread over all GPUs, and the processes on a GPU fit in its memory. The share is rounded down to a
    multiple of 1/10,000, Ray's unit, and is at least one unit. need: bytes of GPU memory that a process uses; 0:
    unknown, so memory does not limit the number of processes. total: bytes of a GPU's memory.
    """
    room = max(1, total // need) if need else processes
    return max(1, floor(10_000 / min(-(-processes // gpus), room))) / 10_000


def with_share(configs: Sequence[Experiment], processes: int) -> list[Experiment]:
    """Return the experiments with ``federation.gpus_per_actor auto`` replaced by a number, if Ray has GPUs.

    Of the experiments with equal memory needs, one runs a short round on a GPU. The largest memory decides the share of
    all experiments. Ray must be connected.

    processes: number of processes that run at the same time.

    Raises:
        UserError: other work uses all GPUs; see ``ray_cluster.reserve``.
    """
    automatic = [c for c in configs if c.federation.gpus_per_actor == ray_cluster.AUTO]
    if not automatic or not ray_cluster.gpu_share(ray_cluster.AUTO):
        return [*configs]
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    shapes = {dotted.values_of(c, SHAPE): c for c in automatic}
    pin, driver, base_folder = ray_cluster.node_labels(ray_cluster.AUTO), hosts.facts(), str(registry.base())
    place = ray_cluster.reserve(
        [ray_cluster.bundle(ray_cluster.AUTO)], pin, "the measurement for federation.gpus_per_actor auto"
    )
    try:
        on_it = PlacementGroupSchedulingStrategy(place)
        task: Any = ray.remote(num_cpus=1, num_gpus=1, scheduling_strategy=on_it, max_calls=1)(hosts.run_if_same)
        tasks = [task.remote(driver, measured, base_folder, sweep.with_absolute_paths(c)) for c in shapes.values()]
        measurements: list[tuple[int, int]] = ray.get(tasks)
    finally:
        ray_cluster.free(place)
    chosen = share(*max(measurements), processes, int(cpu_kind.resources(ray.nodes(), pin)["GPU"]))
    return [
        replace(c, federation=replace(c.federation, gpus_per_actor=chosen))
        if c.federation.gpus_per_actor == ray_cluster.AUTO
        else c
        for c in configs
    ]


def measured(here: str, config: Experiment) -> tuple[int, int]:
    """Return (bytes of GPU memory that the experiment uses, bytes of the GPU), in a Ray task; (0, 0) without a GPU.

    If the measured round fails, the first number is that of the whole GPU if memory is the reason, else 0: unknown.
    here: the folder to which the names of user-defined components are relative.
    """
    registry.work_in(here)
    if not has_gpu():
        return 0, 0
    default_device()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        play(config)
    except Exception as error:  # the run itself meets the error and reports it
        return total if is_full(error) else 0, total
    return int(MARGIN * torch.cuda.max_memory_reserved()) + CONTEXT, total


@fresh_torch()
def play(config: Experiment) -> None:
    """Run the steps of an experiment that use the most memory.

    They are local steps of a client (of all clients that are trained together), a chunk of the evaluation, a small
    measurement of the convergence parameters, and the training and sampling of the generator with the most examples.
    """
    prepared = build.build(config)
    contributed, _ = cost.contribute(prepared, [cost.stand_in(need) for need in prepared.requests])
    ready = assemble.assemble_contributed(prepared, contributed)
    plan, joined = ready.plan, joining(ready.plan.facts.n_clients, ready.plan.participation)
    clients = -(-joined // plan.blocks) if ready.spec.local.batched else 1
    one_block = replace(ready, plan=replace(plan, blocks=1))
    now, _ = SmallRounds(one_block, 1, 2 * ready.spec.local.batch_size, clients).play()
    cost.of_observing(ready, now)
    if prepared.requests:
        cost.measure_generator(max(prepared.requests, key=lambda need: len(need.examples)))
