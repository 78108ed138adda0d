"""The rate on quadratics: a bound, and faults that exceed it; Corollary I by hand, the advisor and its probe."""

import json
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import report_runs
from sweep_runs import rows_of

from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddm import FedDM
from fedcommons.algorithms.one_shot import OneShot
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import presets
from fedcommons.config.dotted import override
from fedcommons.config.experiment import Experiment
from fedcommons.convergence import lemma1, rates
from fedcommons.convergence.advisor import LocalWork, Probed, predict, probed, relative_rounds
from fedcommons.convergence.laboratory import Estimate
from fedcommons.convergence.rates import on_quadratics
from fedcommons.core.algorithm import Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, copy, flat
from fedcommons.runs import assemble, build, experiment
from fedcommons.storage.artifact_store import Store
from fedcommons.testing import rate
from fedcommons.tracking.run_folder import read_rounds
from papers.fedssyn.advice import Advice, advice_table, local_work
from papers.fedssyn.probe import probe


def test_fedavg_stays_within_the_bound_on_any_quadratics() -> None:
    """Random Hessians that do not commute, step sizes up to 1/L, any number of steps."""
    draw, shares = np.random.default_rng(0), []
    for _ in range(300):
        n, d, tau = draw.integers(2, 6), draw.integers(1, 5), int(draw.integers(1, 12))
        roots = draw.normal(size=(n, d, d)) * draw.uniform(0, 2, (n, 1, d))
        a = roots @ roots.swapaxes(1, 2)
        gradients = draw.normal(size=(n, d)) * draw.exponential(size=(n, 1))
        gradients -= gradients.mean(0)  # at x* = 0
        smooth, mu = np.linalg.eigvalsh(a).max(), np.linalg.eigvalsh(a.mean(0)).min()
        eta, x = draw.uniform(0.01, 1) / smooth, draw.normal(size=d)
        start, zeta_sq = float(np.linalg.norm(x)), float(np.square(gradients).sum(1).mean())
        for r in range(60):
            error = x @ a.mean(0) @ x / 2
            shares.append(error / on_quadratics(r, eta, tau, zeta_sq, smooth, mu, start))
            y = np.repeat(x[None], n, axis=0)
            for _ in range(tau):
                y = y - eta * (np.einsum("nij,nj->ni", a, y) + gradients)
            x = y.mean(0)
    assert max(shares) <= 1
    assert max(shares) > 0.5


def test_the_bound_is_its_formula_and_a_step_size_above_1_over_L_is_refused() -> None:
    draw = np.random.default_rng(2)
    for tau in (2, 5, 9):
        mu, start, zeta = draw.uniform(0.1, 1), draw.uniform(1, 3), draw.uniform(1, 3)
        smooth = mu + draw.uniform(0.5, 2)
        eta = draw.uniform(0.1, 0.9) / smooth
        phi = (1 - (1 - eta * smooth) ** tau) / (eta * tau * smooth)
        drift = sqrt(smooth / 8) * eta * (tau - 1) * zeta / phi
        first = start + eta * (tau - 1) * zeta * sqrt(smooth / mu) / (2 * phi)
        root = drift + sqrt(smooth / 2) * (1 - phi * eta * tau * mu) ** 3 * first
        assert on_quadratics(3, eta, tau, zeta**2, smooth, mu, start) == pytest.approx(root**2, rel=1e-12)
    assert on_quadratics(10**6, 0.1, 1, 5.0, 1.0, 0.1, 1.0) < 1e-300  # one local step has no drift
    assert on_quadratics(1, 0.5, 1, 0.0, 2.0, 1.0, 1.0) == 0.25
    with pytest.raises(ValueError, match=r"must lie in \(0, 1/L\]"):
        on_quadratics(1, 0.6, 1, 0.0, 2.0, 1.0, 1.0)


@dataclass(frozen=True)
class Faster(FedAvg):
    """Local steps are longer than the learning rate."""

    times: float

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        return weighted_reply(x, work.local(x, data, seed, lr=self.times * work.rates[0]), work.weight(data))


@dataclass(frozen=True)
class Biased(FedAvg):
    """The server adds something to the mean."""

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        state = super().merge(executor, state, total, replies, round, seed)
        model = copy(flat(state, "model"))
        return {**state, "model": add(model, Flat(model.layout, model.buffer.new_ones(len(model.buffer))), 1e-3)}


@pytest.mark.long
def test_fedavg_converges_as_the_corollary_says_and_a_changed_step_or_a_bias_exceeds_it() -> None:
    assert "is 0.48 times" in rate.within_the_bound(FedAvg())
    assert rate.not_judged(FedAvg()) is None
    assert all(rate.not_judged(method) for method in (OneShot(), Ditto(), FedDM()))  # outside the corollary
    assert np.max(np.divide(rate.errors(Faster(0.5), 0), rate.bounds(0))) > 1
    for wrong, zeta in ((Biased(), 0), (Faster(1.5), 10)):  # far above the bound, and 1.1 times
        with pytest.raises(AssertionError, match=f"at zeta {zeta} after round"):
            rate.within_the_bound(wrong)


