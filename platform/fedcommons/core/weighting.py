"""Weights of clients in averages: equal (Fedssyn) or by client size (FedDM, NIID-Bench).

A client's size n_i is its number of examples, or the sum of the examples' weights if examples have weights.
"""

from collections.abc import Sequence

WEIGHTINGS = ("uniform", "samples")


def weight(weighting: str, n: float) -> float:
    """Return w_i, the weight of a client of size n: 1 or n_i."""
    return float(n) if weighting == "samples" else 1.0


def total_weight(weighting: str, sizes: Sequence[float]) -> float:
    """Return the sum of w_i over all N clients, whether they take part or not: N or n."""
    return float(sum(sizes)) if weighting == "samples" else float(len(sizes))
