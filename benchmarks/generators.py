"""CPU milliseconds per training step of each generator, compared with a bare loop of the same work, in turns.

python benchmarks/generators.py [--repeats 7] [--side 8] [--images 500] [--steps 16] [--only cvae,beta_vae]

Images have one channel, or three with side 32. Networks and batch sizes are the generators' defaults; DDPM's U-Net has
16 and 32 channels. Our side calls ``generator.fit``, as a client does. The bare loops use the same layers, initial
weights and random numbers, and write out batches, forward passes, augmentation, losses and averages of weights. If both
sides do not end with the same weights, bit for bit, this program stops. Goal: a ratio of 1.1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from typing import Any

import torch
from round_time import cpu_name
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.core.worker import set_up_process
from fedcommons.data.examples import Examples
from fedcommons.generators.beta_vae import BetaVAE
from fedcommons.generators.cvae import CVAE
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.gan import GAN
from fedcommons.seeding import generator, set_default_generator
from lightning_modules.gan import Normed

SEED, CLASSES = 0, 10
How = GAN | CVAE | BetaVAE | DDPM


def batches(x: Tensor, y: Tensor, how: How, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of ``how.fit``.

    A PyTorch data loader draws a seed before each epoch's order, and a further order after a short last batch.
    """
    order, as_loader = generator(SEED, "order"), isinstance(how, BetaVAE | DDPM)
    for _ in range(epochs):
        if as_loader:
            torch.empty((), dtype=torch.int64).random_(generator=order)
        rows = torch.randperm(len(y), generator=order)
        if as_loader and len(y) % how.batch_size:
            torch.randperm(len(y), generator=order)
        for part in rows.split(how.batch_size):
            yield x[part], y[part]


def named(module: nn.Module, values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return these values by the names of the module's parameters."""
    return {name: value.detach() for (name, _), value in zip(module.named_parameters(), values, strict=True)}


def augmented(x: Tensor, uniforms: Tensor) -> Tensor:
    """Return images with random colour, translation and cutout; uniforms: (B, 8), uniform random numbers per image."""
    n, _, side, _ = x.shape
    u, places, most, hole = uniforms.T[..., None], torch.arange(side), (side + 4) // 8, side // 2
    colour = u[:3, ..., None, None]
    x = x + colour[0] - 0.5
    mean = x.mean(1, keepdim=True)
    x = (x - mean) * (2 * colour[1]) + mean
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * (colour[2] + 0.5) + mean
    rows, columns = (places - (part * (2 * most + 1)).floor().long() + 2 * most for part in u[3:5])
    x = F.pad(x, (most,) * 4)[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None]].movedim(3, 1)
    first = (u[5:7] * (side + 1)).floor() - hole // 2
    rows, columns = (places >= first) & (places < first + hole)
    return x * ~(rows[:, :, None] & columns[:, None])[:, None]


def decoded(layers: nn.Module, z: Tensor, y: Tensor, side: int) -> Tensor:
    """Return the decoder's pixel logits for latents z and labels y, cropped to side x side."""
    images = layers(torch.cat([z, F.one_hot(y, CLASSES).float()], 1))
    edge = (images.shape[-1] - side) // 2
    return images[..., edge : edge + side, edge : edge + side] if edge else images


def padded(x: Tensor, margin: tuple[int, ...]) -> Tensor:
    return F.pad(x, margin) if any(margin) else x


