"""Fields that the presets set for private generators, on top of ``presets.preset``.

smoke and small predict the image and clip at 0.1, where the paper's DDPM predicts the noise and clips at 1. An image's
gradient is rarely longer than 0.5, so with a clipping norm of 1 the noise is far larger than necessary.
"""

from collections.abc import Mapping
from typing import Any

from fedcommons.config import presets

_SMALL = {"generator.batch_size": 32, "generator.channels": (8, 16), "generator.prediction": "sample",
          "generator.clip": 0.1, "generator.label_noise": 2.0}  # fmt: skip

PRIVATE: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_SMALL, "generator.epochs": 3, "generator.batch_size": 16},
    "small": {**_SMALL, "generator.epochs": 60},
    "paper": {"generator.batch_size": 128},  # where 1.906 gives 10: see docs/notes/epsilon_of_the_paper.md
}

NDPDC: Mapping[str, Mapping[str, Any]] = {
    "smoke": {"sharing.iterations": 20, "sharing.batch": 10, "sharing.width": 8},
    "small": {"sharing.iterations": 200, "sharing.width": 32, "sharing.per_class": 20, "sharing.lr": 0.3},
    "paper": {"sharing.iterations": 10_000, "sharing.per_class": 50},
}  # fmt: skip
"""Fields of the strategy ndpdc; small's fields were chosen by validation images of digits, with seeds 10 and 11."""

OF_SUMS = {"merf": "FedMERF", "ndpdc": "NDPDC"}
"""Sharing strategies that fit images to clients' noisy sums, and their names on pages."""

_PLAIN = ("generator.epochs", "generator.batch_size", "generator.channels", "generator.lr")


def fields(preset: str) -> dict[str, Any]:
    """Return the dotted fields of private generators in this preset; rho is 1, as privacy protects single images."""
    return {"generator.name": "private_ddpm", "generator.rho": 1.0, **PRIVATE[preset]}


def plain(preset: str, dataset: str) -> dict[str, Any]:
    """Return the fields of the plain generator to compare with: training as in the preset, same prediction target."""
    values = presets.preset(preset, dataset)
    return {"generator.name": "ddpm", **{name: values[name] for name in _PLAIN if name in values}}


def of_sums(setting: str, preset: str, epsilon: float) -> dict[str, dict[str, Any]]:
    """Return the dotted fields of each pool of this strategy, by the kind of its clients' noise: local or summed."""
    level = {"sharing.setting": setting, "sharing.target_epsilon": epsilon}
    if setting == "merf":
        return {noise: {**level, "sharing.noise": noise} for noise in ("local", "summed")}
    return {"local": {**level, **NDPDC[preset]}}
