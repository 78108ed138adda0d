"""DP-SGD: clipping, noise and Poisson batches as the accountant supposes them."""

from copy import deepcopy
from dataclasses import replace
from math import sqrt
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from closed_forms import Digits
from opacus.grad_sample import GradSampleModule
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons import ClientData, Experiment, LocalSGD, Work
from fedcommons.algorithms.fedmix import mean_images
from fedcommons.config.dotted import override
from fedcommons.config.registry import make
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import Noise, Source
from fedcommons.runs.build import local_loop, noise_key
from fedcommons.seeding import wide_generator
from lightning_modules import Classifier

FULL = 1000  # a batch size above every client's number of examples: q = 1, so that everybody is in the batch
HUGE = 1e9  # a norm that no gradient has
SILENT = DPSGD(noise_multiplier=0.0, clip=HUGE)


class _Flat(LightningModule):
    """A loss that is zero everywhere: all that moves the weights is noise."""

    def __init__(self, dim: int, lr: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=torch.float64))
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return (0 * self.w).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def _rows(n: int) -> ClientData:
    return ClientData(torch.zeros(n, 1), torch.zeros(n))


def _moved(local: LocalSGD, work: Work, rows: ClientData, seed: int = 0) -> Tensor:
    """y - x after the local steps from the initial model, with the noise of the client of this seed."""
    work.noise = Noise(work.source, seed)
    y, _, _ = local.run(work, work.initial, rows, seed)
    return y.buffer - work.initial.buffer


def _gradient(dp: DPSGD, work: Work, rows: ClientData, lr: float) -> Tensor:
    return -_moved(LocalSGD(1, FULL, dp=dp), work, rows) / lr


def test_the_weights_of_examples_are_in_their_losses(digits: Digits) -> None:
    federation = digits()
    rows = replace(federation.data.clients[0], weight=torch.linspace(0, 2, 9))
    ours, theirs = (_moved(LocalSGD(3, FULL, dp=dp), federation.work(), rows) for dp in (SILENT, None))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - _moved(LocalSGD(3, FULL), federation.work(), replace(rows, weight=None))).abs().max() > 1e-3
    gradients = []
    for weight in (0.0, 1.0, 1e6):  # what is clipped is the gradient of the weighted loss
        data = replace(rows, weight=torch.cat([torch.tensor([weight]), torch.ones(8)]))
        gradients.append(_gradient(DPSGD(0.0, 0.5), federation.work(), data, 0.1))
    for gradient in gradients[1:]:
        assert 0.1 < 9 * (gradient - gradients[0]).norm() < 0.5 * (1 + 1e-3)


def test_the_gradients_of_examples_are_those_of_opacus() -> None:
    torch.default_generator.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(12, 5), torch.arange(12) % 3
    hooked = GradSampleModule(deepcopy(network), loss_reduction="mean")
    F.cross_entropy(hooked(x.clone().requires_grad_()), y).backward()  # an input without gradient makes torch warn
    samples = [p.grad_sample for p in hooked.parameters()]  # pyright: ignore[reportAttributeAccessIssue]
    theirs = torch.cat([g.reshape(12, -1) for g in samples], dim=1)
    norms = theirs.norm(dim=1, keepdim=True)
    work = Work(Classifier(network, lr=1.0), torch.device("cpu"))
    for clip in (1e9, float(norms.median())):
        ours = _gradient(DPSGD(0.0, clip), work, ClientData(x, y), 1.0)
        assert torch.allclose(ours, (theirs * (clip / norms).clamp(max=1)).sum(0) / 12, rtol=0, atol=1e-6)


def test_noise_is_keyed_by_the_client(digits: Digits) -> None:
    federation = digits(dropout=0.3)
    local, rows = LocalSGD(2, 5, augment=True, dp=DPSGD(1.0, 1.0)), federation.data.clients[1]
    work = federation.work()
    first, other = (_moved(local, work, rows, seed) for seed in (1, 2))
    assert torch.equal(first, _moved(local, federation.work(), rows, 1))
    assert not torch.equal(first, other)
    quiet = _moved(replace(local, dp=DPSGD(0.0, 1.0)), work, rows, 1)
    louder = _moved(replace(local, dp=DPSGD(1e-6, 1.0)), work, rows, 1)
    few, moves = replace(local, augment=False, dp=DPSGD(1e-9, 10.0)), []
    for source in (1, 2):  # Poisson batches are drawn from the source of noise, too
        work = Work(federation.module(), torch.device("cpu"), source=Source(source))
        work.load(federation.model)
        moves.append(_moved(few, work, rows, 1))
    assert (moves[0] - moves[1]).abs().max() > 1e-3
    assert torch.allclose(quiet, louder, rtol=0, atol=1e-4)  # batches and dropout do not depend on sigma
    assert not torch.equal(quiet, louder)


