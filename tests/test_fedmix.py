"""FedMix's loss against a slow computation of each example, its gradient against finite differences, in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedmix import FedMix, mean_images
from fedcommons.core.algorithm import Message, Reply
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.seeds import set_default_generator
from fedcommons.tensors import flat
from lightning_modules import Classifier

if TYPE_CHECKING:
    from fedcommons.testing.federations import Federation

    Digits = Callable[..., Federation]

FULL = 1000  # a batch size above every client's number of examples: full-batch steps, in which the order only rounds
LR = 0.5


def _module() -> Classifier:
    """Smooth, so that the last term has a gradient everywhere; features of four numbers, three classes."""
    set_default_generator("a module for FedMix")
    module = Classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), lr=LR).double()
    module.head = "network.2"
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    return module


def _rows(n_means: int = 1, weights: bool = False) -> ClientData:
    draws = torch.Generator().manual_seed(0)
    x, means = (torch.randn(n, 4, generator=draws, dtype=torch.float64) for n in (6, n_means))
    frequencies = torch.rand(n_means, 3, generator=draws, dtype=torch.float64).softmax(1)
    weight = torch.linspace(0, 2, 6, dtype=torch.float64) if weights else None
    return ClientData(x, torch.arange(6) % 3, weight, commons=Examples(5 * means - 2, frequencies))


def _client(
    algorithm: FedMix, rows: ClientData, seed: int = 0, module: Classifier | None = None, steps: int = 1
) -> Reply:
    work = Work(module or _module(), torch.device("cpu"), LocalSGD(steps, FULL))
    return algorithm.client(work, Message({"model": work.initial}), {}, rows, 1, seed)


def _gradient(algorithm: FedMix, rows: ClientData, module: Classifier | None = None) -> Tensor:
    """What the one step of ``algorithm`` went down."""
    return -flat(_client(algorithm, rows, module=module).sums, "delta").buffer / LR


def _terms(
    module: Classifier, x: Tensor, rows: ClientData, mix: float, x_bar: Tensor, y_bar: Tensor
) -> tuple[float, float, float]:
    """CE(f(u), y), CE(f(u), y_bar) and <grad_u CE(f(u), y), x_bar> at u = (1 - mix) x, summed one by one, over B.

    ``x``, ``x_bar``: as the network sees them.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for j in range(len(rows)):
        u = ((1 - mix) * x[j : j + 1]).clone().requires_grad_()
        log_p = module.network(u).log_softmax(1)[0]
        (slope,) = torch.autograd.grad(-log_p[rows.y[j]], u, retain_graph=True)
        of_example = torch.stack([-log_p[rows.y[j]], -(y_bar.double() * log_p).sum(), (slope[0] * x_bar).sum()])
        sums += of_example.detach() * (1 if rows.weight is None else rows.weight[j])
    ce, of_mean, inner = (sums / len(rows)).tolist()
    return ce, of_mean, inner


def _total(terms: tuple[float, float, float], mix: float, box: bool = False) -> float:
    ce, of_mean, inner = terms
    return (1 - mix) * ce + mix * of_mean + mix * inner * (1 - mix if box else 1)


def _slopes(module: Classifier, value: Callable[[], float]) -> Tensor:
    """Central differences of ``value`` in every parameter of ``module``."""
    h, found = 1e-5, []
    for parameter in module.parameters():
        entries = parameter.data.view(-1)
        for k in range(len(entries)):
            entries[k] += h
            above = value()
            entries[k] -= 2 * h
            found.append((above - value()) / (2 * h))
            entries[k] += h
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("mix", [0.05, 0.4])
def test_the_loss_is_the_formula(mix: float, box: bool, weights: bool) -> None:
    """The box's factor (1 - lambda) is on the last term alone; weights of examples are on all three."""
    rows, module = _rows(weights=weights), _module()
    assert rows.commons is not None
    terms = _terms(module, rows.x, rows, mix, rows.commons.x[0], rows.commons.y[0])
    reply = _client(FedMix(mix, box=box), rows)
    assert float(reply.metrics["loss"]) == pytest.approx(_total(terms, mix, box), abs=1e-6)  # summed in float32
    assert mix * abs(terms[2]) > 1e-2
    assert abs(_total(terms, mix, box) - _total(terms, mix, not box)) > 2e-4


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("mix", [0.05, 0.4])
def test_the_gradient_is_that_of_all_three_terms(mix: float, box: bool, weights: bool) -> None:
    """Against central differences of the formula. The last term is differentiated through: a part of it is its own."""
    rows, module = _rows(weights=weights), _module()
    assert rows.commons is not None
    x_bar, y_bar = rows.commons.x[0], rows.commons.y[0]
    numeric = _slopes(module, lambda: _total(_terms(module, rows.x, rows, mix, x_bar, y_bar), mix, box))
    gradient = _gradient(FedMix(mix, box=box), rows)
    assert torch.allclose(gradient, numeric, rtol=0, atol=1e-8)
    of_inner = _slopes(module, lambda: _terms(module, rows.x, rows, mix, x_bar, y_bar)[2])
    assert mix * torch.linalg.vector_norm(of_inner) > 1e-2


