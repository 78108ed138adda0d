"""FedMERF: features, sums, sensitivity, noise, the views' epsilons, the fit, and what a run says of it."""

from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.config.flat import choose
from fedcommons.core import gaussian
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.runs import build, experiment, secret
from fedcommons.seeds import generator
from fedcommons.sharing import merf
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.random_features import Features, Fourier, fitted, pixels, sums
from fedcommons.sharing.stage import share
from fedcommons.testing import check_stage

SMALL = MERF(noise_multiplier=1.0, features=40, per_class=2, steps=3)
PHI = Fourier.draw(64, 200, [8.0], 3)


def some(n: int, seed: int = 0) -> Examples:
    draws = generator(seed, "images of the test")
    x = torch.randint(256, (n, 1, 8, 8), generator=draws, dtype=torch.uint8)
    return Examples(x, torch.randint(10, (n,), generator=draws))


def dealt(*cuts: int, seed: int = 0, is_secret: bool = False, n: int = 60) -> Dealt:
    """The same images, cut into clients at these places."""
    return Dealt(Clients(some(n), np.split(np.arange(n), cuts)), 10, False, seed, is_secret)


def total(stage: MERF, given: Dealt, phi: Features = PHI) -> Tensor:
    return sum((stage.message(given, i, phi).values for i in range(len(given.own))), torch.zeros(()))


# --- features and their sums


def test_features_have_norm_one_and_their_products_are_the_kernel() -> None:
    x, s = torch.rand(40, 64, generator=generator("kernel")), 8.0
    phi = Fourier.draw(64, 40_000, [s], 1)
    assert torch.allclose(phi(x).norm(dim=1), torch.ones(40), atol=1e-5)
    kernel = torch.exp(-(torch.cdist(x, x) ** 2) / (2 * s))
    assert (phi(x) @ phi(x).T - kernel).abs().max() < 5 / sqrt(20_000)


def test_two_scales_share_the_features() -> None:
    phi = Fourier.draw(64, 40_000, [8.0, 2.0], 1)
    assert phi.size == 40_000
    spreads = [half.std().item() for half in phi.w.chunk(2)]
    assert spreads == pytest.approx([1 / sqrt(8), 1 / sqrt(2)], rel=0.01)


def test_a_blank_image_adds_nothing_and_any_other_a_vector_of_norm_one_to_its_class_alone() -> None:
    examples = some(30)
    whole = sums(PHI, examples, 10)
    for i in range(30):
        x = examples.x.float() / 255
        x[i] = torch.nan
        blanked = sums(PHI, Examples(x, examples.y), 10)
        moved = whole - blanked
        assert moved.norm() == pytest.approx(1.0, abs=1e-5)
        assert moved[examples.y[i]].norm() == pytest.approx(1.0, abs=1e-5)
        assert whole[:, -1].sum() * sqrt(2) == pytest.approx(30)


def test_replacing_an_image_moves_the_sums_by_at_most_the_root_of_two() -> None:
    examples, others = some(30), some(30, seed=1)
    largest = 0.0
    for i in range(30):
        x, y = examples.x.clone(), examples.y.clone()
        x[i], y[i] = others.x[i], others.y[i]
        moved = (sums(PHI, Examples(x, y), 10) - sums(PHI, examples, 10)).norm().item()
        largest = max(largest, moved)
    assert 1.0 < largest <= sqrt(2) + 1e-6


