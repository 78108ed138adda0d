"""Fast squared norms of per-sample gradients = the obvious loop, for every kind of layer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedcommons.convergence import per_sample
from fedcommons.convergence.per_sample import gradients, has_closed_forms, require_apart
from lightning_modules import Classifier
from lightning_modules.networks import CNN, VGG11

SHAPE = (3, 32, 32)


class ResNet(nn.Module):
    """A residual block with GroupNorm, a strided convolution in groups, ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.body, self.norm2 = (
            nn.Conv2d(8, 8, 3, padding="same", groups=4, padding_mode="circular"),
            nn.GroupNorm(4, 8),
        )
        self.down = nn.Conv2d(8, 6, (3, 5), stride=(2, 3), dilation=2)
        self.last = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.norm(self.stem(x)))
        return self.last(torch.relu_(self.down(torch.relu(h + self.norm2(self.body(h))))).mean((2, 3)))


class Words(nn.Module):
    """Embedding with a padding token, LayerNorm and linear layers along a sequence."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 6, padding_idx=0, scale_grad_by_freq=scaled), nn.LayerNorm(6)
        self.each, self.last = nn.Linear(6, 7), nn.Linear(7, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (3 * x[:, 0, 0, :9].abs()).long().clamp(max=4)
        return self.last(torch.tanh(self.each(self.norm(self.embedding(tokens)))).mean(1))


class Norms(nn.Module):
    """LayerNorm of whole images and of vectors, BatchNorm along rows of pixels and of vectors; no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.rows = nn.LayerNorm([3, 32, 32]), nn.BatchNorm1d(3)
        self.hidden, self.batch = nn.Linear(3 * 32 * 32, 7, bias=False), nn.BatchNorm1d(7)
        self.vectors, self.last = nn.LayerNorm(7, bias=False), nn.Linear(7, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(torch.relu(self.rows(self.images(x).flatten(2))).flatten(1))
        return self.last(torch.relu(self.vectors(torch.tanh(self.batch(h)))))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(torch.relu(self.convolution(x))).flatten(1))


class OfItsOwn(nn.Module):
    """A parameter that no known layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(3, 1, 1)), nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x * self.scale).flatten(1))


class PastItsLayer(nn.Module):
    """A weight is used by itself, as well as by its layer or, if that is never called, instead."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.a, self.last = nn.Linear(32, 32), nn.Linear(32, 10)
        self.b = self.a if called else nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(torch.relu(self.a(x[:, 0, 0])) @ self.b.weight))


class Doubled(nn.Linear):
    """A kind of its own, that is a known one too."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(torch.relu(self.a(x[:, 0, 0]))))


FAST: dict[str, Callable[[], nn.Module]] = {
    "VGG-11": lambda: VGG11(SHAPE, 10),
    "CNN": lambda: CNN(SHAPE, 10),
    "CNN with BatchNorm": lambda: CNN(SHAPE, 10, batch_norm=True),
    "ResNet with GroupNorm": ResNet,
    "words": Words,
    "norms": Norms,
}
SLOW: dict[str, Callable[[], nn.Module]] = {
    "called twice": CalledTwice,
    "a parameter of its own": OfItsOwn,
    "tied": Tied,
    "gradients scaled by the frequency of words": lambda: Words(scaled=True),
    "a weight used past its layer": lambda: PastItsLayer(called=True),
    "a weight whose layer is never called": lambda: PastItsLayer(called=False),
    "a kind of its own": lambda: nn.Sequential(nn.Flatten(), Doubled(3 * 32 * 32, 10)),
}


def _module(name: str) -> Classifier:
    torch.manual_seed(0)
    module = Classifier((FAST | SLOW)[name](), lr=0.1)
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
def test_equals_the_loop(name: str, weighted: bool) -> None:
    batch = _batch(weighted=weighted)
    mean, sq_norms = gradients(_module(name), batch)
    slow_mean, slow_sq_norms = _loop(_module(name), batch)
    assert (sq_norms / slow_sq_norms - 1).abs().max() < 1e-5
    assert (mean - slow_mean).norm() < 1e-5 * slow_mean.norm()


@pytest.mark.parametrize("name", FAST)
def test_a_known_model_takes_one_backward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_sample, "_one_by_one", lambda *_: pytest.fail("it went the slow way"))
    assert has_closed_forms(_module(name))
    gradients(_module(name), _batch())


@pytest.mark.parametrize("name", ["a kind of its own", "a parameter of its own", "tied"])
def test_a_parameter_without_one_layer_of_a_known_kind_has_no_closed_form(name: str) -> None:
    assert not has_closed_forms(_module(name))


def test_layers_are_left_without_hooks() -> None:
    module = _module("CNN")
    gradients(module, _batch())
    assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize("chunk", [1, 10**9])
def test_neither_the_size_of_chunks_nor_the_way_to_a_product_changes_a_norm(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(per_sample, "CHUNK_ELEMENTS", chunk)
    draw = torch.Generator().manual_seed(2)
    for n, m, places in ((3, 4, 50), (40, 30, 2)):
        a, g = (torch.randn(6, k, places, generator=draw, dtype=torch.float64) for k in (n, m))
        explicit = torch.einsum("bnt,bmt->bnm", a, g).square().sum((1, 2))
        assert torch.allclose(per_sample._sum_over_places(a, g), explicit, rtol=1e-12)


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