def test_two_experiments_of_one_seed_share_no_noise() -> None:
    """They would be subtracted, and leave the difference of two gradients. What decides no result changes no noise."""
    base = override(Experiment(), {"dp.local": True, "client.batch_size": FULL, "client.epochs": 1})

    def noise(**values: object) -> Tensor:
        config = override(base, {k.replace("__", "."): v for k, v in values.items()})
        work = Work(_Flat(2000), torch.device("cpu"), source=Source(noise_key(config)))
        return _moved(local_loop(config, augment=False), work, _rows(1), seed=5)

    first = noise()
    for value in (
        noise(client__lr=0.1), noise(dp__delta=1e-6), noise(seed=1), noise(algorithm="scaffold"), noise(target=0.5),
        noise(dp__noise_multiplier=2.0),
    ):  # fmt: skip
        assert abs(float(F.cosine_similarity(first, value, dim=0))) < 4 / sqrt(2000)
    # where and how it runs decides nothing; 5 is the default 5.0; and a longer run begins as a shorter one
    assert torch.equal(first, noise(artifacts="elsewhere", federation__actors=1, dp__clip=5, federation__rounds=7))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_noise_is_added_once_to_the_sum_in_the_type_of_the_parameters(kind: torch.dtype) -> None:
    """More examples in the batch, with the same B: the same noise. An empty batch is noise alone, not nan."""
    gradients = []
    for n in (0, 1, 7):
        param, batch = nn.Parameter(torch.zeros(4000, dtype=kind)), (torch.zeros(n, 1), torch.zeros(n))
        loss = lambda batch, step, p=param: (0 * p).sum()  # noqa: E731
        value, _ = DPSGD(2.0, 3.0).gradients([param], loss, batch, 0, 4, wide_generator(1))
        assert float(value) == 0
        assert param.grad is not None
        assert param.grad.dtype == kind
        gradients.append(param.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert float(gradients[0].double().std()) == pytest.approx(2 * 3 / 4, rel=0.06)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e30])
def test_an_example_without_a_finite_gradient_adds_nothing(factor: float) -> None:
    param = nn.Parameter(torch.zeros(2))
    x = torch.tensor([[3.0, 4.0], [factor, -factor], [0.3, 0.4]])
    batch = (x, torch.zeros(3))
    DPSGD(0.0, 1.0).gradients([param], lambda batch, step: (batch[0][0] * param).sum(), batch, 0, 1, wide_generator(1))
    assert param.grad is not None
    assert torch.allclose(param.grad, torch.tensor([0.6 + 0.3, 0.8 + 0.4]))


def test_each_example_is_in_a_batch_with_probability_q_independently() -> None:
    """20,000 draws of B = 5 of 20: rate, variance of the size and correlations, each within 5 standard errors."""
    dp, draws, n, b, times = DPSGD(1.0, 1.0), wide_generator("poisson"), 20, 5, 20_000
    q = b / n
    inside = np.zeros((times, n))
    for batch in inside:
        batch[dp.sample(n, b, draws).numpy()] = 1
    sizes = inside.sum(1)
    assert abs(sizes.mean() - b) < 5 * sqrt(n * q * (1 - q) / times)
    assert np.all(np.abs(inside.mean(0) - q) < 5 * sqrt(q * (1 - q) / times))
    assert sizes.var() == pytest.approx(n * q * (1 - q), rel=5 * sqrt(2 / times))  # zero, were the size fixed
    centred = (inside - q) / sqrt(q * (1 - q))
    correlations = (centred.T @ centred / times)[np.triu_indices(n, 1)]
    assert np.abs(correlations).max() < 5 / sqrt(times)
    assert abs(np.corrcoef(np.stack([sizes[1:], sizes[:-1]]))[0, 1]) < 5 / sqrt(times)  # from step to step


@pytest.mark.parametrize(
    ("name", "constants"),
    [("fedprox", {"mu": 0.1}), ("scaffold", {}), ("feddyn", {"alpha": 0.1, "clip": None}), ("moon", {}),
     ("fedmix", {"mix": 0.3})],
)  # fmt: skip
@pytest.mark.long
def test_works_with_every_methods_loss_and_correction(name: str, constants: dict[str, Any], digits: Digits) -> None:
    """Without noise and clipping full batches are the method's own, to rounding (with one mean for FedMix)."""
    federation, method = digits(lr=0.05), make("algorithm", name, constants)
    one_mean = mean_images(federation.data.clients[0:1], FULL, 10, seed=0)
    clients = federation.data.clients.with_commons(one_mean)
    federation = replace(federation, data=replace(federation.data, clients=clients))
    both = (federation.training(LocalSGD(2, FULL, dp=dp)) for dp in (SILENT, None))
    with mock.patch.object(DPSGD, "gradients", autospec=True, side_effect=DPSGD.gradients) as clipped:
        ours, theirs = (each.run(method, each.plan(2))[-1][0] for each in both)
    assert clipped.call_count == 2 * 5 * 2  # in both rounds of all clients, epoch by epoch
    assert torch.allclose(ours.model.buffer, theirs.model.buffer, rtol=0, atol=5e-5)
    assert (theirs.model.buffer - federation.model.buffer).abs().max() > 1e-2
