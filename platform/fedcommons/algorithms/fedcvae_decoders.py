"""FedCVAE's decoders: clients train them, and the server samples images from them and distils them into one decoder.

z: codes, (n, l), l independent N(0, 1) numbers per image, truncated to [-w, w];  y: classes, (n,);  n: number of
images.   The networks are those of ``lightning_modules.cvae``, with BatchNorm, for images of any height and width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Flat, flatten
from fedcommons.seeding import generator, seed_for, set_default_generator
from lightning_modules.cvae import CVAE, Decoder, decode, reconstruction, truncated_normal


@dataclass(frozen=True)
class Networks:
    """Sizes of encoder and decoder.

    shape: (C, H, W) of an image. latent: length of a code. norm_bias: whether layers before BatchNorm have biases.
    """

    shape: tuple[int, ...]
    n_classes: int
    channels: tuple[int, ...]
    latent: int
    norm_bias: bool = True

    @property
    def loss(self) -> str:
        """Return the reconstruction loss's name: squares (squared error) for 3-channel images, else cross_entropy."""
        return "squares" if self.shape[0] == 3 else "cross_entropy"

    def decoder(self, weights: Flat | None = None) -> Decoder:
        """Return a decoder with ``weights``, which include BatchNorm's statistics, or with random weights if None."""
        network = Decoder(self.shape, self.n_classes, self.channels, self.latent, True, self.norm_bias)
        if weights is not None:
            network.load_state_dict(dict(weights), strict=False)  # ``weights`` lacks BatchNorm's batch counters.
        return network


@dataclass(frozen=True)
class Training:
    """Constants of a network's training by Adam."""

    epochs: int
    batch_size: int
    lr: float


