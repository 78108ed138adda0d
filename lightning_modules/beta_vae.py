"""beta-VAE with controlled capacity (Burgess et al. 2018, arXiv:1804.03599), as Fedssyn trains it on dSprites.

x: an image with pixels in [0, 1];  mu, v: mean and log-variance of its code of l numbers;  z ~ N(mu, e^v): the code;
x^: logits of the image decoded from z;  BCE: binary cross entropy;  gamma: weight of the KL term;  C: capacity in nats,
which rises linearly from 0 to ``capacity`` and then stays.

    loss = BCE(x^, x), summed over pixels, + gamma |KL - C|,   KL = sum over l of (mu^2 + e^v - 1 - v) / 2

The loss takes the absolute value after BCE and KL are averaged over the batch. The encoder has convolutions 4x4 with
stride 2, which halve the image down to 4x4, then linear layers 256-256-2l. The decoder mirrors the encoder. At 64x64
the encoder has four convolutions, as in the papers. Images are padded with zeros to a square whose side is a power of
two, and decoded images are cropped.
"""

from collections.abc import Callable
from math import ceil, log2

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.cvae import divergence, reconstruction

SMALLEST = 4
"""Height and width of the encoder's smallest feature maps, in pixels."""


class BetaVAE(LightningModule):
    """beta-VAE that also stores the mean code of each class, around which codes of new images are sampled.

    shape: (C, H, W) of an image. latent: l, length of a code. filters: channels of each convolution. hidden: width of
    the linear layers. ramp: number of steps in which the capacity rises to ``capacity``. flip: whether to mirror images
    with probability 1/2. A batch is (x, y): x uint8 (B, C, H, W), y (B,) classes, which the loss does not use. All
    random numbers come from a generator seeded with ``seed``.
    """

    means: Tensor

    def __init__(
        self, *, shape: tuple[int, ...], n_classes: int, latent: int, filters: int, hidden: int, lr: float,
        gamma: float = 100.0, capacity: float = 20.0, ramp: int = 1, flip: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.latent, self.lr, self.flip = latent, lr, flip
        self.gamma, self.capacity, self.ramp, self.steps = gamma, capacity, ramp, 0
        halvings = max(1, ceil(log2(max(shape[1:]) / SMALLEST)))
        height, width = (SMALLEST * 2**halvings - side for side in shape[1:])
        top, left = height // 2, width // 2
        self.pad = (left, width - left, top, height - top)
        self.rows, self.columns = slice(top, top + shape[1]), slice(left, left + shape[2])
        flat = filters * SMALLEST**2
        down: list[nn.Module] = []
        up: list[nn.Module] = [nn.Unflatten(1, (filters, SMALLEST, SMALLEST))]
        for level in range(halvings):
            first, last = level == 0, level == halvings - 1
            down += [nn.Conv2d(shape[0] if first else filters, filters, 4, 2, 1), nn.ReLU()]
            up += [nn.ConvTranspose2d(filters, shape[0] if last else filters, 4, 2, 1), nn.ReLU()]
        self.encoder = nn.Sequential(
            *down, nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 2 * latent),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, flat),
            nn.ReLU(), *up[:-1],
        )  # fmt: skip
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
        self.register_buffer("means", torch.zeros(n_classes, latent))
        self.generator = torch.Generator().manual_seed(seed)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the batch's mean binary cross entropy plus ``gamma`` times |mean KL - capacity of this step|."""
        images, n = batch[0], len(batch[0])
        if self.flip:
            mirrored = (torch.rand(n, 1, 1, 1, generator=self.generator) < 0.5).to(self.device)
            images = torch.where(mirrored, images.flip(-1), images)
        self.steps += 1
        bce, distance = self(images, torch.randn(n, self.latent, generator=self.generator).to(self.device))
        return bce.mean() + self.gamma * (distance.mean() - self.target(self.steps)).abs()

    def target(self, step: int) -> float:
        """Return the capacity C, in nats, of a training step; steps count from 1."""
        return self.capacity * min(1.0, step / self.ramp)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return binary cross entropy, summed over pixels, and KL of each image, both (B,); ``noise``: (B, l)."""
        mean, log_variance = self.encode(images)
        decoded = self.decode(mean + (log_variance / 2).exp() * noise)
        return reconstruction(decoded, images / 255, "cross_entropy"), divergence(mean, log_variance)

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance, each (B, l), of the codes of uint8 images (B, C, H, W)."""
        x = F.pad(images / 255, self.pad) if any(self.pad) else images / 255
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        """Return the pixel logits (B, C, H, W) of the images decoded from codes z (B, l)."""
        return self.decoder(z)[..., self.rows, self.columns]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a constant learning rate."""
        return torch.optim.Adam(self.parameters(), self.lr)

    @torch.no_grad()
    def centre(self, images: Tensor, labels: Tensor) -> None:
        """Set each class's mean code to the mean over its images; a class without images gets 0, the prior's mean."""
        classes = torch.arange(len(self.means), device=self.device)
        total = torch.zeros(self.means.shape, dtype=torch.float64, device=self.device)
        for x, y in zip(images.split(256), labels.split(256), strict=True):
            of_class = (y.to(self.device) == classes[:, None]).double()
            total += (
                of_class @ self.encode(x.to(self.device))[0].double()
            )  # a matrix product, because index_add_ would sum in an undefined order
        counts = torch.bincount(labels, minlength=len(self.means)).clamp(min=1).to(self.device)
        self.means.copy_(total / counts[:, None])

    @torch.no_grad()
    def sample(self, labels: Tensor, seed: int, *, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """Sample one image per class in ``labels``, uint8 (n, C, H, W), by decoding codes z ~ N(mean code of class, I).

        progress: called with (batches done, total batches).
        """
        generator = torch.Generator().manual_seed(seed)
        parts, images = labels.split(256), []
        for done, y in enumerate(parts, 1):
            z = self.means[y.to(self.device)] + torch.randn(len(y), self.latent, generator=generator).to(self.device)
            images.append((255 * self.decode(z).sigmoid()).round().to(torch.uint8))
            if progress:
                progress(done, len(parts))
        return torch.cat(images)

    @torch.no_grad()
    def losses(self, images: Tensor, seed: int, *, draws: int = 16) -> Tensor:
        """Return cross entropy + KL per image, (n,), averaged over ``draws`` codes; all images use the same noise."""
        noise = torch.randn(draws, 1, self.latent, generator=torch.Generator().manual_seed(seed)).to(self.device)
        image_losses = []
        for x in images.to(self.device).split(256):
            bounds = [torch.stack(self(x, eps.expand(len(x), -1))).sum(0) for eps in noise]
            image_losses.append(torch.stack(bounds).mean(0))
        return torch.cat(image_losses)
