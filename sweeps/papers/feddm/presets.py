"""Presets of the experiments of FedDM: config fields, and the learning rates to try."""

from collections.abc import Mapping
from typing import Any

from fedcommons.config import presets

_EVERY = {"partition.name": "dirichlet_niid", "federation.weighting": "samples", "model.name": "convnet",
          "measure.every": 0, "data.augment": False}  # fmt: skip
_SMALL = {"model.width": 16, "federation.rounds": 8, "client.batch_size": 32, "client.epochs": 5, "client.lr": 1.0,
          "feddm.ipc": 3, "feddm.least": 10, "feddm.iterations": 20, "feddm.image_lr": 0.3, "feddm.server_epochs": 30,
          "feddm.server_batch": 64, "feddm.server_lr": 0.05, "target": 0.7}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "smoke": {**_EVERY, **_SMALL, "model.width": 4, "federation.rounds": 2, "client.epochs": 1, "feddm.iterations": 2,
              "feddm.server_epochs": 2, "target": 0.2, "data.limit": 600},
    "small": {**_EVERY, **_SMALL},
    "paper": {**_EVERY, "federation.rounds": 20, "client.batch_size": 256, "client.epochs": 10, "client.lr": 0.01},
}  # fmt: skip
"""Config fields that each preset adds to the package's preset. The fields of small were chosen with seed 100."""
_LARGE_IMAGES = {"data.limit": 2000, "client.lr": 0.1, "feddm.ipc": 5, "feddm.iterations": 30, "feddm.image_lr": 1.0,
                 "feddm.match_batch": 64, "target": 0.8}  # fmt: skip
"""Config fields that preset small adds for images of 28x28 and more, chosen on MNIST with seed 100."""
_RATES = {
    "smoke": ("", ""),
    "small": ("0.03,0.1,0.3,1", "0.3,1,2,4"),
    "paper": ("", "0.001,0.01,0.1"),  # the paper's rates for other methods; its only rate for FedDM's pixels is 1
}
_LARGE_IMAGES_RATES = ("0.3,1,3", "0.03,0.1,0.3")


def fields(preset: str, dataset: str) -> Mapping[str, Any]:
    """Return the config fields (dotted names) of a preset of this experiment."""
    result = {**presets.preset(preset, dataset), **FIELDS[preset]}
    if _is_large(preset, dataset):
        result |= _LARGE_IMAGES
    if preset == "paper" and dataset == "cifar100":
        result["feddm.ipc"] = 5
    return result


def rates(preset: str, dataset: str) -> tuple[str, str]:
    """Return ``--image-rates`` (for FedDM's pixels) and ``--rates`` (for clients of other methods) as texts."""
    return _LARGE_IMAGES_RATES if _is_large(preset, dataset) else _RATES[preset]


def _is_large(preset: str, dataset: str) -> bool:
    return preset == "small" and dataset in presets.LARGE_IMAGES
