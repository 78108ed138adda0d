"""Fast squared norms of per-sample gradients = the obvious loop, for every kind of layer and every order of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcommons.convergence import per_sample
from fedcommons.convergence.per_sample import gradients, has_closed_forms, require_apart
from lightning_modules import Classifier
from lightning_modules.networks import CNN

SHAPE = (3, 32, 32)
D = 3 * 32 * 32


class Net(nn.Module):
    """Layers by name, and a forward pass as a function of the module and the batch."""

    def __init__(self, rule: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


def resnet() -> nn.Module:
    """A residual block with GroupNorm, a strided convolution in groups, ReLU in place."""

    def rule(m: Any, x: Tensor) -> Tensor:
        h = torch.relu_(m.norm(m.stem(x)))
        return m.last(torch.relu_(m.down(torch.relu(h + m.norm2(m.body(h))))).mean((2, 3)))

    body = nn.Conv2d(8, 8, 3, padding="same", groups=4, padding_mode="circular")
    down = nn.Conv2d(8, 6, (3, 5), stride=(2, 3), dilation=2)
    stem, norms = nn.Conv2d(3, 8, 3, padding=1, bias=False), (nn.GroupNorm(2, 8), nn.GroupNorm(4, 8))
    return Net(rule, stem=stem, norm=norms[0], body=body, norm2=norms[1], down=down, last=nn.Linear(6, 10))


def tokens(x: Tensor) -> Tensor:
    return (3 * x.abs()).long().clamp(max=4)


def words() -> nn.Module:
    return Net(
        lambda m, x: m.last(torch.tanh(m.each(m.norm(m.embedding(tokens(x[:, 0, 0, :9]))))).mean(1)),
        embedding=nn.Embedding(5, 6, padding_idx=0), norm=nn.LayerNorm(6),
        each=nn.Linear(6, 7), last=nn.Linear(7, 10, bias=False),
    )  # fmt: skip


def norms() -> nn.Module:
    """LayerNorm of whole images and of vectors, BatchNorm along rows of pixels and of vectors; no biases."""

    def rule(m: Any, x: Tensor) -> Tensor:
        h = m.hidden(torch.relu(m.rows(m.images(x).flatten(2))).flatten(1))
        return m.last(torch.relu(m.vectors(torch.tanh(m.batch(h)))))

    return Net(
        rule, images=nn.LayerNorm([3, 32, 32]), rows=nn.BatchNorm1d(3), hidden=nn.Linear(D, 7, bias=False),
        batch=nn.BatchNorm1d(7), vectors=nn.LayerNorm(7, bias=False), last=nn.Linear(7, 10, bias=False),
    )  # fmt: skip


def called_twice() -> nn.Module:
    return Net(
        lambda m, x: m.last(m.convolution(torch.relu(m.convolution(x))).flatten(1)),
        convolution=nn.Conv2d(3, 3, 3, padding=1), last=nn.Linear(D, 10),
    )  # fmt: skip


class Doubled(nn.Linear):
    """A subclass of nn.Linear: a layer type of its own that also passes for a known type."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def pixels(rule: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Two linear layers for a line of pixels; ``rule`` does something to the batch before, between or after them."""
    return Net(lambda m, x: rule(m, x[:, 0, 0]), first=nn.Linear(32, 12), last=nn.Linear(12, 10))


def plain(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.tanh(m.first(x)))


def one_for_all() -> nn.Module:
    """A layer gets one row that is the same for all samples."""

    def rule(m: Any, x: Tensor) -> Tensor:
        return m.last(torch.tanh(m.query(torch.ones(1, 4, dtype=x.dtype)) * m.key(x[:, 0, 0])))

    return Net(rule, query=nn.Linear(4, 12), key=nn.Linear(32, 12), last=nn.Linear(12, 10))


def folded() -> nn.Module:
    """Layers see every channel as a row of its own, sample by sample."""

    def rule(m: Any, x: Tensor) -> Tensor:
        n, channels = x.shape[:2]
        h = m.each(m.batch(torch.relu_(m.norm(m.convolution(x.reshape(-1, 1, 32, 32)))).mean((2, 3))))
        return m.last(torch.tanh(h.view(n, channels, -1)).sum(1))

    return Net(
        rule, convolution=nn.Conv2d(1, 4, 5, stride=9, padding=1), norm=nn.GroupNorm(2, 4), batch=nn.BatchNorm1d(4),
        each=nn.Linear(4, 6), last=nn.Linear(6, 10),
    )  # fmt: skip


