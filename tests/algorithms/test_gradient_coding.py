"""Approximate gradient coding: unbiased over stragglers, by enumeration; gradient descent without stragglers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from closed_forms import Problem
from torch import Tensor

from fedcommons import Facts, Flat, LocalSGD, RunData, State, flat, scalar
from fedcommons.algorithms.gradient_coding import GradientCoding
from fedcommons.data.clients import Clients, Rows
from fedcommons.federation.stragglers import Independent
from fedcommons.testing.federations import Federation

ALL_ARRIVE = (1.0,) * 4
FULL = LocalSGD(1, 1000)  # one full-batch step
SEVERAL = LocalSGD(3, 4)  # three epochs of batches of four
WITH_COPIES = [[0, 1, 2, 3, 4, 9, 14], [4, 5, 6, 7, 8, 9, 0], [9, 10, 11, 12, 13, 14], [14, 15, 16, 17, 18, 19, 4]]


def _copied(federation: Federation, rows: Sequence[Sequence[int]] = WITH_COPIES) -> Federation:
    """Its clients hold these rows; an example that d clients hold has the weight 1/d."""
    copies = np.bincount(np.concatenate(rows))
    parts = [np.array(r) for r in rows]
    clients = Clients(federation.data.clients.store, Rows.from_lists(parts, [1 / copies[r] for r in parts]))
    return replace(federation, data=RunData(clients, clients, {}))


def _coded(federation: Federation, method: GradientCoding, state: State) -> list[Tensor]:
    """What each client sends."""
    work, sent = federation.work(), []
    for i, data in enumerate(federation.data.clients):
        reply = method.client(work, method.down(state, 1, i), {}, data, 1, i)
        sent.append(flat(reply.sums, "coded").buffer.clone())
    return sent


def _after(federation: Federation, method: GradientCoding, state: State, sent: Sequence[Tensor]) -> np.ndarray:
    """The server's step when these replies arrive; none without replies, as the engine skips the merge."""
    at = flat(state, "model")
    if not sent:
        return np.zeros(len(at.buffer))
    total = {"coded": Flat(at.layout, torch.stack(list(sent)).double().sum(0))}
    merged = method.merge(federation.serial(method), state, total, {}, 1, 0)
    return (flat(merged, "model").buffer - at.buffer).double().numpy()


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_without_stragglers_a_round_is_gradient_descent_on_all_examples(form: str, least_squares: Problem) -> None:
    problem = least_squares(sizes=(5, 5, 5, 5))
    federation = _copied(problem.federation(0.1)).training(FULL)
    method = GradientCoding(form)
    ((after, _),) = federation.run(method, federation.plan(1))
    a, b = np.concatenate(problem.a), np.concatenate(problem.b)
    gradient = -a.T @ b / (len(b) if form == "mean" else 1)
    assert np.allclose(after.model.buffer.numpy(), -0.1 * gradient, rtol=1e-6)  # weights of mean 1 are float32


@pytest.mark.parametrize("local", [FULL, SEVERAL], ids=["one step", "several steps"])
@pytest.mark.parametrize("arrival", [(0.5, 0.5, 0.5, 0.5), (0.9, 0.3, 0.5, 0.8)], ids=["alike", "per client"])
def test_the_mean_over_stragglers_is_a_step(local: LocalSGD, arrival: Sequence[float], least_squares: Problem) -> None:
    """If all are alike, also the mean over all pairs of drawn clients."""
    federation = _copied(least_squares(sizes=(5, 5, 5, 5)).federation(0.1)).training(local)
    method = GradientCoding()
    facts = [replace(federation.plan(1).facts, arrival=each) for each in (arrival, ALL_ARRIVE)]
    state, all_arrive = (method.start(federation.model, each, 0) for each in facts)
    sent, expected = _coded(federation, method, state), np.zeros(3)
    for arrived in product([False, True], repeat=4):
        p = np.prod([a if here else 1 - a for a, here in zip(arrival, arrived, strict=True)])
        expected += p * _after(federation, method, state, [s for s, here in zip(sent, arrived, strict=True) if here])
    whole = _after(federation, method, all_arrive, _coded(federation, method, all_arrive))
    assert np.allclose(expected, whole, rtol=1e-12)
    assert np.abs(whole).max() > 0.01
    assert not np.allclose(_after(federation, method, state, sent[:1]), whole, rtol=0.1)  # one set does not give it
    if len(set(arrival)) == 1:
        pairs = [_after(federation, method, state, list(two)) for two in combinations(sent, 2)]
        assert np.allclose(np.mean(pairs, 0), whole, rtol=1e-12)


def test_the_rate_decays_with_answered_rounds_only(least_squares: Problem) -> None:
    problem = least_squares(sizes=(5, 5, 5, 5))
    federation, method = problem.federation(0.1).training(FULL), GradientCoding(decay=0.5)
    a, b, w = np.concatenate(problem.a), np.concatenate(problem.b), np.zeros(3)
    for k, (now, _) in enumerate(federation.run(method, federation.plan(3))):
        w = w - 0.1 * 0.5**k * a.T @ (a @ w - b) / len(b)
        assert np.allclose(now.model.buffer.numpy(), w, rtol=1e-9)
        assert int(scalar(now.state, "answered")) == k + 1

    def late(joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        return {i: 0.0 for i in joined if round in (2, 3)}

    plan = federation.plan(4, late=Independent(0.9))
    played = [now for now, _ in federation.run(method, replace(plan, straggler_rule=late))]
    assert [int(scalar(now.state, "answered")) for now in played] == [1, 1, 1, 2]
    assert torch.equal(played[0].model.buffer, played[2].model.buffer)
