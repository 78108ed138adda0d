"""Federated algorithms by the name they have in configs: one file each, both halves in it."""

from collections.abc import Callable

from fedcommons.algorithms.algorithm import Algorithm
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.local import LocalSGD
from fedcommons.config import Experiment


def _fedavg(config: Experiment, local: LocalSGD) -> Algorithm:
    return FedAvg(local, config.federation.weighting)


ALGORITHMS: dict[str, Callable[[Experiment, LocalSGD], Algorithm]] = {"fedavg": _fedavg}


def build(config: Experiment, augment: bool) -> Algorithm:
    """The algorithm that ``config`` names, with its local loop."""
    local = LocalSGD(
        config.client.epochs, config.client.batch_size, config.client.drop_last, config.client.equal_work, augment
    )
    return ALGORITHMS[config.algorithm](config, local)
