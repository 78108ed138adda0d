"""The diffusion model and the generator around it, on 8x8 digits with a tiny U-Net."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from fedcommons.config import experiment as config
from fedcommons.config.flat import override
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.ddpm import DDPM as Generator
from fedcommons.runs import inputs
from fedcommons.runs.build import prepare
from fedcommons.seeds import set_default_generator
from lightning_modules.ddpm import DDPM

SHAPE, N_CLASSES = (1, 8, 8), 10
DIGITS = inputs.load(config.Data(limit=48)).train
TINY = Generator(
    epochs=1, batch_size=16, lr=1e-3, channels=(8, 16), timesteps=20, sampler="ddim", sampling_steps=4
)  # three steps


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """More threads would round differently, and on so little are slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(
    *, seed: int = 0, timesteps: int = 20, lr: float = 1e-3, schedule: str = "linear", ema_decay: float = 0.9995,
    flip: bool = False, prediction: str = "epsilon",
) -> DDPM:  # fmt: skip
    """A tiny model whose initial weights are the same whatever its seed."""
    set_default_generator(0, "weights")
    return DDPM(
        shape=SHAPE,
        n_classes=N_CLASSES,
        channels=(8, 16),
        lr=lr,
        timesteps=timesteps,
        schedule=schedule,
        prediction=prediction,
        ema_decay=ema_decay,
        flip=flip,
        seed=seed,
    )


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fit(
    seed: int, generator: Generator = TINY, examples: Examples = DIGITS, *, flip: bool = False
) -> Mapping[str, Tensor]:
    """The weights after the training."""
    return generator.fit(examples, N_CLASSES, seed, [TINY.epochs], flip=flip)[TINY.epochs].weights


@pytest.fixture(scope="module")
def trained() -> Mapping[str, Tensor]:
    return fit(0)


# --- the generator


def test_it_says_that_nothing_protects_it() -> None:
    receipt = TINY.fit(DIGITS, N_CLASSES, 0, [1])[1].receipt
    assert receipt is not None
    assert not receipt.release(0).covered


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"channels": (8,)}, r"generator\.channels must be two or more multiples of 8 \(group norm\), got \[8\]"),
        ({"channels": (8, 12)}, r"generator\.channels must be two or more multiples of 8 \(group norm\)"),
        ({"timesteps": 3}, r"generator\.sampling_steps must be at most generator\.timesteps = 3, got 4"),
    ],
)
def test_what_it_is_not_defined_for_is_refused(change: dict[str, Any], sentence: str) -> None:
    TINY.check({})
    with pytest.raises(UserError, match=sentence):
        replace(TINY, **change).check({})


def test_a_side_that_cannot_be_halved_as_often_is_refused() -> None:
    TINY.check_shape((1, 28, 28), "mnist")
    with pytest.raises(UserError, match=r"has 4 levels, so the image side must be a multiple of 8, and mnist has 28"):
        replace(TINY, channels=(8, 8, 8, 8)).check_shape((1, 28, 28), "mnist")
    with pytest.raises(UserError, match=r"the generator would take .* use a smaller generator\.channels"):
        replace(TINY, channels=(80_000, 80_000)).check_shape((1, 28, 28), "mnist")


def test_one_seed_gives_the_same_weights_bit_for_bit(trained: Mapping[str, Tensor]) -> None:
    torch.manual_seed(99)  # what was drawn before must not matter
    assert same(fit(0), trained)


def test_a_training_is_the_beginning_of_a_longer_one(trained: Mapping[str, Tensor]) -> None:
    n = TINY.epochs
    both = TINY.fit(DIGITS, N_CLASSES, 0, [n, n + 1])
    assert sorted(both) == [n, n + 1]
    assert same(both[n].weights, trained)
    assert same(both[n + 1].weights, TINY.fit(DIGITS, N_CLASSES, 0, [n + 1])[n + 1].weights)
    assert not same(both[n + 1].weights, trained)


def test_another_seed_gives_other_weights(trained: Mapping[str, Tensor]) -> None:
    other = fit(1)
    assert other.keys() == trained.keys()
    assert not same(other, trained)


