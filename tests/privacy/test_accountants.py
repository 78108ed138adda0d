"""Epsilons and the noise for a target: against definitions, Opacus, dp-accounting and published tables."""

import warnings
from math import exp, sqrt
from pathlib import Path

import numpy as np
import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.stats import norm

from fedcommons import UserError, experiment, load_runs, run
from fedcommons.config.dotted import choose, same_results
from fedcommons.privacy import gaussian
from fedcommons.privacy.accountants import LARGEST_SIGMA, composed, epsilon, noise_for, require_reachable
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.renyi import divergences
from fedcommons.runs.build import build, noise_key
from fedcommons.tracking.run_folder import read_config

DELTA = 1e-5
Q = 256 / 3750
"""Fedssyn's sampling rate: batches of 256, and three quarters of a client's 5,000 images."""

COURSES = [(Q, 1.906, 7500), (0.01, 1.1, 1000), (0.2, 4.0, 200)]
BY_COURSE = pytest.mark.parametrize(("q", "sigma", "steps"), COURSES)


def by_opacus(*history: tuple[float, float, int], delta: float = DELTA) -> float:
    """Return Opacus' epsilon of steps (q, sigma, steps)."""
    accountant = RDPAccountant()
    accountant.history = [(sigma, q, steps) for q, sigma, steps in history]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the best order is the first or last one
        return accountant.get_epsilon(delta)


@BY_COURSE
def test_epsilons_are_those_of_opacus_called_directly(q: float, sigma: float, steps: int) -> None:
    assert epsilon(q, sigma, steps, DELTA) == pytest.approx(by_opacus((q, sigma, steps)), abs=1e-6)
    parts = ((q, sigma, steps // 3), (q, sigma, steps - steps // 3))
    assert composed(parts, DELTA) == pytest.approx(by_opacus((q, sigma, steps)), abs=1e-6)
    for spent in (((0.25, 1.0, 11), (0.5, 2.0, 4)), ((0.1, 1.0, 20), (1.0, 4.0, 1))):
        assert composed(spent, DELTA) == pytest.approx(by_opacus(*spent), abs=1e-6)
    by_prv = PRVAccountant()
    by_prv.history = [(4.0, 0.2, 200)]
    assert epsilon(0.2, 4.0, 200, DELTA, "prv") == pytest.approx(by_prv.get_epsilon(DELTA), abs=1e-6)


@pytest.mark.parametrize("q", [1e-6, 0.01, 0.2, 0.49, 0.9, 1 - 1e-6, 1.0])
@pytest.mark.parametrize("sigma", [0.001, 0.3, 0.8, 2.0, 50.0])
def test_divergences_are_those_of_opacus_at_every_order(q: float, sigma: float) -> None:
    """In a step, to 1e-11 or 15 digits; at sigma 0.001 they are near 10^7, and e to that is no float."""
    orders = RDPAccountant.DEFAULT_ALPHAS
    theirs = np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=orders))
    assert divergences(q, sigma, np.asarray(orders, float)) == pytest.approx(theirs, abs=1e-11, rel=1e-15)
    assert not divergences(0.0, sigma, np.array([1.5, 2.0])).any()


@BY_COURSE
@pytest.mark.long
def test_numerical_composition_by_another_library_agrees_and_renyi_is_above(q: float, sigma: float, steps: int) -> None:
    dp = pytest.importorskip("dp_accounting", reason="of the dev extra; `pip install dp-accounting`")
    from dp_accounting.pld import PLDAccountant  # pyright: ignore[reportMissingImports]

    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))
    tight = PLDAccountant(value_discretization_interval=1e-3).compose(event, steps).get_epsilon(DELTA)
    assert tight <= epsilon(q, sigma, steps, DELTA, "prv") <= tight + 0.02  # PRV's error bound of 0.01, both ways
    assert tight < epsilon(q, sigma, steps, DELTA) < 1.15 * tight


