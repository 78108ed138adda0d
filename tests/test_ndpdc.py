"""NDPDC: random networks and sums of their features, rates and sigmas, the fit beside a slow loop, the epsilon."""

from dataclasses import replace

import pytest
import torch
from cut_clients import SHAPE, clients, some
from torch import Tensor

from fedcommons import Examples
from fedcommons.accounting.privacy import Ledger
from fedcommons.core.accountants import epsilon
from fedcommons.generators.condensation import Networks, clipped, pixels, sums
from fedcommons.seeds import generator, keyed_globals
from fedcommons.sharing.ndpdc import NDPDC
from fedcommons.sharing.stage import share
from lightning_modules.networks import ConvNet

SMALL = NDPDC(noise_multiplier=1.0, iterations=3, per_class=2, batch=2, width=8)


def networks(seed: int = 0, scale: int | None = None, augment: str = "none", flip: bool = False) -> Networks:
    return Networks(SHAPE, 10, 8, scale, augment, flip, seed)


@pytest.mark.parametrize("augment", ["none", "all"])
def test_an_image_adds_a_vector_of_at_most_norm_one_to_its_class_alone_and_a_blank_one_nothing(augment: str) -> None:
    examples, phi = some(20), networks(5, 1, augment, True).at(0)
    whole = sums(phi, examples, 10)
    for i in range(20):
        x = examples.x.float()
        x[i] = torch.nan
        moved = whole - sums(phi, Examples(x, examples.y), 10)
        assert 0.5 < moved.norm() <= 1 + 1e-5
        assert moved[examples.y[i]].norm() == pytest.approx(moved.norm().item(), abs=1e-5)
        loud = examples.x.float()
        loud[i] *= 1e6
        assert (sums(phi, Examples(loud, examples.y), 10) - sums(phi, Examples(x, examples.y), 10)).norm() <= 1 + 1e-5


def test_only_features_that_are_too_long_are_cut() -> None:
    features = torch.tensor([[0.3, 0.4], [3.0, 4.0], [torch.inf, 0.0], [torch.nan, 1.0]])
    assert torch.allclose(clipped(features), torch.tensor([[0.3, 0.4], [0.6, 0.8], [0.0, 0.0], [0.0, 0.0]]))


def test_every_step_has_a_network_and_an_augmentation_of_its_own_which_all_can_draw_again() -> None:
    x, y = pixels(some(5).x), torch.arange(5)
    first = networks().at(0)(x, y)
    assert torch.equal(networks().at(0)(x, y), first)
    for other in (networks().at(1), networks(1).at(0)):
        assert (other(x, y) - first).norm() > 0.1
    copies = pixels(some(1).x).expand(3, -1, -1, -1)
    one, same, other = networks(0, 1, "all").at(0)(copies, torch.tensor([3, 3, 4]))
    assert torch.equal(one, same)
    assert (one - other).norm() > 0.1


def test_the_rate_follows_public_numbers_and_is_one_for_small_clients() -> None:
    stage = NDPDC(noise_multiplier=1.0)
    assert stage.rate(60_000, 10) == pytest.approx(1 / 120)
    assert replace(stage, class_size=5421).rate(60_000, 10) == pytest.approx(50 / 5421)
    assert stage.rate(500, 10) == stage.rate(129, 10) == stage.rate(0, 10) == 1


def test_a_label_decides_nothing_but_the_row_its_image_is_added_to() -> None:
    silent, start = replace(SMALL, noise_multiplier=0.0), clients()
    y = start.own.store.y.clone()
    y[7] = (y[7] + 1) % 10
    sender, phi = silent.sender(start, 0), silent.networks(start).at(0)
    relabelled = replace(sender, own=Examples(start.own.store.x, y), draws=silent.sender(start, 0).draws)
    for step in range(6):
        moved = relabelled.message(phi, step).values - sender.message(phi, step).values
        assert moved.norm(dim=1).max() <= 1 + 1e-5
        assert (moved.norm(dim=1) > 1e-5).sum() in (0, 2)
    with pytest.raises(ValueError, match="has been drawn"):  # no message is drawn twice
        sender.message(phi, 0)


