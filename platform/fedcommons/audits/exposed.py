"""Worst-case membership: the success of the membership attack on the images that it identifies best.

An average over all images hides the few images that a generator reveals (Carlini et al., S&P 2022, arXiv:2112.03570;
see also arXiv:2502.12976).   K: number of generators, each trained on a random half of the images;  n: images;
s_kj: score of image j under generator k;  m_j, o_j: mean score under the generators that were, and were not, trained on
image j;  c_j, d_j: numbers of these generators.

The K generators are divided into two halves. The first half chooses the images with the largest exposure
|m_j - o_j| / (1/c_j + 1/d_j)^(1/2), and fits the likelihood ratios of ``membership``. The second half judges: its
generators are the targets of the attack. Then the halves swap, and the results are averaged. The targets' scores do not
influence the choice, so an attack on a generator that ignores its data has an expected AUC of 0.5.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedcommons.audits.membership import auc, roc
from fedcommons.seeding import numpy_generator

SHARE, FEWEST = 0.05, 12
"""Share of the images that are chosen; smallest number of generators: with 4, up to a fifth of the intervals of attacks
without information were wholly above 0.5, with 12 a tenth."""


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """The success of the attack on the most exposed images.

    auc_interval: 2.5 and 97.5 % quantiles of a bootstrap. With 12 generators, this interval is too narrow: it contained
    0.5 in 85 to 89 % of attacks without information. images: number of chosen images in each half. tpr_at: true
    positive rate at a false positive rate of 1 %; None: the targets of a half have less than 100 pairs with chosen
    images that were no training images, too few for 1 %.
    """

    images: int
    auc: float
    auc_interval: tuple[float, float]
    tpr_at: float | None

    def record(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return {**asdict(self), "auc_interval": list(self.auc_interval)}


def worst_case(
    scores: np.ndarray, inside: np.ndarray, seed: int, share: float = SHARE, draws: int = 400
) -> Exposed | None:  # fmt: skip
    """Attack the ``share`` of images that the attack identifies best; None: there are fewer than ``FEWEST`` generators.

    The interval is from ``draws`` bootstrap samples of the targets in each half: it holds for these n images.

    Args:
        scores: (K, n), high for training images.
        inside: (K, n) bool, the training images of each generator.
    """
    if len(scores) < FEWEST:
        return None
    count = max(1, round(share * scores.shape[1]))
    folds = [_judged(scores, inside, first, count) for first in (0, 1)]
    rates = [roc(ratios.ravel(), coins.ravel()) for ratios, coins in folds]
    again = numpy_generator(seed, "bootstrap of targets")
    aucs = [_auc([(r[rows], c[rows]) for r, c in folds for rows in [again.integers(len(r), size=len(r))]])
            for _ in range(draws)]  # fmt: skip
    low, high = (float(q) for q in np.quantile(aucs, [0.025, 0.975]))
    is_resolved = min((~coins).sum() for _, coins in folds) >= 100
    at = float(np.mean([tpr[fpr <= 0.01].max() for fpr, tpr in rates])) if is_resolved else None
    return Exposed(images=count, auc=_auc(folds), auc_interval=(low, high), tpr_at=at)


def _auc(folds: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the mean AUC of the folds; 0.5 for a fold that has only members, or none."""
    return float(np.mean([auc(*roc(r.ravel(), c.ravel())) if 0 < c.mean() < 1 else 0.5 for r, c in folds]))


def _judged(scores: np.ndarray, inside: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log likelihood ratios and memberships (targets, count) of the images that generators ``first::2`` choose.

    The other generators are the targets.
    """
    s, x = scores[first::2], inside[first::2]
    means, counts = [], [x.sum(0), (~x).sum(0)]
    for side, n in zip((x, ~x), counts, strict=True):
        of_all = np.sum(np.where(side, s, 0)) / max(side.sum(), 1)
        means.append(np.where(n > 0, np.where(side, s, 0).sum(0) / np.maximum(n, 1), of_all))
    variance = (s - np.where(x, *means)).var() or 1.0
    fewest = np.minimum(*counts)
    exposure = np.where(fewest > 0, np.abs(means[0] - means[1]) / np.sqrt(sum(1 / np.maximum(n, 1) for n in counts)), 0)
    chosen = np.argsort(-exposure, kind="stable")[:count]
    targets, (member, other) = scores[1 - first :: 2, chosen], (mean[chosen] for mean in means)
    ratios = ((targets - other) ** 2 - (targets - member) ** 2) / (2 * variance)
    return ratios, inside[1 - first :: 2, chosen]
