"""The audit of a pool of synthetic images: do generators memorise their training images?

Each client's synthetic images are compared with the training images of its generator (seen images) and with an equal
number of held-out images of the same classes. Distances are measured in pixels and in a feature space
(``nearest_neighbours``); an image that is moved by a pixel or mirrored counts as the same (``distances``).
If nothing was memorised, seen and held-out images are exchangeable. Then the closest image to a synthetic image is a
seen image with probability 1/2, and both kinds are equally often near to a synthetic image (``verdict``). Each verdict
comes with the power of the audit: the smallest share of copies that it would detect (``detection_power``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcommons.audits.detection_power import fewest_copies
from fedcommons.audits.distances import Space
from fedcommons.audits.nearest_neighbours import Compared, Subject, compare
from fedcommons.audits.verdict import counts, independent, memorised


def clopper_pearson(share: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson confidence interval of a probability, from the observed ``share`` in n trials.

    For dependent trials, n is the number of independent trials with the same variance, which may be fractional.
    """
    from scipy.stats import beta  # imported here, because it takes half a second

    k, tail = share * n, (1 - confidence) / 2
    low = float(beta.ppf(tail, k, n - k + 1)) if k > 0 else 0.0
    return low, float(beta.ppf(1 - tail, k + 1, n - k)) if k < n else 1.0


def facts(compared: Sequence[Compared], label: int | None = None) -> dict[str, Any] | None:
    """Summarise the comparisons of clients, for all classes or for class ``label``; None without synthetic images.

    A seen image is a training image; m seen images are matched by class with m held-out images.

    images: k, the number of synthetic images.
    closer: share of synthetic images that are closer to a matched seen image than to any held-out image.
    low, high: 95 % confidence interval of ``closer``, computed for k^2 / sum_r k_r^2 independent images. The k_r
        synthetic images whose closest real image is image r depend on each other.
    near_copies: number of synthetic images whose distance to a seen image is below the near-copy limit.
    expected: upper bound on the expected number of near-copies if the k images were new real images.
    identical: number of synthetic images that are exact, moved or mirrored copies of a seen image.
    copied, control: numbers of matched seen and of held-out images within the near-copy limit of a synthetic image.
    copied_half, control_half: the same numbers for half of the near-copy limit.
    to_seen, to_held_out: median distance to the closest matched seen image, and to the closest held-out image.
    memorised: whether one of the three tests in ``verdict.py`` reports memorised images.
    """
    labels = [c.subject.synthetic.y.numpy() for c in compared]
    masks = [np.full(len(y), True) if label is None else y == label for y in labels]
    k = sum(int(mask.sum()) for mask in masks)
    if not k:
        return None

    def select(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])

    total = np.sum([counts(c, label) for c in compared], 0)
    closer = float(total[1]) / k
    low, high = clopper_pearson(closer, independent(total))
    return {
        "images": k,
        "closer": closer,
        "low": low,
        "high": high,
        "near_copies": int(select([c.near for c in compared]).sum()),
        "expected": sum(c.expected * int(mask.sum()) for c, mask in zip(compared, masks, strict=True)),
        "identical": int(select([c.identical for c in compared]).sum()),
        **dict(zip(("copied", "control", "copied_half", "control_half"), map(int, total[3:]), strict=True)),
        "to_seen": float(np.median(select([c.nearest.to_matched for c in compared]))),
        "to_held_out": float(np.median(select([c.nearest.to_held_out for c in compared]))),
        "memorised": memorised(total),
    }


def audit(subjects: Sequence[Subject], spaces: Mapping[str, Space], seed: int) -> "Audit":
    """Compare every client's images in every space of distances, such as pixels and features.

    seed: seed of the random copies of training images that measure the power of the audit.
    """
    return Audit({name: [compare(client, space, seed) for client in subjects] for name, space in spaces.items()}, seed)


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of an audit. compared: space of distances -> comparisons of all clients. seed: see ``audit``."""

    compared: Mapping[str, Sequence[Compared]]
    seed: int

    def near(self) -> dict[int, np.ndarray]:
        """Return for each client a boolean mask (k,): which of its k synthetic images are near-copies in any space."""
        masks: dict[int, np.ndarray] = {}
        for of_space in self.compared.values():
            for c in of_space:
                masks[c.subject.client] = c.near | masks.get(c.subject.client, np.full(len(c.near), False))
        return masks

    def record(self) -> dict[str, Any]:
        """Return the verdicts as dicts and numbers: for each space of distances, overall, per client and per class.

        A verdict contains ``facts`` and the power of the audit: ``finds``, the smallest share of copies in this pool
        that the audit detects with probability 0.9 (``detection_power``), and ``finds_images``, their number. Both are
        None if images are memorised, or if the audit does not detect a pool that consists of copies only.
        """
        return {name: _of_space(of_space, self.seed) for name, of_space in self.compared.items()}


def _of_space(compared: Sequence[Compared], seed: int) -> dict[str, Any]:
    labels = sorted({int(y) for c in compared for y in c.subject.synthetic.y.unique()})
    return {
        "all": _verdict(compared, seed),
        "clients": {str(c.subject.client): _verdict([c], seed) for c in compared if len(c.near)},
        "classes": {str(label): _verdict(compared, seed, label) for label in labels},
    }


def _verdict(compared: Sequence[Compared], seed: int, label: int | None = None) -> dict[str, Any] | None:
    result = facts(compared, label)
    if result is None:
        return None
    fewest = None if result["memorised"] else fewest_copies(compared, seed, label)
    return {**result, "finds": fewest and fewest / result["images"], "finds_images": fewest}
