"""Fast squared norms of per-sample gradients = the obvious loop, for every kind of layer and every order of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fedcommons.convergence import per_sample
from fedcommons.convergence.per_sample import gradients, has_closed_forms, require_apart
from lightning_modules import Classifier
from lightning_modules.networks import CNN, VGG11

SHAPE = (3, 32, 32)
D = 3 * 32 * 32
Rows = Callable[[Tensor], Tensor]


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Net(nn.Module):
    """Layers by name, and a forward pass as a function of the module and the batch."""

    def __init__(self, rule: Callable[[Any, Tensor], Tensor], **layers: nn.Module | nn.Parameter) -> None:
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


def words(scaled: bool = False) -> nn.Module:
    """Embedding with a padding token, LayerNorm and linear layers along a sequence."""
    return Net(
        lambda m, x: m.last(torch.tanh(m.each(m.norm(m.embedding(tokens(x[:, 0, 0, :9]))))).mean(1)),
        embedding=nn.Embedding(5, 6, padding_idx=0, scale_grad_by_freq=scaled), norm=nn.LayerNorm(6),
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


def past_its_layer(called: bool) -> nn.Module:
    """A weight is used by itself, as well as by its layer or, if that is never called, instead."""
    a = nn.Linear(32, 32)
    return Net(
        lambda m, x: m.last(torch.tanh(torch.relu(m.a(x[:, 0, 0])) @ m.b.weight)),
        a=a, b=a if called else nn.Linear(32, 32, bias=False), last=nn.Linear(32, 10),
    )  # fmt: skip


class Doubled(nn.Linear):
    """A kind of its own, that is a known one too."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def tied() -> nn.Module:
    """Two layers, one weight."""
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    b.weight = a.weight
    return Net(lambda m, x: m.last(m.b(torch.relu(m.a(x[:, 0, 0])))), a=a, b=b, last=nn.Linear(32, 10))


def pixels(before: Rows = _as_it_is, between: Rows = _as_it_is, after: Rows = _as_it_is) -> nn.Module:
    """Two linear layers on a line of pixels; something is done to the batch before, between and after them."""
    return Net(
        lambda m, x: after(m.last(between(torch.tanh(m.first(before(x[:, 0, 0])))))),
        first=nn.Linear(32, 12), last=nn.Linear(12, 10),
    )  # fmt: skip


def constants(each: bool) -> nn.Module:
    """A layer is fed what is the same for all samples: one row of it, or one for each."""

    def rule(m: Any, x: Tensor) -> Tensor:
        rows = x[:, 0, 0]
        ones = torch.ones(len(x), 4, dtype=x.dtype) + 0 * rows[:, :4] if each else torch.ones(1, 4, dtype=x.dtype)
        return m.last(torch.tanh(m.query(ones) * m.key(rows)))

    return Net(rule, query=nn.Linear(4, 12), key=nn.Linear(32, 12), last=nn.Linear(12, 10))


def folded(by_sample: bool) -> nn.Module:
    """Layers see every channel as a row of its own: sample by sample, or channel by channel."""

    def rule(m: Any, x: Tensor) -> Tensor:
        n, channels = len(x), x.shape[1]
        rows = (x if by_sample else x.transpose(0, 1)).reshape(n * channels, 1, 32, 32)
        h = m.each(m.batch(torch.relu_(m.norm(m.convolution(rows))).mean((2, 3))))
        h = h.view(n, channels, -1) if by_sample else h.view(channels, n, -1).transpose(0, 1)
        return m.last(torch.tanh(h).sum(1))

    return Net(
        rule, convolution=nn.Conv2d(1, 4, 5, stride=9, padding=1), norm=nn.GroupNorm(2, 4), batch=nn.BatchNorm1d(4),
        each=nn.Linear(4, 6), last=nn.Linear(6, 10),
    )  # fmt: skip


def moved() -> nn.Module:
    """The samples stand in the second dimension of what the layers see."""
    return Net(
        lambda m, x: m.last(torch.tanh(m.each(m.norm(x[:, 0].transpose(0, 1)))).mean(0)),
        norm=nn.LayerNorm(32), each=nn.Linear(32, 7), last=nn.Linear(7, 10),
    )  # fmt: skip


def one_token() -> nn.Module:
    """Tokens (B,), without a sequence."""
    return Net(
        lambda m, x: m.last(torch.tanh(m.embedding(tokens(x[:, 0, 0, 0])))),
        embedding=nn.Embedding(5, 6), last=nn.Linear(6, 10),
    )  # fmt: skip


def no_batch() -> nn.Module:
    """Layers see a sample without the dimension of the batch: one call for each row of a batch."""
    return Net(
        lambda m, x: torch.stack([m.last(torch.tanh(m.convolution(row)).mean((1, 2))) for row in x]),
        convolution=nn.Conv2d(3, 4, 5, stride=9), last=nn.Linear(4, 10),
    )  # fmt: skip


def hooked() -> nn.Module:
    """The layer's output is changed by a hook."""
    network: Any = pixels()
    network.first.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return network


def pruned() -> nn.Module:
    """The layer's weight is made of a parameter of another name."""
    network: Any = pixels()
    prune.random_unstructured(network.first, "weight", 0.5)
    return network


def _shuffled(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(4))]