@pytest.mark.long
def test_a_method_that_corrects_drift_reaches_the_minimiser_linearly_and_fedavg_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate, "ROUNDS", 100)
    assert rate.is_linear(SCAFFOLD()).startswith("linear to the exact minimiser")
    with pytest.raises(AssertionError, match="which is not linear"):
        rate.is_linear(FedAvg())


sweep = report_runs.script("advise")
AT = Probed(gradient_sq=0.5, zeta_sq=9.0, sigma_sq=4.0, sigma_pool_sq=12.0, delta_sq=0.3, L_max=8.0, L_pool=3.0)
WORK = LocalWork(n_clients=10, tau=100, batch_size=4)
SHARES = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9]


def test_the_corollary_s_terms_by_hand() -> None:
    noise, drift, descent = 2 * 25 / (4 * 0.0625), 2 * (9 * 4 + 3 * 5) / 0.125, 2 * 9 / 0.25
    assert rates.non_convex(0.25, n=4, tau=9, zeta_sq=16, step_sq=25, smooth=2) == noise + drift + descent


def test_the_ratio_by_hand_and_where_one_term_rules() -> None:
    for p in SHARES:
        smooth = lemma1.smoothness(p, AT.L_max, AT.L_pool) / AT.L_max
        drift = replace(AT, zeta_sq=1e12, sigma_sq=0, sigma_pool_sq=0, delta_sq=0)
        of_drift = relative_rounds(drift, p, LocalWork(10**9, 100, 10**9), 0.5)
        assert of_drift == pytest.approx((1 - p) * smooth, rel=1e-4, abs=1e-3)
        assert relative_rounds(AT, p, WORK, 1e9) == pytest.approx(smooth, rel=1e-3)  # plain descent
        noise = lemma1.sigma_sq(p, 4.0, 12.0, 9.0, 0.3) / 4
        assert relative_rounds(AT, p, WORK, 1e-20) == pytest.approx(smooth * noise, rel=1e-3)
    p, epsilon = 0.5, 0.5
    sigma_sq = (0.5 * 4 + 0.5 * 12 + 0.25 * 9.3) / 4  # of a batch
    with_pool = 5.5 * (sigma_sq / (10 * 0.25) + (100 * 1.5 + 10 * sqrt(sigma_sq)) / 0.5**1.5 + 200)
    without = 8 * (1 / (10 * 0.25) + (100 * 3 + 10) / 0.5**1.5 + 200)
    assert relative_rounds(AT, p, WORK, epsilon) == pytest.approx(with_pool / without, rel=1e-12)


def test_a_prediction_is_of_the_last_model_and_uncertain_estimates_widen_its_band() -> None:
    probes = [[replace(AT, zeta_sq=z, gradient_sq=g)] for z, g in ((1.0, 2.0), (30.0, 0.1), (9.0, 0.5))]
    result = predict(probes, SHARES, WORK)
    assert [f.relative for f in result] == [relative_rounds(AT, p, WORK, 0.5) for p in SHARES]
    assert (result[0].relative, result[0].low, result[0].high) == (1, 1, 1)  # p = 0
    for f in result[1:]:
        every = [relative_rounds(v[0], f.p, WORK, v[0].gradient_sq * k) for v in probes for k in (1, 0.1)]
        assert (f.low, f.high) == (min(every), max(every))
        assert f.low < f.high
    with pytest.raises(UserError, match="gradient is zero"):
        predict([[AT], [replace(AT, gradient_sq=0.0)]], SHARES, WORK)
    sure = {name: Estimate(getattr(AT, name)) for name in Probed.__dataclass_fields__}
    unsure = sure | {"zeta_sq": Estimate(9.0, 1.0), "delta_sq": Estimate(0.3, 1.0)}
    assert probed(sure) == [AT]
    ends = [(v.zeta_sq, v.delta_sq) for v in probed(unsure)]
    assert ends == [(9, 0.3), (9 - 2.365, 0.3), (9 + 2.365, 0.3), (9, 0), (9, 0.3 + 2.365)]  # no square is negative
    zero = sure | {"gradient_sq": Estimate(0.5, 1.0)}  # its interval reaches a gradient of zero
    narrow, wide, last = (predict([probed(e)], [0.5], WORK)[0] for e in (sure, unsure, zero))
    assert narrow.relative == wide.relative
    assert wide.low < narrow.low < narrow.high < wide.high
    assert 0 < last.low < last.high < 1


