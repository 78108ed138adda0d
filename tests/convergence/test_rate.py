"""The rate on quadratics: a bound, and faults that exceed it; Corollary I by hand, and the advisor."""

from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import report_runs

from fedcommons import ClientData, Executor, Experiment, Message, Replies, Reply, State, Work
from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddm import FedDM
from fedcommons.algorithms.one_shot import OneShot
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.cli.display import Display
from fedcommons.config.dotted import override
from fedcommons.convergence import advisor, lemma1, rates
from fedcommons.convergence.advisor import LocalWork, Measured, theory
from fedcommons.convergence.rates import on_quadratics
from fedcommons.core.averaging import weighted_reply
from fedcommons.flat_tensors import Flat, Payload, add, copy, flat
from fedcommons.runs import experiment
from fedcommons.testing import rate
from fedcommons.tracking.run_folder import read_rounds
from fedcommons.tune import study
from papers.fedssyn import advice


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
def test_a_method_that_corrects_drift_converges_linearly_and_fedavg_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate, "ROUNDS", 100)
    assert rate.is_linear(SCAFFOLD()).startswith("linear to the exact minimiser")
    with pytest.raises(AssertionError, match="which is not linear"):
        rate.is_linear(FedAvg())


sweep = report_runs.script("advise")
AT = Measured(gradient_sq=0.5, zeta_sq=9.0, sigma_sq=4.0, sigma_pool_sq=12.0, delta_sq=0.3, L_max=8.0, L_pool=3.0)
WORK = LocalWork(n_clients=10, tau=100, batch_size=4)
SHARES = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9]


def test_the_corollary_s_terms_by_hand() -> None:
    noise, drift, descent = 2 * 25 / (4 * 0.0625), 2 * (9 * 4 + 3 * 5) / 0.125, 2 * 9 / 0.25
    assert rates.non_convex(0.25, n=4, tau=9, zeta_sq=16, step_sq=25, smooth=2) == noise + drift + descent


def test_the_ratio_of_the_theory_by_hand_and_where_one_term_rules() -> None:
    for p in SHARES:
        smooth = lemma1.smoothness(p, AT.L_max, AT.L_pool) / AT.L_max
        drift = replace(AT, zeta_sq=1e12, sigma_sq=0, sigma_pool_sq=0, delta_sq=0)
        of_drift = theory(drift, p, LocalWork(10**9, 100, 10**9), 0.5)
        assert of_drift == pytest.approx((1 - p) * smooth, rel=1e-4, abs=1e-3)
        assert theory(AT, p, WORK, 1e9) == pytest.approx(smooth, rel=1e-3)  # plain descent
        noise = lemma1.sigma_sq(p, 4.0, 12.0, 9.0, 0.3) / 4
        assert theory(AT, p, WORK, 1e-20) == pytest.approx(smooth * noise, rel=1e-3)
    p, epsilon = 0.5, 0.5
    sigma_sq = (0.5 * 4 + 0.5 * 12 + 0.25 * 9.3) / 4  # of a batch
    with_pool = 5.5 * (sigma_sq / (10 * 0.25) + (100 * 1.5 + 10 * sqrt(sigma_sq)) / 0.5**1.5 + 200)
    without = 8 * (1 / (10 * 0.25) + (100 * 3 + 10) / 0.5**1.5 + 200)
    assert theory(AT, p, WORK, epsilon) == pytest.approx(with_pool / without, rel=1e-12)


def test_the_first_round_is_linear_between_rounds_and_the_first_of_several() -> None:
    curve = [0.1, 0.3, 0.2, 0.6]
    assert [advisor.first_round(curve, a) for a in (0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.61)] == pytest.approx(
        [0, 0, 0.5, 1, 2.75, 3, None]
    )


def test_the_ratio_is_to_the_largest_accuracy_that_both_curves_reach() -> None:
    slow, fast = [0.1, 0.2, 0.3, 0.4, 0.5], [0.1, 0.3, 0.5, 0.7, 0.9]
    assert advisor.ratio(fast, slow) == pytest.approx(0.5)  # to 0.5
    assert advisor.ratio(slow, fast) == pytest.approx(2)
    assert advisor.ratio([0.1, 0.05, 0.1], slow) == advisor.ratio(slow, [0.1, 0.1, 0.1]) == 1  # nothing is learnt


