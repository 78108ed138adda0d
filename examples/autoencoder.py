r"""Data without labels, and a LightningModule that defines the loss itself: a beta-VAE.

Higgins et al., "beta-VAE: learning basic visual concepts with a constrained variational framework", ICLR 2017:

    loss = ||x^ - x||^2 + beta KL(N(mu, e^v) || N(0, 1)),   summed over pixels and over the coordinates of a code

x: an image;  x^: the decoded image;  mu, v: mean and log-variance of its code.

python examples/autoencoder.py        trains the beta-VAE for three rounds
python sweeps/run.py --data examples/autoencoder.py:unlabelled --model examples/autoencoder.py:BetaVAE \
    --partition.name by_group --data.client_test 0.2 --algorithm ditto --evaluate.clients true
"""

from math import prod
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedcommons import experiment, run

QUICK = {"federation.rounds": 3, "client.epochs": 2, "measure.every": 0, "wandb": "off", "data.limit": 400}


def unlabelled():
    """Return scikit-learn's digits without labels, in five groups by thickness of the pen, from thin to thick."""
    digits: Any = load_digits()
    ink = digits.images.sum((1, 2))
    pens = np.argsort(np.argsort(ink)) * 5 // len(ink)
    return (255 / 16 * digits.images).round().astype("uint8"), None, pens


class BetaVAE(LightningModule):
    """A beta-VAE with two linear layers in the encoder and two in the decoder; evaluation logs the training loss.

    Args:
        latent: length of a code
        beta: weight of the divergence of the codes' distribution from N(0, 1)
    """

    def __init__(self, shape, lr: float, latent: int = 8, beta: Annotated[float, "[0, 1e6]"] = 4.0) -> None:
        super().__init__()
        n, self.shape, self.lr, self.beta = prod(shape), shape, lr, beta
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(n, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, n), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        """Return the images (B, C, H, W) in [0, 1] decoded from the mean codes of images x in 0..255."""
        return self.decoder(self.encoder(x / 255).chunk(2, 1)[0]).view(-1, *self.shape)

    def training_step(self, batch, batch_idx):
        x, weight = batch[0] / 255, batch[2:]  # The labels batch[1] are zeros and unused.
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        each = (self.decoder(z) - x.flatten(1)).square().sum(1) + self.beta * kl
        return (weight[0] * each if weight else each).mean()

    def validation_step(self, batch, batch_idx):
        x = batch[0] / 255
        self.log("loss", self.training_step(batch, batch_idx))
        self.log("squares", (self(batch[0]) - x).square().flatten(1).sum(1).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


if __name__ == "__main__":
    chosen = {"data": f"{__file__}:unlabelled", "model": f"{__file__}:BetaVAE", "partition": "by_group"}
    with TemporaryDirectory() as folder:
        result = run(experiment("smoke", values={**QUICK, **chosen, "client.lr": 0.003}), folder, say=lambda text: None)
        print("loss by round:", *result.rounds["test/loss"].round(1))
