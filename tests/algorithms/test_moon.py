"""MOON's loss and gradient against the formula written out, in float64; what a client remembers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from closed_forms import FULL, Digits
from torch import Tensor
from torch.nn import functional as F

from fedcommons import ClientData, Flat, LocalSGD, Message, Payload, Reply, Work, flat, set_default_generator
from fedcommons.algorithms.moon import MOON
from fedcommons.privacy.dp_sgd import DPSGD
from lightning_modules import Classifier
from lightning_modules.networks import CNN, Projected

LR, SEED = 0.1, 3
Make = Callable[[], Classifier]


@dataclass(frozen=True)
class _Model:
    """Weights, and BatchNorm's statistics where there are any."""

    weights: Flat
    buffers: Payload

    def put_into(self, module: Classifier) -> Classifier:
        module.load_state_dict({**module.state_dict(), **self.weights, **self.buffers})  # pyright: ignore
        return module


def _plain(batch_norm: bool = False, projected: bool = False, dropout: float = 0.0) -> Classifier:
    set_default_generator("a module for MOON")
    network = CNN((1, 8, 8), 10, channels=(3, 4), hidden=16, batch_norm=batch_norm)
    network.conv2 = torch.nn.Sequential(torch.nn.Dropout(dropout), network.conv2)  # pyright: ignore[reportAttributeAccessIssue]
    return Classifier(Projected(network, 6) if projected else network, lr=LR, mean=(0.3,), std=(0.4,)).double()


_batch_norm, _projected = partial(_plain, batch_norm=True), partial(_plain, projected=True)
_dropout = partial(_plain, dropout=0.5)


def _moved(x: Flat, by: float = 0.1) -> Flat:
    noise = torch.randn(x.buffer.shape, generator=torch.Generator().manual_seed(1), dtype=x.buffer.dtype)
    return Flat(x.layout, x.buffer + by * noise)


def _features(module: Classifier, x: Tensor) -> Tensor:
    """The input of the last linear layer, by the network's own names for its parts."""
    network = module.network
    assert isinstance(network, CNN | Projected)
    return network.embed((x - module.mean) / module.std)


def _direct(
    make: Make, rows: ClientData, local: _Model, server: _Model, previous: _Model, mu: float, temperature: float
) -> tuple[float, Tensor]:
    """The loss and its gradient at ``local``: example by example, with exponentials and a logarithm."""
    module = local.put_into(make())
    with torch.no_grad():
        z_glob, z_prev = (_features(model.put_into(make()).eval(), rows.x) for model in (server, previous))
    set_default_generator(SEED, "dropout")
    z = _features(module, rows.x)
    logits = module.network.last(z)  # pyright: ignore[reportCallIssue]
    total = torch.zeros((), dtype=torch.float64)
    for j in range(len(rows)):
        s_glob, s_prev = (z[j] @ other[j] / (z[j].norm() * other[j].norm()) for other in (z_glob, z_prev))
        near, far = (s_glob / temperature).exp(), (s_prev / temperature).exp()
        of_example = -F.log_softmax(logits[j], 0)[rows.y[j]] - mu * (near / (near + far)).log()
        total = total + of_example * (1 if rows.weight is None else rows.weight[j])
    loss = total / len(rows)
    return loss.item(), torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, [*module.parameters()])])


def _client(method: MOON, make: Make, x: _Model, memory: Payload, rows: ClientData, local: LocalSGD) -> Reply:
    work = Work(make(), torch.device("cpu"), local)
    work.load_buffers(x.buffers or work.initial_buffers)  # pyright: ignore[reportArgumentType]
    return method.client(work, Message({"model": x.weights}), memory, rows, 1, SEED)


def _after(reply: Reply, x: Flat) -> Flat:
    return Flat(x.layout, x.buffer + flat(reply.sums, "delta").buffer)


def _last_step(
    make: Make, x: _Model, memory: Payload, rows: ClientData, steps: int, mu: float, temperature: float
) -> tuple[Flat, float, Tensor]:
    """The model before the last of ``steps`` full-batch steps, and that step's loss and gradient."""
    begin, losses = x.weights, 0.0
    for k in (steps - 1, steps):
        if k:
            reply = _client(MOON(mu, temperature), make, x, memory, rows, LocalSGD(k, FULL))
            begin, end = (begin if k == steps else _after(reply, x.weights)), _after(reply, x.weights)
            losses, loss = float(reply.metrics["loss"]) * k, float(reply.metrics["loss"]) * k - losses
    return begin, loss, (begin.buffer - end.buffer) / LR  # pyright: ignore[reportPossiblyUnbound]


