"""The GAN: its losses, the two regularisers and the augmentation, each against its equation."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedcommons.config import experiment as config
from fedcommons.core.noise import Noise, Source
from fedcommons.generators.gan import GAN as Generator
from fedcommons.generators.gan import Course
from fedcommons.generators.private_gan import PrivateGAN
from fedcommons.runs import inputs
from lightning_modules.gan import GAN, Normed, augmented

DIGITS = inputs.load(config.Data(limit=22)).train[slice(0, 12)]
X = DIGITS.x / 127.5 - 1


def model(regulariser: str = "spectral", augment: str = "all") -> GAN:
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
    gan = model(regulariser)
    fakes, of_fakes = gan.images(DIGITS.y).detach(), DIGITS.y.flip(0)
    one, other = gan.draw(12), gan.draw(12)
    wanted = torch.zeros(())
    for i in range(12):
        x = augmented(X[i : i + 1], one[i : i + 1], "all").requires_grad_()
        real, fake = (
            gan.discriminator(x, DIGITS.y[i : i + 1]),
            gan.judged(fakes[i : i + 1], of_fakes[i : i + 1], other[i : i + 1]),
        )
        slope = torch.autograd.grad(real.sum(), x, create_graph=True)[0].square().sum()
        penalty = slope if regulariser == "r1" else torch.zeros(())  # gamma/2 = 1
        wanted = wanted + ((1 + (-real).exp()).log() + (1 + fake.exp()).log() + penalty).sum() / 12
    result = gan(DIGITS.x, DIGITS.y, fakes, of_fakes, one, other)
    torch.testing.assert_close(result, wanted)
    weights = list(gan.discriminator.parameters())
    pairs = zip(torch.autograd.grad(result, weights), torch.autograd.grad(wanted, weights), strict=True)
    for a, b in pairs:  # R1's second derivatives, too
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["none", "translation", "all"])
@pytest.mark.parametrize("flip", [False, True])
def test_augmentation_treats_each_image_by_itself_and_is_differentiable(kind: str, *, flip: bool) -> None:
    drawn = torch.rand(12, 8, generator=torch.Generator().manual_seed(0))
    together = augmented(X, drawn, kind, flip)
    one_by_one = [augmented(X[i : i + 1], drawn[i : i + 1], kind, flip) for i in range(12)]
    torch.testing.assert_close(together, torch.cat(one_by_one))
    assert torch.equal(together, X) == (kind == "none" and not flip)
    x = X[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: augmented(x, drawn[:2].double(), kind, flip), [x])


def test_augmentation_is_what_zhao_et_al_say() -> None:
    """Translation by whole pixels, filled with zeros; a square of half the side cut out; brightness by up to 1/2.

    Saturation times up to 2, contrast times 1/2 to 3/2.
    """
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
    course = Course(Generator(channels=(4, 8), ema_decay=0.2, lr=0.01), model())
    wanted = [p.detach().clone() for p in course.model.generator.parameters()]
    for keep in (1 / 10, 2 / 11, 0.2):
        course.generator_step(DIGITS.y)
        now = course.model.generator.parameters()
        wanted = [keep * old + (1 - keep) * p.detach() for old, p in zip(wanted, now, strict=True)]
    result = course.averaged()
    for (name, p), average in zip(course.model.generator.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(result[name], average)
        assert not torch.equal(result[name], p.detach())


def test_a_step_trains_its_own_network_and_the_power_iteration_follows_the_discriminator() -> None:
    course = Course(Generator(channels=(4, 8), lr=0.1), model())
    states = [deepcopy(course.model)]
    course.discriminator_step(DIGITS.x, DIGITS.y)
    states.append(deepcopy(course.model))
    course.generator_step(DIGITS.y)
    states.append(course.model)
    for network, expected in (("generator", [False, True]), ("discriminator", [True, False])):
        before = [parameters_to_vector(getattr(state, network).parameters()) for state in states]
        assert [not torch.equal(a, b) for a, b in pairwise(before)] == expected
    after = {name: t for name, t in course.model.discriminator.named_buffers() if name.endswith(("u", "v"))}
    states[1].discriminator.iterate()
    assert all(t.equal(states[1].discriminator.get_buffer(name)) for name, t in after.items())


class Watched(PrivateGAN):
    """Records, after every step of the discriminator and the generator, the state of what all can draw again."""

    def train(self, *of: Any, draws: torch.Generator, after: Any, weights: Any, **more: Any) -> Any:
        def recorded() -> None:
            after()
            STATES.append((draws.get_state(), weights()))

        drawn: list[list[Tensor]] = []
        for rows in (slice(None), torch.tensor([2])):
            draws.manual_seed(5)
            drawn.append(of[3](30, rows))
        for together, alone in zip(*drawn, strict=True):
            torch.testing.assert_close(together[2:3], alone)  # batch norm does not mix them
        return super().train(*of, draws=draws, after=recorded, weights=weights, **more)


STATES: list[tuple[Tensor, dict[str, Tensor]]] = []


@pytest.mark.long
def test_steps_of_a_private_generator_do_not_tell_how_many_images_batches_had() -> None:
    part = Watched(channels=(4, 8), latent=3, batch_size=6, draws=8, noise_multiplier=1.0)
    runs = []
    for key in range(3):
        STATES.clear()
        part.fit(DIGITS, 10, 7, [3], noise=Noise(Source(key)))
        runs.append(STATES[:])
    assert len(runs[0]) > 2
    for other in runs[1:]:
        assert all(a[0].equal(b[0]) for a, b in zip(runs[0], other, strict=True))
    assert any(not a.equal(b) for a, b in zip(runs[0][-1][1].values(), runs[1][-1][1].values(), strict=True))
