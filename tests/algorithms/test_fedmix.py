"""FedMix: its loss against each example's, its gradient against finite differences, and the means that are shared."""

from dataclasses import replace

import pytest
import torch
from closed_forms import FULL, Digits, reply_of, smooth_module
from torch import Tensor

from fedcommons import ClientData, ClientDatasets, Clients, Examples, LocalSGD, flat
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedmix import FedMix, mean_images
from fedcommons.sharing.exchange import share, share_by_method
from fedcommons.sharing.real import ShuffledReal
from lightning_modules import Classifier

LR = 0.5


def _module() -> Classifier:
    return smooth_module(LR, scale=2.0)


def _rows(n_means: int = 1, weights: bool = False) -> ClientData:
    draws = torch.Generator().manual_seed(0)
    x, means = (torch.randn(n, 4, generator=draws, dtype=torch.float64) for n in (6, n_means))
    frequencies = torch.rand(n_means, 3, generator=draws, dtype=torch.float64).softmax(1)
    weight = torch.linspace(0, 2, 6, dtype=torch.float64) if weights else None
    return ClientData(x, torch.arange(6) % 3, weight, commons=Examples(5 * means - 2, frequencies))


def _loss(method: FedMix, rows: ClientData, seed: int = 0, module: Classifier | None = None, steps: int = 1) -> float:
    reply = reply_of(method, module or _module(), rows, LocalSGD(steps, FULL), seed=seed)
    return float(reply.metrics["loss"])


def _formula(
    module: Classifier, x: Tensor, rows: ClientData, mix: float, box: bool = False, means: Examples | None = None
) -> Tensor:
    """(1 - l) CE(f(u), y) + l CE(f(u), y_bar) + l <grad_u CE(f(u), y), x_bar> at u = (1 - l) x, summed one by one.

    ``x``, ``means``: as the network sees them. ``box``: its factor (1 - l) is on the last term alone.
    """
    commons, total = means or rows.commons, torch.zeros((), dtype=torch.float64)
    assert commons is not None
    for j, label in enumerate(rows.y):
        u = ((1 - mix) * x[j : j + 1]).requires_grad_()
        log_p = module.network(u).log_softmax(1)[0]
        (slope,) = torch.autograd.grad(-log_p[label], u, create_graph=True)
        inner = (slope[0] * commons.x[0]).sum() * (1 - mix if box else 1)
        of_example = -(1 - mix) * log_p[label] - mix * (commons.y[0].double() * log_p).sum() + mix * inner
        total = total + of_example * (1 if rows.weight is None else rows.weight[j])
    return total / len(rows)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("mix", "box"), [(0.05, True), (0.4, False), (0.4, True)])
def test_the_loss_is_the_formula_and_the_gradient_that_of_all_three_terms(mix: float, box: bool, weights: bool) -> None:
    rows, module = _rows(weights=weights), _module()
    reply, expected = reply_of(FedMix(mix, box=box), _module(), rows), _formula(module, rows.x, rows, mix, box)
    assert float(reply.metrics["loss"]) == pytest.approx(expected.item(), abs=1e-6)  # summed in float32
    assert abs(expected.item() - _formula(module, rows.x, rows, mix, not box).item()) > 2e-4
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(expected, [*module.parameters()])])
    assert torch.allclose(-flat(reply.sums, "delta").buffer / LR, gradient, rtol=0, atol=1e-8)


def test_images_and_their_means_are_normalised_alike(digits: Digits) -> None:
    """u and x_bar are what the network sees: pixels scaled, less the mean, over the std, before (1 - lambda)."""
    federation, mix = digits(lr=LR), 0.3
    module = federation.module().double()
    assert isinstance(module, Classifier)
    rows = federation.data.clients[0]
    means = mean_images(federation.data.clients[0:1], len(rows), 10, seed=0)
    assert torch.allclose(means.x[0], rows.x.float().mean(0))  # one mean, of all its images
    rows = replace(rows, commons=Examples(means.x.double(), means.y.double()))
    x, x_bar = ((pixels - module.mean) / module.std for pixels in (rows.x, means.x))
    expected = _formula(module, x, rows, mix, means=Examples(x_bar, means.y)).item()
    assert _loss(FedMix(mix=mix), rows, module=module) == pytest.approx(expected, abs=1e-6)


def test_the_mean_of_a_step_is_drawn_uniformly_by_the_seed() -> None:
    """At learning rate 0, the mean loss of two steps averages two independent draws: six possible values, not three."""
    rows, mix, module = _rows(n_means=3), 0.4, _module()
    assert rows.commons is not None
    possible = [_formula(module, rows.x, rows, mix, means=rows.commons[j : j + 1]).item() for j in range(3)]
    algorithm = FedMix(mix=mix)
    result = [_loss(algorithm, rows, seed) for seed in range(60)]
    choices = [min(range(3), key=lambda j: abs(possible[j] - loss)) for loss in result]
    assert result == pytest.approx([possible[j] for j in choices], abs=1e-6)
    assert all(abs(choices.count(j) - 20) < 4 * 3.7 for j in range(3))  # 3.7 is one standard deviation
    assert result[0] == _loss(algorithm, rows, 0)
    module.lr = 0.0
    pairs = {round((possible[a] + possible[b]) / 2, 4) for a in range(3) for b in range(a + 1)}
    assert pairs == {round(_loss(algorithm, rows, seed, module, steps=2), 4) for seed in range(40)}
    assert len(pairs) == 6


@pytest.mark.parametrize("size", [1, 4, 100])
def test_means_weighted_by_their_images_are_the_clients_mean(size: int, digits: Digits) -> None:
    """And every mean has ``size`` images or more, where the client has as many."""
    clients = digits().data.clients
    for client, rows in enumerate(clients):
        means = mean_images(Clients(clients.store, [clients.rows[client]]), size, 10, 0)
        n, groups = len(rows), max(1, len(rows) // size)
        assert (len(means), means.x.dtype) == (groups, torch.float32)
        sizes = torch.tensor([len(part) for part in torch.arange(n).tensor_split(groups)]).float()
        assert sizes.min() >= min(size, n)
        assert torch.allclose((sizes.view(-1, 1, 1, 1) * means.x).sum(0) / n, rows.x.float().mean(0), atol=1e-3)
        frequencies = torch.bincount(rows.y, minlength=10) / n
        assert torch.allclose((sizes[:, None] * means.y).sum(0) / n, frequencies, atol=1e-6)


def test_means_are_keyed_and_of_what_clients_train_on_counted_once_and_covered_by_nothing(digits: Digits) -> None:
    shared, method = share(ShuffledReal(0.5), ClientDatasets(digits().data.clients, 10, False, 0)), FedMix(mean_size=4)
    assert share_by_method(shared, FedAvg(), 10, 0) is shared
    clients, ours = shared.data.clients, share_by_method(shared, method, 10, 0)
    means, other = (mean_images(clients, 4, 10, seed) for seed in (0, 1))
    commons = ours.data.clients[3].commons
    assert commons is not None
    assert torch.equal(commons.x, means.x)
    assert not torch.equal(means.x, other.x)
    fewer = mean_images(clients[slice(0, 2)], 4, 10, 0)  # another client changes no other's
    assert torch.equal(means.x[: len(fewer)], fewer.x)
    assert ours.traffic.once == shared.traffic.once + 5 * 4 * len(means) * (64 + 10)  # up once, down to four others
    assert [(r.client, r.what, r.covered) for r in [*ours.releases][len(shared.releases) :]] == [
        (client, ("means of images", "means of labels"), False) for client in range(5)
    ]
