"""The privacy ledger: what each client released, the epsilon that it cost, and what no epsilon covers.

Whoever makes a message or an artifact states in a ``Release`` what protects it. Without a statement it is uncovered.

Accountant: Opacus' Renyi differential privacy of the subsampled Gaussian mechanism (Mironov et al. 2019).
q: sampling rate;  sigma: noise multiplier;  delta: of the guarantee;  n_i: examples of client i.

Neighbouring data sets: one example of one client is blanked out, that is, it keeps its place but its gradient is zero.
Then n_i is the same for both, and so are q, the batch size B and the number of steps K, which depend on n_i; n_i is
public. Sums over Poisson samples of the two data sets have the distributions of Mironov et al. for data sets with and
without the example, at the same q. So the accountant's epsilon holds. Replacing an example by another one is two such
steps (blank it out, fill it again) and costs more epsilon than is printed.

The clients' data are disjoint, so the guarantee of all is the largest of theirs (parallel composition).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Self

import numpy as np

from fedcommons.config.experiment import Experiment
from fedcommons.core.release import Release
from fedcommons.errors import UserError


@lru_cache(maxsize=4096)
def _rdp_of_a_step(q: float, sigma: float) -> np.ndarray:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    return np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS))


Spent = tuple[tuple[float, float, int], ...]
"""(q, sigma, steps) of one client's events."""


def epsilon(q: float, sigma: float, steps: int, delta: float) -> float:
    """epsilon >= 0 of this number of DP-SGD steps; 0 for no step."""
    return composed(((q, sigma, steps),), delta)


