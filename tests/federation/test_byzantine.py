"""Robust aggregation against numpy references of the papers' formulae, and attacks of Byzantine clients."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, descended

from fedcommons import LocalSGD, experiment, run
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config.dotted import override
from fedcommons.core.aggregation import Aggregation, aggregation_of
from fedcommons.core.attacks import Attack
from fedcommons.core.compression import Compression, TopK
from fedcommons.core.updates import Updates
from fedcommons.errors import DivergenceError
from fedcommons.federation.rounds import Plan
from fedcommons.runs.build import build

RULES = ("median", "trimmed_mean:0.3", "krum:3", "multi_krum:3", "multi_krum:2:6", "geometric_median")
WEIGHTS = np.array([1.0, 3, 1, 2, 5, 1, 1, 2, 2, 4])


def rule_of(text: str) -> Aggregation:
    rule = aggregation_of(text)
    assert rule is not None
    return rule


def aggregate(text: str, u: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    w = np.ones(len(u)) if weights is None else weights
    return rule_of(text)(torch.from_numpy(u), torch.from_numpy(w)).numpy()


def krum(u: np.ndarray, f: int, m: int) -> np.ndarray:
    scores = [sum(sorted(((v - x) ** 2).sum() for j, v in enumerate(u) if j != i)[: len(u) - f - 2])
              for i, x in enumerate(u)]  # fmt: skip
    return u[np.argsort(scores)[:m]].mean(0)


def weiszfeld(u: np.ndarray, w: np.ndarray) -> np.ndarray:
    v = np.zeros(u.shape[1])
    for _ in range(20_000):
        pull = w / np.maximum(1e-6, np.linalg.norm(u - v, axis=1))
        v = pull @ u / pull.sum()
    return v


def reference(text: str, u: np.ndarray, w: np.ndarray) -> np.ndarray:
    return {
        "median": lambda: np.median(u, axis=0), "trimmed_mean:0.3": lambda: np.sort(u, axis=0)[3:-3].mean(0),
        "krum:3": lambda: krum(u, 3, 1), "multi_krum:3": lambda: krum(u, 3, 5), "multi_krum:2:6": lambda: krum(u, 2, 6),
        "geometric_median": lambda: weiszfeld(u, w),
    }[text]()  # fmt: skip


def updates(n: int = 10, d: int = 40) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, d)) * np.linspace(0.5, 2, d)


@pytest.mark.parametrize("text", RULES)
def test_a_rule_is_the_papers_formula_and_moves_with_its_inputs(text: str) -> None:
    u, shift, order = updates(), np.linspace(-3, 5, 40), np.random.default_rng(1).permutation(10)
    result = aggregate(text, u, WEIGHTS)
    assert np.allclose(result, reference(text, u, WEIGHTS), rtol=0, atol=1e-6)
    assert np.allclose(aggregate(text, 2 * u + shift, WEIGHTS), 2 * result + shift, rtol=0, atol=1e-6)
    assert np.allclose(aggregate(text, u[order], WEIGHTS[order]), result, rtol=0, atol=1e-9)
    assert np.allclose(aggregate(text, np.tile(u[0], (10, 1)), WEIGHTS), u[0], rtol=0, atol=1e-12)
    far = np.concatenate([u[:7], np.tile(-1e12 * u[0], (3, 1))])  # three of ten updates are false
    assert np.linalg.norm(aggregate(text, far) - u[:7].mean(0)) < np.linalg.norm(u[:7] - u[:7].mean(0), axis=1).max()


def test_special_cases_of_the_rules() -> None:
    for n in (4, 9):  # an even and an odd number of replies
        u = updates(n)
        assert np.allclose(aggregate("trimmed_mean:0", u), u.mean(0), rtol=0, atol=1e-14)
        assert np.allclose(aggregate("median", u), np.median(u, axis=0), rtol=0, atol=1e-14)
    assert any((aggregate("krum:3", updates()) == row).all() for row in updates())
    line = np.array([0.0, 1, 2, 7, 30])[:, None] * np.ones(3)  # of collinear points, the median
    assert np.allclose(aggregate("geometric_median", line), 2, rtol=0, atol=1e-5)
    assert np.allclose(aggregate("geometric_median", line, np.array([1.0, 1, 1, 1, 9])), 30, rtol=0, atol=1e-5)
    assert [rule_of(text).least for text in ("median", "trimmed_mean:0.3", "krum:3", "multi_krum:1:6")] == [1, 4, 9, 7]


def plan_with(plan: Plan, rule: str, attack: Attack | None = None) -> Plan:
    return replace(plan, aggregation=aggregation_of(rule), attack=attack)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_round_aggregates_the_clients_updates(rule: str, weighting: str, least_squares: Problem) -> None:
    sizes = (8, 3, 12, 5, 8, 9, 4, 8, 7, 6)
    problem, zero = least_squares(sizes=sizes), np.zeros(3)
    federation = problem.federation(0.1).training(LocalSGD(5, FULL), weighting)
    models = np.stack([descended(problem, i, zero, zero, 0, 0.1, 5) for i in range(10)])
    ((now, _),) = federation.run(FedAvg(), plan_with(federation.plan(1), rule))
    w = np.array(sizes, float) if weighting == "samples" else np.ones(10)
    assert np.allclose(now.model.buffer.numpy(), reference(rule, models, w), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_only_the_mean_breaks_down_under_three_false_updates_of_ten(rule: str, least_squares: Problem) -> None:
    problem = least_squares(sizes=[8] * 10)
    federation = problem.federation(0.1).training(LocalSGD(5, FULL))
    plan = plan_with(federation.plan(6), rule, Attack("sign_flip", frozenset({1, 4, 8}), 1e6))
    distance = np.linalg.norm(federation.run(FedAvg(), plan)[-1][0].model.buffer.numpy() - problem.optimum)
    assert distance < 2, distance
    with pytest.raises(DivergenceError):
        federation.run(FedAvg(), replace(plan, aggregation=None))


def test_attacks_send_what_the_papers_say(least_squares: Problem) -> None:
    federation = least_squares(sizes=[8] * 10).federation(0.1).training(LocalSGD(5, FULL))
    zero, clients = np.zeros(3), [2, 3, 7]
    u = np.stack([descended(least_squares(sizes=[8] * 10), i, zero, zero, 0, 0.1, 5) for i in range(10)])
    honest, bad = u[[i for i in range(10) if i not in clients]].sum(0), u[clients]
    z = NormalDist().inv_cdf((10 - 3 - (6 - 3)) / (10 - 3))  # s = floor(n/2 + 1) - m supporters
    sent = {"sign_flip": -2 * bad.sum(0), "alie": 3 * (bad.mean(0) - 2 * z * bad.std(0)), "label_flip": 2 * bad.sum(0)}
    for name, false in sent.items():
        plan = plan_with(federation.plan(1), "mean", Attack(name, frozenset(clients), 2.0))
        ((now, _),) = federation.run(FedAvg(), plan)
        assert np.allclose(now.model.buffer.numpy(), (honest + false) / 10, rtol=0, atol=1e-12), name
    attack = Attack("gaussian", frozenset(clients), 2.0)
    noise = attack.false_updates(torch.zeros(3, 20_000), clients, 10, 1, 0)
    assert torch.allclose(noise.std(1), torch.full((3,), 2.0), rtol=0.03)
    assert torch.equal(noise[1:], attack.false_updates(torch.zeros(2, 20_000), clients[1:], 10, 1, 0))
    assert not torch.equal(noise, attack.false_updates(torch.zeros(3, 20_000), clients, 10, 2, 0))


@pytest.mark.parametrize("rule", ["mean", "krum:1", "geometric_median"])
def test_neither_blocks_nor_an_attack_without_clients_change_bits(rule: str, digits: Digits) -> None:
    """With BatchNorm, whose statistics are aggregated, too."""
    federation = digits(batch_norm=True)
    runs = [
        federation.run(FedAvg(), plan_with(federation.plan(2, blocks=blocks), rule, attack))[-1][0]
        for attack in (None, Attack("sign_flip", frozenset()))
        for blocks in ((2,) if rule == "mean" else (1, 3, 5))
    ]
    for other in runs[1:]:
        assert torch.equal(runs[0].model.buffer, other.model.buffer)
        assert torch.equal(runs[0].buffers.buffer, other.buffers.buffer)
        assert runs[0].traffic == other.traffic


def test_false_updates_meet_max_norm_and_few_replies_change_nothing(digits: Digits) -> None:
    federation, attack = digits(), Attack("sign_flip", frozenset({1, 3}), 1e3)
    plan = replace(plan_with(federation.plan(1), "mean", attack), max_norm=50.0)
    ((now, facts),) = federation.run(FedAvg(), plan)
    assert (facts["rejected"], now.rejected_now) == (2, [1, 3])
    few = replace(plan, aggregation=aggregation_of("krum:1"), updates=Updates((Compression(TopK(0.5), True),)))
    start = federation.start(FedAvg(), few)
    ((now, facts),) = federation.run(FedAvg(), few)
    assert torch.equal(now.model.buffer, start.model.buffer)
    assert (facts["rejected"], facts["skipped"]) == (2, 1)
    assert not any(now.memory.get(i, {}) for i in range(5))  # no error of compression, as no update counted


@pytest.mark.long
def test_data_attacks_change_rows_of_byzantine_clients_only(tmp_path: Path) -> None:
    base = experiment("smoke", values={"partition.n_clients": 10, "data.limit": 100, "federation.rounds": 1})
    clean, spec = build(base), build(override(base, {"attack.share": 0.3, "attack.name": "label_flip"}))
    flipped, chosen = spec.train, spec.plan.attack.clients if spec.plan.attack else frozenset()
    rows = np.concatenate([clean.partition.rows[i] for i in chosen])
    assert len(chosen) == 3
    expected = clean.train.y.clone()
    expected[rows] = 9 - expected[rows]
    assert torch.equal(flipped.y, expected)
    assert torch.equal(flipped.x, clean.train.x)
    config = override(base, {"attack.share": 0.3, "attack.name": "backdoor", "attack.target": 7})
    train, white = build(config).train, clean.train.x.max()
    has_square = (train.x[..., -3:, -3:] == white).flatten(1).all(1)
    assert set(np.flatnonzero(has_square)) <= set(rows)
    assert has_square.sum() == sum((len(clean.partition.rows[i]) + 1) // 2 for i in chosen)
    assert (train.y[has_square] == 7).all()
    assert torch.equal(train.x[~has_square], clean.train.x[~has_square])
    assert torch.equal(train.y[~has_square], clean.train.y[~has_square])
    few = {"measure.every": 0, "client.epochs": 1, "federation.aggregation": "krum:1", "straggler.q": 0.9}
    run(override(config, few), tmp_path / "run", say=(messages := list[str]()).append)
    assert [text for text in messages if "federation.aggregation krum:1 used no reply in 1 of 1 rounds" in text]
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["byzantine"] == sorted(chosen)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert all(0 <= line["attack/success"] <= 1 for line in lines)
    attack, test = build(config).plan.attack, clean.dataset.test
    examples = attack.triggered(clean.dataset) if attack else None
    assert examples is not None
    assert examples.y.tolist() == [7] * int((test.y != 7).sum())
    assert torch.equal(examples.x[..., :-3], test.x[test.y != 7][..., :-3])
    assert (examples.x[..., -3:, -3:] == white).all()