def test_epsilon_is_zero_for_no_step_never_negative_and_monotone() -> None:
    assert epsilon(0.1, 1.0, 0, DELTA) == epsilon(0.1, 1.0, 0, DELTA, "prv") == epsilon(1.0, 3.0, 0, DELTA) == 0
    assert composed((), DELTA) == 0
    assert by_opacus((0.9, 500.0, 1), delta=0.5) < 0 == epsilon(0.9, 500.0, 1, 0.5) == epsilon(1.0, 500.0, 1, 0.5)
    base = epsilon(0.1, 1.0, 100, DELTA)
    more = [(0.1, 1.0, 101, DELTA), (0.11, 1.0, 100, DELTA), (0.1, 0.9, 100, DELTA), (0.1, 1.0, 100, 1e-6)]
    assert all(base < epsilon(*course) for course in more)


@pytest.mark.parametrize(("target", "q", "steps"), [(0.5, Q, 7500), (3.0, 0.2, 200), (10.0, 0.2, 50)])
@pytest.mark.long
def test_the_noise_for_a_target_just_reaches_it(target: float, q: float, steps: int) -> None:
    sigma = noise_for(target, q, steps, DELTA)
    assert target - 0.01 <= epsilon(q, sigma, steps, DELTA) <= target
    if target == 3.0:  # PRV needs less noise
        tight = noise_for(target, q, steps, DELTA, "prv")
        assert 0.8 * sigma < tight < sigma
        assert target - 0.01 <= epsilon(q, tight, steps, DELTA, "prv") <= target


def test_a_target_beyond_the_largest_noise_is_refused() -> None:
    least = epsilon(1.0, LARGEST_SIGMA, 1000, DELTA)
    require_reachable(least, 1.0, 1000, DELTA)
    for target in (0.5, least * (1 - 1e-9)):
        with pytest.raises(UserError, match=r"target_epsilon .* above 100"):
            require_reachable(target, 1.0, 1000, DELTA)


# Steps without sampling are one Gaussian mechanism, and exact


@pytest.mark.parametrize(
    ("sigma", "epsilon_", "delta"),
    [  # dp_accounting 0.5.1, GaussianPrivacyLoss(sigma).get_delta_for_epsilon(epsilon)
        (0.5, 10, 9.940202816118192e-06),
        (3.731, 1, 9.98361831549752e-06),
        (16.3, 0.2, 1.0033699266597646e-05),
        (1.0, 3.0, 0.0015371853694009577),
        (0.1, 60.0, 0.13683538039646126),
    ],
)
def test_delta_and_epsilon_equal_dp_accounting_and_the_definition(sigma: float, epsilon_: float, delta: float) -> None:
    """delta: the mass by which one density exceeds e^epsilon times the other."""
    assert gaussian.delta(epsilon_, 1 / sigma) == pytest.approx(delta, rel=1e-10)
    assert gaussian.epsilon(1 / sigma, delta) == pytest.approx(epsilon_, rel=1e-9)
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 1_000_001)
    for e in (epsilon_, 0.0):
        excess = np.maximum(norm.pdf(x, 1, sigma) - exp(e) * norm.pdf(x, 0, sigma), 0)
        assert gaussian.delta(e, 1 / sigma) == pytest.approx(np.trapezoid(excess, x), rel=1e-6)


@pytest.mark.parametrize(
    ("target", "sigma"),
    [(0.2, 16.304), (2, 1.994), (10, 0.500)],  # shared/spec/methods.md, 13
)
def test_the_noise_for_a_target_equals_the_specs_table_and_spends_the_whole_target(target: float, sigma: float) -> None:
    assert gaussian.noise_for(target, DELTA) == pytest.approx(sigma, abs=5e-4)
    spent = ((1.0, 8.0, 30), (1.0, 2.0, 1), (1.0, 5.0, 0), (0.5, 1.0, 0))
    assert composed(spent, DELTA) == pytest.approx(gaussian.epsilon(sqrt(30 / 64 + 1 / 4), DELTA), rel=1e-12)
    for steps in (1, 25):
        noise = noise_for(target, 1.0, steps, DELTA)
        assert noise == pytest.approx(sqrt(steps) * gaussian.noise_for(target, DELTA), rel=1e-12)
        assert target * (1 - 1e-9) <= epsilon(1.0, noise, steps, DELTA) <= target


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.4])
@pytest.mark.parametrize("mu", [1e-5, 0.01, 1.0, 30.0, 1e4])
def test_delta_at_the_epsilon_is_the_delta_that_was_asked_for_at_every_noise_level(mu: float, delta: float) -> None:
    result = gaussian.epsilon(mu, delta)
    if result == 0:
        assert gaussian.delta(0.0, mu) <= delta
    else:
        assert gaussian.delta(result, mu) == pytest.approx(delta, rel=1e-6)
    assert gaussian.epsilon(0.0, delta) == 0


