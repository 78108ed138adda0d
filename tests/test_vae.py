"""The autoencoder that classifies by its code: its loss written out, its code, its parts and sizes."""

import pytest
import torch
from torch import Tensor, nn

from fedcommons.config import presets
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import build_module
from lightning_modules import VAEClassifier, vae
from lightning_modules.networks import Encoder

DIGITS, FMNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
RATE = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "optimizer": "adam"}


def _vae(trade_off: float = 0.05) -> VAEClassifier:
    torch.manual_seed(0)
    return vae(DIGITS, 10, **RATE, latent=5, channels=(3, 4), trade_off=trade_off).double()


def _batch(n: int = 6) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.rand(n, *DIGITS, generator=draws, dtype=torch.float64), torch.arange(n) % 10


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25, 1.0], dtype=torch.float64)])
def test_the_joint_loss_is_the_formula_example_by_example(weights: Tensor | None) -> None:
    """With one draw of the code, which all three terms share where they need it."""
    module, (x, y) = _vae(0.3), _batch()
    torch.manual_seed(7)
    result = module.training_step((x, y) if weights is None else (x, y, weights), 0)
    torch.manual_seed(7)
    noise, total = torch.randn(6, 5, dtype=torch.float64), 0.0
    for j in range(6):
        mu, v = (part[0] for part in module.encode(x[j : j + 1]))
        z = mu + torch.exp(v / 2) * noise[j]
        ce = -torch.log_softmax(module.classifier(z), 0)[y[j]]
        kl = sum(0.5 * (m * m + torch.exp(s) - 1 - s) for m, s in zip(mu, v, strict=True)) / 5
        mse = ((module.decoder(z[None])[0] - x[j]) ** 2).sum()
        total += (1.0 if weights is None else weights[j]) * (ce + 0.3 * (kl + mse)) / 6
    assert isinstance(total, Tensor)
    torch.testing.assert_close(result, total)


def test_without_its_weight_the_joint_loss_is_the_cross_entropy_bit_for_bit() -> None:
    result = []
    for name in ("training_step", "cross_entropy"):
        module = _vae(0.0)
        torch.manual_seed(7)
        loss = getattr(module, name)(_batch(), 0)
        loss.backward()
        grads = [p.grad for n, p in module.named_parameters() if not n.startswith("decoder")]
        result.append([loss.detach(), *(g for g in grads if g is not None)])
    assert len(result[0]) == len(result[1]) == 1 + 4 + 4 + 2  # loss; convolutions, code, classifier
    assert all(map(torch.equal, *result))
    assert all(p.grad is None for p in module.decoder.parameters())  # pyright: ignore[reportPossiblyUnboundVariable]


def test_the_loss_as_in_the_authors_code() -> None:
    """The features are classified, not the code; pixels have a cross entropy; BatchNorm after all but one convolution.

    In evaluation mode, so that the code is its mean and BatchNorm has statistics of its own.
    """
    options = {"batch_norm": True, "classify": "features", "reconstruction": "cross_entropy"}
    module = vae(DIGITS, 10, **RATE, latent=5, channels=(3, 4), depth=2, trade_off=0.3, **options).double()
    x, y = _batch()
    for _ in range(3):
        module(x)
    module.eval()
    mu, v = module.encode(x)
    features, decoded = module.encoder(x), module.decoder(mu)
    torch.testing.assert_close(module(x), module.classifier(features))
    ce = -torch.log_softmax(module.classifier(features), 1)[torch.arange(6), y]
    kl = (mu * mu + torch.exp(v) - 1 - v).sum(1) / 10
    of_pixels = -(x * decoded.log() + (1 - x) * (1 - decoded).log()).sum((1, 2, 3))
    torch.testing.assert_close(module.training_step((x, y), 0), (ce + 0.3 * (kl + of_pixels)).mean())
    for part, expected in ((module.encoder, 4), (module.decoder, 3)):
        assert sum(isinstance(m, nn.BatchNorm2d) for m in part.modules()) == expected
    *_, before, last = module.decoder.children()
    assert isinstance(before, nn.ConvTranspose2d)  # else pixels would be in [1/2, 1]
    assert isinstance(last, nn.Sigmoid)
    base = Encoder(DIGITS, 10, latent=5, channels=(3, 4), depth=2, batch_norm=True)
    of_codes = _size(module.mean) + _size(module.log_variance)
    assert _size(base) == _size(module) - _size(module.decoder) - of_codes  # the same encoder and classifier


