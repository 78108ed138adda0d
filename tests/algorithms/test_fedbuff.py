"""FedBuff against a queue of events by the paper's algorithm 1; its clock in closed form; its state does not grow."""

from heapq import heappop, heappush

import numpy as np
import pytest
import torch
from closed_forms import FULL, Problem, descended, weights_of

from fedcommons import LocalSGD, Reply, numpy_generator
from fedcommons.algorithms.fedbuff import FedBuff
from fedcommons.core.returned import split_merged
from fedcommons.flat_tensors import Flat, data, flat
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.testing.federations import LeastSquares

SIZES, RATE, STEPS = (8, 3, 12, 5, 9, 6), 0.1, 2


def durations(spread: float, seed: int = 0) -> np.ndarray:
    slowness = [numpy_generator(seed, "slowness", i).standard_normal() for i in range(len(SIZES))]
    return np.array(SIZES) / np.mean(SIZES) * np.exp(spread * np.array(slowness))


def simulated(problem: LeastSquares, method: FedBuff, k: int, m: int, weighting: str, rounds: int):
    """Yield model, time and stalenesses after each step. A client computes its update when it begins."""
    takes, w = durations(method.spread), weights_of(weighting, SIZES)
    x, now, queue, idle = np.zeros(3), 0.0, [], set(range(len(SIZES)))
    for t in range(rounds):
        draws, senders, buffer = numpy_generator(0, "participants", t + 1), set(), []
        wanted = m - len(queue)
        while len(buffer) < k:
            free = sorted(idle - senders)
            count = min(wanted, len(free))
            chosen = free if count == len(free) else draws.choice(free, count, replace=False, shuffle=False).tolist()
            for i in chosen:
                idle.remove(i)
                heappush(queue, (now + takes[i], i, t, descended(problem, i, x, x, 0.0, RATE, STEPS) - x))
            now, i, version, delta = heappop(queue)
            idle.add(i)
            senders.add(i)
            buffer.append((i, t - version, delta))
            wanted = 1 if method.refill == "reply" else 0
        total = sum(w[i] * (1 + tau) ** -method.exponent * delta for i, tau, delta in buffer)
        x = x + method.server_lr * total / sum(w[i] for i, _, _ in buffer)
        yield x, now, [tau for _, tau, _ in buffer]


@pytest.mark.parametrize(
    ("method", "weighting"),
    [(FedBuff(2), "uniform"), (FedBuff(2, 4, 0.5, 2.0), "samples"), (FedBuff(1, 3, spread=2.0), "uniform"),
     (FedBuff(2, 4, refill="step"), "samples"), (FedBuff(3, exponent=0.0, spread=0.0), "uniform")],
)  # fmt: skip
def test_it_is_the_queue_of_events(method: FedBuff, weighting: str, least_squares: Problem) -> None:
    """Model, time and mean staleness of each step; and the state keeps only models from which clients still train."""
    problem, rounds = least_squares(sizes=SIZES), 12
    federation = problem.federation(RATE).training(LocalSGD(STEPS, FULL), weighting)
    k, m = method.buffer or 0, method.concurrency or len(SIZES)
    expected, stale = simulated(problem, method, k, m, weighting, rounds), 0
    for (now, facts), (x, time, taus) in zip(federation.run(method, federation.plan(rounds)), expected, strict=True):
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-13)
        assert facts["server/time"] == pytest.approx(time, rel=1e-12)
        assert facts["server/staleness"] == pytest.approx(np.mean(taus))
        training, started = data(now.state["ends"]) >= 0, data(now.state["started"])
        training[data(now.state["buffer"])] = True
        versions = {int(name.partition("/")[2]) for name in now.state if name.startswith("version/")}
        assert versions == {*started[training].tolist()} - {now.round}
        assert len(versions) <= m
        stale = max(stale, *taus)
    assert stale > 1


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_time_of_synchronous_rounds_is_the_slowest_clients(spread: float, least_squares: Problem) -> None:
    """test_identities.py compares its models with FedAvg's, bit for bit. Staleness is zero."""
    federation = least_squares(sizes=SIZES).federation(RATE)
    synchronous = [FedBuff(6, spread=spread), FedBuff(6, spread=spread, refill="step")]
    for method in synchronous:
        for now, facts in federation.run(method, federation.plan(3)):
            assert facts["server/time"] == pytest.approx(now.round * durations(spread).max())
            assert facts["server/staleness"] == 0
    faster = federation.run(FedBuff(2, spread=spread), federation.plan(3))[-1][1]["server/time"]
    assert faster < 3 * durations(spread).max()


def test_a_step_without_a_rejected_reply_divides_by_the_others_and_both_begin_again(least_squares: Problem) -> None:
    federation, method = least_squares(sizes=SIZES).federation(RATE), FedBuff(2)
    state = method.start(federation.model, federation.plan(1).facts, 0)
    first, second = method.participants(state, 1)
    total = {"delta": Flat(federation.model.layout, torch.ones(3, dtype=torch.float64))}
    merged = method.merge(federation.serial(method), state, total, {second: Reply(weight=2.0)}, 1, 0)
    after, _ = split_merged(merged)
    assert torch.equal(flat(after, "model").buffer, federation.model.buffer + 0.5)
    assert data(after["started"])[[first, second]].tolist() == [1, 1]


@pytest.mark.long
def test_a_client_is_charged_each_of_its_trainings(least_squares: Problem) -> None:
    """A fast client takes part more often, and the privacy ledger has its own number of steps."""
    federation = least_squares(sizes=SIZES).federation(RATE).training(LocalSGD(1, 3, dp=DPSGD(1.0, 1.0)))
    played = federation.run(FedBuff(2), federation.plan(8))
    times = np.zeros(len(SIZES), int)
    for now, _ in played:
        times[list(now.participants or ())] += 1
    ledger = played[-1][0].ledger
    assert ledger.uncovered == {}
    steps = {i: sum(spent.values()) for i, spent in ledger.updates.covered.items()}
    assert steps == {i: k * -(-SIZES[i] // 3) for i, k in enumerate(times.tolist()) if k}
    assert len({*times.tolist()}) > 2