def test_sums_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    once = sums(PHI, some(30), 10)
    monkeypatch.setattr("fedcommons.sharing.random_features.BLOCK", 7)
    assert torch.allclose(sums(PHI, some(30), 10), once, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cuts", [(), (30,), (1, 2, 40), tuple(range(1, 60))])
def test_without_noise_it_does_not_matter_who_holds_what(cuts: tuple[int, ...]) -> None:
    silent = replace(SMALL, noise_multiplier=0.0)
    assert torch.allclose(total(silent, dealt(*cuts)), sums(PHI, some(60), 10), rtol=0, atol=1e-5)


# --- noise


@pytest.mark.parametrize(
    ("stage", "of_each", "of_all"),
    [
        (replace(SMALL, noise_multiplier=2.0), 2.0, 2.0 * sqrt(5)),
        (replace(SMALL, noise_multiplier=2.0, noise="summed"), 2.0 / sqrt(5), 2.0),
        (replace(SMALL, noise_multiplier=2.0, noise="summed", may_miss=2), 2.0 / sqrt(3), 2.0 * sqrt(5 / 3)),
    ],
    ids=["local", "summed", "summed, two may be missing"],
)
def test_noise_has_the_variance_that_is_stated(stage: MERF, of_each: float, of_all: float) -> None:
    given = dealt(10, 20, 30, 40)
    exact = [sums(PHI, given.own.store[rows], 10) for rows in given.own.rows]
    noises = [stage.message(given, i, PHI).values - exact[i] for i in range(5)]
    n = noises[0].numel()  # 2,010 numbers: their standard deviation is known to 1/sqrt(2 n)
    for noise in noises:
        assert noise.std().item() == pytest.approx(of_each, rel=4 / sqrt(2 * n))
    assert torch.stack(noises).sum(0).std().item() == pytest.approx(of_all, rel=4 / sqrt(2 * n))
    assert abs(torch.corrcoef(torch.stack([noise.flatten() for noise in noises]))[0, 1:]).max() < 4.5 / sqrt(n)


def test_the_same_message_has_the_same_noise_and_any_other_has_other_noise() -> None:
    def noise(stage: MERF = SMALL, client: int = 0, **how: Any) -> Tensor:
        given = dealt(20, 40, **how)
        return stage.message(given, client, PHI).values - sums(PHI, given.own.store[given.own.rows[client]], 10)

    assert torch.equal(noise(), noise())
    assert torch.equal(noise(), noise(replace(SMALL, per_class=9, steps=7)))  # the images are not the message
    others = [noise(client=1), noise(seed=1), noise(n=59), noise(replace(SMALL, noise_multiplier=1.5)) / 1.5]
    others.append(noise(replace(SMALL, scale=3.0)))
    for other in others:
        assert (noise() - other).std() > 1.2  # sqrt(2), and 0 if they were the same


def test_secret_noise_is_drawn_from_a_salt_that_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path))
    seeded, secret = (total(SMALL, dealt(20, is_secret=on)) for on in (False, True))
    assert not torch.allclose(seeded, secret, atol=0.1)
    assert torch.equal(secret, total(SMALL, dealt(20, is_secret=True)))
    assert len(set(SMALL.salts(dealt(20)))) == 2
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "another"))
    assert not torch.allclose(secret, total(SMALL, dealt(20, is_secret=True)), atol=0.1)


# --- what is stated


@pytest.mark.parametrize("target", [0.2, 1.0, 10.0])
@pytest.mark.parametrize("noise", ["local", "summed"])
def test_the_ledgers_epsilon_is_the_target(target: float, noise: str) -> None:
    stage, given = MERF(target_epsilon=target, noise=noise), dealt(20, 40)
    _, events = stage.release(given, SMALL.make(given, []))
    assert [event.client for event in events] == [0, 1, 2]
    for event in events:
        assert gaussian.epsilon(1 / event.sigma, 1e-5) == pytest.approx(target, rel=1e-6)
    assert ("added up over clients only" in events[0].what[0]) == (noise == "summed")


def test_without_noise_nothing_is_covered() -> None:
    stage = replace(SMALL, noise_multiplier=0.0)
    shared = share(stage, dealt(20, 40))
    assert [event.covered for event in shared.releases] == [False] * 3
    assert [event.seen for event in shared.releases] == [20, 20, 20]
    assert shared.views == {}


def test_what_leaves_moves_no_more_than_is_stated() -> None:
    check_stage(replace(SMALL, noise_multiplier=3.0))


def test_whoever_sees_messages_with_summed_noise_finds_less_than_is_stated_of_the_sum() -> None:
    """That is what the event's name says, and ``views`` in numbers."""
    with pytest.raises(AssertionError, match="standard deviations of its noise"):
        check_stage(replace(SMALL, noise="summed", noise_multiplier=3.0))


@dataclass(frozen=True)
class HalfTheNoise(MERF):
    """Less than it says."""

    def sigma_of_each(self, n_clients: int) -> float:
        return super().sigma_of_each(n_clients) / 2


def test_a_stage_with_less_noise_than_it_says_is_found() -> None:
    kept = {name: getattr(SMALL, name) for name in ("features", "per_class", "steps")}
    with pytest.raises(AssertionError, match="standard deviations of its noise"):
        check_stage(HalfTheNoise(**kept, noise_multiplier=3.0))


class Long(Fourier):
    """Features of norm four."""

    def __call__(self, x: Tensor) -> Tensor:
        return 4 * super().__call__(x)


def test_features_that_are_too_long_are_cut() -> None:
    assert torch.allclose(sums(Long(PHI.w), some(30), 10), sums(PHI, some(30), 10), rtol=0, atol=1e-5)


class Broken(Fourier):
    """Features of which some are no numbers."""

    def __call__(self, x: Tensor) -> Tensor:
        phi = super().__call__(x)
        return torch.where((torch.arange(len(x)) % 3 == 0)[:, None], phi * torch.tensor([torch.nan, *[1.0] * 199]), phi)


