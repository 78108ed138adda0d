"""Federated algorithms by the name they have in configs: one file each, both halves in it."""

from collections.abc import Callable

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config.experiment import Experiment, deciding
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.seeds import wide_key


def _patterns(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(p.strip() for p in text.split(",") if p.strip())


ALGORITHMS: dict[str, Callable[[Experiment, LocalSGD], Algorithm]] = {
    "fedavg": lambda c, local: FedAvg(local, c.federation.weighting),
    "fedprox": lambda c, local: FedProx(local, c.federation.weighting, c.fedprox.mu),
    "scaffold": lambda c, local: SCAFFOLD(local, c.federation.weighting, c.scaffold.option),
    "fedpvr": lambda c, local: FedPVR(local, c.federation.weighting, _patterns(c.fedpvr.layers)),
    "feddyn": lambda c, local: FedDyn(local, c.federation.weighting, c.feddyn.alpha, c.feddyn.clip, c.feddyn.squared),
    "fednova": lambda c, local: FedNova(local, c.federation.weighting),
    "moon": lambda c, local: MOON(local, c.federation.weighting, c.moon.mu, c.moon.temperature),
    "fedmix": lambda c, local: FedMix(local, c.federation.weighting, c.fedmix.mix, c.fedmix.box),
}


def local_loop(config: Experiment, augment: bool) -> LocalSGD:
    """The local training of ``config``."""
    c = config.client
    dp = DPSGD(config.dp.noise_multiplier, config.dp.clip, noise_key(config)) if config.dp.local else None
    return LocalSGD(c.epochs, c.batch_size, c.drop_last, c.equal_work, augment, dp)


def noise_key(config: Experiment) -> int:
    """128 bits of all that decides the results of ``config``: no two experiments share their noise.

    What may change between a run and its resumption has no part in it, nor has 1 against 1.0.
    """
    facts = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in deciding(config).items()}
    return wide_key("experiment", repr(sorted(facts.items())))


def build(config: Experiment, augment: bool) -> Algorithm:
    """The algorithm that ``config`` names, with its local loop."""
    return ALGORITHMS[config.algorithm](config, local_loop(config, augment))
