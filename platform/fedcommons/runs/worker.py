"""Build a worker process's objects: the module that clients train, and the worker with algorithm and data."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import nn

from fedcommons.config import live_objects, registry
from fedcommons.config.fields import select_arguments
from fedcommons.config.live_objects import LiveObject
from fedcommons.config.validate import require_sources
from fedcommons.config.weights_file import WeightsFile
from fedcommons.core import hooks
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.schedules import Schedule
from fedcommons.core.worker import RunData, Worker, default_device, fresh_torch, require_precision
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError, before_any_work, user_code_context
from fedcommons.privacy import salts
from fedcommons.privacy.noise import Source
from fedcommons.runs import model_files
from fedcommons.seeding import set_default_generator
from fedcommons.storage.artifact_store import key_of
from lightning_modules import Classifier, Regressor
from lightning_modules.networks import Projected


@fresh_torch()
def build_module(
    dataset: Dataset, device: str = "cpu", *, seed: int, name: str, constants: Mapping[str, Any],
    projection: int | None = None, weights: WeightsFile | None = None, notes: list[str] | None = None,
    **training: float | str,
) -> LightningModule:  # fmt: skip
    """Return the LightningModule that clients train. Its initial weights follow from the seed or ``weights``.

    ``name`` is a LightningModule or a plain network. Its parameters called shape, n_classes, mean, std, lr, momentum,
    weight_decay and optimizer get the values of this run. A plain network is wrapped in a ``Classifier``, or in a
    ``Regressor`` if labels are floats; the wrapper gets all arguments except shape and n_classes. With float labels
    ``n_classes`` is the number of values in a label; without labels it is None.

    notes: list to which a message is appended if some weights were not loaded. training: lr, momentum, weight_decay and
    optimizer.

    Raises:
        UserError: the module cannot be built for this data set.
    """
    set_default_generator(seed, "initial weights")
    offered = {
        "shape": dict(dataset.inputs) or dataset.shape,
        "n_classes": dataset.n_classes or dataset.targets or dataset.positions,
        "mean": dataset.mean,
        "std": dataset.std,
        **training,
    }
    part, is_own = registry.find("model", name), registry.is_user_defined(name)
    without = f"needs labels, and {dataset.name} has none: name a LightningModule that computes its loss itself"
    if not (is_own or offered["n_classes"]):
        raise UserError(f"model.name {name} {without}.")
    has = "inputs by name" if dataset.inputs else "a class per position" if dataset.positions else None
    if has and not is_own:
        raise UserError(f"model.name {name} takes one input and predicts one label, and {dataset.name} has {has}.")
    if not (is_own or offered["shape"]):
        raise UserError(
            f"model.name {name} needs examples with at least one axis, and each example of {dataset.name} is one "
            "number: give x.reshape(-1, 1)."
        )
    with torch.device(device):
        with (
            before_any_work(),
            user_code_context(f"{registry.component_label('model', name)} cannot be built for {dataset.name}"),
        ):
            model = part(**select_arguments(part, offered), **constants)
        # A compiled module would be wrapped like a plain network, and trained with another loss.
        if hasattr(model, "_orig_mod"):
            raise UserError(f"model.name {name} is compiled by torch.compile: give the module without torch.compile.")
        if dataset.n_classes is None and isinstance(model, LightningModule) and not is_own:
            raise UserError(f"model.name {name} classifies, and the labels of {dataset.name} are no classes.")
        if isinstance(model, LightningModule):
            if dataset.inputs:
                raise UserError(
                    f"model.name {name} must be a plain network, whose forward gets the inputs "
                    f"{', '.join(n for n, _ in dataset.inputs)} of {dataset.name} by name, not a LightningModule."
                )
            if projection:
                raise UserError(f"model.projection is for plain networks, and {name} is a LightningModule.")
            module = model
        elif isinstance(model, nn.Module):
            if not offered["n_classes"]:
                raise UserError(f"model.name {name} is a plain network, which {without}.")
            if projection and has:
                raise UserError(f"model.projection needs one input and one label, and {dataset.name} has {has}.")
            if projection and not isinstance(getattr(model, "last", None), nn.Linear):
                raise UserError(
                    f"model.projection needs a network whose last layer is a Linear called last, not {name}."
                )
            network = Projected(model, projection) if projection else model
            del offered["shape"], offered["n_classes"]
            predictor = Regressor if dataset.targets else Classifier
            module = predictor(network, **offered, inputs=dataset.inputs)
        else:
            raise UserError(f"model.name {name} must be a LightningModule or a network, got {type(model).__name__}.")
    with before_any_work(), user_code_context(registry.component_label("model", name), "setup"):
        hooks.prepare(module)
    if weights:
        with before_any_work(), user_code_context(registry.component_label("model", name)):
            message = model_files.load_weights(module, weights)
        if message and notes is not None:
            notes.append(message)
    return module


def standardises(model: str, module: LightningModule) -> bool:
    """Check whether the module of component ``model`` got the data set's mean and standard deviation as arguments."""
    requested = select_arguments(registry.find("model", model), {"mean": (), "std": ()})
    return bool(requested) or type(module) in (Classifier, Regressor)


def run_name(experiment: int, data: str, salt: bytes = b"") -> str:
    """Return the name of a run in its checkpoints and clients' stored states: a hash of all that decides its results.

    experiment: the ``noise_key`` of the experiment, so that a run with more rounds has the same name. data: the hash of
    the data set. salt: the run's salt; empty if the noise is seeded.
    """
    return key_of({"experiment": experiment, "data": data, "noise": salts.name_of(salt) if salt else ""})


def build_worker(
    module: Callable[[], LightningModule], loop: LocalSGD, weighting: str, source: Source, algorithm: Algorithm,
    data: RunData,
) -> Worker:  # fmt: skip
    """Return the worker of this process, which trains clients; weighting: rule for the clients' weights in averages."""
    device = default_device()
    require_precision("client.precision", loop.precision, device)
    return Worker(Work(module(), device, loop, weighting, source), algorithm, data.to(device))


def build_worker_elsewhere(
    here: str, module: Callable[[], LightningModule], loop: LocalSGD, weighting: str, source: Source, data: RunData, *,
    algorithm: Callable[[], Algorithm], schedule: Callable[[], Schedule | None], names: Mapping[str, str],
    digests: Mapping[str, str], weights: str | None, live: Mapping[str, LiveObject],
) -> Worker:  # fmt: skip
    """Return the worker of a separate process, which imports the user-defined components itself.

    here: the folder to which the names of user-defined components are relative. names, digests, weights: see
    ``require_sources``. live: components that are objects of the driver's process.
    """
    live_objects.objects.update(live)
    registry.work_in(here)
    require_sources(names, digests, weights)
    return build_worker(module, replace(loop, schedule=schedule()), weighting, source, algorithm(), data)
