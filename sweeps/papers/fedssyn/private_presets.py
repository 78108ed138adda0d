"""Config fields that the presets set for private generators, on top of ``presets.preset``.

The DDPM of smoke and small predicts the image, and its gradients are clipped at norm 0.1. The paper's DDPM predicts the
noise and clips at 1. The gradient of an image is rarely longer than 0.5, so clipping at 1 needs far too much noise.
"""

from collections.abc import Mapping
from typing import Any

from fedcommons.config import presets

_SMALL = {"generator.batch_size": 32, "generator.channels": (8, 16), "generator.prediction": "sample",
          "generator.clip": 0.1, "generator.label_noise": 2.0}  # fmt: skip

PRIVATE: Mapping[str, Mapping[str, Any]] = {
    "smoke": {**_SMALL, "generator.epochs": 3, "generator.batch_size": 16},
    "small": {**_SMALL, "generator.epochs": 60},
    # With this batch size, noise multiplier 1.906 gives epsilon 10, see docs/notes/epsilon_of_the_paper.md.
    "paper": {"generator.batch_size": 128},
}

NDPDC: Mapping[str, Mapping[str, Any]] = {
    "smoke": {"sharing.iterations": 20, "sharing.batch": 10, "sharing.width": 8},
    "small": {"sharing.iterations": 200, "sharing.width": 32, "sharing.per_class": 20, "sharing.lr": 0.3},
    "paper": {"sharing.iterations": 10_000, "sharing.per_class": 50},
}  # fmt: skip
"""Config fields of the strategy ndpdc; for small, chosen by validation accuracy on digits, with seeds 10 and 11."""

OF_SUMS = {"merf": "FedMERF", "ndpdc": "NDPDC"}
"""Sharing strategies that fit images to clients' noisy sums, and their names in tables."""

_PLAIN = ("generator.epochs", "generator.batch_size", "generator.channels", "generator.lr")


def fields(preset: str) -> dict[str, Any]:
    """Return the config fields of private generators in this preset; each generator sees all images of its client."""
    return {"generator.name": "private_ddpm", "generator.rho": 1.0, **PRIVATE[preset]}


def plain(preset: str, dataset: str) -> dict[str, Any]:
    """Return the config fields of the preset's DDPM without privacy, with which private generators are compared."""
    values = presets.preset(preset, dataset)
    return {"generator.name": "ddpm", **{name: values[name] for name in _PLAIN if name in values}}


def of_sums(setting: str, preset: str, epsilon: float) -> dict[str, dict[str, Any]]:
    """Return the config fields of each pool of this sharing strategy, by where noise is added (local or summed).

    local: to each client's sum. summed: only to the sum over clients (merf only).
    """
    level = {"sharing.setting": setting, "sharing.target_epsilon": epsilon}
    if setting == "merf":
        return {noise: {**level, "sharing.noise": noise} for noise in ("local", "summed")}
    return {"local": {**level, **NDPDC[preset]}}