def no_batch() -> nn.Module:
    """Layers see a sample without the dimension of the batch: one call for each row of a batch."""
    return Net(
        lambda m, x: torch.stack([m.last(torch.tanh(m.convolution(row)).mean((1, 2))) for row in x]),
        convolution=nn.Conv2d(3, 4, 5, stride=9), last=nn.Linear(4, 10),
    )  # fmt: skip


def hooked() -> nn.Module:
    network: Any = pixels(plain)
    network.first.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return network


ODD: dict[str, Callable[[], nn.Module]] = {
    "one row for all": one_for_all,
    "each row twice": lambda: pixels(lambda m, x: plain(m, torch.cat([x, x]))[: len(x)]),
    "the mean of the batch taken off": lambda: pixels(lambda m, x: plain(m, x - x.mean(0))),
    "rows folded by sample": folded, "no dimension of the batch": no_batch, "changed by a hook": hooked,
}  # fmt: skip
"""Layers that do not see the samples' rows in order, one each."""

FAST: dict[str, Callable[[], nn.Module]] = {
    "CNN with BatchNorm": lambda: CNN(SHAPE, 10, batch_norm=True), "ResNet with GroupNorm": resnet, "words": words,
    "norms": norms,
}  # fmt: skip
SLOW: dict[str, Callable[[], nn.Module]] = {
    "called twice": called_twice,
    "a kind of its own": lambda: nn.Sequential(nn.Flatten(), Doubled(D, 10)),
}


def _module(name: str) -> Classifier:
    torch.manual_seed(0)
    module = Classifier((FAST | SLOW | ODD)[name](), lr=0.1)
    with torch.no_grad():
        for parameter in module.parameters():  # normalisations begin at ones and zeros, where mistakes hide
            parameter.add_(0.1 * torch.randn_like(parameter))
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.add_(torch.rand_like(buffer))
    return module


def _batch(n: int = 5, weighted: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    batch = [torch.randn(n, *SHAPE, generator=draw), torch.randint(0, 10, (n,), generator=draw)]
    return [*batch, torch.rand(n, generator=draw) + 0.5] if weighted else batch


def _loop(module: Classifier, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    module = module.double().eval()
    each = []
    for j in range(len(batch[1])):
        example = [c[j : j + 1].double() if c.is_floating_point() else c[j : j + 1] for c in batch]
        loss = module.training_step(tuple(example), 0)
        parts = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)
        each.append(torch.cat([part.flatten() for part in parts]))
    stacked = torch.stack(each)
    return stacked.mean(0), stacked.square().sum(1)


class Counted(Classifier):
    calls = 0

    def training_step(self, batch: tuple[Tensor, ...], number: int) -> Tensor:
        self.calls += 1
        value = super().training_step(batch, number)
        assert isinstance(value, Tensor)
        return value


def require_the_loop(name: str, batch: list[Tensor], once: bool = False) -> None:
    """Compare with the loop. once: the model must take one pass and keep no hook."""
    module = Counted(_module(name).network, lr=0.1)
    mean, sq_norms = gradients(module, batch)
    slow_mean, slow_sq_norms = _loop(_module(name), batch)
    assert (sq_norms / slow_sq_norms - 1).abs().max() < 1e-5
    assert (mean - slow_mean).norm() < 1e-5 * slow_mean.norm()
    if once:
        assert has_closed_forms(module)
        assert module.calls == 1
        assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize("name", FAST | SLOW)
@pytest.mark.long
def test_equals_the_loop(name: str) -> None:
    require_the_loop(name, _batch(weighted=True), once=name in FAST)
    assert name != "a kind of its own" or not has_closed_forms(_module(name))


@pytest.mark.parametrize("name", ODD)
def test_a_sample_is_what_it_is_in_a_batch_of_its_own_whatever_the_model_does_with_rows(name: str) -> None:
    for n in (1, 5):
        require_the_loop(name, _batch(n))


def test_the_size_of_chunks_changes_no_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradients(_module("CNN with BatchNorm"), _batch())[1]
    monkeypatch.setattr(per_sample, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(gradients(_module("CNN with BatchNorm"), _batch())[1], whole, rtol=1e-5, atol=0)


def test_samples_meet_in_batch_norm_only_while_it_takes_their_statistics() -> None:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.BatchNorm1d(10, track_running_stats=False))
    with pytest.raises(ValueError, match=r"network\.2 normalises with the statistics of the batch"):
        gradients(Classifier(bare, lr=0.1), _batch())
    network = CNN(SHAPE, 10, batch_norm=True)
    require_apart(network.eval())
    network.norm2.train()
    with pytest.raises(ValueError, match="norm2 normalises with the statistics of the batch"):
        require_apart(network)
