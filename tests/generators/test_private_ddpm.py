"""The private diffusion model: its receipts, its steps, what it shares with the plain one, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from broken_noise import OfNoData
from torch import Tensor

from fedcommons import Experiment, Receipt, UserError
from fedcommons.config import schema as config
from fedcommons.config.dotted import choose
from fedcommons.generators.ddpm import PrivateDDPM
from fedcommons.privacy.accountants import epsilon
from fedcommons.privacy.noise import Source
from fedcommons.privacy.release import SAMPLED_GAUSSIAN
from fedcommons.runs.build import build, load

N_CLASSES = 10
DIGITS = load(config.Data(limit=36)).train
TINY = PrivateDDPM(
    epochs=1, batch_size=12, lr=1e-3, channels=(8, 16), timesteps=20, sampler="ddim", sampling_steps=4,
    noise_multiplier=1.5, draws=2,
)  # fmt: skip


def fit(generator: PrivateDDPM = TINY, seed: int = 0, **more: Any) -> Mapping[str, Tensor]:
    return generator.fit(DIGITS, N_CLASSES, seed, [1], **more)[1].weights


TARGET: dict[str, Any] = {"generator__noise_multiplier": None, "generator__target_epsilon": 3.0}


def experiment(**values: Any) -> Experiment:
    """Four clients with 359 digits each, and a pool of private images."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return choose(
        {
            "data.name": "digits", "partition.name": "iid", "partition.n_clients": 4, "data.validation": 0.0,
            "sharing.setting": "shuffled_synthetic", "generator.name": "private_ddpm", "generator.batch_size": 60,
            "generator.noise_multiplier": 2.0, "generator.channels": (8, 16), "generator.timesteps": 20,
            "generator.sampling_steps": 4, "generator.sampler": "ddim", "generator.epochs": 1, **named,
        }
    )  # fmt: skip


@pytest.mark.parametrize("target_epochs", [None, 5])
@pytest.mark.long
def test_each_size_has_the_noise_with_which_its_target_is_reached(target_epochs: int | None) -> None:
    generator = replace(TINY, batch_size=36, noise_multiplier=None, target_epsilon=4.0, target_epochs=target_epochs)
    last, sigmas = target_epochs or 1, []
    for n in (len(DIGITS), 200):
        sigmas.append(generator.sigma(n))
        steps = -(-n // 36)
        assert 3.99 <= epsilon(36 / n, sigmas[-1], last * steps, 1e-5) <= 4.0
    assert len(set(sigmas)) == 2
    receipt = generator.fit(DIGITS, N_CLASSES, 0, [1])[1].receipt
    assert receipt is not None
    assert (receipt.sigma, receipt.steps) == (sigmas[0], 1)


@pytest.mark.long
def test_every_constant_changes_a_training_but_not_the_size_of_the_pieces() -> None:
    noise = OfNoData(Source(0))  # secret noise differs with each constant

    def flat(more: dict[str, Any], **change: Any) -> Tensor:
        return torch.cat([t.reshape(-1) for t in fit(replace(TINY, **change), **more).values()])

    plain = flat({"noise": noise})
    for change in ({"noise_multiplier": 3.0}, {"clip": 0.1}, {"draws": 1}, {"lr": 2e-3}):
        assert not torch.equal(flat({"noise": noise}, **change), plain), change
    pieces = flat({}, physical_batch=5) - flat({})
    assert pieces.abs().max() < 0.02 * TINY.lr  # Adam's first steps move every weight by lr
    both = TINY.fit(DIGITS, N_CLASSES, 0, [1, 2])
    assert [both[e].receipt for e in (1, 2)] == [
        Receipt(SAMPLED_GAUSSIAN, q=12 / 36, sigma=1.5, sensitivity=1.0, steps=3 * e) for e in (1, 2)
    ]


def test_nothing_but_sampling_and_length_shares_noise_between_two_trainings() -> None:

    def draw(flip: bool = False, seed: int = 0, **change: Any) -> tuple[float, ...]:
        changed = {f"generator__{name}": value for name, value in change.items()}
        prepared = build(experiment(seed=seed, data__limit=40, generator__batch_size=5, **changed))
        need = replace(prepared.requests[0], flip=flip)
        return tuple(need.noise.call("any", need.examples.x).stream("noise", 0).random(4).tolist())

    same: list[dict[str, Any]] = [{"epochs": 9}, {"sampler": "ddpm"}, {"sampling_steps": 3}]
    others: list[dict[str, Any]] = [
        {}, {"noise_multiplier": 1.6}, {"lr": 3e-3}, {"clip": 2.0}, {"draws": 3}, {"seed": 1}, {"flip": True}
    ]  # fmt: skip
    assert {draw(**change) for change in same} == {draw()}
    assert len({number for change in others for number in draw(**change)}) == 4 * len(others)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [({"generator__target_epsilon": 1.0}, "generator.noise_multiplier, not both"),
     ({**TARGET, "generator__target_epsilon": 100.1, "generator__accountant": "prv"}, "at most 100 with .* prv"),
     ({"generator__target_epochs": 3}, "generator.target_epochs is for generator.target_epsilon"),
     ({"generator__delta": 1e-6}, "generator.delta must be dp.delta = 1e-05, got 1e-06"),
     ({"generator__delta": 0.01, "dp__delta": 0.01}, "delta must be below 1/n = 0.00372.*client 0.*269"),
     ({"generator__batch_size": 270}, "batch_size must be at most .* client 0's generator is trained on 269"),
     ({"generator__channels": (8,)}, "generator.channels must be two or more multiples of 8"),
     ({"generator__physical_batch": 10**8}, "smaller generator.physical_batch"),
     ({**TARGET, "generator__target_epsilon": 0.05}, "client 0: .* noise multiplier above 100"),
     ({**TARGET, "generator__epochs": 9, "generator__target_epochs": 8}, "target_epochs must be at least .* = 9")],
)  # fmt: skip
def test_a_run_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build(experiment(**values))


def test_the_limits_are_allowed() -> None:
    build(experiment(generator__batch_size=269))
    build(experiment(**TARGET, generator__epochs=9, generator__target_epochs=9))
