"""Weights of clients in averages: equal ("uniform", Fedssyn) or proportional to n_i ("samples", FedDM, NIID-Bench).

n_i: number of training examples of client i, or the sum of the examples' weights if they have weights.
"""

from collections.abc import Sequence

WEIGHTINGS = ("uniform", "samples")


def weight(weighting: str, n: float) -> float:
    """Return w_i, the weight in averages of a client with n examples (n_i): 1 or n, by the rule ``weighting``."""
    return float(n) if weighting == "samples" else 1.0


def total_weight(weighting: str, sizes: Sequence[float]) -> float:
    """Return the sum of the weights w_i over all N clients, participating or not: N or the sum of ``sizes`` (n_i)."""
    return float(sum(sizes)) if weighting == "samples" else float(len(sizes))
