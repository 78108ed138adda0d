"""Presets: named sets of field values for a test in seconds, a laptop, or the settings of the papers.

``smoke``: tiny numbers, so that a run of the whole code takes seconds. ``small``: for laptops. ``paper``: for GPUs.
``authors``: preset ``paper`` with the values that Fedssyn's released code uses in all configurations of its Table 1.
The sweeps add the values of single configurations (``sweeps/papers/fedssyn/authors.py``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcommons.config.dotted import choose, full_names, require_fields
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError, quote, unknown

_DIGITS_GENERATOR: dict[str, Any] = {
    "generator.channels": (16, 32),
    "generator.epochs": 90,
    "generator.batch_size": 64,
    "generator.lr": 2e-3,
    "generator.schedule": "squaredcos_cap_v2",  # gives far better 8x8 images than the schedule "linear" in 150 steps
    "generator.sampler": "ddim",
    "generator.sampling_steps": 25,
}

_FEW_PIXELS: dict[str, Any] = {
    # A training step on ten 8x8 images takes 0.45 ms, but 0.65 ms with oneDNN. From 32 images on, oneDNN is faster.
    "client.onednn": False,
    "fedcvae.channels": (32, 64),  # the default of four levels would pad 8x8 images to 16x16
}

_SMALL: dict[str, Any] = {
    **_DIGITS_GENERATOR,
    "client.lr": 0.04,
    "client.batch_size": 10,
    "federation.rounds": 30,
    "measure.every": 15,
}

# For data sets with larger images than ``digits``: fewer training images and rounds, and larger batches.
_SMALL_LARGE_IMAGES: dict[str, Any] = {
    "data.limit": 3000,
    "generator.channels": (16, 32, 32),
    "generator.epochs": 30,
    "client.batch_size": 20,
    "federation.rounds": 15,
    "measure.every": 0,
}

_SMOKE: dict[str, Any] = {
    **_DIGITS_GENERATOR,
    "data.limit": 200,
    "generator.epochs": 2,
    "generator.sampling_steps": 4,
    "partition.n_clients": 4,
    "client.lr": 0.1,
    "client.batch_size": 10,
    "client.epochs": 5,
    "federation.rounds": 3,
    "federation.checkpoint_every": 1,
    "measure.every": 3,
    "target": 0.2,
    "feddm.ipc": 1,
    "feddm.least": 1,  # the default, 10, would leave out most classes of a client with few images
    "feddm.iterations": 2,
    "feddm.server_epochs": 5,
    "dense.generated": 8,
    "dense.generator_steps": 2,
    "coboosting.generated": 8,
    "coboosting.generator_steps": 2,
    "fedcvae.local_epochs": 5,
    "fedcvae.samples": 200,
}

_PAPER: dict[str, Any] = {
    "model.name": "vgg11",
    "client.batch_size": 256,
    "client.lr": 0.1,
    "client.epochs": 10,
    "federation.rounds": 100,
    "generator.channels": (64, 128, 128, 128),
    "generator.epochs": 500,
    "generator.batch_size": 256,
    "generator.lr": 1e-4,
    "generator.sampler": "ddpm",
    "generator.sampling_steps": 1000,
    "measure.every": 0,
    "feddm.iterations": 1000,
    "feddm.server_epochs": 500,
    "dense.generated": 256,
    "dense.width": 64,
    "coboosting.generated": 128,
    "coboosting.width": 64,
}

_GENERATORS: dict[str, dict[str, dict[str, Any]]] = {
    "cvae": {
        "smoke": {"epochs": 20, "batch_size": 32, "lr": 2e-3, "channels": (16, 32), "hidden": 64},
        "small": {"epochs": 200, "batch_size": 32, "lr": 1e-3, "channels": (32, 64), "hidden": 128},
        "paper": {"epochs": 500, "batch_size": 32, "lr": 1e-3, "channels": (32, 32, 64, 64), "hidden": 500},
    },
    "gan": {
        "smoke": {"epochs": 5, "batch_size": 32, "lr": 1e-3, "channels": (16, 32), "augment": "translation"},
        "small": {"epochs": 200, "batch_size": 32, "lr": 1e-3, "channels": (32, 64), "augment": "translation"},
        "paper": {"epochs": 500, "batch_size": 64, "lr": 5e-4, "channels": (64, 128, 256), "augment": "all"},
    },
    "private_ddpm": {"smoke": {"batch_size": 16}},  # must not exceed a client's images, about 37 with data.limit 200
}

AUTHORS: Mapping[str, Any] = {
    "data.validation": 0.1,
    "data.validation_from": "last",
    "client.batch_size": 128,
    "client.drop_last": True,
    "generator.schedule": "squaredcos_cap_v2",
    "generator.sampling_steps": 250,
    "feddyn.squared": False,
}
"""Preset ``authors`` is preset ``paper`` with these values (dotted name -> value)."""

SMOKE = "SMOKE: numbers mean nothing"
"""Warning shown in tables and pictures of preset ``smoke``, whose runs are too small for conclusions."""

PRESETS = ("smoke", "small", "paper", "authors")

LARGE_IMAGES = ("mnist", "fmnist", "cifar10", "cifar100")


def generator(name: str, preset: str) -> Mapping[str, Any]:
    """Return dotted name -> value that a preset sets for a generator; if empty, the preset's values for DDPM apply."""
    of_presets = _GENERATORS.get(name, _GENERATORS.get(name.removeprefix("private_"), {}))
    fields = of_presets.get("paper" if preset == "authors" else preset, {})
    return {f"generator.{field}": value for field, value in fields.items()}


def preset(name: str, dataset: str, made_by: str = "ddpm") -> Mapping[str, Any]:
    """Return dotted name -> value of the fields that the preset sets for a data set and the generator ``made_by``."""
    if name not in PRESETS:
        raise unknown("preset", str(name), PRESETS)
    fields = {"data.name": dataset, **{"smoke": _SMOKE, "small": _SMALL}.get(name, _PAPER)}
    if name == "authors":
        fields |= AUTHORS
    if name == "small" and dataset in LARGE_IMAGES:
        fields |= _SMALL_LARGE_IMAGES
    if name in ("smoke", "small") and dataset == "digits":
        fields |= _FEW_PIXELS
    return {**fields, **generator(made_by, name)}


def experiment(name: str = "small", dataset: str = "digits", values: Mapping[str, Any] | None = None) -> Experiment:
    """Return the experiment of a preset, with the fields in ``values`` replaced; see ``fedcommons.experiment``."""
    fields = full_names(_plain({} if values is None else values))
    config = choose(
        {**preset(name, dataset, str(fields.get("generator.name", "ddpm"))), "tracking.preset": name, **fields}
    )
    require_fields(fields, config)
    return config


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with each value converted to the type that the command line would yield."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise UserError(f"values must be a mapping from names of fields to values, got {quote(values)}.")
    return {name: plain(value) for name, value in values.items()}


def plain(value: Any) -> Any:
    """Return a list as a tuple, a numpy scalar as a Python number, a path as text, and any other value unchanged."""
    import numpy as np

    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value.item() if isinstance(value, np.generic) else str(value) if isinstance(value, Path) else value
