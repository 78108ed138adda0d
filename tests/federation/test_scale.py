"""Time and memory grow neither with clients that take no part nor with what clients keep."""

import tracemalloc
from collections.abc import Callable
from cProfile import Profile
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import Digits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedcommons import Algorithm, Examples, LocalSGD
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.data.clients import Clients, Rows
from fedcommons.federation import rounds
from fedcommons.federation.rounds import Plan
from fedcommons.federation.stragglers import Independent

N = 1_000_000
STORE = Examples(torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1), torch.arange(20) % 10)


def million(store: Examples = STORE, commons: Examples | None = None, weight: torch.Tensor | None = None) -> Clients:
    """Client i holds the five rows from 5 i on, modulo the rows there are (a multiple of 5)."""
    n = len(store)
    return Clients(store, Rows(torch.arange(n), np.arange(N) * 5 % n, np.full(N, 5), weight), commons=commons)


def test_every_example_needs_one_weight_and_every_client_some() -> None:
    rows = [np.array([0, 3]), np.array([1])]
    with pytest.raises(ValueError, match="one weight for each of its examples"):
        Rows.from_lists(rows, [np.ones(1), np.ones(2)])
    for bad, why in ((0.0, "weights of client 1 are all zero"), (-1.0, "not negative"), (np.nan, "finite")):
        with pytest.raises(ValueError, match=why):
            Rows.from_lists(rows, [np.ones(2), np.array([bad])])
    clients = Clients(STORE, Rows.from_lists(rows, [np.array([0.5, 1.5]), np.array([4])]))
    assert [client.weight.tolist() for client in clients if client.weight is not None] == [[0.5, 1.5], [1.0]]
    assert [client.size for client in clients] == [2, 4]


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that is computed, which tracemalloc does not see."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradient_coding", "ditto"])
@pytest.mark.long
def test_a_round_of_a_million_clients_costs_what_its_participants_cost(
    name: str, quick: Callable[[str], Algorithm], digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = quick(name)
    small = digits(method=algorithm)
    clients = million(small.data.sets["test"], small.data.clients.commons)
    data = replace(small.data, clients=clients, real=clients, sets={})
    federation = replace(small, data=data).training(LocalSGD(1, 5))
    facts = replace(small.plan(2).facts, n_clients=N, sizes=clients.sizes, arrival=(4 / N * 0.9,) * N,
                    counts=partial(clients.counts, 10))  # fmt: skip
    plan = Plan(facts, 4 / N, 2, 0, Independent(0.1))
    asked, get = [], Clients.__getitem__
    monkeypatch.setattr(Clients, "__getitem__", lambda self, i: (asked.append(i), get(self, i))[1])
    course = rounds.run(algorithm, federation.serial(algorithm), plan, federation.start(algorithm, plan))
    before, _ = next(course)  # what is done once in a process
    asked.clear()
    tracemalloc.start()
    with Largest() as tensors:
        now, metrics = next(course)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert metrics["clients"] == 4
    assert asked == rounds.answering(algorithm, plan, before.state, 2)[1]
    assert len(now.memory) <= 8
    assert max(peak, tensors.nbytes) < 500_000  # bytes; a vector with one byte for each client takes twice that


def test_the_engine_calls_few_functions_per_client(digits: Digits) -> None:
    calls = []
    for n in (10, 10, 30):  # the first fills caches
        federation, profile = digits(sizes=[5] * n, linear=True).training(LocalSGD(1, 5)), Profile()
        profile.runcall(federation.run, FedAvg(), federation.plan(2))
        calls.append(sum(e.callcount for e in profile.getstats() if "platform/fedcommons" in str(e.code)))
    assert 0 < (calls[2] - calls[1]) / 40 < 105