@pytest.mark.parametrize("delta", [1e-250, 0.999999])
@pytest.mark.parametrize("target", [0.001, 1.0, 1000.0])
def test_every_allowed_delta_has_its_noise(target: float, delta: float) -> None:
    assert gaussian.epsilon(1 / gaussian.noise_for(target, delta), delta) == pytest.approx(target, rel=1e-6)
    values = {"sharing.setting": "merf", "sharing.target_epsilon": target, "dp.delta": delta, "sharing.delta": delta}
    choose(values)
    with pytest.raises(UserError, match=r"dp.delta must lie in \[1e-250, 1\)"):
        choose({**values, "dp.delta": 1.0})


@pytest.mark.parametrize("delta", [1e-250, 1e-12, 1e-5, 0.4])
def test_epsilon_with_hardly_any_noise_is_a_bound_within_a_relative_1e_minus_5(delta: float) -> None:
    below, above = (gaussian.epsilon(gaussian.MU[1] * by, delta) for by in (1, 1 + 1e-9))
    assert below < above < below * (1 + 1e-5)
    assert gaussian.epsilon(1e9, delta) == pytest.approx(1e18 / 2, rel=1e-6)


# dp.target_epsilon: each client has its own noise, and spends the target in all rounds


PRIVATE = {
    "dp.local": True, "dp.target_epsilon": 4.0, "federation.rounds": 2, "client.epochs": 1, "client.batch_size": 16,
    "model": "linear", "data.limit": 150, "measure.every": 0, "wandb": "off",
}  # fmt: skip


@pytest.mark.long
def test_each_client_spends_the_target_in_all_rounds(tmp_path: Path) -> None:
    result = run(experiment("smoke", values=PRIVATE), tmp_path / "run", say=lambda _: None)
    (table,) = result.summary["privacy"]["mechanisms"]["updates"]
    sizes = build(result.experiment).client_data.clients.sizes
    assert table["client"] == list(range(len(sizes)))
    assert table["q"] == [DPSGD.sampling_rate(n, 16) for n in sizes]
    assert table["steps"] == [2 * DPSGD.steps(n, 16) for n in sizes]
    spent = [epsilon(q, s, k, DELTA) for q, s, k in zip(table["q"], table["sigma"], table["steps"], strict=True)]
    assert all(3.98 <= e <= 4.0 for e in spent)
    assert spent == result.summary["privacy"]["epsilon_local_training_if_secret"]["of_each_client"]
    assert (table["clip"], table["delta"], set(table["accountant"])) == (5.0, DELTA, {"rdp"})
    assert result.summary["effective"]["dp.noise_multiplier"] == table["sigma"]
    row = load_runs(result.folder).iloc[0]
    for name in ("sigma", "q", "steps"):
        assert (row[f"{name}_min"], row[f"{name}_max"]) == (min(table[name]), max(table[name]))
    # the default of the noise multiplier was not used, so no record has it
    assert "dp.noise_multiplier" not in {*row.index, *result.summary["config"]}
    assert same_results(read_config(result.folder), result.experiment) == []


def test_longer_runs_need_more_noise_so_that_they_share_none() -> None:
    assert len({noise_key(experiment("smoke", values={**PRIVATE, "federation.rounds": r})) for r in (2, 3)}) == 2
    with pytest.raises(UserError, match=r"it needs dp\.local true"):
        build(experiment("smoke", values={**PRIVATE, "dp.local": False}))
