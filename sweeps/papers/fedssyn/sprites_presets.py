"""Presets of the dSprites sweep: Fedssyn's appendix A.4, and smaller experiments on procedurally drawn sprites.

The paper's classifier has a head of 2,048 inputs, as VGG-11 has for images of 64x64. The paper does not print learning
rate, local epochs and rounds, so the presets use the values of the paper's other experiments.
"""

from collections.abc import Mapping
from typing import Any

from fedcommons.config import presets

_CLIENTS: dict[str, Any] = {
    "partition.name": "by_factor",
    "partition.factor": "quadrant_shape",
    "partition.n_clients": 12,
    "sharing.setting": "shuffled_synthetic",
    "generator.name": "beta_vae",
    "measure.every": 0,
}

_SMALL: dict[str, Any] = {
    **_CLIENTS,
    "data.name": "procedural_sprites",
    "data.side": 16,
    "data.images": 6000,
    "generator.epochs": 120,
    "generator.batch_size": 64,
    "generator.lr": 2e-3,
    "generator.ramp": 8,
    "model.name": "encoder",
    "client.optimizer": "adam",
    "client.lr": 3e-3,  # best of 0.002, 0.003 and 0.006 by validation accuracy after 16 rounds with sharing.p 0.2
    "client.batch_size": 32,
    "client.epochs": 5,  # with n_i/4 synthetic images, the rule of equal work reduces five epochs to four
    "federation.rounds": 20,  # last accuracy: 66 % if a fifth of the images is swapped, 33 % (chance) without sharing
}

_SMOKE: dict[str, Any] = {
    "data.side": 8,
    "data.images": 480,
    "generator.epochs": 8,
    "generator.filters": 4,
    "generator.hidden": 16,
    "generator.ramp": 1,
    "federation.rounds": 2,
    "federation.checkpoint_every": 1,
}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_SMALL, **_SMOKE},
    "small": _SMALL,
    "paper": {
        **_CLIENTS,
        "data.validation": 0.0,
        "model.name": "vgg11",
        "client.batch_size": 256,
        "client.lr": 0.1,
        "client.epochs": 10,
        "federation.rounds": 100,
    },
}
"""Config fields of each preset. With data.validation 0 a client of dSprites has 55,296 images, as in the paper."""

LISTS: Mapping[str, tuple[str, str, str, str]] = {
    "smoke": ("0.5,1", "0.5,1", "0.25", "0.5"),
    "small": ("0.04,0.2,1", "0.25,1", "0.25,1", "1"),
    "paper": ("0.01,0.02,0.04,0.08,0.16,0.32,0.64,1", "0.1,0.25,0.5,1", "0.0625,0.125,0.25,0.5,1", "0.04,0.16,0.64,1"),
}
"""Four lists of values by preset: rho; checkpoints as shares of the generators' epochs; n~/n_i; rho again.

rho: share of a client's n_i images that its generator sees. n~: synthetic images that a client gets. The values n~/n_i
are used with each rho of the fourth list. With each rho of the first list, n~/n_i is 1/4.
"""


def fields(preset: str, dataset: str) -> dict[str, Any]:
    """Return the config fields (dotted names) of a preset with this data set."""
    base = presets.preset("small" if preset == "paper" else preset, dataset)
    generic = {name: value for name, value in base.items() if not name.startswith(("generator.", "feddm."))}
    preset_fields = {**FIELDS[preset], "data.name": dataset}
    if dataset == "dsprites" and preset != "paper":
        preset_fields["data.side"] = 16  # The side must divide 64, the side of dSprites images.
    return {**generic, **preset_fields}
