"""The estimate by canary directions: in simulated sums, in the private steps of both loops, and for single releases."""

from collections.abc import Callable
from math import exp, inf, sqrt
from typing import Any, cast

import numpy as np
import pytest
import torch
from broken_noise import break_noise
from scipy.stats import norm
from torch import Tensor, nn

from fedcommons.algorithms.latents import noisy_mean
from fedcommons.audits.one_run import bound
from fedcommons.audits.white_box_estimate import Estimate, estimate, gaussian_epsilon, of_release
from fedcommons.audits.white_box_runs import Directed, directions, of_local_steps, of_vectorised_steps
from fedcommons.core.local_training import LocalSGD
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import TrainedGenerator
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import CipherStream, Noise, Stream, of_audit
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release

DELTA = 1e-5
ABOVE, NOT_ABOVE = "above the reported one", "not above the reported one"


def gaussian(q: float, sigma: float, steps: int) -> Release:
    return Release(mechanism=SAMPLED_GAUSSIAN, q=q, sigma=sigma, sensitivity=1.0, steps=steps)


@pytest.mark.parametrize("mu", [0.1, 1.0, 12.0])
def test_the_curve_is_that_of_two_normal_distributions(mu: float) -> None:
    """delta(epsilon) is the largest P(S) - e^epsilon Q(S), taken where the densities' ratio is above e^epsilon."""
    e = gaussian_epsilon(mu, DELTA)
    edge = e / mu + mu / 2
    assert norm.sf(edge - mu) - exp(e + norm.logsf(edge)) == pytest.approx(DELTA, rel=1e-5)
    assert gaussian_epsilon(0.0, DELTA) == gaussian_epsilon(-mu, DELTA) == gaussian_epsilon(1e-9, DELTA) == 0
    assert gaussian_epsilon(inf, DELTA) == inf


def simulated(
    seed: int, k: int = 400, q: float = 0.25, sigma: float = 2.0, steps: int = 100, *,
    noise: float = 1.0, rate: float | None = None, length: float = 1.0,
) -> Estimate:  # fmt: skip
    """Scores of orthogonal directions, whose noise is independent. noise: of what is stated, the share there is."""
    draws = np.random.default_rng(seed)
    inside = draws.random(k) < 0.5
    often = draws.binomial(steps, q if rate is None else rate, k)
    scores = length * often * inside + noise * sigma * sqrt(steps) * draws.standard_normal(k)
    return estimate(scores, inside, gaussian(q, sigma, steps), DELTA)


def test_honest_sums_are_rarely_accused_and_their_interval_holds_mu() -> None:
    found = [simulated(seed) for seed in range(100)]
    assert sum(bool(e.faults) for e in found) <= 5
    large = [simulated(seed, 4000, 1.0, 2.0, 1) for seed in range(100)]
    assert sum(bool(e.faults) for e in large) <= 5
    assert np.quantile([e.epsilon / e.reported for e in large], 0.05) > 0.5
    honest = 0.25 * sqrt(100) / 2
    assert 90 <= sum(e.low <= honest <= e.high for e in found) <= 99
    assert np.mean([e.mu for e in found]) == pytest.approx(honest, abs=0.04)
    assert found[0].ceiling == gaussian_epsilon(honest, DELTA) < found[0].reported
    assert np.mean([e.noise[0] for e in found]) == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize(
    "fault",
    [{"noise": 0.0}, {"noise": 0.5}, {"length": 10.0}, {"rate": 0.5}],
    ids=["no noise", "half of the noise", "no clipping", "twice the rate"],
)
def test_simulated_faults_are_found_in_20_of_20_seeds(fault: dict[str, float]) -> None:
    for seed in range(20):
        found = simulated(seed, **fault)  # pyright: ignore[reportArgumentType]
        assert found.verdict == ABOVE
        assert f"epsilon is about {found.epsilon:.3g}, not {found.reported:.3g}" in found.faults
        assert ("the noise multiplier is about" in str(found.faults)) == (fault.get("noise", 1.0) < 1)


def test_where_half_of_the_noise_would_not_show_in_epsilon_it_cannot_tell_and_measures_the_noise() -> None:
    for seed in range(20):
        honest, half = (simulated(seed, 1000, 0.1, 2.0, 10, noise=noise) for noise in (1.0, 0.5))
        assert honest.verdict == "cannot tell"
        assert any(fault.startswith("the noise multiplier is about") for fault in half.faults)
    assert simulated(0, 100_000, 0.1, 2.0, 10).verdict == NOT_ABOVE  # more directions can


def test_directions_are_orthogonal_and_keyed() -> None:
    u = directions(30, 50, 1)
    assert torch.allclose(u @ u.T, torch.eye(30), atol=1e-6)
    assert torch.equal(u, directions(30, 50, 1))
    module, of_module = network(), directions(5, 522, 0)
    Directed(module, of_module, 3.0)(torch.tensor([2]), torch.tensor([1.0])).backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    assert torch.allclose(gradient, 3 * of_module[2])
    assert not torch.equal(u, directions(30, 50, 2))
    with pytest.raises(ValueError, match="at most 50 directions are orthogonal in 50 parameters, got 51"):
        directions(51, 50, 1)


