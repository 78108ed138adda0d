"""Presets of figure 4 of Fedssyn: config fields, and the lists of values that its three panels vary.

rho: share of a client's n_i images that its generator sees; n~: synthetic images that a client gets; N: clients. (a)
varies rho and n~ at alpha 0.1. (b) varies the generators' epochs for two N, (c) varies the generator; both at alpha
0.01. The method is FedAvg.
"""

from collections.abc import Mapping
from typing import Any

from fedcommons.config import presets

ALPHAS = {"a": 0.1, "b": 0.01, "c": 0.01}

_SMALL: dict[str, Any] = {
    "model.name": "encoder",
    "federation.rounds": 10,
    "client.epochs": 5,
    "client.lr": 0.16,  # has the best validation accuracy at both alphas, see docs/results/commons_digits.md
    "measure.every": 0,
    "generator.even_batches": True,  # else 129 images in batches of 64 leave a batch of one, which harms the DDPM
}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_SMALL, "federation.rounds": 2, "client.epochs": 2, "client.lr": 0.1},
    "small": _SMALL,
    "paper": {"measure.every": 0},
}
"""Config fields that each preset adds to the package's preset of the same name."""

LISTS: Mapping[str, tuple[str, str, str, str, str]] = {
    "smoke": ("0.5,1", "0.25,1", "0.5,1", "4,6", "ddpm,gan"),
    "small": ("0.1,0.3,1", "0.1,0.3,1", "0.1,0.3,1", "10,40", "ddpm,gan,cvae"),
    "paper": ("0.1,0.25,0.5,0.75,1", "0.1,0.25,0.5,0.75,1", "0.1,0.3,0.5,0.7,0.9", "10,40", "ddpm,gan"),
}
"""Five lists of values for each preset. The panels of the figure are (a) to (c).

For (a): rho, then n~/n_i. For (b): checkpoints as shares of all epochs of a generator, then N. For (c): generators. The
module's docstring explains rho, n~, n_i and N. Only the values of N are from the paper.
"""


def fields(preset: str, dataset: str) -> dict[str, Any]:
    """Return the config fields of a preset with this data set: FedAvg with shuffled synthetic images."""
    return {**presets.preset(preset, dataset), **FIELDS[preset], "data.name": dataset, "algorithm": "fedavg",
            "sharing.setting": "shuffled_synthetic"}  # fmt: skip


def generator(name: str, preset: str, epochs: int) -> dict[str, Any]:
    """Return the config fields of a generator in panel (c); ``epochs`` applies unless the preset sets epochs."""
    return {"generator.epochs": epochs, **presets.generator(name, preset), "generator.name": name}
