"""The audit of a pool: do generators memorise what they were trained on?

Each client's images are compared with those that its generator saw and with as many held-out ones of the same classes,
in pixels and in a feature space (``closeness``). If nothing was memorised, seen and held-out images may be exchanged.
Then a made image is closer to a seen one than to any held-out one with probability 1/2, and whether an image has a made
one near to it does not depend on which of both it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcommons.audits.closeness import Compared, Embedding, Subject, compare

ALARM = 0.001
"""Probability with which a generator that memorised nothing is said to have."""


def clopper_pearson(share: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a probability of which ``share`` was seen in n independent trials.

    n need not be whole: of dependent trials it is the number of independent ones with the same variance.
    """
    from scipy.stats import beta  # half a second to import

    k, tail = share * n, (1 - confidence) / 2
    low = float(beta.ppf(tail, k, n - k + 1)) if k > 0 else 0.0
    return low, float(beta.ppf(1 - tail, k + 1, n - k)) if k < n else 1.0


def facts(found: Sequence[Compared], label: int | None = None) -> dict[str, Any] | None:
    """What these comparisons say, of the made images of all classes or of one; None where there is no such image.

    ``closer``: the share of images that are closer to a seen than to a held-out one; with ``low`` and ``high``, for
    which images with the same closest record count together (k^2 / sum_r k_r^2 of them), as chance decides about them
    together. ``near_copies``: images below the limit, ``expected`` of fresh ones at most; ``identical``: at distance 0.
    ``copied`` and ``control``: seen and held-out images that some made image is as near to. ``memorised``: more
    than chance explains.
    """
    from scipy.stats import binomtest

    masks = [c.of.made.y.numpy() == label if label is not None else np.full(len(c.near), True) for c in found]
    k = sum(int(mask.sum()) for mask in masks)
    if not k:
        return None

    def of(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])

    closer = float(of([c.closer for c in found]).mean())
    together = np.concatenate([np.bincount(c.record[mask]) for c, mask in zip(found, masks, strict=True)])
    independent = k**2 / float(np.sum(together.astype(float) ** 2))
    low, high = clopper_pearson(closer, independent)
    sides = [_hits(c, label) for c in found]
    copied, control = sum(s[0] for s in sides), sum(s[1] for s in sides)
    chance = binomtest(copied, copied + control, alternative="greater").pvalue if copied + control else 1.0
    return {
        "images": k,
        "closer": closer,
        "low": low,
        "high": high,
        "near_copies": int(of([c.near for c in found]).sum()),
        "expected": sum(c.expected * int(mask.sum()) for c, mask in zip(found, masks, strict=True)),
        "identical": int((of([c.to_seen for c in found]) == 0).sum()),
        "copied": copied,
        "control": control,
        "to_seen": float(np.median(of([c.to_matched for c in found]))),
        "to_held_out": float(np.median(of([c.to_held_out for c in found]))),
        "memorised": clopper_pearson(closer, independent, 1 - 2 * ALARM)[0] > 0.5 or float(chance) < ALARM,
    }


def _hits(one: Compared, label: int | None) -> tuple[int, int]:
    """How many matched seen and how many held-out images of the class some made image is near to."""
    m = len(one.of.held_out)
    labels = one.of.seen.y[one.of.matched], one.of.held_out.y
    inside = [np.full(m, True) if label is None else y.numpy() == label for y in labels]
    return int(one.hit[:m][inside[0]].sum()), int(one.hit[m:][inside[1]].sum())


def audit(subjects: Sequence[Subject], spaces: Mapping[str, Embedding], flip: bool) -> "Audit":
    """Compare every client's images in every space."""
    return Audit({name: [compare(one, space, flip) for one in subjects] for name, space in spaces.items()})


@dataclass(frozen=True, eq=False)
class Audit:
    """The comparisons of all clients, by space."""

    compared: Mapping[str, Sequence[Compared]]

    def near(self) -> dict[int, np.ndarray]:
        """By client: which of its images are near-copies in any space."""
        masks: dict[int, np.ndarray] = {}
        for found in self.compared.values():
            for c in found:
                masks[c.of.client] = c.near | masks.get(c.of.client, np.full(len(c.near), False))
        return masks

    def record(self) -> dict[str, Any]:
        """Plain values: for each space the ``facts`` of all, of each client and of each class."""
        return {name: _of_space(found) for name, found in self.compared.items()}


def _of_space(found: Sequence[Compared]) -> dict[str, Any]:
    labels = sorted({int(y) for c in found for y in c.of.made.y.unique()})
    return {
        "all": facts(found),
        "clients": {str(c.of.client): facts([c]) for c in found if len(c.near)},
        "classes": {str(label): facts(found, label) for label in labels},
    }