ODD: dict[str, Callable[[], nn.Module]] = {
    "one constant row": lambda: constants(each=False),
    "a constant row for each": lambda: constants(each=True),
    "reversed before the first layer": lambda: pixels(before=lambda x: x.flip(0)),
    "permuted and brought back": lambda: pixels(before=lambda x: x.flip(0), after=lambda x: x.flip(0)),
    "permuted between layers": lambda: pixels(between=_shuffled),
    "rolled after the last layer": lambda: pixels(after=lambda x: x.roll(1, 0)),
    "ordered by what it sees": lambda: pixels(before=lambda x: x[x.sum(1).argsort()]),
    "each row twice": lambda: pixels(before=lambda x: torch.cat([x, x]), after=lambda x: x[: len(x) // 2]),
    "each row twice, in turns": lambda: pixels(
        before=lambda x: x.repeat_interleave(2, 0), after=lambda x: x[::2] + x[1::2].square()
    ),
    "all rows the first's": lambda: pixels(before=lambda x: x[:1].expand(x.shape)),
    "the mean of the batch taken off": lambda: pixels(between=lambda x: x - x.mean(0)),
    "the mean of the batch alone": lambda: pixels(before=lambda x: x.mean(0, keepdim=True).expand(x.shape)),
    "another way for some": lambda: pixels(between=lambda x: 2 * x if bool(x.sum() > 0) else x),
    "folded by sample": lambda: folded(by_sample=True),
    "folded by channel": lambda: folded(by_sample=False),
    "samples in the second dimension": moved,
    "one token": one_token,
    "no dimension of the batch": no_batch,
    "changed by a hook": hooked,
    "pruned": pruned,
}
"""Layers that do not see the samples' rows in order, one each."""

FAST: dict[str, Callable[[], nn.Module]] = {
    "VGG-11": lambda: VGG11(SHAPE, 10),
    "CNN": lambda: CNN(SHAPE, 10),
    "CNN with BatchNorm": lambda: CNN(SHAPE, 10, batch_norm=True),
    "ResNet with GroupNorm": resnet,
    "words": words,
    "norms": norms,
}
SLOW: dict[str, Callable[[], nn.Module]] = {
    "called twice": called_twice,
    "a parameter of its own": lambda: Net(
        lambda m, x: m.last((x * m.scale).flatten(1)), scale=nn.Parameter(torch.ones(3, 1, 1)), last=nn.Linear(D, 10)
    ),
    "tied": tied,
    "gradients scaled by the frequency of words": lambda: words(scaled=True),
    "a weight used past its layer": lambda: past_its_layer(called=True),
    "a weight whose layer is never called": lambda: past_its_layer(called=False),
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
    """Sample by sample, in double precision."""
    module = module.double().eval()
    each = []
    for j in range(len(batch[1])):
        one = [c[j : j + 1].double() if c.is_floating_point() else c[j : j + 1] for c in batch]
        loss = module.training_step(tuple(one), 0)
        parts = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)
        each.append(torch.cat([part.flatten() for part in parts]))
    stacked = torch.stack(each)
    return stacked.mean(0), stacked.square().sum(1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", FAST | SLOW)
@pytest.mark.long
def test_equals_the_loop(name: str, weighted: bool) -> None:
    batch = _batch(weighted=weighted)
    mean, sq_norms = gradients(_module(name), batch)
    slow_mean, slow_sq_norms = _loop(_module(name), batch)
    assert (sq_norms / slow_sq_norms - 1).abs().max() < 1e-5
    assert (mean - slow_mean).norm() < 1e-5 * slow_mean.norm()


@pytest.mark.parametrize("name", ODD)
def test_a_sample_is_what_it_is_in_a_batch_of_its_own_whatever_the_model_does_with_rows(name: str) -> None:
    for n in (1, 5):
        mean, sq_norms = gradients(_module(name), _batch(n))
        slow_mean, slow_sq_norms = _loop(_module(name), _batch(n))
        assert (sq_norms / slow_sq_norms - 1).abs().max() < 1e-5
        assert (mean - slow_mean).norm() < 1e-5 * slow_mean.norm()


class Counted(Classifier):
    calls = 0

    def training_step(self, batch: tuple[Tensor, ...], number: int) -> Tensor:
        self.calls += 1
        value = super().training_step(batch, number)
        assert isinstance(value, Tensor)
        return value


@pytest.mark.parametrize("name", FAST)
def test_a_known_model_takes_one_pass(name: str) -> None:
    module = Counted(_module(name).network, lr=0.1)
    assert has_closed_forms(module)
    gradients(module, _batch())
    assert module.calls == 1


@pytest.mark.parametrize("name", ["a kind of its own", "a parameter of its own", "tied"])
def test_a_parameter_without_one_layer_of_a_known_kind_has_no_closed_form(name: str) -> None:
    assert not has_closed_forms(_module(name))


def test_layers_are_left_without_hooks() -> None:
    module = _module("CNN")
    gradients(module, _batch())
    assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize("name", ["CNN", "words"])
@pytest.mark.parametrize("chunk", [1, 10**9])
def test_the_size_of_chunks_changes_no_norm(chunk: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradients(_module(name), _batch())[1]
    monkeypatch.setattr(per_sample, "CHUNK_ELEMENTS", chunk)
    torch.testing.assert_close(gradients(_module(name), _batch())[1], whole, rtol=1e-5, atol=0)


def test_batch_norm_without_running_statistics_is_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.BatchNorm1d(10, track_running_stats=False))
    with pytest.raises(ValueError, match=r"network\.2 normalises with the statistics of the batch"):
        gradients(Classifier(network, lr=0.1), _batch())


def test_samples_meet_in_batch_norm_only_while_it_takes_their_statistics() -> None:
    network = CNN(SHAPE, 10, batch_norm=True)
    require_apart(network.eval())
    network.norm2.train()
    with pytest.raises(ValueError, match="norm2 normalises with the statistics of the batch"):
        require_apart(network)
