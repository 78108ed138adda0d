"""What images that left clients show of those that they were made from: near-copies and a membership advantage.

The audit is that of pools (``fedcommons.audits.copies``), in pixels. Advantage: of a matched pair of an image that was
seen and one that was held out, how much better than by chance the nearest made image tells which was seen, 2 a - 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcommons.audits.closeness import subject
from fedcommons.audits.copies import audit
from fedcommons.audits.distances import pixel_space
from fedcommons.config.experiment import Experiment
from fedcommons.data.examples import Examples
from fedcommons.federation import checkpoint
from fedcommons.runs.build import Prepared, prepare
from fedcommons.tensors import data


@dataclass(frozen=True)
class Shown:
    """copies: share of made images that are near-copies; advantage, low, high: in [-1, 1], with its 95 % interval."""

    copies: float
    advantage: float
    low: float
    high: float

    @staticmethod
    def of(found: Mapping[str, Any]) -> "Shown":
        """From the ``facts`` of an audit."""
        ends = (2 * found[name] - 1 for name in ("closer", "low", "high"))
        return Shown(found["near_copies"] / found["images"], *ends)


EXACT = Shown(1.0, 1.0, 1.0, 1.0)
"""Of images that were sent as they are."""

STAYS = ("local_synthetic",)
"""Sharing stages whose made images leave nobody."""


def shown_by(summary: Mapping[str, Any], config: Experiment, folder: Path) -> Shown | None:
    """Of a run; None where no image leaves a client, or what is made of it is none (means, codes, features)."""
    if summary.get("disclosed_raw"):
        return EXACT
    if config.sharing.setting in STAYS:
        return None
    if found := (summary.get("audit") or {}).get("pixels"):
        return Shown.of(found)
    if config.sharing.setting == "merf":
        return _of_fitted(prepare(config))
    return _of_state(prepare(config), folder) if config.algorithm in ("feddm", "fedcvae") else None


def _of_fitted(prepared: Prepared) -> Shown | None:
    """Of images that were fitted to clients' noisy sums, which are fitted anew."""
    pool = prepared.stage.make(prepared.dealt, ())
    return _against_all(prepared, pool.store[pool.rows])


def _of_state(prepared: Prepared, folder: Path) -> Shown | None:
    """Of the images that the server had in the last round, against all clients' images and the validation data."""
    standing, dataset = checkpoint.load_latest(folder / "checkpoints"), prepared.dataset
    if standing is None or "images" not in standing.state:
        return None
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (dataset.mean, dataset.std))
    x = data(standing.state["images"])
    if x.is_floating_point():  # as the network sees them
        x = (x * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    return _against_all(prepared, Examples(x, data(standing.state["labels"])))


def _against_all(prepared: Prepared, made: Examples) -> Shown | None:
    """Of images that were made of all clients' images."""
    dataset = prepared.dataset
    of_all = subject(0, made, prepared.train, dataset.validation, prepared.config.seed)
    found = audit([of_all], {"pixels": pixel_space}, prepared.config.seed).record()["pixels"]["all"]
    return Shown.of(found) if found else None