def test_example_with_weight_zero_is_not_read() -> None:
    rows = _rows(weights=True)
    changed = rows.x.clone()
    changed[0] += 1
    algorithm = FedMix(mix=0.4)
    ours, same = (_gradient(algorithm, r) for r in (rows, replace(rows, x=changed)))
    assert torch.allclose(ours, same, rtol=0, atol=1e-14)
    assert not torch.allclose(ours, _gradient(algorithm, replace(rows, x=changed, weight=None)), rtol=0, atol=1e-3)


def test_images_and_their_means_are_normalised_alike(digits: "Digits") -> None:
    """u and x_bar are what the network sees: pixels scaled, less the mean, over the std, before (1 - lambda)."""
    federation, mix = digits(lr=LR), 0.3
    module = federation.module().double()
    assert isinstance(module, Classifier)
    rows = federation.data.clients[0]
    means = mean_images(federation.data.clients[0:1], len(rows), 10, seed=0)
    assert torch.allclose(means.x[0], rows.x.float().mean(0))  # one mean, of all its images
    rows = replace(rows, commons=Examples(means.x.double(), means.y.double()))
    x, x_bar = ((pixels - module.mean) / module.std for pixels in (rows.x, means.x[0]))
    reply = _client(FedMix(mix=mix), rows, module=module)
    terms = _terms(federation.module().double(), x, rows, mix, x_bar, means.y[0])  # pyright: ignore[reportArgumentType]
    assert float(reply.metrics["loss"]) == pytest.approx(_total(terms, mix), abs=1e-6)
    assert abs(terms[2]) > 5e-3


def test_the_mean_of_a_step_is_drawn_uniformly_by_the_seed() -> None:
    """300 seeds, three means: each loss is one of three, each about a hundred times (sd 8.2)."""
    rows, mix, module = _rows(n_means=3), 0.4, _module()
    means = rows.commons
    assert means is not None
    possible = [_total(_terms(module, rows.x, rows, mix, means.x[j], means.y[j]), mix) for j in range(3)]
    algorithm = FedMix(mix=mix)
    found = [float(_client(algorithm, rows, seed).metrics["loss"]) for seed in range(300)]
    drawn = [min(range(3), key=lambda j: abs(possible[j] - loss)) for loss in found]
    assert found == pytest.approx([possible[j] for j in drawn], abs=1e-6)
    assert all(abs(drawn.count(j) - 100) < 4 * 8.2 for j in range(3))
    assert found[:20] == [float(_client(algorithm, rows, seed).metrics["loss"]) for seed in range(20)]


def test_every_step_draws_a_mean_of_its_own() -> None:
    """With learning rate 0 the mean loss of two steps is that of two draws: six values, not three."""
    rows, mix = _rows(n_means=3), 0.4
    means = rows.commons
    assert means is not None
    module = _module()
    possible = [_total(_terms(module, rows.x, rows, mix, means.x[j], means.y[j]), mix) for j in range(3)]
    pairs = {round((possible[a] + possible[b]) / 2, 4): (a, b) for a in range(3) for b in range(a + 1)}
    found = set()
    for seed in range(60):
        module = _module()
        module.lr = 0.0
        found.add(pairs[round(float(_client(FedMix(mix=mix), rows, seed, module, steps=2).metrics["loss"]), 4)])
    assert len(pairs) == len(found) == 6


def test_the_means_of_all_clients_are_drawn_the_clients_own_included(digits: "Digits") -> None:
    """One mean a client, whose losses at the untrained model differ."""
    federation = digits()
    clients = federation.data.clients.with_commons(mean_images(federation.data.clients, 20, 10, seed=0))
    data = clients[3]
    assert data.commons is not None
    assert len(data.commons) == 5
    algorithm, work = FedMix(mix=0.5), federation.training(LocalSGD(1, FULL)).work()

    def loss(rows: ClientData, seed: int) -> float:
        reply = algorithm.client(work, Message({"model": federation.model}), {}, rows, 1, seed)
        return round(float(reply.metrics["loss"]), 4)

    alone = [loss(replace(data, commons=data.commons[slice(j, j + 1)]), 0) for j in range(5)]
    assert len(set(alone)) == 5
    assert {loss(data, seed) for seed in range(60)} == set(alone)
