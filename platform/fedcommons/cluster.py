"""Connecting to Ray: a cluster that is there, else one on this machine."""

import logging
import os

from fedcommons.config import Experiment
from fedcommons.errors import UserError

INLINE_BYTES = 4 * 2**20
"""Arguments and results below this travel with the call; a cluster is told so in ray_cluster.yaml."""


def connect(num_cpus: int | None = None) -> None:
    """Connect to the cluster of RAY_ADDRESS, else start Ray on this machine with ``num_cpus`` (default: ``cores``).

    It has the GPUs that CUDA_VISIBLE_DEVICES names, which Slurm sets.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nobody else can reach a Ray that listens on this machine only
    ray.init(
        address="local",  # not one of somebody else's on this machine
        num_cpus=num_cpus or cores(),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"max_direct_call_object_size": INLINE_BYTES},
    )


def cores() -> int | None:
    """The cores that Slurm or the system leaves to this process; None: all that Ray finds."""
    limits = [len(os.sched_getaffinity(0))] if hasattr(os, "sched_getaffinity") else []
    if asked := os.environ.get("SLURM_CPUS_PER_TASK", ""):
        limits.append(int(asked))
    fewest = min(limits, default=None)
    return fewest if fewest != os.cpu_count() else None


def gpu_share(wanted: float) -> float:
    """The share of a GPU to ask for: ``wanted`` where there is a GPU, else 0, as Ray would wait for one for ever."""
    import ray

    return wanted if ray.cluster_resources().get("GPU", 0) > 0 else 0


def describe() -> str:
    """What Ray has, in words."""
    import ray

    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    return f"{int(resources.get('CPU', 0))} cores, {gpus} GPU{'s' if gpus != 1 else ''}, {len(ray.nodes())} node(s)"


def bundle(gpus_per_actor: float) -> dict[str, float]:
    """What one process that trains clients reserves."""
    gpus = gpu_share(gpus_per_actor)
    return {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}


def require_actors(config: Experiment) -> None:
    """Refuse at once what Ray could only wait for.

    Raises:
        UserError: the machine or cluster never has room for a run's actors.
    """
    import ray

    n = config.federation.actors if config.federation.executor == "ray_actors" else 1
    resources = ray.cluster_resources()
    for kind, each in bundle(config.federation.gpus_per_actor).items():
        has = resources.get(kind, 0)
        room = int(has / each + 1e-9) if each >= 1 else int(has) * int(1 / each + 1e-9)  # a share lies on one GPU
        if n > room:
            raise UserError(
                f"federation.actors: one run needs {n * each:g} {kind}, and Ray has {has:g}, room for {room} such "
                "actors; use fewer or federation.executor serial."
            )
