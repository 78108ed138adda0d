"""The audit of a pool: do generators memorise what they were trained on?

Each client's images are compared with those that its generator saw and with as many held-out ones of the same classes,
in pixels and in a feature space (``closeness``), where an image that is moved by a pixel or mirrored is the same
(``distances``). If nothing was memorised, seen and held-out images may be exchanged. Then a made image is closer to a
seen image than to any held-out one with probability 1/2, and a seen image has a made one near to it as probably as a
held-out image has (``verdict``). Beside each verdict stands the smallest share of copies that it finds (``power``).
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
    made images at distance 0, so exact, moved or mirrored copies. ``copied``, ``control``: seen and held-out images to
    which a made image is nearer than the limit; ``copied_half``, ``control_half``: than half of it.
    ``to_seen``, ``to_held_out``: medians of the distances to the closest matched and held-out image.
    ``memorised``: whether this is more than chance explains.
    """
    masks = [c.of.made.y.numpy() == label if label is not None else np.full(len(c.near), True) for c in compared]
    k = sum(int(mask.sum()) for mask in masks)
    if not k:
        return None

    def of(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([value[mask] for value, mask in zip(values, masks, strict=True)])

    total = np.sum([counts(c, label) for c in compared], 0)
    closer = float(total[1]) / k
    low, high = clopper_pearson(closer, independent(total))
    return {
        "images": k,
        "closer": closer,
        "low": low,
        "high": high,
        "near_copies": int(of([c.near for c in compared]).sum()),
        "expected": sum(c.expected * int(mask.sum()) for c, mask in zip(compared, masks, strict=True)),
        "identical": int(of([c.identical for c in compared]).sum()),
        "copied": int(total[3]),
        "control": int(total[4]),
        "copied_half": int(total[5]),
        "control_half": int(total[6]),
        "to_seen": float(np.median(of([c.made.to_matched for c in compared]))),
        "to_held_out": float(np.median(of([c.made.to_held_out for c in compared]))),
        "memorised": memorised(total),
    }


def audit(subjects: Sequence[Subject], spaces: Mapping[str, Space], seed: int) -> "Audit":
    """Compare every client's images in every space; ``seed``: of the copies that are planted to know the power."""
    return Audit({name: [compare(one, space, seed) for one in subjects] for name, space in spaces.items()}, seed)


@dataclass(frozen=True, eq=False)
class Audit:
    """The comparisons of all clients, by space."""

    compared: Mapping[str, Sequence[Compared]]
    seed: int

    def near(self) -> dict[int, np.ndarray]:
        """By client: which of its images are near-copies in any space."""
        masks: dict[int, np.ndarray] = {}
        for of_space in self.compared.values():
            for c in of_space:
                masks[c.of.client] = c.near | masks.get(c.of.client, np.full(len(c.near), False))
        return masks

    def record(self) -> dict[str, Any]:
        """Plain values: for each space the verdicts on all, on each client and on each class.

        A verdict is its ``facts``, ``finds``: the smallest share of copies in this pool that would have been found
        with probability 0.9 (``power``), and ``finds_images``: how many images these are. Both are None where not even
        a pool of copies would have been found, or where the verdict is that it is memorised.
        """
        return {name: _of_space(of_space, self.seed) for name, of_space in self.compared.items()}


def _of_space(compared: Sequence[Compared], seed: int) -> dict[str, Any]:
    labels = sorted({int(y) for c in compared for y in c.of.made.y.unique()})
    return {
        "all": _verdict(compared, seed),
        "clients": {str(c.of.client): _verdict([c], seed) for c in compared if len(c.near)},
        "classes": {str(label): _verdict(compared, seed, label) for label in labels},
    }


def _verdict(compared: Sequence[Compared], seed: int, label: int | None = None) -> dict[str, Any] | None:
    found = facts(compared, label)
    if found is None:
        return None
    fewest = None if found["memorised"] else fewest_copies(compared, seed, label)
    return {**found, "finds": fewest and fewest / found["images"], "finds_images": fewest}
