"""FedMERF and NDPDC: features, sums, sensitivity, noise, rates, what each party sees, and the fit of images."""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from cut_clients import SHAPE, clients, some
from torch import Tensor

from fedcommons import ClientDatasets, Contributions, Examples, generator
from fedcommons.generators import condensation
from fedcommons.generators.condensation import Networks, clipped
from fedcommons.privacy import gaussian
from fedcommons.privacy.accountants import epsilon
from fedcommons.privacy.dp_sgd import NoisySum
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.statement import statement
from fedcommons.seeding import keyed_globals
from fedcommons.sharing import merf
from fedcommons.sharing.exchange import share
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.merf_generator import CODE, Generator, generate_images, sample_images, train
from fedcommons.sharing.ndpdc import NDPDC
from fedcommons.sharing.random_features import Fourier, bounded, fit_images, means, pixels, sums
from lightning_modules.networks import ConvNet

SMALL = MERF(noise_multiplier=1.0, features=40, per_class=2, steps=3)
PHI = Fourier.draw(64, 200, [8.0], 3)
SERVER, SECURE = "the server without it", "the server under secure aggregation"
OUTSIDERS, ANOTHER = "outsiders, who see images", "another client, which knows its own noise"


def total(stage: MERF, start: ClientDatasets, phi: Fourier = PHI) -> Tensor:
    return sum((stage.message(start, i, phi).values for i in range(len(start.clients))), torch.zeros(()))


def test_features_have_norm_one_and_their_products_are_the_kernel() -> None:
    x, s = torch.rand(40, 64, generator=generator("kernel")), 8.0
    phi = Fourier.draw(64, 40_000, [s], 1)
    assert torch.allclose(phi(x).norm(dim=1), torch.ones(40), atol=1e-5)
    kernel = torch.exp(-(torch.cdist(x, x) ** 2) / (2 * s))
    assert (phi(x) @ phi(x).T - kernel).abs().max() < 5 / sqrt(20_000)
    assert merf.SCALE * 784 == 105  # DP-MERF's for MNIST
    two = Fourier.draw(64, 40_000, [8.0, 2.0], 1)
    assert [half.std().item() for half in two.w.chunk(2)] == pytest.approx([1 / sqrt(8), 1 / sqrt(2)], rel=0.01)


def test_an_image_moves_its_class_by_one_and_another_in_its_place_by_at_most_the_root_of_two() -> None:
    examples, others = some(30), some(30, seed=1)
    whole, largest = sums(PHI, examples, 10), 0.0
    assert whole[:, -1].sum() * sqrt(2) == pytest.approx(30)
    for i in range(30):
        x = examples.x.float() / 255
        x[i] = torch.nan
        moved = whole - sums(PHI, Examples(x, examples.y), 10)
        assert moved[examples.y[i]].norm() == pytest.approx(1.0, abs=1e-5)
        x, y = examples.x.clone(), examples.y.clone()
        x[i], y[i] = others.x[i], others.y[i]
        largest = max(largest, (sums(PHI, Examples(x, y), 10) - whole).norm().item())
    assert 1.0 < largest <= sqrt(2) + 1e-6


def test_sums_are_those_of_their_parts_across_blocks_and_clients() -> None:
    examples = some(5000)
    parts = [sums(PHI, examples[slice(i, i + 700)], 10) for i in range(0, 5000, 700)]
    assert torch.allclose(sums(PHI, examples, 10), torch.stack(parts).sum(0), rtol=0, atol=1e-4)
    silent = replace(SMALL, noise_multiplier=0.0)
    for cuts in ((), (1, 2, 40), tuple(range(1, 60))):
        assert torch.allclose(total(silent, clients(*cuts)), sums(PHI, some(60), 10), rtol=0, atol=1e-5)


class Broken(Fourier):
    """Features that are four times too long, and no numbers in every third row."""

    def __call__(self, x: Tensor) -> Tensor:
        phi = 4 * super().__call__(x)
        return torch.where((torch.arange(len(x)) % 3 == 0)[:, None], phi * torch.tensor([torch.nan, *[1.0] * 199]), phi)


