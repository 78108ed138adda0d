"""Ensemble of client models and training of an image generator, used by DENSE and Co-Boosting.

The server distils the ensemble into its model on synthetic images.

x: server model, the student;  f_i: logits of client i's model;  a_i: client i's weight, sum_i a_i = 1;
f = sum_i a_i f_i: logits of the ensemble;  G: generator, z: its input noise, y: labels;  p_T = softmax(f / T).

    divergence:  T^2 KL(p_T(target) || p_T(other)), with about the same gradient size for all T (Hinton et al. 2015)

Adam trains generator and noise together. The result is the batch with the lowest loss of all steps, as uint8. Networks
are in evaluation mode, except the student in distillation. The student's BatchNorm uses the mean of the clients'
statistics, with which the server model is also evaluated.

The generator G:  z (B, l) -> linear, to 2w maps of H/4 x W/4, BatchNorm -> twice [upsampling by 2, convolution 3x3,
BatchNorm, LeakyReLU 0.2], to 2w and to w maps -> convolution 3x3, sigmoid: H x W pixels in (0, 1). B: batch size;  l:
``latent``, length of z;  w: ``width``, number of channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcommons.core.client_worker import Work
from fedcommons.core.features import seen
from fedcommons.flat_tensors import Flat
from fedcommons.seeding import generator, set_default_generator

if TYPE_CHECKING:
    from fedcommons.algorithms.one_shot_models import Classroom, OneShotModels

Score = Callable[[Tensor, Tensor], Tensor]
"""Function of a batch (network inputs, labels) that returns the generator's loss, a scalar."""


class Ensemble:
    """The clients' models on a worker, which runs each model in its module.

    models: P weights of each of the N clients' models, (N, P), in the order of the module's parameters. statistics:
    floating-point buffers (BatchNorm's statistics) of the N models, (N, B); B is 0 without BatchNorm.
    """

    def __init__(self, work: Work, models: Tensor, statistics: Tensor) -> None:
        self.module = work.module
        rows = zip(models.to(work.device), statistics.to(work.device), strict=True)
        self.members = [{**Flat(work.params.layout, w), **Flat(work.buffers.layout, b)} for w, b in rows]
        self.server = {name: parameter.detach() for name, parameter in work.named.items()}

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the N clients' models for network inputs x, (N, n, classes)."""
        return torch.stack([functional_call(self.module, member, (x,)) for member in self.members])

    def student(self, x: Tensor) -> Tensor:
        """Return the student's logits for network inputs x, (n, classes), without a gradient for its weights."""
        return functional_call(self.module, self.server, (x,))

    @contextmanager
    def gaps(self) -> Iterator[list[Tensor]]:
        """Yield a list to which every forward pass appends ||mean - m|| + ||variance - v|| of each BatchNorm layer.

        mean, variance: statistics of the layer's input, per channel. m, v: running statistics of the layer.
        """
        distances: list[Tensor] = []

        def note(layer: nn.modules.batchnorm._BatchNorm, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            by_channel = inputs[0].transpose(0, 1).flatten(1)
            assert layer.running_mean is not None
            assert layer.running_var is not None
            mean = torch.linalg.vector_norm(by_channel.mean(1) - layer.running_mean)
            distances.append(mean + torch.linalg.vector_norm(by_channel.var(1, correction=0) - layer.running_var))

        layers = [module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        handles = [layer.register_forward_hook(note) for layer in layers if layer.running_mean is not None]
        try:
            yield distances
        finally:
            for handle in handles:
                handle.remove()


def divergence(target: Tensor, other: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(p_T(target) || p_T(other)) of logits (n, classes), per example, (n,); p_T(f) = softmax(f / T)."""
    p, q = (torch.stack([target, other]) / temperature).log_softmax(2)
    return temperature**2 * (p.exp() * (p - q)).sum(1)


def make(
    room: "Classroom", how: "OneShotModels", score: Score, seed: int, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Train a new generator and its input noise to minimise the loss ``score``; return the best batch and its labels.

    clip: largest norm of the gradient of the generator's weights; None: no clipping. The gradient of the noise is never
    clipped. Returns images, uint8 (n, C, H, W), of the step with the lowest loss, and labels (n,).
    """
    work, draws = room.work, generator(seed, "noise and labels")
    kind = work.params.buffer.dtype
    set_default_generator(seed, "generator")
    network = Upsampler(room.shape, how.latent, how.width, how.norm_bias).to(work.device, kind)
    z = torch.randn(how.generated, how.latent, generator=draws).to(work.device, kind).requires_grad_()
    labels = torch.randint(room.classes, (how.generated,), generator=draws).to(work.device)
    optimizer = torch.optim.Adam([*network.parameters(), z], how.generator_lr, (0.5, 0.999))
    best, best_pixels = torch.full((), inf, device=work.device, dtype=kind), torch.zeros(0)
    work.module.eval()
    for step in range(how.generator_steps):
        pixels = network(z)
        loss = score(seen(work.module, pixels), labels)
        lower = loss.detach() < best
        best_pixels = torch.where(lower, pixels.detach(), best_pixels) if step else pixels.detach()
        best = torch.where(lower, loss.detach(), best)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return (255 * best_pixels).round().to(torch.uint8), labels


def order(n: int, batch: int, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the row indices of the batches of one pass over n rows in random order. batch: rows per batch."""
    return torch.randperm(n, generator=generator(seed, "order")).to(device).split(batch)


def optimizer_of(work: Work, velocity: Tensor, lr: float, momentum: float, decay: float = 0.0) -> torch.optim.SGD:
    """Return SGD on the module's weights with the momentum buffer ``velocity``, which its steps change in place."""
    optimizer = torch.optim.SGD(work.named.values(), lr, momentum, weight_decay=decay)
    parts = Flat(work.params.layout, velocity)
    for name, parameter in work.named.items():
        optimizer.state[parameter]["momentum_buffer"] = parts[name]
    return optimizer


def set_training_mode(module: nn.Module) -> None:
    """Set training mode except for BatchNorm, whose statistics stay fixed until ``module.train()`` is called."""
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()


SCALE = 0.02
"""Standard deviation of the generator's initial weights."""


class Upsampler(nn.Module):
    """Generator from noise (B, latent) to images (B, C, H, W) in (0, 1); outputs larger than H x W are cropped.

    With latent 256, width 64 and 3x32x32 images the layers are those of the generator in DENSE's released code. In that
    code, convolutions before BatchNorm have no bias, as here with ``norm_bias`` false. That code draws the initial
    BatchNorm scales from N(1, 0.02^2); here they are 1.
    """

    def __init__(self, shape: tuple[int, ...], latent: int, width: int, norm_bias: bool = True) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        h, w = -(-self.height // 4), -(-self.width // 4)
        self.layers = nn.Sequential(
            nn.Linear(latent, 2 * width * h * w),
            nn.Unflatten(1, (2 * width, h, w)),
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=norm_bias),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=norm_bias),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )
        for layer in self.layers:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.normal_(layer.weight, 0.0, SCALE)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)[..., : self.height, : self.width]