def batches(n: int, epochs: int, size: int, seed: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield (epoch, row indices) of each step. A batch of one row has this row twice, as BatchNorm needs two rows."""
    draws = generator(seed, "order")
    orders = torch.stack([torch.randperm(n, generator=draws) for _ in range(epochs)]).to(device)
    for epoch, order in enumerate(orders):
        for rows in order.split(size):
            yield epoch, rows if len(rows) > 1 else rows.repeat(2)


def train(
    networks: Networks, hidden: int, beta: float, how: Training, x: Tensor, y: Tensor, share: float, seed: int
) -> tuple[Flat, Tensor]:
    """Train a client's autoencoder; return its decoder with BatchNorm's statistics, and the mean loss of the steps.

    hidden: width of the encoder's linear layer. beta: weight of the KL term. x: images, uint8. y: classes. share:
    fraction of all steps that the client takes, below 1 for a straggler's partial work.
    """
    set_default_generator(seed, "initial weights")
    model = CVAE(
        shape=networks.shape, n_classes=networks.n_classes, channels=networks.channels, hidden=hidden,
        latent=networks.latent, beta=beta, reconstruction=networks.loss, batch_norm=True,
        norm_bias=networks.norm_bias,
    ).to(x.device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), how.lr)
    noise = torch.randn(how.epochs, len(y), networks.latent, generator=generator(seed, "codes")).to(x.device)
    steps = ceil(how.epochs * -(-len(y) // how.batch_size) * share - 1e-9)  # A straggler takes fewer steps.
    losses = []
    of_steps = batches(len(y), how.epochs, how.batch_size, seed, x.device)
    for _, (epoch, rows) in zip(range(steps), of_steps, strict=False):
        loss = model(x[rows], y[rows], noise[epoch][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = model.decoder.state_dict()
    sent = flatten({name: t for name, t in state.items() if t.is_floating_point()})
    return sent, torch.stack(losses).mean()


def quotas(samples: int, sizes: Sequence[int]) -> list[int]:
    """Return each client's number of images, proportional to ``sizes``, rounded down; the last gets the remainder."""
    counts = [samples * size // sum(sizes) for size in sizes]
    return [*counts[:-1], samples - sum(counts[:-1])]


@dataclass(frozen=True)
class Drawing:
    """The server's task to sample images from the decoders of N clients.

    sizes: numbers of images of the clients. histograms: numbers of images per class of the clients, (N, classes).
    samples: number of images to sample. bound: truncation bound of codes. again: constants with which the
    server trains a distilled decoder, which then makes all images, with uniform labels; None: no distilled decoder.
    """

    networks: Networks
    decoders: Sequence[Flat]
    sizes: Sequence[int]
    histograms: Tensor
    samples: int
    bound: float
    again: Training | None

    @property
    def nbytes(self) -> int:
        return sum(decoder.buffer.nbytes for decoder in self.decoders)


def draw(worker: Worker, task: Drawing, seed: int) -> tuple[Tensor, Tensor]:
    """Sample synthetic images, uint8 (n, C, H, W), and classes (n,) from the clients' or the distilled decoder."""
    networks, device = task.networks, worker.work.device
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with onednn(worker.work.loop.onednn):
        set_default_generator(seed, "decoders")
        shares = zip(task.decoders, task.histograms, quotas(task.samples, task.sizes), strict=True)
        for number, (weights, histogram, n) in enumerate(shares):
            if n:
                draws = generator(seed, "codes and classes", number)
                y = torch.multinomial(histogram.double(), n, replacement=True, generator=draws).to(device)
                z = truncated_normal(n, networks.latent, task.bound, draws).to(device)
                parts.append((z, y, decode(networks.decoder(weights).to(device), z, y)))
        z, y, images = (torch.cat(column) for column in zip(*parts, strict=True))
        if task.again is not None:
            decoder = distilled_decoder(networks, task.again, z, y, images, seed)
            draws = generator(seed, "codes and uniform classes")
            y = torch.randint(networks.n_classes, (task.samples,), generator=draws).to(device)
            images = decode(decoder, truncated_normal(len(y), networks.latent, task.bound, draws), y)
    return (255 * images).round().to(torch.uint8).cpu(), y.cpu()


def distilled_decoder(networks: Networks, how: Training, z: Tensor, y: Tensor, images: Tensor, seed: int) -> Decoder:
    """Train and return a new decoder that reproduces ``images``, with pixels in [0, 1], from codes z and classes y."""
    set_default_generator(seed, "the server's decoder")
    decoder = networks.decoder().to(images.device)
    optimizer = torch.optim.Adam(decoder.parameters(), how.lr)
    orders = seed_for(seed, "the server's decoder")
    for _, rows in batches(len(y), how.epochs, how.batch_size, orders, images.device):
        loss = reconstruction(decoder(z[rows], y[rows]), images[rows], networks.loss).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return decoder


@dataclass(frozen=True)
class Lesson:
    """The server model's training task in a round. first, second: Adam's moments after ``steps`` steps."""

    model: Flat
    first: Flat
    second: Flat
    steps: int
    images: Tensor
    labels: Tensor
    how: Training
    round: int

    @property
    def nbytes(self) -> int:
        return 3 * self.model.buffer.nbytes + self.images.nbytes


def learn(worker: Worker, task: Lesson, seed: int) -> tuple[Flat, Flat, Flat, int]:
    """Train the server model for all epochs; return the model, Adam's two moments and Adam's number of steps."""
    work, device, layout = worker.work, worker.work.device, task.model.layout
    work.load(Flat(layout, task.model.buffer.to(device)))
    work.load_buffers(work.initial_buffers)
    work.module.train()
    set_default_generator(seed, "dropout")
    moments = [Flat(layout, x.buffer.to(device, copy=True)) for x in (task.first, task.second)]
    adam, steps = torch.optim.Adam(work.named.values(), task.how.lr), task.steps
    for name, parameter in work.named.items():
        at = {key: x[name] for key, x in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)}
        adam.state[parameter] = {"step": torch.tensor(float(steps)), **at}
    x, y = task.images.to(device), task.labels.to(device)
    with work.logged, onednn(work.loop.onednn):
        for epoch, rows in batches(len(y), task.how.epochs, task.how.batch_size, seed, device):
            work.clock.set(task.round, (task.round - 1) * task.how.epochs + epoch, steps)
            loss = work.module.training_step((x[rows], y[rows]), 0)
            assert isinstance(loss, Tensor)
            adam.zero_grad()
            loss.backward()
            adam.step()
            steps += 1
    model, first, second = (Flat(layout, f.buffer.detach().cpu().clone()) for f in (work.params, *moments))
    return model, first, second, steps
