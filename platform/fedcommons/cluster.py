"""Connecting to Ray: a cluster that is there, else one on this machine."""

import logging
import os

from fedcommons.errors import UserError
from fedcommons.federation.ray_actors import INLINE_BYTES


def connect(num_cpus: int | None = None) -> None:
    """Connect to the cluster of RAY_ADDRESS, else start Ray on this machine with ``num_cpus`` (default: all)."""
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
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"max_direct_call_object_size": INLINE_BYTES},
    )


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


def require(n: int, bundle: dict[str, float]) -> None:
    """Refuse at once what Ray could only wait for.

    Raises:
        UserError: the cluster never has ``n`` such bundles.
    """
    import ray

    resources = ray.cluster_resources()
    for kind, each in bundle.items():
        if n * each > resources.get(kind, 0) + 1e-9:
            raise UserError(
                f"federation.actors: one run needs {n * each:g} {kind}, and Ray has {resources.get(kind, 0):g}; "
                "use fewer actors or federation.executor serial."
            )
