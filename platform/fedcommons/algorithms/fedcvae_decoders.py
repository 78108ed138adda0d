"""FedCVAE's decoders: clients train them, and the server samples images from them and distils them into one decoder.

z: codes, (n, l), l independent N(0, 1) numbers per image, truncated to [-w, w];  y: classes, (n,);  n: number of
images.   The networks are those of ``lightning_modules.cvae``, with BatchNorm, for images of any height and width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.algorithm import State
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Flat, Payload, data, flat, flatten, scalar
from fedcommons.seeding import generator, seed_for, set_default_generator
from lightning_modules.cvae import CVAE, Decoder, decode, reconstruction, truncated_normal

if TYPE_CHECKING:
    from fedcommons.algorithms.fedcvae import FedCVAE


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


def batches(n: int, epochs: int, size: int, seed: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield (epoch, row indices) of each step. A batch of one row has this row twice, as BatchNorm needs two rows."""
    draws = generator(seed, "order")
    orders = torch.stack([torch.randperm(n, generator=draws) for _ in range(epochs)]).to(device)
    for epoch, order in enumerate(orders):
        for rows in order.split(size):
            yield epoch, rows if len(rows) > 1 else rows.repeat(2)


def train(networks: Networks, how: "FedCVAE", x: Tensor, y: Tensor, share: float, seed: int) -> tuple[Flat, Tensor]:
    """Train a client's autoencoder; return its decoder with BatchNorm's statistics, and the mean loss of the steps.

    x: images, uint8. y: classes. share: fraction of all steps that the client takes, below 1 for a straggler's partial
    work.
    """
    set_default_generator(seed, "initial weights")
    model = CVAE(
        shape=networks.shape, n_classes=networks.n_classes, channels=how.channels, hidden=how.hidden,
        latent=how.latent, beta=how.beta, reconstruction=networks.loss, batch_norm=True, norm_bias=how.norm_bias,
    ).to(x.device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), how.local_lr)
    noise = torch.randn(how.local_epochs, len(y), how.latent, generator=generator(seed, "codes")).to(x.device)
    steps = ceil(how.local_epochs * -(-len(y) // how.batch_size) * share - 1e-9)  # A straggler takes fewer steps.
    losses = []
    of_steps = batches(len(y), how.local_epochs, how.batch_size, seed, x.device)
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
    """The server's task to sample images from the clients' decoders. sent: what each client sent, see ``FedCVAE``."""

    method: "FedCVAE"
    networks: Networks
    sent: Sequence[Payload]

    @property
    def nbytes(self) -> int:
        return sum(flat(each, "decoder").buffer.nbytes for each in self.sent)


def draw(worker: Worker, task: Drawing, seed: int) -> tuple[Tensor, Tensor]:
    """Sample synthetic images, uint8 (n, C, H, W), and classes (n,) from the clients' or the distilled decoder."""
    how, networks, device = task.method, task.networks, worker.work.device
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with onednn(worker.work.loop.onednn):
        set_default_generator(seed, "decoders")
        shares = quotas(how.samples, [int(scalar(each, "size")) for each in task.sent])
        for number, (each, n) in enumerate(zip(task.sent, shares, strict=True)):
            if n:
                draws = generator(seed, "codes and classes", number)
                y = torch.multinomial(data(each["histogram"]).double(), n, replacement=True, generator=draws).to(device)
                z = truncated_normal(n, networks.latent, how.bound, draws).to(device)
                parts.append((z, y, decode(networks.decoder(flat(each, "decoder")).to(device), z, y)))
        z, y, images = (torch.cat(column) for column in zip(*parts, strict=True))
        if how.variant == "kd":
            decoder = distilled_decoder(networks, how, z, y, images, seed)
            draws = generator(seed, "codes and uniform classes")
            y = torch.randint(networks.n_classes, (how.samples,), generator=draws).to(device)
            images = decode(decoder, truncated_normal(len(y), networks.latent, how.bound, draws), y)
    return (255 * images).round().to(torch.uint8).cpu(), y.cpu()


def distilled_decoder(networks: Networks, how: "FedCVAE", z: Tensor, y: Tensor, images: Tensor, seed: int) -> Decoder:
    """Train and return a new decoder that reproduces ``images``, with pixels in [0, 1], from codes z and classes y."""
    set_default_generator(seed, "the server's decoder")
    decoder = networks.decoder().to(images.device)
    optimizer = torch.optim.Adam(decoder.parameters(), how.decoder_lr)
    orders = seed_for(seed, "the server's decoder")
    for _, rows in batches(len(y), how.decoder_epochs, how.batch_size, orders, images.device):
        loss = reconstruction(decoder(z[rows], y[rows]), images[rows], networks.loss).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return decoder


def learn(worker: Worker, task: ServerTask["FedCVAE"], seed: int) -> State:
    """Train the server model for all epochs; return the changed entries of the server state."""
    work, device, how, state = worker.work, worker.work.device, task.method, task.payload
    layout = work.params.layout
    work.load(Flat(layout, data(state["model"]).to(device)))
    work.load_buffers(work.initial_buffers)
    work.module.train()
    set_default_generator(seed, "dropout")
    moments = [Flat(layout, data(state[name]).to(device, copy=True)) for name in ("first", "second")]
    adam, steps = torch.optim.Adam(work.named.values(), how.server_lr), int(scalar(state, "steps"))
    for name, parameter in work.named.items():
        at = {key: x[name] for key, x in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)}
        adam.state[parameter] = {"step": torch.tensor(float(steps)), **at}
    x, y = (data(state[name]).to(device) for name in ("images", "labels"))
    with work.logged, onednn(work.loop.onednn):
        for epoch, rows in batches(len(y), how.server_epochs, how.server_batch, seed, device):
            work.clock.set(task.round, (task.round - 1) * how.server_epochs + epoch, steps)
            loss = work.loss((x[rows], y[rows]))
            adam.zero_grad()
            loss.backward()
            adam.step()
            steps += 1
    trained = zip(("model", "first", "second"), (work.params, *moments), strict=True)
    after = {name: Flat(layout, x.buffer.detach().cpu().clone()) for name, x in trained}
    return {**after, "steps": torch.tensor(steps)}
