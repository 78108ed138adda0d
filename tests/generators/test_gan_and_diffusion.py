"""The diffusion model and the GAN: losses, samplers, averages, regularisers and augmentation by their equations."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, product
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedcommons import UserError, experiment, generator, set_default_generator
from fedcommons.audits.membership import Losing
from fedcommons.config.schema import Data
from fedcommons.generators.ddpm import DDPM as Generator
from fedcommons.generators.gan import GAN as GANGenerator
from fedcommons.generators.gan import Course, PrivateGAN
from fedcommons.generators.training_loop import batch_of
from fedcommons.privacy.noise import Noise, Source
from fedcommons.runs.build import build, load
from lightning_modules.ddpm import DDPM
from lightning_modules.gan import GAN, Normed, augmented

SHAPE, N_CLASSES = (1, 8, 8), 10
DIGITS = load(Data(limit=48)).train
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
        ({"channels": (8,) * 4}, "multiple of 8, but mnist has a side of 28"),
        ({"channels": (80_000,) * 2}, "smaller generator"),
    ):
        with pytest.raises(UserError, match=words):
            check(**change)


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
    assert isinstance(TINY, Losing)
    losses = ddpm.losses(DIGITS.x[:6], DIGITS.y[:6], seed=5)  # of no noise: the size of the draws, equal for all images
    assert len({*losses.tolist()}) == 1
    assert float(losses[0]) == pytest.approx(1, abs=0.15)


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
    needs = build(experiment("smoke", values=values)).requests
    assert [need.epochs for need in needs] == [ceil(12 / ceil(len(need.examples) / 8)) for need in needs]


TWELVE = load(Data(limit=22)).train[slice(0, 12)]
X = TWELVE.x / 127.5 - 1


def small_gan(regulariser: str = "spectral", augment: str = "all") -> GAN:
    torch.manual_seed(0)
    return GAN(
        shape=(1, 8, 8), n_classes=10, channels=(4, 8), latent=3, regulariser=regulariser, gamma=2.0, augment=augment
    )  # fmt: skip


def test_the_gradient_of_a_normed_layer_is_equation_12() -> None:
    """(G - <G, W/s> u v^T) / s for a loss with derivative G in W/s."""
    layer = Normed(nn.Linear(5, 4, bias=False)).double()
    layer.u, layer.v = layer.u.double(), layer.v.double()
    layer.iterate(500)
    g = torch.randn(4, 5, dtype=torch.float64)
    result = torch.autograd.grad((layer.weight * g).sum(), layer.layer.weight)[0]
    w = layer.layer.weight.detach()
    u, s, v = torch.linalg.svd(w)
    torch.testing.assert_close(result, (g - (g * w / s[0]).sum() * torch.outer(u[:, 0], v[0])) / s[0])


@pytest.mark.parametrize("regulariser", ["spectral", "r1"])
def test_the_losses_are_the_equations(regulariser: str) -> None:
    gan = small_gan(regulariser)
    fakes, of_fakes = gan.images(TWELVE.y).detach(), TWELVE.y.flip(0)
    first, other = gan.draw(12), gan.draw(12)
    wanted = torch.zeros(())
    for i in range(12):
        x = augmented(X[i : i + 1], first[i : i + 1], "all").requires_grad_()
        real, fake = (
            gan.discriminator(x, TWELVE.y[i : i + 1]),
            gan.judged(fakes[i : i + 1], of_fakes[i : i + 1], other[i : i + 1]),
        )
        slope = torch.autograd.grad(real.sum(), x, create_graph=True)[0].square().sum()
        penalty = slope if regulariser == "r1" else torch.zeros(())  # gamma/2 = 1
        wanted = wanted + ((1 + (-real).exp()).log() + (1 + fake.exp()).log() + penalty).sum() / 12
    result = gan(TWELVE.x, TWELVE.y, fakes, of_fakes, first, other)
    torch.testing.assert_close(result, wanted)
    weights = list(gan.discriminator.parameters())
    pairs = zip(torch.autograd.grad(result, weights), torch.autograd.grad(wanted, weights), strict=True)
    for a, b in pairs:  # R1's second derivatives, too
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["none", "translation", "all"])
@pytest.mark.parametrize("flip", [False, True])
def test_augmentation_treats_each_image_by_itself_and_is_differentiable(kind: str, *, flip: bool) -> None:
    draws = torch.rand(12, 8, generator=torch.Generator().manual_seed(0))
    together = augmented(X, draws, kind, flip)
    one_by_one = [augmented(X[i : i + 1], draws[i : i + 1], kind, flip) for i in range(12)]
    torch.testing.assert_close(together, torch.cat(one_by_one))
    assert torch.equal(together, X) == (kind == "none" and not flip)
    x = X[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: augmented(x, draws[:2].double(), kind, flip), [x])


def test_augmentation_is_what_zhao_et_al_say() -> None:
    """Brightness by up to 1/2, saturation times up to 2, contrast times 1/2 to 3/2."""
    draws = torch.Generator().manual_seed(0)
    x, moved, covered = torch.rand(1, 3, 8, 8, generator=draws) + 1, set(), []
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    for u in torch.rand(200, 8, generator=draws):
        down, right = (int(3 * part) for part in u[3:5])
        window = padded[..., 2 - down : 10 - down, 2 - right : 10 - right]
        assert torch.equal(augmented(x, u[None], "translation"), window)
        moved.add((down, right))
        u[:5] = 0.5  # no colour, no shift
        gone = augmented(torch.ones(1, 1, 8, 8), u[None], "all")[0, 0] == 0
        rows, columns = gone.any(1).nonzero().flatten(), gone.any(0).nonzero().flatten()
        assert gone.sum() == len(rows) * len(columns)
        assert len(rows) == rows[-1] - rows[0] + 1 <= 4
        covered.append(int(gone.sum()))
    assert len(moved) == 9  # by up to 8/8 pixels each way
    assert max(covered) == 16
    for u in torch.rand(50, 8, generator=draws):
        u[3:6] = torch.tensor([0.5, 0.5, 0.0])  # no shift, and the square around the upper edge
        bright = x - 1.5 + (u[0] - 0.5)
        grey = bright.mean(1, keepdim=True)
        saturated = grey + 2 * u[1] * (bright - grey)
        wanted = saturated.mean() + (0.5 + u[2]) * (saturated - saturated.mean())
        torch.testing.assert_close(augmented(x - 1.5, u[None], "all")[..., 2:, :], wanted[..., 2:, :])


def test_images_come_from_a_moving_average_that_warms_up() -> None:
    """Weights of the old average: 1/10, then 2/11, then the decay 0.2 where 3/12 is more."""
    course = Course(GANGenerator(channels=(4, 8), ema_decay=0.2, lr=0.01), small_gan())
    wanted = [p.detach().clone() for p in course.model.generator.parameters()]
    for keep in (1 / 10, 2 / 11, 0.2):
        course.generator_step(TWELVE.y)
        now = course.model.generator.parameters()
        wanted = [keep * old + (1 - keep) * p.detach() for old, p in zip(wanted, now, strict=True)]
    result = course.averaged()
    for (name, p), average in zip(course.model.generator.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(result[name], average)
        assert not torch.equal(result[name], p.detach())


def test_a_step_trains_its_own_network_and_the_power_iteration_follows_the_discriminator() -> None:
    course = Course(GANGenerator(channels=(4, 8), lr=0.1), small_gan())
    states = [deepcopy(course.model)]
    course.discriminator_step(TWELVE.x, TWELVE.y)
    states.append(deepcopy(course.model))
    course.generator_step(TWELVE.y)
    states.append(course.model)
    for network, expected in (("generator", [False, True]), ("discriminator", [True, False])):
        before = [parameters_to_vector(getattr(state, network).parameters()) for state in states]
        assert [not torch.equal(a, b) for a, b in pairwise(before)] == expected
    after = {name: t for name, t in course.model.discriminator.named_buffers() if name.endswith(("u", "v"))}
    states[1].discriminator.iterate()
    assert all(t.equal(states[1].discriminator.get_buffer(name)) for name, t in after.items())


class Watched(PrivateGAN):
    def training(self, *facts: Any) -> Any:
        training = super().training(*facts)

        def recorded() -> None:
            training.after()
            STATES.append((training.draws.get_state(), dict(training.weights())))

        samples: list[list[Tensor]] = []
        for rows in (slice(None), torch.tensor([2])):
            training.draws.manual_seed(5)
            samples.append([*training.draw(30, rows)])
        for together, alone in zip(*samples, strict=True):
            torch.testing.assert_close(together[2:3], alone)  # batch norm does not mix them
        return replace(training, after=recorded)


STATES: list[tuple[Tensor, dict[str, Tensor]]] = []


@pytest.mark.long
def test_steps_of_a_private_generator_do_not_tell_how_many_images_batches_had() -> None:
    part = Watched(channels=(4, 8), latent=3, batch_size=6, draws=8, noise_multiplier=1.0)
    runs = []
    for key in range(3):
        STATES.clear()
        part.fit(TWELVE, 10, 7, [3], noise=Noise(Source(key)))
        runs.append(STATES[:])
    assert len(runs[0]) > 2
    for other in runs[1:]:
        assert all(a[0].equal(b[0]) for a, b in zip(runs[0], other, strict=True))
    assert any(not a.equal(b) for a, b in zip(runs[0][-1][1].values(), runs[1][-1][1].values(), strict=True))