def test_the_order_of_images_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # a larger network draws more initial weights: drawn from the same generator, the order would change with it
    step, seen = DDPM.training_step, []

    def recorded(self: DDPM, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        seen.extend(image.numpy().tobytes() for image in batch[0])
        return step(self, batch, batch_idx)

    def order(seed: int, channels: tuple[int, ...]) -> list[bytes]:
        seen.clear()
        fit(seed, replace(TINY, channels=channels))
        return seen.copy()

    monkeypatch.setattr(DDPM, "training_step", recorded)
    first = order(0, (8, 16))
    assert len(first) == len(DIGITS)  # an epoch sees every image once
    assert sorted(first) == sorted(image.numpy().tobytes() for image in DIGITS.x)
    assert order(0, (16, 16)) == first
    assert order(1, (8, 16)) != first


def test_weights_are_on_the_cpu_and_of_no_graph(trained: Mapping[str, Tensor]) -> None:
    assert all(t.device.type == "cpu" and not t.requires_grad and t.isfinite().all() for t in trained.values())


def test_fit_sees_every_image_of_the_client_also_where_they_are_fewer_than_a_batch() -> None:
    few = Examples(DIGITS.x[:5], DIGITS.y[:5])
    big = replace(TINY, batch_size=256)
    exact = replace(TINY, batch_size=5)
    assert same(
        fit(0, big, few),
        fit(0, exact, few),
    )


def test_samples_are_uint8_images_one_for_each_label(trained: Mapping[str, Tensor]) -> None:
    labels = torch.tensor([3, 0, 3, 9, 1])
    images = TINY.sample(trained, SHAPE, N_CLASSES, labels, 0)
    assert images.dtype == torch.uint8
    assert images.shape == (5, *SHAPE)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_one_seed_gives_the_same_images_and_another_seed_others(sampler: str, trained: Mapping[str, Tensor]) -> None:
    tiny, labels = replace(TINY, sampler=sampler), torch.arange(6)
    first = tiny.sample(trained, SHAPE, N_CLASSES, labels, 0)
    torch.manual_seed(99)
    assert torch.equal(first, tiny.sample(trained, SHAPE, N_CLASSES, labels, 0))
    assert not torch.equal(first, tiny.sample(trained, SHAPE, N_CLASSES, labels, 1))


def test_two_images_of_one_label_differ(trained: Mapping[str, Tensor]) -> None:
    # ddim draws nothing after the start: equal start noise would give equal images
    images = TINY.sample(trained, SHAPE, N_CLASSES, torch.full((4,), 7), 0)
    assert len({image.numpy().tobytes() for image in images}) == 4


def test_the_label_decides_the_image(trained: Mapping[str, Tensor]) -> None:
    a, b = (TINY.sample(trained, SHAPE, N_CLASSES, torch.full((4,), label), 0) for label in (0, 1))
    assert not torch.equal(a, b)  # the same start noise


# --- the module


def test_start_noise_is_fresh_in_every_batch_of_samples() -> None:
    ddpm = model()
    images = ddpm.sample(torch.full((6,), 7), 0, sampler="ddim", steps=2, batch_size=2)
    assert len({image.numpy().tobytes() for image in images}) == 6


def test_samples_are_clipped_before_they_are_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    # a model that predicts no noise leaves pixels far outside [-1, 1]; wrapped around, they would be of any grey
    ddpm = model()

    class Silent(torch.nn.Module):
        def forward(self, x: Tensor, t: Tensor, class_labels: Tensor):
            return type("Output", (), {"sample": torch.zeros_like(x)})()

    monkeypatch.setattr(ddpm, "unet", Silent())
    monkeypatch.setattr(ddpm, "schedule", DDPMScheduler(20, clip_sample=False, beta_start=0.02, beta_end=0.2))
    start = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    images = ddpm.sample(torch.zeros(3, dtype=torch.int64), 0, sampler="ddim", steps=20)
    # noise-free ddim divides x by sqrt(abar) on the way: the sign of the start decides black or white
    assert torch.equal(images[start.abs() > 0.9] > 127, start[start.abs() > 0.9] > 0)
    assert set(images[start.abs() > 0.9].tolist()) == {0, 255}


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
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
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_a_perfect_prediction_of_each_kind_draws_the_image(
    prediction: str, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All data are one image, so what the network shall predict is known exactly; its loss is zero, too."""
    ddpm, x = model(prediction=prediction, timesteps=100), DIGITS.x[:1] / 127.5 - 1
    abar = ddpm.schedule.alphas_cumprod

    class Perfect(torch.nn.Module):
        def forward(self, noisy: Tensor, t: Tensor, class_labels: Tensor):
            a = abar[t].view(-1, 1, 1, 1)
            noise = (noisy - a.sqrt() * x) / (1 - a).sqrt()
            found = {"epsilon": noise, "sample": x + 0 * noisy, "v_prediction": a.sqrt() * noise - (1 - a).sqrt() * x}
            return type("Output", (), {"sample": found[prediction]})()

    monkeypatch.setattr(ddpm, "unet", Perfect())
    images = ddpm.sample(torch.zeros(3, dtype=torch.int64), 0, sampler=sampler, steps=20)
    assert (images.int() - DIGITS.x[:1].int()).abs().max() <= 1  # of 255
    rows = DIGITS.x[:1].expand(8, *SHAPE), torch.zeros(8, dtype=torch.int64)
    assert ddpm.training_step(rows, 0) < 1e-8
    assert ddpm.losses(*rows, seed=0).max() < 1e-8


def test_steps_draw_fresh_noise_keyed_by_the_seed() -> None:
    batch = DIGITS.x[:8], DIGITS.y[:8]

    def losses(seed: int) -> list[float]:
        ddpm = model(seed=seed)
        with torch.no_grad():
            return [float(ddpm.training_step(batch, 0)) for _ in range(3)]

    first = losses(0)
    torch.manual_seed(99)
    assert losses(0) == first
    assert len(set(first)) == 3
    assert losses(1) != first


@pytest.mark.long
def test_the_loss_falls_in_training() -> None:
    ddpm = model(timesteps=100, lr=3e-3)
    optimizer = ddpm.configure_optimizers()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = ddpm.training_step((DIGITS.x, DIGITS.y), 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 0.9  # an untrained network predicts nothing of noise of variance one
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]


def test_the_average_warms_up_to_its_decay() -> None:
    # min(decay, (1 + k)/(10 + k)), k counting steps, as diffusers' EMAModel has it; step k = 0 copies the weights
    decay = 0.4
    ddpm = model(ema_decay=decay)
    parameter = next(iter(ddpm.unet.parameters()))
    average, keep = torch.zeros_like(parameter), 0.0
    for k in range(12):
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k)))
        ddpm.on_train_batch_end()
        keep = min(decay, (1 + k) / (10 + k)) if k else 0.0
        average = keep * average + (1 - keep) * parameter.detach()
        torch.testing.assert_close(ddpm.average.shadow_params[0], average, atol=1e-6, rtol=1e-6)
    assert keep == decay  # reached: (1 + 11)/(10 + 11) is above it


def test_samples_are_drawn_with_the_average_not_with_the_last_weights() -> None:
    ddpm = model()
    parameter = next(iter(ddpm.unet.parameters()))
    for _ in range(3):
        with torch.no_grad():
            parameter.add_(1)
        ddpm.on_train_batch_end()
    last = parameter.detach().clone()
    state = ddpm.averaged()
    assert torch.equal(parameter, last)  # training goes on where it was
    averaged = state[next(name for name, _ in ddpm.unet.named_parameters())]
    assert not torch.equal(averaged, last)
    assert torch.equal(averaged, ddpm.average.shadow_params[0])


def test_fit_returns_the_average(monkeypatch: pytest.MonkeyPatch, trained: Mapping[str, Tensor]) -> None:
    monkeypatch.setattr(DDPM, "averaged", lambda self: self.unet.state_dict())
    assert not same(fit(0), trained)


def test_mirroring_is_asked_for_and_changes_the_weights(trained: Mapping[str, Tensor]) -> None:
    assert not same(fit(0, flip=True), trained)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"generator.sampling_steps": 1001}, r"generator\.sampling_steps must be at most"),
        ({"generator.channels": (8,) * 5}, r"has 5 levels, so the image side must be a multiple of 16, and digits"),
    ],
)
def test_a_run_asks_it_what_it_refuses_before_any_work(values: dict[str, Any], sentence: str) -> None:
    asked = override(config.Experiment(), {"sharing.setting": "shuffled_synthetic", **values})
    with pytest.raises(UserError, match=sentence):
        prepare(asked)