@pytest.mark.parametrize(
    ("inside", "release"),
    [([True, False, False, False], gaussian(1.0, 1.0, 1)), ([True, True, True, False], gaussian(1.0, 1.0, 1)),
     ([True, True, False, False], Release())],
)  # fmt: skip
def test_what_cannot_be_estimated_is_refused(inside: list[bool], release: Release) -> None:
    with pytest.raises(ValueError, match="two included directions, two excluded and a covered release"):
        estimate(np.arange(4.0), np.array(inside), release, DELTA)


# The private steps of both loops, in the parameters of a small network


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 2))  # 522 parameters in four tensors


class TwiceTheRate(DPSGD):
    def sample(self, n: int, batch_size: int, draws: Stream) -> Tensor:
        return super().sample(n, 2 * batch_size, draws)


DP = DPSGD(noise_multiplier=2.0, clip=1.5)
TWICE = TwiceTheRate(noise_multiplier=2.0, clip=1.5)


def local(seed: int, k: int = 400, q: float = 1.0, epochs: int = 4, dp: DPSGD = DP) -> Estimate:
    """An example after another: small, so that it does not take long. Epochs of 1/q steps."""
    return of_local_steps(LocalSGD(epochs, round(q * k), dp=dp), network(), k, seed)


def vectorised(seed: int, k: int = 400, q: float = 0.25, epochs: int = 15, dp: DPSGD = DP) -> Estimate:
    return of_vectorised_steps(dp, network(), k, round(q * k), epochs, seed)


STEPS = pytest.mark.parametrize("trained", [local, vectorised])


def is_right(found: Estimate) -> bool:
    """Neither accused nor without an answer, and not less than half of what is reported."""
    return not found.faults and found.verdict == NOT_ABOVE and 0.5 * found.reported < found.epsilon < found.reported


@pytest.mark.long
@STEPS
def test_honest_steps_are_not_accused_and_say_half_of_what_is_reported(trained: Callable[..., Estimate]) -> None:
    found = trained(1)
    assert is_right(found)
    assert gaussian_epsilon(found.low, DELTA) < found.ceiling < gaussian_epsilon(found.high, DELTA)
    assert found.noise[0] == pytest.approx(2.0, rel=0.15)
    if trained is vectorised:
        assert trained(1, dp=TWICE).verdict == ABOVE  # another sampling rate
    else:
        assert trained(1, k=60, q=2.0).noise == trained(1, k=60).noise  # a batch is no larger than the data


@pytest.mark.parametrize("name", ["none", "half", "the same in each step"])
@STEPS
def test_a_broken_stream_of_secret_noise_is_found(
    name: str, trained: Callable[..., Estimate], monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 60 if trained is local else 200
    assert not trained(1, k=k).faults
    break_noise(monkeypatch, name)
    faults = trained(1, k=k).faults
    assert any("noise multiplier" in fault for fault in faults)
    assert any("epsilon" in fault for fault in faults)


# Single releases


def of_means(seed: int, sigma: float, draws: int) -> Estimate:
    """The noisy mean of two codes, of which the worst one is far out along an axis; times two, as a sum."""
    stream, axis, clip = Noise(of_audit(seed)).call("means").stream(), np.array([0.6, 0.8, 0.0]), 5.0

    def released(there: bool) -> tuple[np.ndarray, Release]:
        codes = torch.from_numpy(np.stack([100.0 * there * axis, [0.0, 0.0, 3.0]]))
        mean, release = noisy_mean(codes, clip, sigma, stream)
        return len(codes) * mean.numpy(), release

    return of_release(lambda there: released(there)[0], axis, released(True)[1], DELTA, draws)


@pytest.mark.long
def test_a_single_release_reaches_four_fifths_of_what_is_reported() -> None:
    found = of_means(1, 1.0, 2000)
    assert found.faults == []
    assert 0.8 * found.reported < found.epsilon < found.reported
    assert found.noise[0] == pytest.approx(1.0, rel=0.05)


def test_a_private_generator_is_audited_with_secret_noise() -> None:
    drawn: list[bool] = []

    class Fits:
        epochs = 1

        def fit(self, examples: Any, n_classes: int, seed: int, epochs: Any, *, flip: bool = False, noise: Any) -> Any:
            drawn.append(isinstance(noise.call("weights", examples.x).stream(0), CipherStream))
            return {1: TrainedGenerator({"x": examples.x})}

    few = Examples(torch.zeros(8, 1, 2, 2), torch.arange(8) % 2)

    def score(generator: object, weights: object, images: Examples, n: int, seed: int) -> np.ndarray:
        return np.arange(len(images)) * 1.0

    bound(cast("Any", Fits()), few, few, 2, 0, score)
    assert drawn == [True, True]
    with pytest.raises(ValueError, match=r"at least 4 canaries .* got 3"):
        bound(cast("Any", Fits()), few, few[:3], 2, 0, score)