def test_with_normalise_the_encoder_alone_sees_normalised_pixels() -> None:
    """So do images that were decoded; what is reconstructed lies in [0, 1]; and no parameter comes or goes.

    In evaluation the code is its mean, and in training it is drawn; pixels are scaled to one once.
    """
    plain = _vae().float()
    assert not torch.equal(plain(_batch()[0].float()), plain(_batch()[0].float()))
    plain.eval()
    start = {"latent": 5, "channels": (3, 4), "mean": (0.3,), "std": (0.4,)}
    module = vae(DIGITS, 10, **RATE, **start, normalise=True).eval()
    module.load_state_dict(plain.state_dict())
    x = torch.randint(256, (6, *DIGITS), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    moved = (x / 255 - 0.3) / 0.4
    assert torch.equal(plain(x), plain(x / 255))
    assert torch.equal(plain(x), plain.classifier(plain.encode(x)[0]))
    for images in (x, x / 255):
        torch.testing.assert_close(module(images), plain(moved))
        torch.testing.assert_close(module.encode(images), plain.encode(moved))
    mu, v = plain.encode(moved)
    kl, y = (mu * mu + torch.exp(v) - 1 - v).sum(1) / 10, torch.arange(6)
    squares = (plain.decoder(mu) - x / 255).square().sum((1, 2, 3))
    ce = -torch.log_softmax(plain.classifier(mu), 1)[y, y]
    torch.testing.assert_close(module.training_step((x, y), 0), (ce + 0.05 * (kl + squares)).mean())


@pytest.mark.parametrize(("shape", "channels", "depth"), [(DIGITS, (3, 4), 1), (FMNIST, (16, 32), 1), (CIFAR, (4,), 3)])
def test_the_decoder_mirrors_the_encoder(shape: tuple[int, ...], channels: tuple[int, ...], depth: int) -> None:
    """As many convolutions with as many weights, and images in [0, 1] of the encoder's shape; nowhere a BatchNorm."""
    module = vae(shape, 10, **RATE, latent=6, channels=channels, depth=depth)
    decoded = module.decoder(10 * torch.randn(3, 6))
    assert decoded.shape == (3, *shape)
    assert 0 <= decoded.min() <= decoded.max() <= 1
    sizes = [
        sorted(m.weight.numel() for m in part.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d))
        for part in (module.encoder, module.decoder)
    ]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == depth * len(channels)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def test_the_papers_sizes() -> None:
    """CIFAR: Theta > 1,000,000 parameters of encoder and classifier, so that the latents are about 7.68 % (A.9)."""
    module = vae(CIFAR, 10, **RATE, latent=128, channels=(32, 64), depth=2)
    theta = _size(module) - _size(module.decoder)
    assert theta == 1_115_690
    base = Encoder(CIFAR, 10, latent=128, channels=(32, 64), depth=2)
    assert _size(base) == theta - (4096 * 128 + 128)  # without the log-variance
    for name, kind in (("vae", VAEClassifier), ("encoder", Encoder)):
        config = presets.experiment("smoke", values={"model.name": name, "model.latent": 7})
        module = build_module(config, prepare(config).dataset)
        assert isinstance(module if name == "vae" else module.get_submodule("network"), kind)
        with pytest.raises(UserError, match=r"an image 4 times .* multiples of 16, and examples are \(1, 8, 8\)"):
            prepare(presets.experiment("smoke", values={"model.name": name, "model.channels": (2, 2, 2, 2)}))