def test_features_that_are_too_long_are_cut_and_those_that_are_no_numbers_are_zero() -> None:
    """Noise does not hide them: a row that is no number would tell that a client holds its class."""
    whole, there = sums(Broken(PHI.w), some(30), 10), some(30)[np.flatnonzero(np.arange(30) % 3 != 0)]
    assert torch.allclose(whole[:, :-1], sums(PHI, there, 10)[:, :-1], rtol=0, atol=1e-5)
    assert torch.equal(whole[:, -1], sums(PHI, some(30), 10)[:, -1])
    rows = torch.tensor([[0.3, 0.4], [3.0, 4.0], [torch.inf, 0.0], [torch.nan, 1.0]])
    for cut in (bounded(torch.clone, rows), clipped(rows)):  # pyright: ignore[reportArgumentType]
        assert torch.allclose(cut, torch.tensor([[0.3, 0.4], [0.6, 0.8], [0.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize(("target", "noise"), [(0.2, "local"), (10.0, "summed")])
def test_the_ledgers_epsilon_is_the_target_and_a_sum_says_that_it_is_one(target: float, noise: str) -> None:
    stage, start = MERF(target_epsilon=target, noise=noise), clients(20, 40)
    _, events = stage.release(start, Contributions.none(start))
    assert [event.client for event in events] == [0, 1, 2]
    for event in events:
        assert gaussian.epsilon(1 / event.sigma, 1e-5) == pytest.approx(target, rel=1e-6)
        assert ("added up" in event.what[0]) == (noise == "summed")
    ledger = Ledger.before_rounds([replace(event, commons=True) for event in events])
    result = statement(ledger, 3, 1e-5, 0, local=True, secret=True, views=stage.views(3))
    assert result["overall"] == pytest.approx(target, rel=1e-6)
    assert f"epsilon = {target:g} at delta = 1e-05" in result["in_words"][-1]


@pytest.mark.parametrize("t", [0, 1, 3, 6, 9])
def test_each_partys_epsilon_counts_only_the_noise_of_clients_that_are_not_missing(t: int) -> None:
    stage = MERF(target_epsilon=2.0, noise="summed", may_miss=t)
    seen, sigma = stage.views(10), stage.sigma_of_each(10)
    terms = {OUTSIDERS: 10 - t, SECURE: 10 - t, SERVER: 1, ANOTHER: max(1, 9 - t), "5 clients together": max(1, 5 - t)}
    assert list(seen) == list(terms)
    for party, n in terms.items():
        epsilon = gaussian.epsilon(seen[party], 1e-5)
        assert gaussian.delta(epsilon, 1 / (sigma * sqrt(n))) == pytest.approx(1e-5, rel=1e-6)
    assert gaussian.epsilon(seen[SECURE], 1e-5) == pytest.approx(2.0, rel=1e-6)


def test_clients_together_have_a_view_where_it_is_not_another_clients() -> None:
    for n, together in ((1, None), (2, None), (3, 2), (4, 2), (5, 2), (6, 3), (40, 20)):
        seen = MERF(target_epsilon=2.0, noise="summed").views(n)
        rows = [party for party in seen if "together" in party]
        assert rows == ([] if together is None else [f"{together} clients together"])
        assert (ANOTHER in seen) == (n > 1)
        assert n != 3 or seen["2 clients together"] == seen[SERVER]


@pytest.mark.long
def test_the_fit_reaches_images_that_have_the_means() -> None:
    """Means of ten images a class that exist: as many fitted ones have them, to a hundredth of where they began."""
    examples = Examples(some(100).x, torch.arange(10).repeat_interleave(10))
    noisy = sums(PHI, examples, 10)
    wanted = PHI(pixels(examples.x)).view(10, 10, -1).mean(1)

    def error(steps: int) -> float:
        images = fit_images(PHI, noisy, SHAPE, 10, steps, seed=0)
        assert images.y.tolist() == examples.y.tolist()
        assert images.x.dtype == torch.uint8
        return ((PHI(pixels(images.x)).view(10, 10, -1).mean(1) - wanted) ** 2).sum().item()

    assert error(300) < 0.01 * error(1)
    none = torch.full((3, PHI.size + 1), -5.0, dtype=torch.float64)  # noise below zero: no class has an image
    assert len(fit_images(PHI, none, SHAPE, 2, 5, seed=0)) == 6


def bars(n: int, seed: int = 0) -> Examples:
    draws = generator(seed, "images of the test")
    x = torch.randint(60, (n, *SHAPE), generator=draws, dtype=torch.uint8)
    y = torch.arange(n) % 4
    for c in range(4):
        x[y == c, :, 2 * c] += 190
    across = torch.rand(n, generator=draws) < 0.5
    return Examples(torch.where(across[:, None, None, None], x.mT, x), y)


def features_of(noisy: Tensor, steps: int) -> Tensor:
    images = generate_images(PHI, noisy, SHAPE, 50, steps, seed=0)
    return torch.stack([PHI(pixels(images.x[images.y == c])).mean(0) for c in range(4)])


def test_the_network_has_the_papers_size_for_mnist_and_draws_images_of_any_sides() -> None:
    network = Generator((1, 28, 28), 10)
    assert sum(each.numel() for each in network.parameters()) == 166_161
    for shape in ((3, 32, 32), (2, 5, 7), (1, 1, 1)):
        images = sample_images(Generator(shape, 3).eval(), 2, seed=0)
        assert (images.x.shape, images.x.dtype) == ((6, *shape), torch.uint8)


@pytest.mark.long
def test_training_brings_means_of_features_to_those_of_the_sums() -> None:
    noisy = sums(PHI, bars(400), 4)
    first, last = (torch.cdist(features_of(noisy, steps), means(noisy)) ** 2 for steps in (1, 200))
    assert last.diag().sum() < 0.05 * first.diag().sum()
    assert last.argmin(1).tolist() == [0, 1, 2, 3]


def test_the_rate_falls_by_a_tenth_after_each_fifth_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    class Recorded(torch.optim.Adam):
        def step(self, *arguments: Any, **how: Any) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(*arguments, **how)

    monkeypatch.setattr(torch.optim, "Adam", Recorded)
    train(PHI, sums(PHI, bars(40), 4), SHAPE, 10, seed=0)
    assert rates == pytest.approx([0.01 * 0.9 ** (i // 2) for i in range(10)])


def test_images_do_not_depend_on_one_another() -> None:
    network = train(PHI, sums(PHI, bars(40), 4), SHAPE, 3, seed=0)
    images = sample_images(network, 5, seed=0)
    codes = torch.randn(20, CODE, generator=generator(0, "codes of images"))
    assert len(images.x.flatten(1).unique(dim=0)) == 20
    with torch.no_grad():
        for i in range(20):
            image = (255 * network(codes[i : i + 1], images.y[i : i + 1])).round()
            assert (image - images.x[i].float()).abs().max() <= 1  # sums in another order


SENT: list[NoisySum] = []


class Sent(MERF):
    def message(self, client_data: ClientDatasets, client: int, phi: Fourier) -> NoisySum:
        return SENT[client]


@pytest.mark.parametrize("fit", ["generator", "images"])
def test_images_follow_from_the_release_alone(fit: str) -> None:
    constants: dict[str, Any] = {"noise_multiplier": 1.0, "features": 40, "per_class": 3, "steps": 3, "fit": fit}
    stage, (ours, others) = MERF(**constants), (clients(20, n=40, data=bars(40, seed)) for seed in (0, 1))
    SENT[:] = [stage.message(ours, client, stage.phi(ours)) for client in range(2)]
    first, apart, same = (method.make(start, []).store.x[40:]
                        for method, start in ((stage, ours), (stage, others), (Sent(**constants), others)))  # fmt: skip
    assert not torch.equal(first, apart)
    assert torch.equal(first, same)


SHORT = NDPDC(noise_multiplier=1.0, iterations=3, per_class=2, batch=2, width=8)


def networks(seed: int = 0, scale: int | None = None, augment: str = "none", flip: bool = False) -> Networks:
    return Networks(SHAPE, 10, 8, scale, augment, flip, seed)


def test_every_step_has_a_network_and_an_augmentation_of_its_own_which_all_can_draw_again() -> None:
    x, y = condensation.pixels(some(5).x), torch.arange(5)
    first = networks().at(0)(x, y)
    assert torch.equal(networks().at(0)(x, y), first)
    for other in (networks().at(1), networks(1).at(0)):
        assert (other(x, y) - first).norm() > 0.1
    copies = condensation.pixels(some(1).x).expand(3, -1, -1, -1)
    base, same, other = networks(0, 1, "all").at(0)(copies, torch.tensor([3, 3, 4]))
    assert torch.equal(base, same)
    assert (base - other).norm() > 0.1


def test_the_rate_follows_public_numbers_and_is_one_for_small_clients() -> None:
    stage = NDPDC(noise_multiplier=1.0)
    assert stage.rate(60_000, 10) == pytest.approx(1 / 120)
    assert replace(stage, class_size=5421).rate(60_000, 10) == pytest.approx(50 / 5421)
    assert stage.rate(500, 10) == stage.rate(129, 10) == stage.rate(0, 10) == 1


def test_a_label_decides_nothing_but_the_row_its_image_is_added_to() -> None:
    silent, start = replace(SHORT, noise_multiplier=0.0), clients()
    y = start.clients.store.y.clone()
    y[7] = (y[7] + 1) % 10
    sender, phi = silent.sender(start, 0), silent.networks(start).at(0)
    relabelled = replace(sender, examples=Examples(start.clients.store.x, y), draws=silent.sender(start, 0).draws)
    counts = set[int]()
    for step in range(6):
        moved = relabelled.message(phi, step).values - sender.message(phi, step).values
        assert moved.norm(dim=1).max() <= 1 + 1e-5
        counts.add(int((moved.norm(dim=1) > 1e-5).sum()))
    assert counts == {0, 2}  # drawn or not: out of one row, into another
    with pytest.raises(ValueError, match="has been drawn"):  # no message is drawn twice
        sender.message(phi, 0)


@pytest.mark.long
def test_each_image_is_drawn_at_the_rate_whatever_its_class() -> None:
    start, steps = clients(), 400
    sender = replace(SHORT, noise_multiplier=0.0).sender(start, 0)
    assert sender.q == pytest.approx(1 / 3)

    def phi(x: Tensor, y: Tensor) -> Tensor:
        return torch.eye(60)[[int((whole == image).all((1, 2, 3)).nonzero()) for image in x]]

    whole = condensation.pixels(start.clients.store.x)
    counts = torch.stack([sender.message(phi, step).values.sum(0) for step in range(steps)])
    assert ((counts == 0) | (counts == 1)).all()
    assert ((counts.sum(0) - steps / 3).abs() / (steps * 2 / 9) ** 0.5).max() < 5
    assert (torch.corrcoef(counts.T) - torch.eye(60)).abs().max() < 5 / steps**0.5


@pytest.mark.parametrize("cuts", [(), (17, 40)])
def test_without_noise_and_with_every_image_it_is_distribution_matching(cuts: tuple[int, ...]) -> None:
    """Image by image and class by class, with momentum by hand; rounding alone may differ, by one of 255."""
    stage, start = replace(SHORT, noise_multiplier=0.0, batch=60, iterations=4, lr=0.1), clients(*cuts)
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
            for x in start.clients.store.x[start.clients.store.y == c]:
                real += feature(x / 255 * 2 - 1).detach()
            class_images = [images[c * ipc + k].clone().requires_grad_() for k in range(ipc)]
            matched = batch / ipc * torch.stack([feature(x) for x in class_images]).sum(0)
            loss = ((batch / expected * real - matched) ** 2).sum()
            for k, g in enumerate(torch.autograd.grad(loss, class_images)):
                velocity[c * ipc + k] = 0.5 * velocity[c * ipc + k] + g
        images = images - 0.1 * velocity
    order = torch.cat([torch.arange(20)[i :: len(cuts) + 1] for i in range(len(cuts) + 1)])
    slow, before = (((pixels + 1) * 127.5).clamp(0, 255).round()[order] for pixels in (images, first))
    result = stage.make(start, ()).store[slice(60, None)]
    assert result.y.tolist() == (order // ipc).tolist()
    assert (result.x.float() - slow).abs().max() <= 1
    assert (slow - before).abs().mean() > 2  # they have moved


@pytest.mark.long
@pytest.mark.parametrize("batch", [2, 50])
def test_the_ledgers_epsilon_is_the_accountants(batch: int) -> None:
    stage = NDPDC(target_epsilon=3.0, batch=batch, iterations=20, width=8, per_class=1)
    shared = share(stage, clients(10, 35))
    ledger = Ledger.before_rounds([replace(event, commons=True) for event in shared.releases])
    for client, n in enumerate((10, 25, 25)):
        spent = ledger.commons.epsilon(client, 1e-5)
        assert spent == pytest.approx(epsilon(min(1.0, batch * 10 / n), stage.sigma(n, 10), 20, 1e-5), rel=1e-9)
        assert spent == pytest.approx(3.0, abs=0.011)
    assert shared.disclosed == 0
