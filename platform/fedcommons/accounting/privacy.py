"""The privacy ledger: what epsilon local training by DP-SGD has cost each client, and what no epsilon covers.

Opacus' accountant of Renyi differential privacy for the subsampled Gaussian mechanism (Mironov et al. 2019).
q: sampling rate;  sigma: noise multiplier;  delta: of the guarantee. Neighbours differ in one example of one client.
The clients' data are disjoint, so the guarantee of all is the largest of theirs (parallel composition).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedcommons.algorithms import local_loop
from fedcommons.config import Experiment
from fedcommons.data.clients import Clients


@lru_cache(maxsize=4096)
def _rdp_of_a_step(q: float, sigma: float) -> np.ndarray:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    return np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS))


@lru_cache(maxsize=100_000)
def epsilon(q: float, sigma: float, steps: int, delta: float) -> float:
    """epsilon of so many steps of DP-SGD; 0 for none."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    if not steps:
        return 0.0
    orders = RDPAccountant.DEFAULT_ALPHAS
    with warnings.catch_warnings():
        # where the best order is the first or last one it says so: the bound holds, others might be tighter
        warnings.filterwarnings("ignore", "Optimal order is the")
        return float(get_privacy_spent(orders=orders, rdp=list(steps * _rdp_of_a_step(q, sigma)), delta=delta)[0])


@dataclass(frozen=True)
class PrivacyLedger:
    """What DP-SGD local training has cost each client: its sampling rate q and the steps it takes in a round."""

    sigma: float
    delta: float
    rates: Sequence[float]
    steps: Sequence[int]

    def epsilons(self, rounds_joined: Sequence[int]) -> list[float]:
        """Each client's epsilon after it took part in so many rounds."""
        clients = zip(self.rates, self.steps, rounds_joined, strict=True)
        return [epsilon(q, self.sigma, rounds * steps, self.delta) for q, steps, rounds in clients]


def ledger(config: Experiment, clients: Clients) -> PrivacyLedger | None:
    """The ledger of an experiment; None without DP-SGD."""
    local = local_loop(config, augment=False)
    if local.dp is None:
        return None
    sizes, b = clients.sizes, local.batch_size
    rates = [local.dp.sampling_rate(n, b) for n in sizes]
    epochs = [local.epochs_for(n, own) for n, own in zip(sizes, clients.n_own.tolist(), strict=True)]
    steps = [e * local.dp.steps(n, b) for e, n in zip(epochs, sizes, strict=True)]
    return PrivacyLedger(local.dp.noise_multiplier, config.dp.delta, rates, steps)


def statement(config: Experiment, book: PrivacyLedger | None, rounds_joined: Sequence[int]) -> dict[str, Any]:
    """What is protected and what is not, for the summary: an epsilon of all messages only where none is left out."""
    uncovered = [
        "the number of examples of each client, taken as public",
        "what the run folder logs (training loss, class counts, convergence parameters) and this run's seed, with "
        "which the noise can be drawn again: they are the simulation's, and secret",
    ]
    if config.sharing.setting == "shuffled_synthetic":
        uncovered.append("the pool of synthetic images: its generators were trained without differential privacy")
    if config.sharing.setting == "local_synthetic":  # one real image has a part in every synthetic one it trains on
        uncovered.append("the generators of the synthetic images, trained without differential privacy")
    if config.sharing.setting == "shuffled_real":
        uncovered.append("the real images that were swapped through the pool")
    if config.algorithm == "fedmix":
        uncovered.append(f"the means of {config.fedmix.mean_size} images and labels that FedMix shares")
    if book is None:
        uncovered.append("the model updates of every round")
        return {"epsilon_local_training": None, "delta": None, "epsilon_of_messages": None, "uncovered": uncovered}
    spent = book.epsilons(rounds_joined)
    whole = max(spent) if len(uncovered) == 2 else None
    return {
        "epsilon_local_training": {"largest": max(spent), "of_each_client": spent},
        "delta": book.delta,
        "epsilon_of_messages": whole,
        "uncovered": uncovered,
    }
