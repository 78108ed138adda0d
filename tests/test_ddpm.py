"""The diffusion model: its training step, samplers, average and weights of times against the equations."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from fedcommons import UserError, experiment, generator, set_default_generator
from fedcommons.config.sections import Data
from fedcommons.generators.ddpm import DDPM as Generator
from fedcommons.generators.loop import batch_of
from fedcommons.runs import inputs
from fedcommons.runs.build import prepare
from lightning_modules.ddpm import DDPM

SHAPE, N_CLASSES = (1, 8, 8), 10
DIGITS = inputs.load(Data(limit=48)).train
TINY = Generator(epochs=1, batch_size=16, lr=1e-3, channels=(8, 16), timesteps=20, sampler="ddim", sampling_steps=4)
PREDICTIONS = pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])


def model(**constants: Any) -> DDPM:
    set_default_generator(0, "weights")
    small = {"channels": (8, 16), "lr": 1e-3, "timesteps": 20, **constants}
    return DDPM(shape=SHAPE, n_classes=N_CLASSES, **small)


def test_what_it_is_not_defined_for_is_refused() -> None:
    def check(**change: Any) -> None:
        part = replace(TINY, **change)
        part.check({})
        part.check_shape((1, 28, 28), "mnist")

    check(timesteps=4, channels=(8, 8, 8))
    for change, words in (
        ({"timesteps": 3}, r"generator\.sampling_steps .*at most .*3"),
        ({"channels": (8,)}, r"generator\.channels .*two or more"),
        ({"channels": (8, 12)}, r"generator\.channels .*of 8"),
        ({"channels": (8,) * 4}, "multiple of 8, and mnist has 28"),
        ({"channels": (80_000,) * 2}, "smaller generator"),
    ):
        with pytest.raises(UserError, match=words):
            check(**change)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_start_noise_is_fresh_in_every_batch_of_samples_and_keyed_by_the_seed(sampler: str) -> None:
    """ddim draws nothing after the start: equal start noise would give equal images."""
    labels = torch.full((6,), 7)
    first, again, other = (model().sample(labels, seed, sampler=sampler, steps=2, batch_size=2) for seed in (0, 0, 1))
    assert len({image.numpy().tobytes() for image in first}) == 6
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Network(torch.nn.Module):
    def __init__(self, predict: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor, t: Tensor, class_labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=self.predict(x, t))


def test_samples_are_clipped_before_they_are_quantised() -> None:
    # a model that predicts no noise leaves pixels far outside [-1, 1]; wrapped around, they would be of any grey
    ddpm: Any = model()
    ddpm.unet = Network(lambda x, t: torch.zeros_like(x))
    ddpm.schedule = DDPMScheduler(20, clip_sample=False, beta_start=0.02, beta_end=0.2)
    start = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    images = ddpm.sample(torch.zeros(3, dtype=torch.int64), 0, sampler="ddim", steps=20)
    # noise-free ddim divides x by sqrt(abar) on the way: the sign of the start decides black or white
    assert torch.equal(images[start.abs() > 0.9] > 127, start[start.abs() > 0.9] > 0)
    assert set(images[start.abs() > 0.9].tolist()) == {0, 255}


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
@PREDICTIONS
def test_a_training_step_equals_the_formula_with_the_same_draws(prediction: str, schedule: str, flip: bool) -> None:
    n, steps = 16, 1000
    ddpm = model(seed=3, schedule=schedule, timesteps=steps, flip=flip, prediction=prediction)
    images, y = DIGITS.x[:n], DIGITS.y[:n]
    draws = torch.Generator().manual_seed(3)
    t = torch.randint(steps, (n,), generator=draws)
    noise = torch.randn(n, *SHAPE, generator=draws)
    x = images.double() / 255 * 2 - 1  # [-1, 1]
    if flip:
        mirrored = torch.rand(n, 1, 1, 1, generator=draws) < 0.5
        assert 0 < mirrored.sum() < n
        x = torch.stack([image.flip(-1) if m else image for image, m in zip(x, mirrored, strict=True)])
    if schedule == "linear":  # Ho et al.: beta from 1e-4 to 0.02
        abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps, dtype=torch.float64), 0)
    else:  # Nichol & Dhariwal, eq. 17, betas capped at 0.999
        f = torch.cos((torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * torch.pi / 2) ** 2
        abar = torch.cumprod(1 - (1 - f[1:] / f[:-1]).clamp(max=0.999), 0)
    a = abar[t].view(-1, 1, 1, 1)
    noisy = (a.sqrt() * x + (1 - a).sqrt() * noise).float()
    target = {"epsilon": noise, "sample": x, "v_prediction": a.sqrt() * noise - (1 - a).sqrt() * x}[prediction].float()
    with torch.no_grad():
        wanted = (ddpm.unet(noisy, t, class_labels=y).sample - target).square().mean()
        loss = ddpm.training_step((images, y), 0)
        assert ddpm.training_step((images, y), 0) != loss  # fresh noise in every step
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
@PREDICTIONS
def test_a_perfect_prediction_of_each_kind_draws_the_image(prediction: str, sampler: str) -> None:
    ddpm: Any = model(prediction=prediction, timesteps=100)
    x, abar = DIGITS.x[:1] / 127.5 - 1, ddpm.schedule.alphas_cumprod

    def perfect(noisy: Tensor, t: Tensor) -> Tensor:
        a = abar[t].view(-1, 1, 1, 1)
        noise = (noisy - a.sqrt() * x) / (1 - a).sqrt()
        kinds = {"epsilon": noise, "sample": x + 0 * noisy, "v_prediction": a.sqrt() * noise - (1 - a).sqrt() * x}
        return kinds[prediction]

    ddpm.unet = Network(perfect)
    images = ddpm.sample(torch.zeros(3, dtype=torch.int64), 0, sampler=sampler, steps=20)
    assert (images.int() - DIGITS.x[:1].int()).abs().max() <= 1  # of 255
    rows = DIGITS.x[:1].expand(8, *SHAPE), torch.zeros(8, dtype=torch.int64)
    assert ddpm.training_step(rows, 0) < 1e-8
    assert ddpm.losses(*rows, seed=0).max() < 1e-8


@pytest.mark.parametrize("gamma", [0.5, 5.0, 1e6])
@PREDICTIONS
def test_min_snr_weighs_the_error_of_the_image_whatever_is_predicted(prediction: str, gamma: float) -> None:
    """Hang et al. 2023: w_t = min(SNR_t, gamma) of ||x - x_theta||^2."""
    ddpm = model(prediction=prediction, snr_gamma=gamma, schedule="squaredcos_cap_v2")
    t = torch.arange(len(DIGITS)) % 19  # at T the cosine schedule leaves no image
    noise = torch.randn(len(DIGITS), 1, 8, 8, generator=generator(0, "noise"))
    x, abar = DIGITS.x / 127.5 - 1, ddpm.schedule.alphas_cumprod[t]
    a = abar.view(-1, 1, 1, 1)
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    output = ddpm.unet(noisy, t, class_labels=DIGITS.y).sample
    image = {
        "sample": output,
        "epsilon": (noisy - (1 - a).sqrt() * output) / a.sqrt(),
        "v_prediction": a.sqrt() * noisy - (1 - a).sqrt() * output,
    }[prediction]
    expected = ((abar / (1 - abar)).clamp(max=gamma) * (image - x).square().flatten(1).mean(1)).mean()
    torch.testing.assert_close(ddpm(DIGITS.x, DIGITS.y, t, noise), expected, rtol=1e-3, atol=1e-6)


def test_the_average_warms_up_to_its_decay_and_is_what_samples_are_drawn_with() -> None:
    # min(decay, (1 + k)/(10 + k)), k counting steps, as diffusers' EMAModel has it; step k = 0 copies the weights
    decay = 0.4
    ddpm = model(ema_decay=decay)
    name, parameter = next(iter(ddpm.unet.named_parameters()))
    average, keep = torch.zeros_like(parameter), 0.0
    for k in range(12):
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)))
        ddpm.on_train_batch_end()
        keep = min(decay, (1 + k) / (10 + k)) if k else 0.0
        average = keep * average + (1 - keep) * parameter.detach()
        torch.testing.assert_close(ddpm.average.shadow_params[0], average, atol=1e-6, rtol=1e-6)
    assert keep == decay  # reached: (1 + 11)/(10 + 11) is above it
    torch.testing.assert_close(ddpm.averaged()[name], average, atol=1e-6, rtol=1e-6)


def test_every_client_runs_the_steps_of_the_config_and_less_than_a_pass_more() -> None:
    for n, batch, steps, even in product((1, 7, 16, 100, 129), (1, 16, 64), (1, 10, 500), (False, True)):
        of_client = replace(TINY, batch_size=batch, steps=steps, even_batches=even).for_images(n)
        of_pass = ceil(n / batch_of(n, batch, even))
        assert steps <= of_client.epochs * of_pass < steps + of_pass
        assert of_client.steps is None
    assert TINY.for_images(5) is TINY
    values = {"sharing.setting": "shuffled_synthetic", "data.limit": 100, "generator.batch_size": 8,
              "generator.steps": 12, "partition.name": "quantity"}  # fmt: skip
    needs = prepare(experiment("smoke", values=values)).needs
    assert [need.epochs for need in needs] == [ceil(12 / ceil(len(need.examples) / 8)) for need in needs]
