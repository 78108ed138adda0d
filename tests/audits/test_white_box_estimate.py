"""The estimate by canary directions: in simulated sums, in the private steps of generators, and for single releases."""

from dataclasses import replace
from math import sqrt
from typing import Any, cast

import numpy as np
import pytest
import torch
from broken_noise import break_noise
from torch import Tensor, nn
from torch.func import functional_call

from fedcommons import Examples, TrainedGenerator
from fedcommons.algorithms.latents import noisy_mean
from fedcommons.audits.one_run import bound
from fedcommons.audits.white_box_estimate import Estimate, estimate, of_release
from fedcommons.privacy import dp_sgd_vmap, gaussian
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import CipherStream, Draws, Noise, Stream, of_audit
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release

DELTA = 1e-5
ABOVE, NOT_ABOVE = "above the reported one", "not above the reported one"


def stated(q: float, sigma: float, steps: int) -> Release:
    return Release(mechanism=SAMPLED_GAUSSIAN, q=q, sigma=sigma, sensitivity=1.0, steps=steps)


def simulated(
    seed: int, k: int = 400, q: float = 0.25, sigma: float = 2.0, steps: int = 100, *,
    noise: float = 1.0, rate: float | None = None, length: float = 1.0,
) -> Estimate:  # fmt: skip
    """Scores of orthogonal directions, whose noise is independent. noise: of what is stated, the share there is."""
    draws = np.random.default_rng(seed)
    inside = draws.random(k) < 0.5
    often = draws.binomial(steps, q if rate is None else rate, k)
    scores = length * often * inside + noise * sigma * sqrt(steps) * draws.standard_normal(k)
    return estimate(scores, inside, stated(q, sigma, steps), DELTA)


def test_honest_sums_are_rarely_accused_and_their_interval_holds_mu() -> None:
    estimates = [simulated(seed) for seed in range(100)]
    assert sum(bool(e.faults) for e in estimates) <= 5
    large = [simulated(seed, 4000, 1.0, 2.0, 1) for seed in range(100)]
    assert sum(bool(e.faults) for e in large) <= 5
    assert np.quantile([e.epsilon / e.reported for e in large], 0.05) > 0.5
    honest = 0.25 * sqrt(100) / 2
    assert 90 <= sum(e.low <= honest <= e.high for e in estimates) <= 99
    assert np.mean([e.mu for e in estimates]) == pytest.approx(honest, abs=0.04)
    assert estimates[0].ceiling == gaussian.epsilon(honest, DELTA) < estimates[0].reported
    assert np.mean([e.noise[0] for e in estimates]) == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize(
    "fault",
    [{"noise": 0.0}, {"noise": 0.5}, {"length": 10.0}, {"rate": 0.5}],
    ids=["no noise", "half of the noise", "no clipping", "twice the rate"],
)
def test_simulated_faults_are_found_in_20_of_20_seeds(fault: dict[str, float]) -> None:
    for seed in range(20):
        estimate = simulated(seed, **fault)  # pyright: ignore[reportArgumentType]
        assert estimate.verdict == ABOVE
        assert f"epsilon is about {estimate.epsilon:.3g}, not {estimate.reported:.3g}" in estimate.faults
        assert ("the noise multiplier is about" in str(estimate.faults)) == (fault.get("noise", 1.0) < 1)


def test_where_half_of_the_noise_would_not_show_in_epsilon_it_cannot_tell_and_measures_the_noise() -> None:
    for seed in range(20):
        honest, half = (simulated(seed, 1000, 0.1, 2.0, 10, noise=noise) for noise in (1.0, 0.5))
        assert honest.verdict == "cannot tell"
        assert any(fault.startswith("the noise multiplier is about") for fault in half.faults)
    assert simulated(0, 100_000, 0.1, 2.0, 10).verdict == NOT_ABOVE  # more directions can


@pytest.mark.parametrize(
    ("inside", "release"),
    [([True, False, False, False], stated(1.0, 1.0, 1)), ([True, True, True, False], stated(1.0, 1.0, 1)),
     ([True, True, False, False], Release())],
)  # fmt: skip
def test_what_cannot_be_estimated_is_refused(inside: list[bool], release: Release) -> None:
    with pytest.raises(ValueError, match="two included directions, two excluded and a covered release"):
        estimate(np.arange(4.0), np.array(inside), release, DELTA)


