"""The privacy ledger: what epsilon local training by DP-SGD has cost each client, and what no epsilon covers.

Opacus' accountant of Renyi differential privacy for the subsampled Gaussian mechanism (Mironov et al. 2019).
q: sampling rate;  sigma: noise multiplier;  delta: of the guarantee;  n_i: examples of client i.

Neighbours: one example of one client is blanked out, that is, it keeps its place and its gradient is zero. So n_i is
the same for both, and with it q, the batch size B and the number of steps K, which n_i decides; n_i is public. The sum
over a Poisson sample has, on the two, the distributions that Mironov et al. bound in both directions for a data set
with and without an example, at the same q: the accountant's epsilon holds. To replace an example by another is to blank
it out and to fill it again: twice that distance, and more epsilon than is printed.

The clients' data are disjoint, so the guarantee of all is the largest of theirs (parallel composition).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedcommons.algorithms import local_loop
from fedcommons.config.experiment import Experiment
from fedcommons.data.clients import Clients
from fedcommons.errors import UserError


@lru_cache(maxsize=4096)
def _rdp_of_a_step(q: float, sigma: float) -> np.ndarray:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    return np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS))


@lru_cache(maxsize=100_000)
def epsilon(q: float, sigma: float, steps: int, delta: float) -> float:
    """epsilon >= 0 of so many steps of DP-SGD; 0 for none."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    if not steps:
        return 0.0
    orders = RDPAccountant.DEFAULT_ALPHAS
    with warnings.catch_warnings():
        # where the best order is the first or last one it says so: the bound holds, others might be tighter
        warnings.filterwarnings("ignore", "Optimal order is the")
        spent = get_privacy_spent(orders=orders, rdp=list(steps * _rdp_of_a_step(q, sigma)), delta=delta)[0]
    return max(0.0, float(spent))  # the bound falls below zero where delta alone is more than enough


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


def refuse_large_delta(config: Experiment, sizes: Sequence[int]) -> None:
    """Refuse a delta that lets a client publish an example of its own; ``sizes``: the clients' n_i.

    Raises:
        UserError: with DP-SGD, delta is not below 1/n_i for every client.
    """
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    if config.dp.local and config.dp.delta * sizes[largest] >= 1:
        raise UserError(
            f"dp.delta must be below 1/n_i = {1 / sizes[largest]:.3g}, got {config.dp.delta:g}: client {largest} has "
            f"{sizes[largest]} examples, and at such a delta it could publish one of them."
        )


COVERED = {"real", "fedavg", "fedprox", "scaffold", "fedpvr", "feddyn", "fednova", "moon"}
"""Settings and methods whose clients send what DP-SGD has trained and nothing else; others send more, or may."""


def statement(
    config: Experiment, book: PrivacyLedger | None, rounds_joined: Sequence[int], rejected: int
) -> dict[str, Any]:
    """What is protected and what is not, for the summary: an epsilon of all messages only where none is left out.

    ``rejected``: replies of the run that were rejected.
    """
    leaks = _leaks(config, book is not None, rejected)
    uncovered = [
        "the number of examples of each client, taken as public: neighbours differ in one example blanked out",
        "what the run folder logs (training loss, class counts, convergence parameters) and this run's seed, with "
        "which the noise can be drawn again: they are the simulation's, and secret, so a seed must be hard to guess",
        "other runs on the same data: each has an epsilon of its own, and they add up; a learning rate that was chosen "
        "among several runs (--lrs, cells of a sweep) costs all of them, and only this one is charged here",
        *leaks,
    ]
    if book is None:
        return {"epsilon_local_training": None, "delta": None, "epsilon_of_messages": None, "uncovered": uncovered}
    spent = book.epsilons(rounds_joined)
    return {
        "epsilon_local_training": {"largest": max(spent), "of_each_client": spent},
        "delta": book.delta,
        "epsilon_of_messages": None if leaks else max(spent),
        "uncovered": uncovered,
    }


def _leaks(config: Experiment, private: bool, rejected: int) -> list[str]:
    """What clients sent that no epsilon covers."""
    said = {
        "shuffled_synthetic": "the pool of synthetic images: its generators were trained without differential privacy",
        # one real image has a part in every synthetic one it trains on
        "local_synthetic": "the generators of the synthetic images, trained without differential privacy",
        "shuffled_real": "the real images that were swapped through the pool",
        "fedmix": f"the means of {config.fedmix.mean_size} images and labels that FedMix shares",
    }
    sent = [value for value in (config.sharing.setting, config.algorithm) if value not in COVERED]
    found = [said.get(value, f"what {value} sends besides trained models") for value in sent]
    if not private:
        return [*found, "the model updates of every round"]
    if rejected:
        found.append(f"that {rejected} replies were rejected, as replies that are not finite are: it tells of the data")
    return found