def test_the_prediction_fits_all_shares_and_its_range_has_the_single_seeds() -> None:
    for k in (0.0, 1.0, 2.5, -0.5):
        assert advisor.exponent((p, (1 - p) ** k) for p in (0.1, 0.25)) == pytest.approx(k)
    slow, fast = [0.1, 0.2, 0.3], [0.1, 0.3, 0.5]
    curves = {0.0: [slow, slow], 0.5: [fast, slow]}  # k is 1 with the first seed, and 0 with the second
    (half,) = advice.predict(curves, [0.75])
    assert half == pytest.approx({"p": 0.75, "predicted": 0.25**0.5, "low": 0.25, "high": 1})


def test_the_measured_ratio_counts_a_missed_target_with_all_rounds() -> None:
    curves = {0.0: [[0.0, 0.2, 0.4], [0.0, 0.1, 0.2]], 0.5: [[0.0, 0.4], [0.0, 0.2, 0.6]]}
    result = advice.compare(curves, 0.5, 0.3)
    assert (result["missed"], result["missed_without"]) == (0, 1)
    assert (result["rounds"], result["rounds_without"]) == pytest.approx(((0.75 + 1.25) / 2, (1.5 + 2) / 2))
    assert (result["least"], result["most"]) == pytest.approx((0.75 / 1.5, 1.25 / 2))
    untrained = advice.compare(curves, 0.5, 0.0)
    assert [untrained[name] for name in ("measured", "least", "most", "rounds_without")] == [1, 1, 1, 0]


def test_the_named_share_is_the_smallest_that_is_enough_and_none_is_a_step_of_its_own() -> None:
    ratios = {0.5: 0.5, 0.1: 0.9, 0.9: 0.1}
    assert [advisor.smallest_enough(ratios, times) for times in (2, 3, 11)] == [0.5, 0.9, None]
    assert advice.steps_apart(0.9, "none", [*ratios]) == 1
    assert advice.steps_apart("none", 0.1, [*ratios]) == 3
    same = {"predicted": 0.5, "rule": 0.75, "theory": 0.9, "measured": 0.4, "participation": 1, "named_by_rule": 0.9}
    lines = [{**same, "alpha": a, "p": p, "named": "none", "best": b} for a, b in ((1, 0.1), (2, 0.9)) for p in ratios]
    assert "2 federations: probe 0.10, rule 1 - p 0.35, theory 0.50" in advice.verdict(lines)
    assert "in 1 of 2 (named by 1 - p: 1)" in advice.verdict(lines)


def test_the_number_of_local_steps_equals_a_count_by_hand() -> None:
    asked = {"federation.participation": 0.35, "client.epochs": 3, "client.batch_size": 4}
    config, sizes = override(Experiment(), asked), [3, 9] * 5
    assert advice.local_work(config, sizes) == LocalWork(3, (3 * 1 + 3 * 3) / 2, 4)
    assert advice.local_work(override(config, {"client.drop_last": True}), sizes).tau == (3 * 1 + 3 * 2) / 2


@pytest.mark.long
def test_the_report_has_the_finished_federations(sweep: ModuleType, tmp_path: Path) -> None:
    """The probe and the check are ordinary runs, and the report reads their folders."""
    out = tmp_path / "advise"
    argv = ["--preset=smoke", "--wandb=off", "--alphas=0.1", "--p=0.5", "--probe-p=0.25", "--check", "--target=0.1",
            "--probe-rounds=1", "--data.limit=80", "--generator.name=cvae", "--model.name=linear",
            "--partition.n_clients=2", f"--out={out}", f"--artifacts={tmp_path}/artifacts"]  # fmt: skip
    options = sweep.arguments(argv)
    entries = sweep.entries(options)
    for entry in entries:
        if not entry["check"]:  # all runs of the check are finished, and no run of the probe
            assert advice.report(study.load(entries, options, out, Display())) is None
        experiment.run(entry.cell.config, out / entry.cell.name)
    assert sweep.advise([*argv, "--resume"]) == 0
    (line,) = pd.read_csv(out / "advise.csv").to_dict("records")
    names = {(entry["p"], entry["check"]): entry.cell.name for entry in entries}
    first, usual = names[0.25, False], names[0.0, False]
    ratio = advisor.ratio(*([r["test/accuracy"] for r in read_rounds(out / name)] for name in (first, usual)))
    assert line["predicted"] == pytest.approx(0.5 ** advisor.exponent([(0.25, ratio)]))
    assert line["mb"] > 0
    assert 0 < line["theory"] < 1