# The private steps that train generators, in the parameters of a small network


class Directed(nn.Module):
    """Example (j, factor) has the gradient 10 C factor u[j] at all weights; u: orthogonal directions of length 1."""

    def __init__(self, k: int, clip: float, seed: int) -> None:
        super().__init__()
        self.net, self.clip = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 2)), clip  # 522 parameters
        normal = np.random.default_rng(seed).standard_normal((522, k))
        self.u = torch.linalg.qr(torch.from_numpy(normal)).Q.T.float()

    def forward(self, j: Tensor, factor: Tensor) -> Tensor:
        weights = torch.cat([p.reshape(-1) for p in self.parameters()])
        return 10 * self.clip * factor * (self.u.index_select(0, j.view(-1)) @ weights).sum()


class TwiceTheRate(DPSGD):
    def sample(self, n: int, batch_size: int, draws: Stream) -> Tensor:
        return super().sample(n, 2 * batch_size, draws)


DP = DPSGD(noise_multiplier=2.0, clip=1.5)
TWICE = TwiceTheRate(noise_multiplier=2.0, clip=1.5)


def vectorised(seed: int, k: int = 400, q: float = 0.25, epochs: int = 15, dp: DPSGD = DP) -> Estimate:
    """Train on k canary directions by ``dp_sgd_vmap.steps``, in epochs of 1/q steps."""
    module, inside = Directed(k, dp.clip, seed), np.random.default_rng(seed).random(k) < 0.5
    scores, releases = [], []
    for release in dp_sgd_vmap.steps(
        module, torch.optim.SGD(module.parameters(), 1e-3), lambda named, *row: functional_call(module, named, row),
        [torch.arange(k), torch.from_numpy(inside).float()], lambda *_: [], dp, batch_size=round(q * k), epochs=epochs,
        physical_batch=k, noise=Draws(of_audit(seed), (seed,)),
    ):  # fmt: skip
        gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
        scores.append((module.u @ gradient).double() * (round(q * k) / dp.clip))
        releases.append(release)
    return estimate(torch.stack(scores).numpy(), inside, replace(releases[0], steps=len(releases)), DELTA)


def is_right(e: Estimate) -> bool:
    """Neither accused nor without an answer, and not less than half of what is reported."""
    return not e.faults and e.verdict == NOT_ABOVE and 0.5 * e.reported < e.epsilon < e.reported


@pytest.mark.long
def test_honest_steps_are_not_accused_and_say_half_of_what_is_reported() -> None:
    estimate = vectorised(1)
    assert is_right(estimate)
    assert gaussian.epsilon(estimate.low, DELTA) < estimate.ceiling < gaussian.epsilon(estimate.high, DELTA)
    assert estimate.noise[0] == pytest.approx(2.0, rel=0.15)
    assert vectorised(1, dp=TWICE).verdict == ABOVE  # another sampling rate


@pytest.mark.parametrize("name", ["none", "half", "the same in each step"])
def test_a_broken_stream_of_secret_noise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not vectorised(1, k=200).faults
    break_noise(monkeypatch, name)
    faults = vectorised(1, k=200).faults
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
    estimate = of_means(1, 1.0, 2000)
    assert estimate.faults == []
    assert 0.8 * estimate.reported < estimate.epsilon < estimate.reported
    assert estimate.noise[0] == pytest.approx(1.0, rel=0.05)


def test_a_private_generator_is_audited_with_secret_noise() -> None:
    is_secret: list[bool] = []

    class Fits:
        epochs = 1

        def fit(self, examples: Any, n_classes: int, seed: int, epochs: Any, *, flip: bool = False, noise: Any) -> Any:
            is_secret.append(isinstance(noise.call("weights", examples.x).stream(0), CipherStream))
            return {1: TrainedGenerator({"x": examples.x})}

    few = Examples(torch.zeros(8, 1, 2, 2), torch.arange(8) % 2)

    def score(generator: object, weights: object, images: Examples, n: int, seed: int) -> np.ndarray:
        return np.arange(len(images)) * 1.0

    bound(cast("Any", Fits()), few, few, 2, 0, score)
    assert is_secret == [True, True]
    with pytest.raises(ValueError, match=r"at least 4 canaries .* got 3"):
        bound(cast("Any", Fits()), few, few[:3], 2, 0, score)