@lru_cache(maxsize=100_000)
def composed(spent: Spent, delta: float) -> float:
    """epsilon >= 0 of all these steps: their Renyi divergences add up at each order."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    costs = [steps * _rdp_of_a_step(q, sigma) for q, sigma, steps in spent if steps]
    if not costs:
        return 0.0
    orders = RDPAccountant.DEFAULT_ALPHAS
    with warnings.catch_warnings():
        # Opacus warns if the best order is the first or the last one: the bound holds, but might be tighter
        warnings.filterwarnings("ignore", "Optimal order is the")
        found = get_privacy_spent(orders=orders, rdp=list(reduce(np.add, costs)), delta=delta)[0]
    return max(0.0, float(found))  # the formula is negative if delta alone is more than enough


Events = Mapping[int, Mapping[tuple[float, float], int]]
"""client -> (q, sigma) -> steps."""


@dataclass(frozen=True)
class Ledger:
    """Counts of what clients have released: covered events by client and mechanism, uncovered ones by name.

    given_away: of each client, the most of its examples that one uncovered event gave away (``Release.seen``).
    """

    shared: Events = field(default_factory=dict)  # before round 1
    trained: Events = field(default_factory=dict)  # in rounds
    uncovered: Mapping[str, int] = field(default_factory=dict)  # name -> how often
    given_away: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, shared: Iterable[Release]) -> Self:
        """The ledger before round 1, with what was released before."""
        events = list(shared)
        return cls(_with({}, events), {}, _counted({}, events), _most({}, events))

    def after(self, round: Sequence[Release]) -> "Ledger":
        """This ledger and the releases of one more round."""
        if not round:
            return self
        given_away = _most(self.given_away, round)
        return Ledger(self.shared, _with(self.trained, round), _counted(self.uncovered, round), given_away)

    def of_training(self, client: int, delta: float) -> float:
        """The epsilon of all that a client sent in rounds."""
        return composed(_spent(self.trained.get(client, {})), delta)

    def of_all(self, client: int, delta: float) -> float | None:
        """The epsilon of all that a client has released; None if any release of any client is uncovered."""
        if self.uncovered:
            return None
        return composed(_spent(self.trained.get(client, {})) + _spent(self.shared.get(client, {})), delta)

    def largest_of_training(self, delta: float) -> float:
        """The largest ``of_training`` of all clients; 0 before anything was sent."""
        return max((self.of_training(client, delta) for client in self.trained), default=0.0)

    def record(self) -> dict[str, Any]:
        """The ledger as plain values, for checkpoints."""
        return {
            "shared": [[i, *key, steps] for i, events in self.shared.items() for key, steps in events.items()],
            "trained": [[i, *key, steps] for i, events in self.trained.items() for key, steps in events.items()],
            "uncovered": dict(self.uncovered),
            "given_away": [[i, n] for i, n in self.given_away.items()],
        }


def read(found: Mapping[str, Any]) -> Ledger:
    """The ledger of which ``found`` is the ``record``.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not a ledger's record.
    """
    uncovered = {str(name): int(times) for name, times in found["uncovered"].items()}
    given_away = {int(client): int(n) for client, n in found["given_away"]}
    return Ledger(_read(found["shared"]), _read(found["trained"]), uncovered, given_away)


def _read(found: Iterable[Sequence[Any]]) -> Events:
    events: dict[int, dict[tuple[float, float], int]] = {}
    for client, q, sigma, steps in found:
        events.setdefault(int(client), {})[float(q), float(sigma)] = int(steps)
    return events


def _with(events: Events, new: Iterable[Release]) -> Events:
    """These events and the new covered ones, as a new mapping; clients without new events share their counts."""
    after, own = dict(events), {}
    for event in new:
        if event.covered:
            mine = own.setdefault(event.client, dict(events.get(event.client, {})))
            mine[event.q, event.sigma] = mine.get((event.q, event.sigma), 0) + event.steps
    return after | own


def _counted(uncovered: Mapping[str, int], new: Iterable[Release]) -> Mapping[str, int]:
    """These counts and those of the new uncovered events, by name."""
    after = dict(uncovered)
    for event in new:
        for name in () if event.covered else event.named or ("something without a name",):
            after[name] = after.get(name, 0) + 1
    return after


def _most(given_away: Mapping[int, int], new: Iterable[Release]) -> Mapping[int, int]:
    """The largest number of examples of each client that an uncovered event gave away, before or now."""
    after = dict(given_away)
    for event in new:
        if event.seen and not event.covered:
            after[event.client] = max(event.seen, after.get(event.client, 0))
    return after


def _spent(events: Mapping[tuple[float, float], int]) -> Spent:
    return tuple((q, sigma, steps) for (q, sigma), steps in sorted(events.items()))


def refuse_large_delta(config: Experiment, sizes: Sequence[int]) -> None:
    """Refuse a delta so large that publishing one example would satisfy it; ``sizes``: the clients' n_i.

    Raises:
        UserError: with DP-SGD, delta is 1/n_i or more for some client.
    """
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    if config.dp.local and config.dp.delta * sizes[largest] >= 1:
        raise UserError(
            f"dp.delta must be below 1/n_i = {1 / sizes[largest]:.3g}, got {config.dp.delta:g}: client {largest} has "
            f"{sizes[largest]} examples, and at such a delta it could publish one of them."
        )


def statement(ledger: Ledger, clients: int, delta: float | None, rejected: int) -> dict[str, Any]:
    """What is protected and what is not, for the summary. An epsilon of all messages is there only if all are covered.

    ``clients``: N. ``delta``: None without DP-SGD. ``rejected``: number of rejected replies in the run.
    """
    leaks = [
        f"{name}, released {times} time{'s'[: times > 1]} with nothing that an epsilon can be computed from"
        for name, times in ledger.uncovered.items()
    ]
    if rejected and delta is not None:
        leaks.append(f"the fact that {rejected} replies were rejected, as it depends on the data")
    uncovered = [
        "each client's number of examples, which counts as public: neighbouring data sets differ in a blanked example",
        "what the run folder holds: training loss, class counts, convergence parameters, and the seed, from which the "
        "noise can be drawn again; keep the folder secret, and choose a seed that is hard to guess",
        "other runs on the same data: their epsilons add up, also those of runs that only served to choose a learning "
        "rate (--lrs, cells of a sweep); only this run is counted here",
        *leaks,
    ]
    if delta is None:
        return {"epsilon_local_training": None, "delta": None, "epsilon_of_messages": None, "uncovered": uncovered}
    spent = [ledger.of_training(client, delta) for client in range(clients)]
    everything = [ledger.of_all(client, delta) for client in range(clients)]
    return {
        "epsilon_local_training": {"largest": max(spent), "of_each_client": spent},
        "delta": delta,
        "epsilon_of_messages": None if leaks else max(e for e in everything if e is not None),
        "uncovered": uncovered,
    }
