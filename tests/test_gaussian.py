"""The exact Gaussian mechanism against its definition, dp-accounting and a table; Renyi accounting is above it."""

from math import exp, sqrt

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from scipy.stats import norm

from fedcommons.config.flat import choose
from fedcommons.core import accountants, gaussian
from fedcommons.errors import UserError


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 10.0), (3.731, 1.0), (1.0, 3.0), (2.0, 0.0), (0.1, 60.0)])
def test_delta_is_the_mass_by_which_one_density_exceeds_e_to_epsilon_times_the_other(
    sigma: float, epsilon: float
) -> None:
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 2_000_001)
    excess = np.maximum(norm.pdf(x, 1, sigma) - exp(epsilon) * norm.pdf(x, 0, sigma), 0)
    assert gaussian.delta(epsilon, 1 / sigma) == pytest.approx(np.trapezoid(excess, x), rel=1e-6)


@pytest.mark.parametrize(
    ("sigma", "epsilon", "delta"),
    [  # dp_accounting 0.5.1, GaussianPrivacyLoss(sigma).get_delta_for_epsilon(epsilon)
        (0.5, 10, 9.940202816118192e-06),
        (3.731, 1, 9.98361831549752e-06),
        (16.3, 0.2, 1.0033699266597646e-05),
        (1.0, 3.0, 0.0015371853694009577),
        (0.1, 60.0, 0.13683538039646126),
    ],
)
def test_delta_and_epsilon_are_those_of_dp_accounting(sigma: float, epsilon: float, delta: float) -> None:
    assert gaussian.delta(epsilon, 1 / sigma) == pytest.approx(delta, rel=1e-10)
    assert gaussian.epsilon(1 / sigma, delta) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("target", "sigma"),
    [(0.2, 16.304), (1, 3.731), (2, 1.994), (5, 0.892), (10, 0.500)],  # shared/spec/methods.md, 13
)
def test_the_noise_for_a_target_is_that_of_the_table_and_spends_the_target(target: float, sigma: float) -> None:
    assert gaussian.noise_for(target, 1e-5) == pytest.approx(sigma, abs=5e-4)
    assert gaussian.epsilon(1 / gaussian.noise_for(target, 1e-5), 1e-5) == pytest.approx(target, rel=1e-9)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.4])
@pytest.mark.parametrize("mu", [1e-5, 0.01, 1.0, 30.0, 1e4])
def test_the_root_is_one_from_all_noise_to_none(mu: float, delta: float) -> None:
    epsilon = gaussian.epsilon(mu, delta)
    if epsilon == 0:
        assert gaussian.delta(0.0, mu) <= delta
    else:
        assert gaussian.delta(epsilon, mu) == pytest.approx(delta, rel=1e-6)
    assert gaussian.epsilon(0.0, delta) == 0


@pytest.mark.parametrize("delta", [1e-250, 0.999999])
@pytest.mark.parametrize("target", [0.001, 1.0, 1000.0])
def test_every_delta_that_may_be_asked_for_has_its_noise(target: float, delta: float) -> None:
    assert gaussian.epsilon(1 / gaussian.noise_for(target, delta), delta) == pytest.approx(target, rel=1e-6)
    names = ("dp.delta", "sharing.delta")
    choose({"sharing.setting": "merf", "sharing.target_epsilon": target, **dict.fromkeys(names, delta)})
    for name in names:
        with pytest.raises(UserError, match=rf"{name} must lie in \[1e-250, 1\), got 1e-305"):
            choose({"sharing.setting": "merf", "sharing.target_epsilon": target, name: 1e-305})


@pytest.mark.parametrize("delta", [1e-250, 1e-12, 1e-5, 0.4])
def test_where_there_is_hardly_any_noise_it_is_a_bound_that_is_no_looser_than_rounding(delta: float) -> None:
    below, above = (gaussian.epsilon(gaussian.MU[1] * by, delta) for by in (1, 1 + 1e-9))
    assert below < above < below * (1 + 1e-5)
    assert gaussian.epsilon(1e9, delta) == pytest.approx(1e18 / 2, rel=1e-6)


def test_steps_without_sampling_are_one_mechanism_and_the_ledger_is_exact_for_them() -> None:
    spent = ((1.0, 8.0, 30), (1.0, 2.0, 1), (1.0, 5.0, 0))
    mu = sqrt(30 / 64 + 1 / 4)
    assert accountants.composed(spent, 1e-5) == pytest.approx(gaussian.epsilon(mu, 1e-5), rel=1e-12)
    assert accountants.composed((), 1e-5) == accountants.epsilon(1.0, 3.0, 0, 1e-5) == 0


@pytest.mark.parametrize(("sigma", "steps"), [(0.3, 1), (1.0, 1), (8.0, 30), (20.0, 5)])
def test_renyi_accounting_says_more_and_not_much_more(sigma: float, steps: int) -> None:
    theirs = RDPAccountant()
    theirs.history = [(sigma, 1.0, steps)]
    exact = accountants.epsilon(1.0, sigma, steps, 1e-5)
    assert exact < theirs.get_epsilon(1e-5) < 1.35 * exact + 0.05


def test_a_mixture_with_sampled_steps_is_counted_by_renyi_as_a_whole() -> None:
    theirs = RDPAccountant()
    theirs.history = [(1.0, 0.1, 20), (4.0, 1.0, 1)]
    spent = ((0.1, 1.0, 20), (1.0, 4.0, 1))
    assert accountants.composed(spent, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)


@pytest.mark.parametrize("steps", [1, 25])
def test_a_target_of_steps_without_sampling_is_met_exactly(steps: int) -> None:
    sigma = accountants.noise_for(3.0, 1.0, steps, 1e-5)
    assert accountants.epsilon(1.0, sigma, steps, 1e-5) == pytest.approx(3.0, rel=1e-9)
