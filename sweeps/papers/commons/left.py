"""What images that left clients show of those that they were made from: near-copies and a membership advantage.

The audit is that of pools (``fedcommons.audits.copies``), in pixels. Advantage: of a matched pair of an image that was
seen and one that was held out, how much better than by chance the nearest made image tells which was seen, 2 a - 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedcommons.audits.copies import audit
from fedcommons.audits.distances import pixel_space
from fedcommons.audits.nearest_neighbours import subject
from fedcommons.config.dotted import choose
from fedcommons.config.experiment import Experiment
from fedcommons.core.worker import fresh_torch
from fedcommons.data.examples import Examples
from fedcommons.federation import checkpoint
from fedcommons.flat_tensors import data
from fedcommons.runs.build import Prepared, prepare
from papers.fedssyn.private_presets import OF_SUMS


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

_OF_POOL = ("data.", "partition.", "sharing.", "dp.", "seed")
"""Beginnings of the names of fields on which images that are fitted to noisy sums depend."""

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
    if config.sharing.setting in OF_SUMS:
        return _of_fitted(tuple(field for field in config.flat.items() if field[0].startswith(_OF_POOL)))
    return _of_state(prepare(config), folder) if config.algorithm in ("feddm", "fedcvae") else None


@cache
@fresh_torch()
def _of_fitted(fields: tuple[tuple[str, Any], ...]) -> Shown | None:
    """Of images that were fitted to clients' noisy sums, which are fitted anew, with one thread as in the runs."""
    torch.set_num_threads(1)  # on a busy machine two take up to a hundred times as long
    prepared = prepare(choose(dict(fields)))
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
