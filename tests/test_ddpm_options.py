"""The DDPM's steps in place of epochs, min-SNR weights, and training in bf16."""

from dataclasses import replace
from itertools import product
from math import ceil

import pytest
import torch
from torch import Tensor

from fedcommons import experiment
from fedcommons.artifacts import key_of
from fedcommons.config.sections import Data
from fedcommons.data.examples import Examples
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.loop import batch_of
from fedcommons.runs import inputs
from fedcommons.runs.build import prepare
from fedcommons.seeds import generator, set_default_generator
from lightning_modules import ddpm

TINY = DDPM(epochs=2, batch_size=16, channels=(8, 16), timesteps=20, sampling_steps=4, lr=1e-3)
IMAGES: Examples = inputs.load(Data(limit=48)).train


def test_every_client_makes_the_steps_that_are_asked_for_and_less_than_a_pass_more() -> None:
    for n, batch, steps, even in product((1, 7, 16, 100, 129), (1, 16, 64), (1, 10, 500), (False, True)):
        found = replace(TINY, batch_size=batch, steps=steps, even_batches=even).for_images(n)
        of_pass = ceil(n / batch_of(n, batch, even))
        assert steps <= found.epochs * of_pass < steps + of_pass
        assert found.steps is None
    assert TINY.for_images(5) is TINY


def test_it_is_the_training_of_those_epochs_under_the_same_key() -> None:
    values = {"sharing.setting": "shuffled_synthetic", "data.limit": 100, "generator.batch_size": 8,
              "partition.name": "quantity"}  # fmt: skip
    asked = prepare(experiment("smoke", values={**values, "generator.steps": 12})).needs
    sizes = [len(need.examples) for need in asked]
    assert len(set(sizes)) > 1
    assert [need.epochs for need in asked] == [ceil(12 / ceil(n / 8)) for n in sizes]
    for need in asked:
        explicit = prepare(experiment("smoke", values={**values, "generator.epochs": need.epochs})).needs[need.client]
        assert key_of(explicit.images_facts) == key_of(need.images_facts)


def _model(prediction: str, gamma: float | None = None) -> ddpm.DDPM:
    set_default_generator("initial weights of the tests")
    more = {"prediction": prediction, "snr_gamma": gamma, "schedule": "squaredcos_cap_v2"}
    return ddpm.DDPM(shape=(1, 8, 8), n_classes=10, channels=(8, 16), lr=1e-3, timesteps=20, **more)  # pyright: ignore


def _of_images(model: ddpm.DDPM, t: Tensor, noise: Tensor) -> Tensor:
    """(n,), the squared error of the image that the prediction means."""
    x = IMAGES.x / 127.5 - 1
    abar = model.schedule.alphas_cumprod[t].view(-1, 1, 1, 1)
    noisy = abar.sqrt() * x + (1 - abar).sqrt() * noise
    said = model.unet(noisy, t, class_labels=IMAGES.y).sample
    image = {
        "sample": said,
        "epsilon": (noisy - (1 - abar).sqrt() * said) / abar.sqrt(),
        "v_prediction": abar.sqrt() * noisy - (1 - abar).sqrt() * said,
    }[model.prediction]
    return (image - x).square().flatten(1).mean(1)


@pytest.mark.parametrize("gamma", [0.5, 5.0, 1e6])
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_min_snr_weighs_the_error_of_the_image_whatever_is_predicted(prediction: str, gamma: float) -> None:
    """Hang et al. 2023: w_t = min(SNR_t, gamma) of ||x - x_theta||^2."""
    model = _model(prediction, gamma)
    t = torch.arange(len(IMAGES)) % 19  # at T the cosine schedule leaves no image, and eps tells nothing of it
    noise = torch.randn(len(IMAGES), 1, 8, 8, generator=generator(0, "noise"))
    abar = model.schedule.alphas_cumprod[t]
    expected = ((abar / (1 - abar)).clamp(max=gamma) * _of_images(model, t, noise)).mean()
    torch.testing.assert_close(model(IMAGES.x, IMAGES.y, t, noise), expected, rtol=1e-3, atol=1e-6)


def test_a_large_gamma_leaves_the_errors_of_the_noise_alike() -> None:
    t, noise = torch.arange(len(IMAGES)) % 20, torch.randn(len(IMAGES), 1, 8, 8, generator=generator(0, "noise"))
    plain, weighed = (_model("epsilon", gamma)(IMAGES.x, IMAGES.y, t, noise) for gamma in (None, 1e6))
    torch.testing.assert_close(weighed, plain)


def _trained(part: DDPM) -> dict[str, Tensor]:
    return dict(part.fit(IMAGES, 10, 0, {2})[2].weights)


def test_bf16_is_near_fp32_and_not_the_same_and_its_weights_stay_float32() -> None:
    full, half = _trained(TINY), _trained(replace(TINY, precision="bf16"))
    assert {t.dtype for t in half.values() if t.is_floating_point()} == {torch.float32}
    start = dict(TINY.build((1, 8, 8), 10, 0).unet.state_dict())
    moved = sum(float((full[name] - start[name]).norm()) for name in full)
    off = sum(float((full[name] - half[name]).norm()) for name in full)
    assert 0 < off < moved


def test_weights_of_times_change_what_is_learnt() -> None:
    full, weighed = _trained(TINY), _trained(replace(TINY, snr_gamma=5.0))
    assert any(not torch.equal(full[name], weighed[name]) for name in full)
