"""Clients' weights in averages: equal (Fedssyn) or their numbers of examples (FedDM, NIID-Bench)."""

from collections.abc import Sequence

WEIGHTINGS = ("uniform", "samples")


def weight(weighting: str, n: int) -> float:
    """w_i: 1 or n_i."""
    return float(n) if weighting == "samples" else 1.0


def total_weight(weighting: str, sizes: Sequence[int]) -> float:
    """Sum of w_i over all N clients, whether they take part or not: N or n."""
    return float(sum(sizes)) if weighting == "samples" else float(len(sizes))
