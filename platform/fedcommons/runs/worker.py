"""What a worker of an experiment holds: the module that clients train, and how they train it."""

import os

import torch
from pytorch_lightning import LightningModule
from torch import nn

from fedcommons.artifacts import key_of
from fedcommons.config import parts
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import taken
from fedcommons.config.flat import deciding, part_of
from fedcommons.core import salts
from fedcommons.core.algorithm import (
    Algorithm,
)
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.noise import Source
from fedcommons.core.work import Work
from fedcommons.core.worker import RunData, Worker, default_device, fresh_torch
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError, before_any_work, somebodys
from fedcommons.runs import weights
from fedcommons.runs.checks import (
    depends_on_rounds,
    require_sources,
    schedule_of,
)
from fedcommons.seeds import set_default_generator, wide_key
from lightning_modules import Classifier
from lightning_modules.networks import Projected


@fresh_torch()
def build_module(config: Experiment, dataset: Dataset, device: str = "cpu") -> LightningModule:
    """The LightningModule that clients train. Its first weights are keyed by the run's seed, or from ``model.weights``.

    ``config.model`` names a LightningModule, which gets what its signature asks for of shape, n_classes, mean, std, lr,
    momentum, weight_decay and optimizer, or a plain network, which gets the first two and stands in a ``Classifier``.

    Raises:
        UserError: it cannot be built of this.
    """
    set_default_generator(config.seed, "initial weights")
    m, c = config.model, config.client
    offered = {
        "shape": dataset.shape,
        "n_classes": dataset.n_classes,
        "mean": dataset.mean,
        "std": dataset.std,
        "lr": c.lr,
        "momentum": c.momentum,
        "weight_decay": c.weight_decay,
        "optimizer": c.optimizer,
    }
    part = parts.find("model", m.name)
    with torch.device(device):
        with before_any_work(), somebodys(f"{parts.called('model', m.name)} cannot be built for {dataset.name}"):
            made = part(**taken(part, offered), **m.constants)
        if hasattr(
            made, "_orig_mod"
        ):  # else it would be taken for a network, and trained with another loss than its own
            raise UserError(f"model.name {m.name} is compiled by torch.compile: give the module as it is.")
        if isinstance(made, LightningModule):
            if m.projection:
                raise UserError(f"model.projection is for plain networks, and {m.name} is a LightningModule.")
            module = made
        elif isinstance(made, nn.Module):
            network = Projected(made, m.projection) if m.projection else made
            del offered["shape"], offered["n_classes"]
            module = Classifier(network, **offered)
        else:
            raise UserError(f"model.name {m.name} must be a LightningModule or a network, got {type(made).__name__}.")
    if m.weights:
        with before_any_work(), somebodys(parts.called("model", m.name)):
            weights.load(module, m.weights, config.source.get("weights"))
    return module


def local_loop(config: Experiment, augment: bool) -> LocalSGD:
    """The local training of ``config``."""
    c = config.client
    dp = DPSGD(config.dp.noise_multiplier, config.dp.clip) if config.dp.local else None
    schedule = schedule_of(c.lr_schedule, c.constants, config.federation.rounds)
    return LocalSGD(
        c.epochs,
        c.batch_size,
        c.drop_last,
        c.equal_work,
        augment,
        dp,
        c.onednn,
        schedule,
        c.clip_norm,
        c.accumulate,
    )


def noise_key(config: Experiment) -> int:
    """128 bits of all that decides the results of ``config``: no two experiments share their noise.

    What may change between a run and its resumption has no part in it, nor has 1 against 1.0; nor has the number of
    rounds where a run with more of them begins like one with fewer.
    """
    is_longer_alike = not depends_on_rounds(config.client.lr_schedule)
    decided = {n: v for n, v in deciding(config).items() if n != "federation.rounds" or not is_longer_alike}
    facts = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in decided.items()}
    return wide_key("experiment", repr(sorted(facts.items())))


def run_name(experiment: int, data: str, salt: bytes = b"") -> str:
    """What names a run in its checkpoints and clients' memories: a digest of all that decides it.

    experiment: its ``noise_key``, so that a run with more rounds has the same name; data: the digest of its data set.
    """
    return key_of({"experiment": experiment, "data": data, "noise": salts.name_of(salt) if salt else ""})


def build_worker(
    config: Experiment, facts: Dataset, here: str, source: Source, algorithm: Algorithm | None, data: RunData
) -> Worker:
    """What a worker of this experiment holds; ``facts``: the data set without its images; ``source``: of its noise.

    here: the folder from which import paths start; algorithm: None in another process, which finds the part itself.

    Raises:
        UserError: in that process a part of somebody's own has other code.
    """
    if algorithm is None:
        os.environ[parts.HERE] = here
        require_sources(config, ("model", "algorithm", "measure", "schedule"))
    device = default_device()
    loop = local_loop(config, facts.augment)
    work = Work(build_module(config, facts), device, loop, config.federation.weighting, source)
    return Worker(work, algorithm or part_of(config, "algorithm"), data.to(device))
