"""Audit of images that clients send: near-copies of training images, and the advantage of a membership attack.

The audit compares pixels (``fedcommons.audits.copies``). The advantage is 2 a - 1: in matched pairs of a training image
and a held-out image, the distance to the nearest synthetic image identifies the training image with probability a.
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
from fedcommons.runs.build import build
from fedcommons.runs.spec import RunSpec
from papers.commons.ways import STAYS
from papers.fedssyn.private_presets import OF_SUMS


@dataclass(frozen=True)
class LeakAudit:
    """Audit result: share of near-copies among the images; a membership attack's advantage and its 95 % interval."""

    copies: float
    advantage: float
    low: float
    high: float

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> "LeakAudit":
        """Build the result from a record with the probability ``closer`` and its 95 % interval (``low``, ``high``)."""
        ends = (2 * facts[name] - 1 for name in ("closer", "low", "high"))
        return LeakAudit(facts["near_copies"] / facts["images"], *ends)


EXACT = LeakAudit(1.0, 1.0, 1.0, 1.0)
"""Audit result of real images that were sent unchanged."""

_OF_POOL = ("data.", "partition.", "sharing.", "dp.", "seed")
"""Prefixes of the config fields that decide a pool of synthetic images fitted to the clients' noisy sums."""


def read_audit(summary: Mapping[str, Any], config: Experiment, folder: Path) -> LeakAudit | None:
    """Return the audit result of a run; None if clients send no images (but, for example, means, codes or features)."""
    if summary.get("disclosed_raw"):
        return EXACT
    if config.sharing.setting in STAYS:
        return None
    if facts := (summary.get("audit") or {}).get("pixels"):
        return LeakAudit.from_facts(facts)
    if config.sharing.setting in OF_SUMS:
        return _of_fitted(tuple(field for field in config.flat.items() if field[0].startswith(_OF_POOL)))
    return _of_state(build(config), folder) if config.algorithm in ("feddm", "fedlap", "fedcvae") else None


@cache
@fresh_torch()
def _of_fitted(fields: tuple[tuple[str, Any], ...]) -> LeakAudit | None:
    """Audit images that are fitted to clients' noisy sums; runs do not store them, so they are fitted again here."""
    torch.set_num_threads(1)  # on a busy machine two threads are up to a hundred times slower
    prepared = build(choose(dict(fields)))
    pool = prepared.stage.make(prepared.client_data, ())
    return _against_all(prepared, pool.store[pool.rows])


def _of_state(prepared: RunSpec, folder: Path) -> LeakAudit | None:
    """Audit the server's images in a run's last checkpoint against all training images; None: there are no images."""
    checkpointed, dataset = checkpoint.load_latest(folder / "checkpoints"), prepared.dataset
    if checkpointed is None or "images" not in checkpointed.state:
        return None
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (dataset.mean, dataset.std))
    x = data(checkpointed.state["images"])
    if x.is_floating_point():  # float images are normalised for the network, so this restores 8-bit pixels
        x = (x * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    return _against_all(prepared, Examples(x, data(checkpointed.state["labels"])))


def _against_all(prepared: RunSpec, images: Examples) -> LeakAudit | None:
    """Audit synthetic images against the training images of all clients, with validation images as held-out images."""
    dataset = prepared.dataset
    of_all = subject(0, images, prepared.train, dataset.validation, prepared.record.seed)
    facts = audit([of_all], {"pixels": pixel_space}, prepared.record.seed).record()["pixels"]["all"]
    return LeakAudit.from_facts(facts) if facts else None