@pytest.mark.long
def test_each_image_is_drawn_at_the_rate_whatever_its_class() -> None:
    start, steps = clients(), 400
    sender = replace(SMALL, noise_multiplier=0.0).sender(start, 0)
    assert sender.q == pytest.approx(1 / 3)

    def phi(x: Tensor, y: Tensor) -> Tensor:
        return torch.eye(60)[[int((whole == one).all((1, 2, 3)).nonzero()) for one in x]]

    whole = pixels(start.own.store.x)
    counts = torch.stack([sender.message(phi, step).values.sum(0) for step in range(steps)])
    assert ((counts == 0) | (counts == 1)).all()
    assert ((counts.sum(0) - steps / 3).abs() / (steps * 2 / 9) ** 0.5).max() < 5
    assert (torch.corrcoef(counts.T) - torch.eye(60)).abs().max() < 5 / steps**0.5


@pytest.mark.parametrize("cuts", [(), (17, 40)])
def test_without_noise_and_with_every_image_it_is_distribution_matching(cuts: tuple[int, ...]) -> None:
    """Image by image and class by class, with momentum by hand; rounding alone may differ, by one of 255."""
    stage, start = replace(SMALL, noise_multiplier=0.0, batch=60, iterations=4, lr=0.1), clients(*cuts)
    every, ipc, batch = stage.networks(start), stage.per_class, stage.batch
    images = first = torch.randn(20, *SHAPE, generator=generator(every.seed, "first images"))
    velocity, expected = torch.zeros_like(images), 60 / 10
    for step in range(stage.iterations):
        with keyed_globals(every.seed, "network", step):
            network = ConvNet(SHAPE, 1, stage.width)

        def feature(x: Tensor, network: ConvNet = network) -> Tensor:
            f = network.features[:4](x.unsqueeze(0)).flatten()
            return f / f.norm().clamp(min=1)

        for c in range(10):
            real = torch.zeros(every.size)
            for x in start.own.store.x[start.own.store.y == c]:
                real += feature(x / 255 * 2 - 1).detach()
            mine = [images[c * ipc + k].clone().requires_grad_() for k in range(ipc)]
            matched = batch / ipc * torch.stack([feature(x) for x in mine]).sum(0)
            loss = ((batch / expected * real - matched) ** 2).sum()
            for k, g in enumerate(torch.autograd.grad(loss, mine)):
                velocity[c * ipc + k] = 0.5 * velocity[c * ipc + k] + g
        images = images - 0.1 * velocity
    order = torch.cat([torch.arange(20)[i :: len(cuts) + 1] for i in range(len(cuts) + 1)])
    slow, before = (((of + 1) * 127.5).clamp(0, 255).round()[order] for of in (images, first))
    result = stage.make(start, ()).store[slice(60, None)]
    assert result.y.tolist() == (order // ipc).tolist()
    assert (result.x.float() - slow).abs().max() <= 1
    assert (slow - before).abs().mean() > 2  # they have moved


@pytest.mark.long
@pytest.mark.parametrize("batch", [2, 50])
def test_the_ledgers_epsilon_is_the_accountants(batch: int) -> None:
    stage = NDPDC(target_epsilon=3.0, batch=batch, iterations=20, width=8, per_class=1)
    shared = share(stage, clients(10, 35))
    ledger = Ledger.of([replace(event, commons=True) for event in shared.releases])
    for client, n in enumerate((10, 25, 25)):
        spent = ledger.commons.of(client, 1e-5)
        assert spent == pytest.approx(epsilon(min(1.0, batch * 10 / n), stage.sigma(n, 10), 20, 1e-5), rel=1e-9)
        assert spent == pytest.approx(3.0, abs=0.011)
    assert shared.disclosed == 0
