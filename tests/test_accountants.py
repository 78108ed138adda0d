"""Epsilons and the noise for a target, against Opacus called directly, published numbers and dp-accounting's PLD."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from fedcommons.core.accountants import LARGEST_SIGMA, composed, epsilon, noise_for, require_reachable
from fedcommons.core.renyi import divergences
from fedcommons.errors import UserError

SWEEPS = Path(__file__).parents[1] / "sweeps"

Q = 256 / 3750
"""Fedssyn's sampling rate: batches of 256, and three quarters of a client's 5,000 images."""

COURSES = [(Q, 1.906, 7500), (Q, 3.19, 7500), (0.01, 1.1, 1000), (0.2, 4.0, 200)]


@pytest.mark.parametrize("course", COURSES)
def test_epsilons_are_those_of_opacus_called_directly(course: tuple[float, float, int]) -> None:
    q, sigma, steps = course
    theirs = RDPAccountant()
    theirs.history = [(sigma, q, steps)]
    assert epsilon(q, sigma, steps, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)
    parts = ((q, sigma, steps // 3), (q, sigma, steps - steps // 3))
    assert composed(parts, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)


@pytest.mark.parametrize("q", [1e-6, 0.01, 0.2, 0.49, 0.9, 1 - 1e-6, 1.0])
@pytest.mark.parametrize("sigma", [0.001, 0.3, 0.8, 2.0, 50.0])
def test_divergences_are_those_of_opacus_at_every_order(q: float, sigma: float) -> None:
    """In a step, to 1e-11 or 15 digits; at sigma 0.001 they are near 10^7, and e to that is no float."""
    orders = RDPAccountant.DEFAULT_ALPHAS
    theirs = np.asarray(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=orders))
    assert divergences(q, sigma, np.asarray(orders, float)) == pytest.approx(theirs, abs=1e-11, rel=1e-15)


def test_no_sampling_costs_nothing() -> None:
    assert not divergences(0.0, 1.0, np.array([1.5, 2.0])).any()


def test_prv_is_that_of_opacus_called_directly() -> None:
    theirs = PRVAccountant()
    theirs.history = [(4.0, 0.2, 200)]
    assert epsilon(0.2, 4.0, 200, 1e-5, "prv") == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "accountant", "wanted"),
    [  # worked out with Opacus' PrivacyEngine before there was any of our code (shared/spec/library_facts.md, 4.3)
        (Q, 1.906, 7500, "rdp", 20.46),
        (Q, 1.906, 7500, "prv", 19.15),
        (Q, 1.906, 7324, "rdp", 20.14),
        (Q, 1.906, 500, "rdp", 4.18),
    ],
)
def test_numbers_that_were_worked_out_before(
    q: float, sigma: float, steps: int, accountant: str, wanted: float
) -> None:
    assert epsilon(q, sigma, steps, 1e-5, accountant) == pytest.approx(wanted, abs=0.006)


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.01, 1.1, 1000), (0.2, 4.0, 200), (Q, 1.906, 7500)])
def test_numerical_composition_by_another_library_agrees_and_renyi_lies_above(
    q: float, sigma: float, steps: int
) -> None:
    dp = pytest.importorskip("dp_accounting", reason="of the dev extra; `pip install dp-accounting`")
    from dp_accounting.pld import PLDAccountant  # pyright: ignore[reportMissingImports]

    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))
    tight = PLDAccountant(value_discretization_interval=1e-3).compose(event, steps).get_epsilon(1e-5)
    assert tight <= epsilon(q, sigma, steps, 1e-5, "prv") <= tight + 0.02  # PRV's error bound of 0.01, both ways
    assert tight < epsilon(q, sigma, steps, 1e-5) < 1.15 * tight


def test_no_step_costs_nothing() -> None:
    assert epsilon(0.1, 1.0, 0, 1e-5) == epsilon(0.1, 1.0, 0, 1e-5, "prv") == 0


@pytest.mark.parametrize("target", [0.5, 3.0, 10.0])
@pytest.mark.parametrize(("q", "steps"), [(Q, 7500), (0.2, 50), (1.0, 20)])
@pytest.mark.long
def test_the_noise_for_a_target_just_reaches_it(target: float, q: float, steps: int) -> None:
    found = epsilon(q, noise_for(target, q, steps, 1e-5), steps, 1e-5)
    assert target - 0.01 <= found <= target


@pytest.mark.long
def test_prv_needs_less_noise_than_rdp() -> None:
    sigma, plain = (noise_for(3.0, 0.2, 200, 1e-5, accountant) for accountant in ("prv", "rdp"))
    assert 0.8 * plain < sigma < plain
    assert 3.0 - 0.01 <= epsilon(0.2, sigma, 200, 1e-5, "prv") <= 3.0


def test_a_target_beyond_the_largest_noise_is_refused() -> None:
    least = epsilon(1.0, LARGEST_SIGMA, 1000, 1e-5)
    require_reachable(least, 1.0, 1000, 1e-5)
    with pytest.raises(UserError, match=r"target_epsilon 0\.5 would need a noise multiplier above 100, at wh"):
        require_reachable(0.5, 1.0, 1000, 1e-5)


@pytest.mark.long
def test_a_target_beyond_the_largest_noise_is_refused_in_one_line() -> None:
    """Importing Opacus has the root logger print all that is logged, ours among it."""
    argv = ["--sharing", "ndpdc", "--sharing.target_epsilon", "0.1", "--sharing.iterations", "10000"]
    run = subprocess.run([sys.executable, str(SWEEPS / "run.py"), *argv], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    said = [line for line in run.stderr.splitlines() if "target_epsilon" in line]
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert said[0].endswith("ask for a larger epsilon or fewer steps.")
