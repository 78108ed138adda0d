"""The audit of a pool: do generators memorise what they were trained on?

Each client's images are compared with those that its generator saw and with as many held-out ones of the same classes,
in pixels and in a feature space (``closeness``). If nothing was memorised, seen and held-out images may be exchanged.
Then a made image is closer to a seen image than to any held-out one with probability 1/2, and a seen image has a made
one near to it as probably as a held-out image has.
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


def facts(compared: Sequence[Compared], label: int | None = None) -> dict[str, Any] | None:
    """What these comparisons say, of the made images of all classes or of one; None where there is no such image.

    ``images``: k, the number of made images. ``closer``: the share of them that is closer to a seen image than to any
    held-out one; ``low``, ``high``: its 95 % interval. Chance decides at once about the k_r images whose closest record
    is r, so the interval is that of k^2 / sum_r k_r^2 independent images.
    ``near_copies``: made images below the limit; ``expected``: how many fresh images would be, at most; ``identical``:
    made images at distance 0. ``copied``, ``control``: seen and held-out images to which a made image is nearer than
    the limit. ``to_seen``, ``to_held_out``: medians of the distances to the closest matched and held-out image.
    ``memorised``: whether this is more than chance explains.
    """
    from scipy.stats import binomtest

    masks = [c.of.made.y.numpy() == label if label is not None else np.full(len(c.near), True) for c in compared]
    k = sum(int(mask.sum()) for mask in masks)
    if not k:
        return None

    def of(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])

    closer = float(of([c.closer for c in compared]).mean())
    together = np.concatenate([np.bincount(c.record[mask]) for c, mask in zip(compared, masks, strict=True)])
    independent = k**2 / float(np.sum(together.astype(float) ** 2))
    low, high = clopper_pearson(closer, independent)
    sides = [_hits(c, label) for c in compared]
    copied, control = sum(s[0] for s in sides), sum(s[1] for s in sides)
    chance = binomtest(copied, copied + control, alternative="greater").pvalue if copied + control else 1.0
    return {
        "images": k,
        "closer": closer,
        "low": low,
        "high": high,
        "near_copies": int(of([c.near for c in compared]).sum()),
        "expected": sum(c.expected * int(mask.sum()) for c, mask in zip(compared, masks, strict=True)),
        "identical": int((of([c.to_seen for c in compared]) == 0).sum()),
        "copied": copied,
        "control": control,
        "to_seen": float(np.median(of([c.to_matched for c in compared]))),
        "to_held_out": float(np.median(of([c.to_held_out for c in compared]))),
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
        for of_space in self.compared.values():
            for c in of_space:
                masks[c.of.client] = c.near | masks.get(c.of.client, np.full(len(c.near), False))
        return masks

    def record(self) -> dict[str, Any]:
        """Plain values: for each space the ``facts`` of all, of each client and of each class."""
        return {name: _of_space(of_space) for name, of_space in self.compared.items()}


def _of_space(compared: Sequence[Compared]) -> dict[str, Any]:
    labels = sorted({int(y) for c in compared for y in c.of.made.y.unique()})
    return {
        "all": facts(compared),
        "clients": {str(c.of.client): facts([c]) for c in compared if len(c.near)},
        "classes": {str(label): facts(compared, label) for label in labels},
    }
