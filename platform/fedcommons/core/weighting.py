"""How much a client counts in averages: all alike (Fedssyn) or by its number of examples (FedDM, NIID-Bench)."""

from collections.abc import Sequence

WEIGHTINGS = ("uniform", "samples")


def weight(weighting: str, n: int) -> float:
    """w_i: 1 or n_i."""
    return float(n) if weighting == "samples" else 1.0


def total_weight(weighting: str, sizes: Sequence[int]) -> float:
    """sum of w_i over all N clients, drawn or not: N or n."""
    return float(sum(sizes)) if weighting == "samples" else float(len(sizes))
