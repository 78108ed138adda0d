"""Build a worker process's objects: the module that clients train, their local training, and the key of the noise."""

import os

import torch
from pytorch_lightning import LightningModule
from torch import nn

from fedcommons.config import registry
from fedcommons.config.dotted import deciding, part_of
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import select_arguments
from fedcommons.core import hooks
from fedcommons.core.algorithm import (
    Algorithm,
)
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, default_device, fresh_torch, require_precision
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError, before_any_work, user_code_context
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
    """Return the LightningModule that clients train. Its initial weights follow from the seed or ``model.weights``.

    ``config.model`` names a LightningModule or a plain network. It gets those of the arguments shape, n_classes, mean,
    std, lr, momentum, weight_decay and optimizer that its signature has. A plain network is wrapped in a
    ``Classifier``, or in a ``Regressor`` if labels are floats; the wrapper gets all arguments except shape and
    n_classes. With float labels ``n_classes`` is the number of values in a label; without labels it is None.

    Raises:
        UserError: the module cannot be built for this config and data set.
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
    part, is_own = registry.find("model", m.name), registry.is_user_defined(m.name)
    without = f"needs labels, and {dataset.name} has none: name a LightningModule that computes its loss itself"
    if not (is_own or offered["n_classes"]):
        raise UserError(f"model.name {m.name} {without}.")
    with torch.device(device):
        with (
            before_any_work(),
            user_code_context(f"{registry.component_label('model', m.name)} cannot be built for {dataset.name}"),
        ):
            model = part(**select_arguments(part, offered), **m.constants)
        if hasattr(
            model, "_orig_mod"
        ):  # a compiled module would be wrapped like a plain network, and trained with another loss
            raise UserError(f"model.name {m.name} is compiled by torch.compile: give the module without torch.compile.")
        if dataset.n_classes is None and isinstance(model, LightningModule) and not is_own:
            raise UserError(f"model.name {m.name} classifies, and the labels of {dataset.name} are no classes.")
        if isinstance(model, LightningModule):
            if m.projection:
                raise UserError(f"model.projection is for plain networks, and {m.name} is a LightningModule.")
            module = model
        elif isinstance(model, nn.Module):
            if not offered["n_classes"]:
                raise UserError(f"model.name {m.name} is a plain network, which {without}.")
            network = Projected(model, m.projection) if m.projection else model
            del offered["shape"], offered["n_classes"]
            module = Regressor(network, **offered) if dataset.targets else Classifier(network, **offered)
        else:
            raise UserError(f"model.name {m.name} must be a LightningModule or a network, got {type(model).__name__}.")
    with before_any_work(), user_code_context(registry.component_label("model", m.name), "setup"):
        hooks.prepare(module)
    if m.weights:
        with before_any_work(), user_code_context(registry.component_label("model", m.name)):
            model_files.load_weights(module, m.weights, config.source.get("weights"))
    return module


def standardises(model: str, module: LightningModule) -> bool:
    """Check whether the module of component ``model`` got the data set's mean and standard deviation as arguments."""
    requested = select_arguments(registry.find("model", model), {"mean": (), "std": ()})
    return bool(requested) or type(module) in (Classifier, Regressor)


def local_loop(config: Experiment, augment: bool) -> LocalSGD:
    """Return the settings of the clients' local training; augment: flip and crop the training images."""
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
    """Return a 128-bit key of the experiment's noise, so that no two experiments use the same noise.

    The key is computed from all fields that decide the results. It does not distinguish 1 and 1.0. It ignores the
    number of rounds if a run with more rounds begins like a run with fewer rounds.
    """
    is_longer_alike = config.dp.target_epsilon is None and not depends_on_rounds(config.client.lr_schedule)
    decided = {n: v for n, v in deciding(config).items() if n != "federation.rounds" or not is_longer_alike}
    facts = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in decided.items()}
    return wide_key("experiment", repr(sorted(facts.items())))


def run_name(experiment: int, data: str, salt: bytes = b"") -> str:
    """Return the name of a run in its checkpoints and clients' stored states: a hash of all that decides its results.

    experiment: the ``noise_key`` of the experiment, so that a run with more rounds has the same name. data: the hash of
    the data set. salt: the run's salt; empty if the noise is seeded.
    """
    return key_of({"experiment": experiment, "data": data, "noise": salts.name_of(salt) if salt else ""})


def build_worker(
    config: Experiment, facts: Dataset, here: str, source: Source, algorithm: Algorithm | None, data: RunData
) -> Worker:
    """Return the worker of this process, which trains clients of the experiment.

    facts: the data set without examples. here: the folder to which the names of user-defined components are relative.
    source: the source of noise. algorithm: None in a separate process, which builds it from ``config``. data: all
    data of the run.

    Raises:
        UserError: this process reads other code for a user-defined component than ``config`` records, or the GPU does
            not support ``client.precision``.
    """
    if algorithm is None:
        os.environ[registry.HERE] = here
        require_sources(config, ("model", "algorithm", "measure", "schedule"))
    device = default_device()
    require_precision("client.precision", config.client.precision, device)
    loop = local_loop(config, facts.augment)
    work = Work(build_module(config, facts), device, loop, config.federation.weighting, source)
    return Worker(work, algorithm or part_of(config, "algorithm"), data.to(device))
