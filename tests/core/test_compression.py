"""Compression of updates: bytes by hand, means over many seeds, error feedback against numpy, and refusals."""

from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, weights_of

from fedcommons import Algorithm, ClientError, LocalSGD, Reply, generator
from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.core.compression import QSGD, Compression, TopK
from fedcommons.core.updates import ERROR, Updates
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Plan
from fedcommons.flat_tensors import data, flat
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.testing.comparing import outcome
from fedcommons.testing.spy import Spy


def compressed(plan: Plan, compressor: TopK | QSGD, *, feedback: bool = True) -> Plan:
    return replace(plan, updates=Updates((Compression(compressor, feedback and isinstance(compressor, TopK)),)))


@pytest.mark.parametrize(
    ("compressor", "d", "itemsize", "nbytes"),
    [
        (TopK(0.01), 1000, 4, 10 * 4 + 13),  # ten positions of 10 bits
        (TopK(0.25), 1000, 4, 250 * 4 + 125),  # one bit for each of the 1,000 positions, as 10 bits * 250 are more
        (TopK(1e-9), 65537, 8, 8 + 3),  # at least one value, with a position of 17 bits
        (QSGD(4), 1000, 4, 2 * 4 + 500),  # two norms, and half a byte for each value
        (QSGD(3), 513, 8, 2 * 8 + 193),
    ],
)
def test_bytes_by_hand(compressor: TopK | QSGD, d: int, itemsize: int, nbytes: int) -> None:
    assert compressor.nbytes(d, itemsize) == nbytes
    v = torch.randn(d, generator=generator("test"), dtype={4: torch.float32, 8: torch.float64}[itemsize])
    reply, sent = Compression(compressor, False)(Reply({"delta": v, "a": torch.tensor(2)}), v.nbytes + 8, {}, 0)
    assert sent == nbytes + 8
    if isinstance(compressor, TopK):
        indices = data(reply.sums["delta"]).nonzero()[:, 0]
        assert sorted(indices.tolist()) == sorted(v.abs().argsort()[-compressor.count(d) :].tolist())


def test_qsgd_sends_levels_whose_mean_is_the_vector() -> None:
    """The variance of level l/s is p (1 - p)/s^2, with p the fraction above l; a zero bucket stays zero."""
    v = torch.cat([torch.randn(700, generator=generator("test")), torch.zeros(600)])
    norms = torch.tensor([v[:512].norm(), v[512:1024].norm(), 1.0]).repeat_interleave(512)[:1300].double()
    samples = torch.stack([QSGD(3).compress(v, seed) for seed in range(4000)]).double()
    levels = samples / norms * 3
    assert torch.allclose(levels, levels.round(), atol=1e-5)
    p = (v.abs() / norms * 3) % 1
    errors = (samples.mean(0) - v) / (norms * (p * (1 - p)).sqrt() / 3 / 4000**0.5).clamp(min=1e-12)
    assert errors[:700].abs().max() < 5
    assert 0.8 < errors[:700].square().mean() < 1.2
    assert not samples[:, 700:].any()
    assert (QSGD(16).compress(v, 0) - v).abs().max() < norms.max() / (2**15 - 1)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_top_k_with_error_feedback_is_its_formula(weighting: str, least_squares: Problem) -> None:
    problem = least_squares(sizes=(8, 6, 9, 8))
    federation = problem.federation(0.1).training(LocalSGD(1, FULL), weighting)
    played = federation.run(FedAvg(), compressed(federation.plan(3), TopK(1 / 3)))
    w, x, errors = weights_of(weighting, [8, 6, 9, 8]), np.zeros(3), np.zeros((4, 3))
    for now, facts in played:
        v = -0.1 * problem.gradients(x) + errors
        sent = np.where(np.abs(v) == np.abs(v).max(1, keepdims=True), v, 0)
        x, errors = x + w @ sent / w.sum(), v - sent
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-14)
        assert facts["comm/up_bytes"] == 4 * (8 + 1)  # a value, and 2 bits
    stored = [data(memory[f"{ERROR}bare delta"]).numpy() for _, memory in sorted(played[-1][0].memory.items())]
    assert np.allclose(stored, errors, rtol=0, atol=1e-14)


@pytest.mark.long
def test_only_error_feedback_reaches_the_optimum(least_squares: Problem) -> None:
    problem = least_squares()
    federation, far = problem.federation(0.1).training(LocalSGD(1, FULL)), {}
    for feedback in (True, False):
        played = federation.run(FedAvg(), compressed(federation.plan(150), TopK(1 / 3), feedback=feedback))
        mean = np.mean([now.model.buffer.numpy() for now, _ in played[75:]], axis=0)
        far[feedback] = np.abs(mean - problem.optimum).max()
    assert far[True] < 0.01
    assert far[False] > 0.2


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(), Ditto()])
def test_all_values_are_no_compression_and_methods_do_not_see_errors(method: Algorithm, digits: Digits) -> None:
    federation = digits(linear=True).training(LocalSGD(1, 5), "samples")
    plan, spy = federation.plan(2), Spy(method)
    plain = federation.run(method, plan)
    assert outcome(federation.run(method, compressed(plan, TopK(1.0)))) == outcome(plain)
    played = federation.run(spy, compressed(plan, TopK(0.1)))
    assert {name for call in spy.calls for name in call.handed} == {n for m in plain[0][0].memory.values() for n in m}
    for memory in played[-1][0].memory.values():
        assert [n for n in memory if n.startswith(ERROR)] == [f"{ERROR}bare {n}" for n in spy.calls[0].reply.sums]
    assert 0 < played[1][1]["comm/up_bytes"] < plain[1][1]["comm/up_bytes"] / 5
    assert outcome(federation.run(method, compressed(plan, QSGD(4)))) != outcome(plain)


