"""What a worker of an experiment holds: the module that clients train, and how they train it."""

import os

import torch
from pytorch_lightning import LightningModule
from torch import nn

from fedcommons.config import registry
from fedcommons.config.dotted import deciding, part_of
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import taken
from fedcommons.core import hooks
from fedcommons.core.algorithm import (
    Algorithm,
)
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, default_device, fresh_torch, require_precision
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError, before_any_work, somebodys
from fedcommons.privacy import salts
from fedcommons.privacy.dp_sgd import DPSGD, Target
from fedcommons.privacy.noise import Source
from fedcommons.runs import model_files
from fedcommons.runs.checks import (
    depends_on_rounds,
    require_sources,
    schedule_of,
)
from fedcommons.seeding import set_default_generator, wide_key
from fedcommons.storage.artifact_store import key_of
from lightning_modules import Classifier, Regressor
from lightning_modules.networks import Projected


@fresh_torch()
def build_module(config: Experiment, dataset: Dataset, device: str = "cpu") -> LightningModule:
    """The LightningModule that clients train. Its first weights are keyed by the run's seed, or from ``model.weights``.

    ``config.model`` names a LightningModule, which gets what its signature asks for of shape, n_classes, mean, std, lr,
    momentum, weight_decay and optimizer, or a plain network, which gets the first two and stands in a ``Classifier``,
    or in a ``Regressor`` where labels are floats. Then ``n_classes`` is the numbers in a label; None without labels.

    Raises:
        UserError: it cannot be built of this.
    """
    set_default_generator(config.seed, "initial weights")
    m, c = config.model, config.client
    offered = {
        "shape": dataset.shape,
        "n_classes": dataset.n_classes or dataset.targets,
        "mean": dataset.mean,
        "std": dataset.std,
        "lr": c.lr,
        "momentum": c.momentum,
        "weight_decay": c.weight_decay,
        "optimizer": c.optimizer,
    }
    part, is_own = registry.find("model", m.name), registry.is_own(m.name)
    without = f"needs labels, and {dataset.name} has none: name a LightningModule with a loss of its own"
    if not (is_own or offered["n_classes"]):
        raise UserError(f"model.name {m.name} {without}.")
    with torch.device(device):
        with before_any_work(), somebodys(f"{registry.called('model', m.name)} cannot be built for {dataset.name}"):
            made = part(**taken(part, offered), **m.constants)
        if hasattr(
            made, "_orig_mod"
        ):  # else it would be taken for a network, and trained with another loss than its own
            raise UserError(f"model.name {m.name} is compiled by torch.compile: give the module as it is.")
        if dataset.n_classes is None and isinstance(made, LightningModule) and not is_own:
            raise UserError(f"model.name {m.name} classifies, and the labels of {dataset.name} are no classes.")
        if isinstance(made, LightningModule):
            if m.projection:
                raise UserError(f"model.projection is for plain networks, and {m.name} is a LightningModule.")
            module = made
        elif isinstance(made, nn.Module):
            if not offered["n_classes"]:
                raise UserError(f"model.name {m.name} is a plain network, which {without}.")
            network = Projected(made, m.projection) if m.projection else made
            del offered["shape"], offered["n_classes"]
            module = Regressor(network, **offered) if dataset.targets else Classifier(network, **offered)
        else:
            raise UserError(f"model.name {m.name} must be a LightningModule or a network, got {type(made).__name__}.")
    with before_any_work(), somebodys(registry.called("model", m.name), "setup"):
        hooks.prepare(module)
    if m.weights:
        with before_any_work(), somebodys(registry.called("model", m.name)):
            model_files.load_weights(module, m.weights, config.source.get("weights"))
    return module


def standardises(model: str, module: LightningModule) -> bool:
    """Return whether the module of the part ``model`` was built with the data set's mean and standard deviation."""
    asked = taken(registry.find("model", model), {"mean": (), "std": ()})
    return bool(asked) or type(module) in (Classifier, Regressor)


def local_loop(config: Experiment, augment: bool) -> LocalSGD:
    """The local training of ``config``."""
    c = config.client
    d, rounds = config.dp, config.federation.rounds
    target = Target(d.target_epsilon, d.delta, rounds) if d.target_epsilon is not None else None
    dp = DPSGD(d.noise_multiplier, d.clip, target, d.at_once) if d.local else None
    schedule = schedule_of(c.lr_schedule, c.constants, rounds)
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
        c.precision,
        c.accumulate,
        c.batched,
        c.graphs,
    )


def noise_key(config: Experiment) -> int:
    """128 bits of all that decides the results of ``config``: no two experiments share their noise.

    What may change between a run and its resumption has no part in it, nor has 1 against 1.0; nor has the number of
    rounds where a run with more of them begins like one with fewer.
    """
    is_longer_alike = config.dp.target_epsilon is None and not depends_on_rounds(config.client.lr_schedule)
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
        UserError: in that process a part of somebody's own has other code, or its GPU lacks the precision.
    """
    if algorithm is None:
        os.environ[registry.HERE] = here
        require_sources(config, ("model", "algorithm", "measure", "schedule"))
    device = default_device()
    require_precision("client.precision", config.client.precision, device)
    loop = local_loop(config, facts.augment)
    work = Work(build_module(config, facts), device, loop, config.federation.weighting, source)
    return Worker(work, algorithm or part_of(config, "algorithm"), data.to(device))