def bare_gan(how: GAN, x: Tensor, y: Tensor, epochs: int) -> dict[str, Tensor]:
    model = how.build(tuple(x.shape[1:]), CLASSES, SEED)
    g, d, draws, side = model.generator, model.discriminator, model.draws, x.shape[-1]
    spectral = how.regulariser == "spectral"
    normed = [layer for layer in d.modules() if isinstance(layer, Normed)]
    layers: list[Any] = [layer for layer in d.modules() if isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding)]
    vectors = [(layer.u, layer.v) for layer in normed]
    weights = list(g.parameters())
    adams = [torch.optim.Adam(net.parameters(), how.lr, (how.momentum, 0.99), fused=True) for net in (d, g)]
    average = [p.detach().clone() for p in weights]

    def weight(number: int) -> Tensor:
        w = layers[number].weight
        if not spectral:
            return w
        u, v = vectors[number]
        return w / (u @ w.flatten(1) @ v)

    def judged(x: Tensor, y: Tensor) -> Tensor:
        x = padded(x, d.margin)
        for number, layer in enumerate(layers[:-2]):
            x = F.leaky_relu(F.conv2d(x, weight(number), layer.bias, 2, 1), 0.2)
        f = x.flatten(1)
        logits = F.linear(f, weight(-2), layers[-2].bias).squeeze(1)
        return logits + (F.embedding(y, weight(-1)) * f).sum(1)

    for step, (images, labels) in enumerate(batches(x, y, how, epochs)):
        n = len(labels)
        with torch.no_grad():
            fakes = decoded(g.layers, torch.randn(n, how.latent, generator=draws), labels, side).tanh()
        for_images, of_fakes = torch.rand(n, 8, generator=draws), torch.rand(n, 8, generator=draws)
        real = augmented(images / 127.5 - 1, for_images).requires_grad_(not spectral)
        logits = judged(real, labels)
        loss = F.softplus(-logits).mean() + F.softplus(judged(augmented(fakes, of_fakes), labels)).mean()
        if not spectral:
            (slopes,) = torch.autograd.grad(judged(real, labels).sum(), real, create_graph=True)
            loss = loss + how.gamma / 2 * slopes.square().flatten(1).sum(1).mean()
        adams[0].zero_grad()
        loss.backward()
        adams[0].step()
        with torch.no_grad():
            for layer, (u, v) in zip(layers if spectral else (), vectors, strict=True):
                matrix = layer.weight.flatten(1)
                v.copy_(F.normalize(matrix.T @ u, dim=0))
                u.copy_(F.normalize(matrix @ v, dim=0))
        z = torch.randn(n, how.latent, generator=draws)
        new, uniforms = decoded(g.layers, z, labels, side).tanh(), torch.rand(n, 8, generator=draws)
        loss = F.softplus(-judged(augmented(new, uniforms), labels)).mean()
        for p, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            p.grad = gradient
        adams[1].step()
        keep = min(how.ema_decay, (1 + step) / (10 + step))
        for mean, p in zip(average, weights, strict=True):
            mean.lerp_(p.detach(), 1 - keep)
    return named(g, average)


