"""Secret noise on clients' sums: no two sums have the same, whatever asks for it, and a run goes on with its own alone.

Salts are kept for ever. Were the same noise on two values, their difference would tell the data.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.core.dp_sgd import NoisySum
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
from fedcommons.sharing.random_features import Fourier

OF_MERF = MERF(target_epsilon=1.0, features=40, per_class=2, steps=3)
OF_NDPDC = NDPDC(target_epsilon=1.0, iterations=3, per_class=2, batch=50, width=8)
Change = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))


def dealt(is_secret: bool = True) -> Dealt:
    draws = generator("images of secret sums")
    x = torch.randint(256, (60, 1, 8, 8), generator=draws, dtype=torch.uint8)
    y = torch.randint(10, (60,), generator=draws)
    return Dealt(Clients(Examples(x, y), np.split(np.arange(60), [20])), 10, False, 0, is_secret)


def message(stage: MERF | NDPDC, given: Dealt) -> NoisySum:
    if isinstance(stage, MERF):
        return stage.message(given, 0, stage.phi(given))
    return stage.sender(given, 0).message(stage.networks(given).at(0), 0)


def first(stage: MERF | NDPDC, is_secret: bool = True) -> tuple[Tensor, float]:
    """The noise in a client's first message, and the sigma that it has."""
    noisy = message(stage, dealt(is_secret))
    bare = message(replace(stage, target_epsilon=None, noise_multiplier=0.0), dealt(is_secret))
    return noisy.values - bare.values, noisy.sigma


def _more_noise(patch: pytest.MonkeyPatch) -> None:
    """What another version of the accountant would ask for."""
    of_merf, of_ndpdc = merf.gaussian.noise_for, ndpdc.noise_for
    patch.setattr(merf.gaussian, "noise_for", lambda *of: 1.003 * of_merf(*of))
    patch.setattr(ndpdc, "noise_for", lambda *of: 1.003 * of_ndpdc(*of))


def _other_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NDPDC, "rate", lambda self, n, classes: 0.999)


def _other_features(patch: pytest.MonkeyPatch) -> None:
    """What another default, or another draw, would give."""
    draw, network = Fourier.draw, Networks._network
    patch.setattr(Fourier, "draw", lambda *of: Fourier(draw(*of).w * 1.01))

    def wider(self: Networks) -> Any:
        made = network(self)
        for weights in made.parameters():
            weights.data *= 1.01
        return made

    patch.setattr(Networks, "_network", wider)


def _other_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(merf, "DRAWS", merf.DRAWS + 1)
    patch.setattr(ndpdc, "DRAWS", ndpdc.DRAWS + 1)


CASES = [
    *((stage, how) for stage in (OF_MERF, OF_NDPDC) for how in (_more_noise, _other_features, _other_version)),
    (replace(OF_NDPDC, target_epsilon=None, noise_multiplier=5.0), _other_rate),
]


@pytest.mark.parametrize(("stage", "change"), CASES)
def test_other_sums_or_another_sigma_have_other_secret_noise_and_other_salts(
    stage: MERF | NDPDC, change: Change, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a run that was begun with the former ones is not resumed."""
    noise, sigma = first(stage)
    assert torch.equal(first(stage)[0], noise)
    told = [*map(name_of, stage.salts(dealt()))]
    (run := tmp_path / "run").mkdir()
    secret.begun(run, told)
    assert secret.kept(run, [*map(name_of, stage.salts(dealt()))])
    change(monkeypatch)
    other, of_other = first(stage)
    assert (noise / sigma - other / of_other).std() > 1.2  # sqrt(2), and 0 if they were the same
    now = [*map(name_of, stage.salts(dealt()))]
    assert not set(told) & set(now)
    with pytest.raises(UserError, match="would release twice"):
        secret.kept(run, now)


@pytest.mark.parametrize("stage", [OF_MERF, OF_NDPDC])
def test_seeded_noise_is_that_of_what_is_asked_for(stage: MERF | NDPDC, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hides nothing, so it need not change, and results stay."""
    noise, sigma = first(stage, is_secret=False)
    _more_noise(monkeypatch)
    other, of_other = first(stage, is_secret=False)
    assert of_other == pytest.approx(1.003 * sigma)
    assert torch.allclose(noise / sigma, other / of_other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [OF_MERF, OF_NDPDC])
def test_a_sum_that_rounds_otherwise_has_other_secret_noise(
    stage: MERF | NDPDC, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the classes in which nothing differs would be those that a client does not hold."""
    module = "sharing.merf" if isinstance(stage, MERF) else "generators.condensation"
    noise, sigma = first(stage)
    exact = __import__(f"fedcommons.{module}", fromlist=["sums"]).sums
    monkeypatch.setattr(f"fedcommons.{module}.sums", lambda *of: exact(*of) * (1 + 2.0**-50))
    other, _ = first(stage)
    assert (noise - other).std() > 1.2 * sigma


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
