"""Heterogeneity of a partition, computed from the clients' class counts alone: no model and no gradient is needed.

n_ic: number of client i's examples of class c;   n_i, n_c, n: sums over classes, over clients, over both;
p_i = n_i. / n_i: client i's distribution of labels;   q = n_.c / n: distribution of all labels;
N: number of clients;   C: number of classes that occur.

``hellinger``          mean Hellinger distance of p_i from q
``hellinger_between``  root mean square Hellinger distance between two clients' p_i, as FedArtML computes it
``ssdi``               Skew-Scarcity Disentanglement Indicator, (``lcd``^2 + ``lds``^2)^(1/2)
``lcd``, ``lds``       the indicator's parts of missing classes (label coverage deficiency) and of present classes
``size_imbalance``     1 - N_eff/N, where N_eff = n^2 / sum_i n_i^2 is the effective number of clients

All metrics are in [0, 1]. ``size_imbalance`` is 0 if all clients have equal sizes, the others if all clients have equal
distributions of labels.
"""

from collections.abc import Sequence
from math import hypot, sqrt

import numpy as np


def hellinger(counts: np.ndarray) -> float:
    """Return the mean Hellinger distance of the clients' distributions of labels p_i from that of all labels q.

    H(p, q) = (1 - sum_c sqrt(p_c q_c))^(1/2) is in [0, 1]. Each client has the same weight in the mean.

    Args:
        counts: (N, C) number of each client's examples per class.
    """
    overlaps = np.sqrt(_distributions(counts)) @ np.sqrt(counts.sum(0) / counts.sum())
    return float(np.sqrt(np.clip(1 - overlaps, 0, 1)).mean())


def hellinger_between(counts: np.ndarray) -> float:
    """Return the root mean square Hellinger distance between two clients' distributions of labels, in [0, 1].

    (1/(N (N - 1)) sum_{i != j} H(p_i, p_j)^2)^(1/2): 1 if no two clients have a class in common.

    Args:
        counts: (N, C) number of each client's examples per class.

    Reference: Jimenez-Gutierrez et al., FedArtML, IEEE Access 2024, as in the released code. The same authors report
    accuracy against this distance (arXiv:2503.17070).
    """
    n = len(counts)
    mean = np.sqrt(_distributions(counts)).sum(0)
    # The sum over i != j of H^2 is N (N - 1) - (|sum_i sqrt(p_i)|^2 - N), because every sqrt(p_i) has norm 1.
    return sqrt(max(0.0, 1 - (float(mean @ mean) - n) / (n * (n - 1)))) if n > 1 else 0.0


def ssdi(counts: np.ndarray) -> tuple[float, float]:
    """Return (LCD, LDS), the parts of the Skew-Scarcity Disentanglement Indicator SSDI = (LCD^2 + LDS^2)^(1/2).

    LCD^2 = sum_{n_ic = 0} d_ic and LDS^2 = sum_{n_ic > 0} d_ic, where d_ic compares the share of a client's class with
    its share if client and label were independent:
    d_ic = (n/n_i + n/n_c) (n_ic/n - n_i n_c/n^2)^2 / (2 (1 - 1/min(N, C))).
    So LCD (label coverage deficiency) is the part of missing classes, and LDS (label distribution skew) the part of
    present ones. SSDI is in [0, 1], and 1 for N = C clients with one class and equal numbers of examples each.

    Args:
        counts: (N, C) number of each client's examples per class.

    Reference: "Disentangling Federated Learning Heterogeneity", AISTATS 2026, as in the released code
    (github.com/wkzeng/SSDI). Departs from the code: C counts only classes that occur.
    """
    counts = counts[:, counts.sum(0) > 0]
    shares = counts / counts.sum()
    clients, classes = shares.sum(1, keepdims=True), shares.sum(0)
    if min(shares.shape) == 1:
        return 0.0, 0.0
    weights = 1 / np.maximum(clients, 1e-300) + 1 / classes
    terms = weights * (shares - clients * classes) ** 2 / (2 * (1 - 1 / min(shares.shape)))
    return sqrt(terms[counts == 0].sum()), sqrt(terms[counts > 0].sum())


def size_imbalance(sizes: Sequence[int] | np.ndarray) -> float:
    """Return 1 - N_eff/N with N_eff = (sum_i n_i)^2 / sum_i n_i^2, Kish's effective number of clients; in [0, 1 - 1/N].

    The value is v^2/(1 + v^2) for the coefficient of variation v of the sizes n_i.
    """
    n = np.asarray(sizes, dtype=np.float64)
    return float(1 - n.sum() ** 2 / (len(n) * (n @ n)))


def describe(sizes: Sequence[int] | np.ndarray, counts: np.ndarray | None) -> dict[str, float]:
    """Return all metrics by name, rounded to six digits, so that CPUs that round otherwise give the same.

    counts: (N, C); None: labels are no classes, so only the sizes are compared.
    """
    metrics = {"size_imbalance": size_imbalance(sizes)}
    if counts is not None:
        lcd, lds = ssdi(counts)
        metrics |= {"hellinger": hellinger(counts), "hellinger_between": hellinger_between(counts)}
        metrics |= {"ssdi": hypot(lcd, lds), "lcd": lcd, "lds": lds}
    return {name: round(value, 6) for name, value in metrics.items()}


def _distributions(counts: np.ndarray) -> np.ndarray:
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)