def bare_cvae(how: CVAE, x: Tensor, y: Tensor, epochs: int) -> dict[str, Tensor]:
    model = how.build(tuple(x.shape[1:]), CLASSES, SEED)
    adam = torch.optim.Adam(model.parameters(), how.lr, fused=True)
    for images, labels in batches(x, y, how, epochs):
        pixels = images / 255
        mean, v = model.encoder.layers(padded(pixels, model.encoder.margin)).chunk(2, 1)
        z = mean + (v / 2).exp() * torch.randn(len(labels), how.latent, generator=model.generator)
        logits = decoded(model.decoder.layers, z, labels, x.shape[-1])
        bce = F.binary_cross_entropy_with_logits(logits, pixels, reduction="none").flatten(1).sum(1)
        loss = (bce + how.beta * ((mean.square() + v.exp() - 1 - v).sum(1) / 2)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return named(model, model.parameters())


def bare_beta_vae(how: BetaVAE, x: Tensor, y: Tensor, epochs: int) -> dict[str, Tensor]:
    set_default_generator(SEED, "initial weights")
    ramp = how.ramp * -(-len(y) // how.batch_size)
    model, side = how._build(tuple(x.shape[1:]), CLASSES, SEED, ramp=ramp), x.shape[-1]
    adam = torch.optim.Adam(model.parameters(), how.lr)
    for step, (images, _) in enumerate(batches(x, y, how, epochs), 1):
        pixels = images / 255
        mean, v = model.encoder(padded(pixels, model.pad)).chunk(2, 1)
        z = mean + (v / 2).exp() * torch.randn(len(images), how.latent, generator=model.generator)
        logits = model.decoder(z)
        if edge := (logits.shape[-1] - side) // 2:
            logits = logits[..., edge : edge + side, edge : edge + side]
        bce = F.binary_cross_entropy_with_logits(logits, pixels, reduction="none").flatten(1).sum(1).mean()
        kl = ((mean.square() + v.exp() - 1 - v).sum(1) / 2).mean()
        loss = bce + how.gamma * (kl - how.capacity * min(1.0, step / ramp)).abs()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return named(model, model.parameters())


def bare_ddpm(how: DDPM, x: Tensor, y: Tensor, epochs: int) -> dict[str, Tensor]:
    set_default_generator(SEED, "initial weights")
    model = how.build(tuple(x.shape[1:]), CLASSES, SEED)
    unet, draws, remains = model.unet, model.generator, model.schedule.alphas_cumprod
    weights = list(unet.parameters())
    adam, average = torch.optim.Adam(weights, how.lr, fused=True), [p.detach().clone() for p in weights]
    for step, (images, labels) in enumerate(batches(x, y, how, epochs)):
        t = torch.randint(how.timesteps, (len(labels),), generator=draws)
        eps = torch.randn(images.shape, generator=draws)
        of_image = remains[t].view(-1, 1, 1, 1)
        noisy = of_image**0.5 * (images / 127.5 - 1) + (1 - of_image) ** 0.5 * eps
        loss = F.mse_loss(unet(noisy, t, class_labels=labels).sample, eps)
        adam.zero_grad()
        loss.backward()
        adam.step()
        keep = min(how.ema_decay, (1 + step) / (10 + step)) if step else 0.0
        with torch.no_grad():
            for mean, p in zip(average, weights, strict=True):
                mean.sub_(mean - p, alpha=1 - keep)
    return named(unet, average)


GENERATORS: dict[str, tuple[How, Callable[[Any, Tensor, Tensor, int], dict[str, Tensor]]]] = {
    "gan": (GAN(), bare_gan),
    "gan_r1": (GAN(regulariser="r1"), bare_gan),
    "cvae": (CVAE(), bare_cvae),
    "beta_vae": (BetaVAE(), bare_beta_vae),
    "ddpm": (DDPM(channels=(16, 32)), bare_ddpm),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed trainings of each")
    parser.add_argument("--side", type=int, default=8, help="pixels on a side; 32 has three channels")
    parser.add_argument("--images", type=int, default=500, help="of a client")
    parser.add_argument("--steps", type=int, default=16, help="of a timed training, at least; it has whole epochs")
    parser.add_argument("--only", default=",".join(GENERATORS), help="generators, separated by commas")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(GENERATORS):
        parser.error(f"unknown generator {', '.join(sorted(unknown))}; known: {', '.join(GENERATORS)}")
    set_up_process()
    shape, draws = (3 if options.side == 32 else 1, options.side, options.side), torch.Generator().manual_seed(1234)
    x = torch.randint(256, (options.images, *shape), dtype=torch.uint8, generator=draws)
    y = torch.randint(CLASSES, (options.images,), generator=draws)
    print(f"{date.today()}, {cpu_name()}, one torch thread, torch {torch.__version__}")
    print(f"\n{options.images} images {shape}, medians of {options.repeats}:\n")
    print("| generator | steps | CPU ms a step | bare | ratio |\n|---|---|---|---|---|")
    for name in options.only.split(","):
        how, bare = GENERATORS[name]
        an_epoch = -(-len(y) // how.batch_size)
        epochs = -(-options.steps // an_epoch)
        steps, seconds = epochs * an_epoch, ([], [])
        for repeat in range(options.repeats + 1):
            start = time.process_time()
            ours = how.fit(Examples(x, y), CLASSES, SEED, [epochs])[epochs].weights
            between = time.process_time()
            plain = bare(how, x, y, epochs)
            end = time.process_time()
            if different := [part for part, value in plain.items() if not torch.equal(ours[part], value)]:
                sys.exit(f"{name}: both loops end at other weights {different[0]}, so they do other work.")
            if repeat:
                seconds[0].append((between - start) / steps)
                seconds[1].append((end - between) / steps)
        ours_s, bare_s = (1000 * statistics.median(times) for times in seconds)
        print(f"| {name} | {steps} | {ours_s:.2f} | {bare_s:.2f} | {ours_s / bare_s:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