def test_errors_outlive_absence_rejection_files_and_a_checkpoint(digits: Digits, tmp_path: Path) -> None:
    """Each round has three of five clients, and the limit of the norm rejects some replies."""
    federation = digits(linear=True).training(LocalSGD(1, 5))
    plan = compressed(federation.plan(6, 0.6), TopK(0.05))
    start = replace(federation.start(FedAvg(), plan), memory=ClientMemory(cap_bytes=0, folder=tmp_path))
    whole = federation.run(FedAvg(), plan)
    for (before, _), (after, _) in pairwise(whole):
        for i in before.memory.keys() - {*(after.participants or ())}:
            assert after.memory[i] is before.memory[i]
    course = rounds.run(FedAvg(), federation.serial(FedAvg()), plan, start)
    checkpoint.save(tmp_path / "checkpoints", list(islice(course, 3))[-1][0])
    again = checkpoint.load_latest(tmp_path / "checkpoints", start.memory)
    assert again is not None
    resumed = outcome(federation.run(FedAvg(), plan, start=again))
    assert f"memory/3/{ERROR}bare delta" in resumed
    assert resumed.items() <= outcome(whole).items()
    strict = replace(plan, max_norm=float(np.median([now.largest.norm for now, _ in whole if now.largest])))
    for (before, _), (after, _) in pairwise(played := federation.run(FedAvg(), strict)):
        for i in after.rejected_now:
            assert after.memory.get(i) is before.memory.get(i)
    assert any(now.rejected_now for now, _ in played[1:])


def test_a_private_update_contains_no_error_without_noise(digits: Digits) -> None:
    v, step = torch.randn(100, generator=generator("test")), Compression(TopK(0.1), True)
    noisy = Release(what=("delta",), mechanism=SAMPLED_GAUSSIAN, sigma=1.0, sensitivity=1.0, steps=1)
    first = step(Reply({"delta": v}), v.nbytes, {}, 0)[0].memory
    assert first is not None
    reply, _ = step(Reply({"delta": v}, memory={"new": v}, releases=[noisy]), v.nbytes, {**first, "old": v}, 0)
    assert torch.equal(data(reply.sums["delta"]), TopK(0.1).compress(v))
    assert reply.memory is not None
    assert reply.memory.keys() == {"new", f"{ERROR}bare delta", f"{ERROR}noisy delta"}
    federation = digits(linear=True).training(LocalSGD(1, 5, dp=DPSGD(1.0, 1.0)))
    ledgers = [
        federation.run(FedAvg(), plan)[-1][0].ledger
        for plan in (federation.plan(2), compressed(federation.plan(2), TopK(0.1)))
    ]
    assert ledgers[0] == ledgers[1]


def test_one_tensor_in_sums_and_each_stays_one_and_integers_are_refused(digits: Digits) -> None:
    v, step = torch.randn(10, 10, generator=generator("test")), Compression(TopK(0.1), True)
    reply, nbytes = step(Reply({"delta": 3 * v}, {"delta": v}, weight=3), v.nbytes, {}, 0)
    assert torch.allclose(data(reply.sums["delta"]), 3 * data(reply.each["delta"]))
    assert (int(data(reply.each["delta"]).count_nonzero()), nbytes) == (10, 10 * 4 + 9)
    other, _ = step(Reply({"delta": v[:5]}), v[:5].nbytes, reply.memory or {}, 0)  # the error has another shape
    assert torch.equal(data(other.sums["delta"]).reshape(-1), TopK(0.1).compress(v[:5].reshape(-1)))

    class Counting(FedAvg):
        def client(self, *args: Any, **named: Any) -> Reply:
            return replace(reply := super().client(*args, **named), sums={**reply.sums, "seen": torch.zeros(10).long()})

    federation = digits(linear=True)
    with pytest.raises(ClientError, match=r"Counting.*communication\.compress.*'seen'.*int64"):
        federation.run(Counting(), compressed(federation.plan(1), TopK(0.1)))


def test_clients_that_train_at_once_send_the_same(digits: Digits) -> None:
    federation = digits(linear=True)
    plan = compressed(federation.plan(2), QSGD(8))
    alone, batched = (
        federation.training(LocalSGD(1, 5, batched=is_batched)).run(FedAvg(), plan)[-1][0]
        for is_batched in (False, True)
    )
    assert torch.allclose(flat(alone.state, "model").buffer, flat(batched.state, "model").buffer, atol=1e-2)
    assert alone.traffic == batched.traffic