def test_features_that_are_no_numbers_are_zero() -> None:
    """Noise does not hide them: a row that is no number would tell that a client holds its class."""
    whole = sums(Broken(PHI.w), some(30), 10)
    there = some(30)[np.flatnonzero(np.arange(30) % 3 != 0)]
    assert torch.allclose(whole[:, :-1], sums(PHI, there, 10)[:, :-1], rtol=0, atol=1e-5)
    assert torch.equal(whole[:, -1], sums(PHI, some(30), 10)[:, -1])
    tiny = replace(SMALL, scale=1e-76)  # 1/sqrt(s) overflows in float32
    assert not tiny.phi(dealt())(torch.ones(1, 64)).isfinite().all()
    assert total(tiny, dealt(20), tiny.phi(dealt())).isfinite().all()


@pytest.mark.parametrize("name", ["scale", "second_scale"])
def test_scales_at_which_features_would_overflow_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} must lie in \[1e-9, 1e9\]"):
        choose({"sharing.setting": "merf", "sharing.target_epsilon": 1.0, f"sharing.{name}": 1e-76})


# --- images


def test_the_fit_finds_images_that_have_the_means() -> None:
    """Means of ten images a class that exist: as many fitted ones have them, to a hundredth of where they began."""
    examples = Examples(some(100).x, torch.arange(10).repeat_interleave(10))
    noisy = sums(PHI, examples, 10)
    wanted = PHI(pixels(examples.x)).view(10, 10, -1).mean(1)

    def error(steps: int) -> float:
        images = fitted(PHI, noisy, (1, 8, 8), 10, steps, seed=0)
        assert images.y.tolist() == examples.y.tolist()
        assert images.x.dtype == torch.uint8
        return ((PHI(pixels(images.x)).view(10, 10, -1).mean(1) - wanted) ** 2).sum().item()

    assert error(300) < 0.01 * error(1)


def test_a_class_that_nobody_has_gets_finite_images() -> None:
    noisy = torch.zeros(3, PHI.size + 1, dtype=torch.float64)
    noisy[1] = -5.0  # noise below zero
    images = fitted(PHI, noisy, (1, 8, 8), 2, 5, seed=0)
    assert len(images) == 6
    assert images.x.float().std() > 0


def test_everybody_gets_all_images_and_pays_for_the_sums_and_them() -> None:
    given = dealt(20, 30)
    shared = share(SMALL, given)
    for i, client in enumerate(shared.data.clients):
        assert len(client) == len(given.own.rows[i]) + 20
        assert client.n_own == len(given.own.rows[i])
    assert shared.traffic.once == 3 * (4 * 41 * 10 + 20 * (prod(given.shape) + 1))
    assert shared.data.pool is not None
    assert len(shared.data.pool.rows.flat) == 20
    assert shared.disclosed == 0


def test_a_dry_run_plays_a_shorter_fit() -> None:
    few, times = MERF(target_epsilon=1.0).shorter()
    assert (few.steps, times) == (20, 20.0)
    assert SMALL.shorter() == (SMALL, 1.0)


# --- runs


def test_a_secret_run_earns_its_epsilon_and_goes_on_with_its_salts_only(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))
    config = choose(
        {"sharing.setting": "merf", "sharing.target_epsilon": 2.0, "sharing.steps": 3, "dp.noise": "secret",
         "federation.rounds": 1, "client.epochs": 1, "model.name": "linear", "tracking.wandb": "off",
         "artifacts": str(tmp_path / "artifacts")}
    )  # fmt: skip
    said = experiment.run(config, tmp_path / "run")["privacy"]
    assert said["pool_epsilon_max"] == pytest.approx(2.0, rel=1e-6)
    assert said["pool_epsilon_of_each_view"]["the server without it"] == pytest.approx(2.0, rel=1e-6)
    assert not any("what these would see" in line for line in said["uncovered"])
    told = build.prepare(config).salts
    assert len(told) == 10
    assert secret.kept(tmp_path / "run", told)
    for salt in (tmp_path / "state" / "salts").glob("artifact-*"):
        salt.unlink()
    with pytest.raises(UserError, match="its salts are lost: with new ones it would release twice"):
        secret.kept(tmp_path / "run", build.prepare(config).salts)


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ("give either sharing.target_epsilon or sharing.noise_multiplier, not neither", {}),
        ("give either sharing.target_epsilon or sharing.noise_multiplier, not both",
         {"sharing.target_epsilon": 1.0, "sharing.noise_multiplier": 1.0}),
        ("sharing.may_miss is for sharing.noise summed", {"sharing.target_epsilon": 1.0, "sharing.may_miss": 1}),
        ("sharing.may_miss must be below the number of clients, 10",
         {"sharing.target_epsilon": 1.0, "sharing.noise": "summed", "sharing.may_miss": 10}),
        ("sharing.delta must be dp.delta = 1e-05, got 0.001", {"sharing.target_epsilon": 1.0, "sharing.delta": 1e-3}),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(said: str, values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=said):
        build.prepare(choose({"sharing.setting": "merf", **values}))


def test_the_published_scale_is_that_of_mnist() -> None:
    assert merf.SCALE * 784 == 105