def test_the_number_of_local_steps_equals_a_count_by_hand() -> None:
    asked = {"federation.participation": 0.35, "client.epochs": 3, "client.batch_size": 4}
    config, sizes = override(Experiment(), asked), [3, 9] * 5
    assert local_work(config, sizes) == LocalWork(3, (3 * 1 + 3 * 3) / 2, 4)
    assert local_work(override(config, {"client.drop_last": True}), sizes).tau == (3 * 1 + 3 * 2) / 2


def test_the_advice_is_the_smallest_share_that_is_enough() -> None:
    same = {"rounds": "5", "outcome": 0.4, "outcome_least": 0.3, "outcome_most": 0.45}
    lines: list[dict] = [
        {**same, "p": p, "relative": r, "low": r / 2, "high": r, "images": 100 * p, "mb": p}
        for p, r in ((0.1, 0.9), (0.5, 0.5), (0.9, 0.1))
    ]
    some = Advice(0.1, "the pool", lines, "")
    assert "2 times faster: 0.5, which discloses 50 images" in some.sentence(2)
    assert some.sentence(11) == "No p of the grid is predicted to be 11 times faster."
    rows = rows_of(advice_table([Advice(0.1, "the pool", lines, "12")], 2))
    assert [row[-3:] for row in rows[2:]] == [["5", "0.40 [0.30, 0.45]", said] for said in ("no", "yes", "no")]
    assert rows[3][:6] == ["0.5", "0.50", "0.25 to 0.50", "2.0x", "50", "0.50"]


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    short = {"model.name": "linear", "partition.n_clients": 2, "federation.rounds": 2, "tracking.wandb": "off",
             "artifacts": str(tmp_path / "artifacts"), "measure.every": 1}  # fmt: skip
    return presets.experiment("smoke", "digits", short)


@pytest.mark.long
def test_the_probe_is_a_run_without_sharing_or_measures_an_existing_pool(config: Experiment, tmp_path: Path) -> None:
    def lines(run: Experiment, name: str) -> list[dict]:
        experiment.run(run, tmp_path / name)
        return read_rounds(tmp_path / name)

    without = lines(override(config, {"measure.smoothness": True}), "run")
    ideal = override(config, {"sharing.setting": "shuffled_synthetic", "measure.every": 0})
    result = probe(ideal, None, lambda _: None)
    assert [accuracy for accuracy, _ in result] == [line["test/accuracy"] for line in without]
    for (_, estimates), line in zip(result, without, strict=True):
        for name in ("gradient_sq", "zeta_sq", "sigma_sq", "L_max"):
            assert estimates[name].value == line[f"convergence/{name}"]
        # an ideal pool is the clients' data together: the law of total variance, for clients of equal sizes
        assert 0 <= estimates["delta_sq"].value < 1e-12
        total = estimates["zeta_sq"].value + estimates["sigma_sq"].value
        assert estimates["sigma_pool_sq"].value == pytest.approx(total, rel=1e-5)
        assert 0 < estimates["L_pool"].value < estimates["L_max"].value
    small = {"data.limit": 60, "federation.rounds": 1}
    generator = {"generator.epochs": 1, "generator.channels": (8, 8), "generator.sampling_steps": 2}
    setting = {"sharing.setting": "shuffled_synthetic", "measure.smoothness": True}
    pool = override(config, {**small, **setting, **generator})
    first = lines(pool, "pool")[0]  # the untrained model
    synthetic = assemble.contributions(build.build(pool), Store(tmp_path / "artifacts"))
    (_, estimates), _ = probe(pool, synthetic, lambda _: None)
    for name in ("zeta_sq", "sigma_pool_sq", "delta_sq", "L_pool"):
        assert estimates[name].value == first[f"convergence/{name}"]


@pytest.mark.long
def test_the_check_compares_predictions_with_finished_runs(sweep: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "advise"
    argv = ["--preset=smoke", "--wandb=off", "--alphas=0.1", "--p=0.2,0.5", "--target=0.1", "--check-p=0.5",
            "--probe-rounds=1", "--data.limit=80", "--generator.channels=[8,8]", "--generator.sampling_steps=2",
            f"--out={out}", f"--artifacts={tmp_path}/artifacts"]  # fmt: skip
    assert sweep.advise(argv) == 0
    (base,), (pool,) = sweep.cells(sweep.arguments([*argv, "--check"])).values()
    finished = {p: experiment.run(one.config, out / one.name) for p, one in ((0.0, base), (0.5, pool))}
    assert sweep.advise([*argv, "--check", "--resume"]) == 0
    small, half = json.loads((out / "summary.json").read_text())["predictions"]
    assert (small["p"], half["p"], small["outcome"]) == (0.2, 0.5, None)
    ratio = finished[0.5]["rounds_to_target"] / finished[0.0]["rounds_to_target"]
    assert half["outcome"] == half["outcome_least"] == ratio
