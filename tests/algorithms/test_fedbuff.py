"""Methods that choose a round's clients, or none: engine, run, replay; FedBuff against the paper's queue of events."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, descended, weights_of

from fedcommons import (
    ClientError,
    Executor,
    Facts,
    LocalSGD,
    Replies,
    Reply,
    State,
    UserError,
    load_runs,
    numpy_generator,
)
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedbuff import FedBuff
from fedcommons.config import presets
from fedcommons.core.algorithm import Merged
from fedcommons.core.returned import split_merged
from fedcommons.flat_tensors import Flat, Payload, data, flat, scalar, scale
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.runs import experiment
from fedcommons.runs.replay import replay
from fedcommons.testing.federations import LeastSquares
from fedcommons.tracking.run_folder import read_rounds

SIZES, RATE, STEPS = (8, 3, 12, 5, 9, 6), 0.1, 2


def durations(spread: float, seed: int = 0) -> np.ndarray:
    slowness = [numpy_generator(seed, "slowness", i).standard_normal() for i in range(len(SIZES))]
    return np.array(SIZES) / np.mean(SIZES) * np.exp(spread * np.array(slowness))


def simulated(problem: LeastSquares, method: FedBuff, k: int, m: int, weighting: str, rounds: int):
    """Yield model, time and stalenesses after each step. A client computes its update when it begins."""
    takes, w = durations(method.spread), weights_of(weighting, SIZES)
    x, now, queue, idle = np.zeros(3), 0.0, [], set(range(len(SIZES)))
    for t in range(rounds):
        draws, taken, buffer = numpy_generator(0, "participants", t + 1), set(), []
        wanted = m - len(queue)
        while len(buffer) < k:
            free = sorted(idle - taken)
            count = min(wanted, len(free))
            chosen = free if count == len(free) else draws.choice(free, count, replace=False, shuffle=False).tolist()
            for i in chosen:
                idle.remove(i)
                heappush(queue, (now + takes[i], i, t, descended(problem, i, x, x, 0.0, RATE, STEPS) - x))
            now, i, version, delta = heappop(queue)
            idle.add(i)
            taken.add(i)
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
        kept = {int(name.partition("/")[2]) for name in now.state if name.startswith("version/")}
        assert kept == {*started[training].tolist()} - {now.round}
        assert len(kept) <= m
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


class ByState(FedAvg):
    """Its state names the clients: 0 and 1, then none, then 1 and 2, then none ...; without clients it halves x."""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "first": torch.tensor(0), "alone": torch.tensor(0)}

    def participants(self, state: State, round: int) -> Sequence[int]:
        first = int(scalar(state, "first"))
        return () if scalar(state, "alone") else (first + 1, first)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> Any:
        first = data(state["first"])
        if not replies:
            return {"model": scale(flat(state, "model"), 0.5), "first": first + 1, "alone": torch.tensor(0)}
        after = super().merge(executor, state, total, replies, round, seed)
        return {**after, "first": first, "alone": torch.tensor(1)}, {"cluster/0": torch.tensor(len(replies)), "b": 0.5}


def test_the_clients_of_a_round_are_those_it_names_and_a_round_may_be_the_servers_alone(digits: Digits) -> None:
    """Trained and merged in client order, whatever order it names them in; the others send nothing."""
    federation, size = digits(), 4 * digits().model.layout.size
    seen: list[list[int]] = []

    class Watched(ByState):
        def merge(self, *given: Any, **named: Any) -> Merged:
            seen.append(list(given[3]))
            return super().merge(*given, **named)

    played = federation.run(Watched(), federation.plan(4, participation=0.2))
    assert seen == [[0, 1], [], [1, 2], []]
    assert [facts["clients"] for _, facts in played] == [2, 0, 2, 0]
    assert [facts["comm/up_bytes"] for _, facts in played] == [2 * size, 0, 2 * size, 0]
    (first, _), (second, facts), *_ = played
    assert torch.equal(second.model.buffer, first.model.buffer / 2)
    assert not {"train/loss", "server/b"} & facts.keys()
    assert (played[2][1]["server/cluster/0"], played[2][1]["server/b"]) == (2, 0.5)
    all_late = replace(federation.plan(2), straggler_rule=lambda joined, facts, round, seed: dict.fromkeys(joined, 0.0))
    silent = federation.run(ByState(), all_late)[-1][0]
    assert torch.equal(silent.model.buffer, federation.model.buffer)


ENDS = r"round 1: .* beside the state must"


@pytest.mark.parametrize(
    ("named", "reported", "message"),
    [
        *(([*those], (), r"must be some of 5 clients, each once, got \[") for those in ([5], [1, 1])),
        ([], (), "^round 1, Naming: the merged model has values that are not finite$"),  # without any reply, too
        *(([], ({name: 1.0},), ENDS) for name in ("a b", "", "/a", 3, "a" * 101)),
        *(([], ({"a": number},), ENDS) for number in (float("nan"), torch.tensor([1, 2]), "1", None)),
        ([], ([1.0],), r"round 1: .*pair \(state, numbers by name\), got \(dict, list\)"),
        ([], ({}, {}), r"round 1: .*pair .*got \(dict, dict, dict\)"),
    ],
)
def test_clients_that_do_not_exist_and_numbers_that_are_not_finite_are_refused(
    named: list[int], reported: tuple[Any, ...], message: str, digits: Digits
) -> None:
    class Naming(FedAvg):
        def participants(self, state: State, round: int) -> Sequence[int]:
            return named

        def merge(self, executor: Executor, state: State, *given: Any, **named: Any) -> Any:
            after = {"model": scale(flat(state, "model"), 1 if reported else float("nan"))}
            return (after, *reported) if reported else after

    federation = digits()
    with pytest.raises(ClientError, match=message):
        federation.run(Naming(), federation.plan(1))


BY_STATE = f"{__file__}:ByState"


@pytest.mark.long
def test_a_client_that_the_state_names_is_replayed_and_only_trained_clients_spend_privacy(tmp_path: Path) -> None:
    values = {"algorithm": BY_STATE, "tracking.wandb": "off", "measure.every": 0, "data.limit": 60, "dp.local": True}
    whole = experiment.run(presets.experiment("smoke", "digits", values), tmp_path / "whole", say=lambda _: None)
    assert [line["clients"] for line in read_rounds(tmp_path / "whole")[1:]] == [2, 0, 2]
    assert [line.get("participants") for line in read_rounds(tmp_path / "whole")] == [None, [0, 1], [], [1, 2]]
    assert load_runs(tmp_path / "whole")["server/b"].tolist() == [0.5]
    spent = whole["privacy"]["epsilon_local_training_if_secret"]["of_each_client"]
    assert [s > 0 for s in spent] == [True, True, True, False]
    assert whole["privacy"]["epsilon_of_messages_if_secret"] == max(spent)
    again = replay(tmp_path / "whole", 3, 2, lambda _: None, [BY_STATE])
    assert again.rejected is None
    assert again.up_bytes > 0
    with pytest.raises(UserError, match=r"client 0 .* not sampled; these do: 1, 2"):
        replay(tmp_path / "whole", 3, 0, lambda _: None, [BY_STATE])