@pytest.fixture
def rows(digits: Digits) -> ClientData:
    """Nine images."""
    return digits().data.clients[0]


FORMULAS: list[tuple[Make, int, float, float, bool]] = [
    (_plain, 1, 5.0, 0.1, True), (_plain, 3, 1.0, 0.5, False), (_plain, 3, 0.3, 2.0, True),
    (_projected, 2, 1.0, 0.5, False), (_batch_norm, 2, 1.0, 0.5, True), (_dropout, 1, 1.0, 0.5, False),
]  # fmt: skip


@pytest.mark.parametrize(("make", "steps", "mu", "temperature", "weights"), FORMULAS)
def test_loss_and_gradient_are_the_formulas(
    make: Make, steps: int, mu: float, temperature: float, weights: bool, rows: ClientData
) -> None:
    """In a first round, where z_prev is the initial model's, and in later ones, where it is the client's own last.

    Statistics: the server's before its steps, the client's from its last round. Both models have no dropout.
    """
    rows = replace(rows, weight=torch.linspace(0, 2, len(rows), dtype=torch.float64) if weights else None)
    work = Work(make(), torch.device("cpu"))
    previous, memory, buffers = _Model(work.initial, work.initial_buffers), {}, work.initial_buffers
    server = _Model(_moved(work.initial), Flat(buffers.layout, buffers.buffer * 1.3 + 0.1))
    for _ in range(3):
        y, loss, gradient = _last_step(make, server, memory, rows, steps, mu, temperature)
        local = _Model(y, {})
        expected, expected_gradient = _direct(make, rows, local, server, previous, mu, temperature)
        assert loss == pytest.approx(expected, abs=5e-6)  # the loop sums losses in float32
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-12)
        _, plain = _direct(make, rows, local, server, previous, 0.0, temperature)
        assert (gradient - plain).abs().max() > 1e-3  # the contrast has a say
        reply = _client(MOON(mu), make, previous, memory, rows, LocalSGD(4, 3))
        assert reply.memory is not None
        previous = _Model(_after(reply, previous.weights), flat(reply.memory, "previous buffers"))
        memory = reply.memory


@pytest.mark.parametrize(
    ("local", "make", "is_kept"),
    [
        (LocalSGD(4, 4), _dropout, True),
        (LocalSGD(4, 4, drop_last=True), _dropout, False),  # the first epoch has not all examples
        (LocalSGD(4, 4, dp=DPSGD(1.0, 1.0)), _plain, False),  # an example's gradient must not depend on another one
    ],
)
def test_kept_features_of_the_models_that_stand_still_are_those_of_each_step(
    local: LocalSGD, make: Make, is_kept: bool, rows: ClientData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with augmentation, which computes them anew; here it is one that changes nothing."""
    rows = replace(rows, weight=torch.linspace(0, 2, len(rows), dtype=torch.float64))
    monkeypatch.setattr("fedcommons.core.local_training.flip_and_crop", lambda images, draws: images)
    slow, passes = _epochs(rows, replace(local, augment=True), make)
    fast, fewer = _epochs(rows, local, make)
    assert (fewer < passes) == is_kept
    assert torch.allclose(slow, fast, rtol=0, atol=1e-13)


def _epochs(rows: ClientData, loop: LocalSGD, make: Make) -> tuple[Tensor, int]:
    """What a client sends after its epochs, and how many passes it made through its network."""
    work = Work(make(), torch.device("cpu"))
    memory = {"previous": _moved(work.initial), "previous buffers": work.initial_buffers}
    passes: list[int] = []

    def counted() -> Classifier:
        module = make()
        module.network.register_forward_hook(lambda *_: passes.append(1))
        return module

    reply = _client(MOON(mu=5.0), counted, _Model(work.initial, {}), memory, rows, loop)
    return flat(reply.sums, "delta").buffer, len(passes)
