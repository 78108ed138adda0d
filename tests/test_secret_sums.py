"""Secret noise on clients' sums: no two sums have the same, whatever differs, and a run goes on with its own alone.

Salts are kept for ever. Were the same noise on two values, their difference would tell the data.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.core.noise import Noise, Source
from fedcommons.core.salts import name_of
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.condensation import Networks
from fedcommons.runs import secret
from fedcommons.seeds import generator
from fedcommons.sharing import merf, ndpdc
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.ndpdc import NDPDC
from fedcommons.sharing.random_features import Features, Fourier

OF_MERF = MERF(target_epsilon=1.0, features=40, per_class=2, steps=3)
OF_NDPDC = NDPDC(target_epsilon=1.0, iterations=3, per_class=2, batch=50, width=8)
BOTH = pytest.mark.parametrize("stage", [OF_MERF, OF_NDPDC], ids=["merf", "ndpdc"])


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))


def dealt(is_secret: bool = True) -> Dealt:
    draws = generator("images of secret sums")
    x = torch.randint(256, (60, 1, 8, 8), generator=draws, dtype=torch.uint8)
    y = torch.randint(10, (60,), generator=draws)
    return Dealt(Clients(Examples(x, y), np.split(np.arange(60), [20])), 10, False, 0, is_secret)


class Rounded(Fourier):
    """It rounds otherwise."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * (1 + 1e-6)


def first(stage: MERF | NDPDC, is_secret: bool = True, rounds_otherwise: bool = False) -> tuple[Tensor, float]:
    """Return the noise in a client's first message, and the sigma that it has."""
    given, messages = dealt(is_secret), []
    for each in (stage, replace(stage, target_epsilon=None, noise_multiplier=0.0)):
        if isinstance(each, MERF):
            phi = each.phi(given)
            messages.append(each.message(given, 0, Rounded(phi.w) if rounds_otherwise else phi))  # pyright: ignore
        else:
            plain = each.networks(given).at(0)
            by = 1 + 1e-6 * rounds_otherwise
            messages.append(each.sender(given, 0).message(lambda x, y, f=plain, by=by: f(x, y) * by, 0))
    return messages[0].values - messages[1].values, messages[0].sigma


# Another version of the package: with the same constants its messages have another sigma, other features or a number


class LouderMERF(MERF):
    def sigma_of_each(self, n_clients: int) -> float:
        return 1.003 * super().sigma_of_each(n_clients)


class LouderNDPDC(NDPDC):
    def sigma(self, n: int, classes: int) -> float:
        return 1.003 * super().sigma(n, classes)


class OtherRate(NDPDC):
    def rate(self, n: int, classes: int) -> float:
        return 0.999


class OtherFeatures(MERF):
    def phi(self, dealt: Dealt) -> Features:
        return Fourier(super().phi(dealt).w * 1.01)  # pyright: ignore[reportAttributeAccessIssue]


class OtherNetworks(NDPDC):
    def networks(self, dealt: Dealt) -> Networks:
        networks = super().networks(dealt)
        return replace(networks, seed=networks.seed + 1)


OF_SIGMA = replace(OF_NDPDC, target_epsilon=None, noise_multiplier=5.0)
VERSIONS = {
    "merf, sigma": (OF_MERF, LouderMERF(**vars(OF_MERF))),
    "merf, features": (OF_MERF, OtherFeatures(**vars(OF_MERF))),
    "merf, version": (OF_MERF, OF_MERF),
    "ndpdc, sigma": (OF_NDPDC, LouderNDPDC(**vars(OF_NDPDC))),
    "ndpdc, features": (OF_NDPDC, OtherNetworks(**vars(OF_NDPDC))),
    "ndpdc, rate": (OF_SIGMA, OtherRate(**vars(OF_SIGMA))),
    "ndpdc, version": (OF_NDPDC, OF_NDPDC),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_another_version_has_other_secret_noise_and_salts_and_resumes_no_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, other = VERSIONS[name]
    noise, sigma = first(stage)
    assert torch.equal(first(stage)[0], noise)
    names = [*map(name_of, stage.salts(dealt()))]
    (run := tmp_path / "run").mkdir()
    secret.begun(run, names)
    assert secret.kept(run, [*map(name_of, stage.salts(dealt()))])
    if "version" in name:
        for module in (merf, ndpdc):
            monkeypatch.setattr(module, "DRAWS", module.DRAWS + 1)
    others_noise, others_sigma = first(other)
    assert (noise / sigma - others_noise / others_sigma).std() > 1.2  # sqrt(2), and 0 if they were the same
    others_names = [*map(name_of, other.salts(dealt()))]
    assert not set(names) & set(others_names)
    with pytest.raises(UserError, match="would release twice"):
        secret.kept(run, others_names)


@pytest.mark.parametrize("name", ["merf, sigma", "ndpdc, sigma"])
def test_seeded_noise_is_that_of_what_is_asked_for(name: str) -> None:
    """It hides nothing, so it need not change, and results stay."""
    stage, other = VERSIONS[name]
    (noise, sigma), (others_noise, others_sigma) = (first(each, is_secret=False) for each in (stage, other))
    assert others_sigma == pytest.approx(1.003 * sigma)
    assert torch.allclose(noise / sigma, others_noise / others_sigma, rtol=0, atol=1e-4)


@BOTH
def test_a_sum_that_rounds_otherwise_has_other_secret_noise(stage: MERF | NDPDC) -> None:
    """Else the classes in which nothing differs would be those that a client does not hold."""
    noise, sigma = first(stage)
    assert (noise - first(stage, rounds_otherwise=True)[0]).std() > 1.2 * sigma


def test_noise_hides_one_value_once() -> None:
    for salt in (b"", bytes(32)):
        noise, one = Noise(Source(1, salt)), torch.ones(3)
        of = [noise.call("test").hiding(value).random(4).tolist() for value in (one, one)]
        assert of[0] != of[1]  # calls differ
        again = [Noise(Source(1, salt)).call("test").hiding(value).random(4).tolist() for value in (one, 2 * one)]
        assert again[0] == of[0]
        assert (again[1] == of[0]) == (salt == b"")
    draws = Noise(Source(1)).call("test")
    draws.hiding(one, 1)
    with pytest.raises(ValueError, match="has been drawn"):
        draws.hiding(one, 1)
