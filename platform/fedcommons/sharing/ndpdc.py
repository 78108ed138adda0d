"""NDPDC: in each step clients release noisy sums of a random network's features; the server fits images to their total.

Zheng and Li, "Differentially private dataset condensation", NDSS 2024 workshop. The steps follow Dosser
(humansensinglab/Dosser), with sums over clients.
phi_t: features of step t's random network, |phi_t| <= 1 (``condensation``);  T: number of steps;  n_i: images of client
i;  B_tic: Poisson sample of client i's images of class c in step t at the sampling rate q_i;  z ~ N(0, I);  sigma_i:
noise multiplier;  S_c: ipc fitted images of class c;  L: expected real images per class that a client uses in a step;
R = sum_i q_i n_i/classes: expected real images per class that all clients use in a step.

    client i sends, T times   M_tic = sum_{x in B_tic} phi_t(x, c) + sigma_i z
    the server descends       sum_c | L/R sum_i M_tic - L/ipc sum_k phi_t(S_ck, c) |^2

Neighbouring data sets differ by one image that is replaced by a blank image, which adds nothing. An image has one
class. So the sensitivity of a step is 1, and a client's messages are T steps of the sampled Gaussian mechanism with
q_i and sigma_i. A party that sees all messages of a client learns at most epsilon. No message depends on the fitted
images. The images are computed from the messages, so they cost no further privacy. All clients get all images.

q_i = min(1, L classes/n_i), as if a client's classes were equally large, because class counts are private and n_i is
public. Every example is drawn at the rate q_i, whatever its class. The public number ``class_size`` can replace
n_i/classes. Samples and noise are seeded by all facts that decide the messages, so the same run sends the same bits.
The messages of a step are added up and then deleted.

Departs from the paper: by default, real and fitted images are not augmented. (The paper applies the same augmentation
to both in a step, see ``augment``.) The paper's sampling rate is L/n_c with the number n_c of images of the smallest
class. Neighbouring data sets are those of the privacy ledger. The distance is divided by (R/L)^2, so that one learning
rate suits any number of clients. The fitted images are rounded to uint8 at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedcommons.core.capabilities import Capabilities
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError
from fedcommons.generators.condensation import Networks, Phi, Sender, fit_images
from fedcommons.generators.requests import Contribution
from fedcommons.privacy import salts
from fedcommons.privacy.dp_sgd import Target
from fedcommons.privacy.noise import Noise, Source
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.seeding import seed_for, wide_key
from fedcommons.sharing import noisy_sums
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases
from fedcommons.storage.artifact_store import constants, key_of

SUMS = "noisy sums of features of random networks"

DRAWS = 1
"""Version of the code for messages, samples and noise. Each version has separate secret salts."""


@dataclass(frozen=True)
class NDPDC:
    """A strategy in which each client trains on its data and on images fitted to the noisy sums of all clients."""

    capabilities: ClassVar[Capabilities] = Capabilities(serves_pool=True)

    target_epsilon: Annotated[float | None, "[0.001, 1000]"] = None
    """target epsilon of all messages of a client. The noise follows from either target_epsilon or noise_multiplier"""
    noise_multiplier: Annotated[float | None, "[0, 1e6]"] = None
    """sigma, standard deviation of the noise divided by the sensitivity (1); 0: no noise and no privacy guarantee"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of the (target_epsilon, delta) guarantee; a run has one delta, so it must be dp.delta"""
    iterations: Annotated[int, "[1, 1e6]"] = 1000
    """T, number of steps, each with a new random network, one message per client and an SGD step (paper: 10,000)"""
    per_class: Annotated[int, "[1, 1e6]"] = 10
    """ipc, number of images per class that are fitted (paper: 10 and 50)"""
    batch: Annotated[int, "[1, 1e9]"] = 50
    """L, expected number of real images per class that a client uses in a step"""
    class_size: Annotated[int | None, "[1, 1e9]"] = None
    """public number of a client's images per class, which decides the sampling rate; default: its images / classes"""
    width: Annotated[int, "[1, 1e4]"] = 128
    """number of channels of the random ConvNets"""
    depth: Annotated[int | None, "[1, 3]"] = None
    """number of blocks of the random ConvNets; each halves the image; default: until 4x4 positions remain (paper: 3)"""
    lr: Annotated[float, "(0, 1e38]"] = 1.0
    """learning rate of SGD on the pixels of the fitted images"""
    augment: Annotated[str, "none | translation | all"] = "none"
    """augmentation of both real and fitted images (the paper augments them); all: colour, translation and cutout"""

    check = noisy_sums.check

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the examples are uint8 images with classes, and that the noise of every client can be computed."""
        if client_data.n_classes is None:
            raise UserError("sharing.setting ndpdc sums features by class, but the labels are not classes.")
        is_image = len(client_data.shape) == 3 and min(client_data.shape[1:]) >= 2
        if not is_image or client_data.clients.store.x.dtype != torch.uint8:
            what = "images (C, H, W) of at least 2x2 whole numbers 0 to 255 (uint8)"
            raise UserError(f"sharing.setting ndpdc fits {what}, but the examples are of another type or shape.")
        for n in {*client_data.clients.sizes}:
            self.sigma(n, client_data.n_classes)

    def rate(self, n: int, classes: int) -> float:
        """Return the sampling rate q of a client with n examples, computed from public numbers only."""
        return min(1.0, self.batch / self.class_size if self.class_size else self.batch * classes / max(n, 1))

    def sigma(self, n: int, classes: int) -> float:
        """Return the noise multiplier of a client with n examples, for data with ``classes`` classes.

        Raises:
            UserError: even the largest noise multiplier does not reach the target epsilon.
        """
        if self.target_epsilon is None:
            return self.noise_multiplier or 0.0
        return Target(self.target_epsilon, self.delta, rounds=1).sigma(self.rate(n, classes), self.iterations)

    def effective_constants(self, client_data: ClientDatasets) -> dict[str, Any]:
        """Return the values that replace unset constants: noise multiplier and class size per client, and depth."""
        sizes, classes = client_data.clients.sizes, client_data.n_classes or 1
        return {
            "noise_multiplier": [self.sigma(n, classes) for n in sizes],
            "class_size": [self.class_size or n / classes for n in sizes],
            "depth": self.networks(client_data).blocks,
        }

    def networks(self, client_data: ClientDatasets) -> Networks:
        """Return the random feature maps phi_1, ..., phi_T, which every party can draw from the run's seed."""
        return Networks(
            shape=client_data.shape,
            n_classes=client_data.n_classes or 0,
            width=self.width,
            depth=self.depth,
            augment=self.augment,
            flip=client_data.flip,
            seed=seed_for(client_data.seed, "ndpdc"),
        )

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Run T steps of messages and image updates, and split the images arbitrarily into clients' contributions."""
        senders = [self.sender(client_data, client) for client in range(len(client_data.clients))]

        def total(phi: Phi, step: int) -> Tensor:
            messages = [sender.message(phi, step).values.float() for sender in senders]  # messages are sent as float32
            return torch.stack(messages).sum(0)

        networks, expected = self.networks(client_data), self.expected(client_data)
        images = fit_images(networks, total, self.iterations, self.per_class, expected, self.batch, self.lr)
        return noisy_sums.contribute(client_data, images)

    def expected(self, client_data: ClientDatasets) -> float:
        """Return R, the expected number of real images per class in a step, computed from public numbers only."""
        classes = client_data.n_classes or 1
        return sum(self.rate(n, classes) * n / classes for n in client_data.clients.sizes)

    def sender(self, client_data: ClientDatasets, client: int) -> Sender:
        """Return the sender of a client's T messages, one per step: noisy sums of features per class, (classes, D)."""
        examples, classes = client_data.clients.store[client_data.clients.rows[client]], client_data.n_classes or 0
        sigma = self.sigma(len(examples), classes)
        salt = self._salt(client_data, client) if client_data.is_secret and sigma else client_data.salt
        source = Source(wide_key("ndpdc", self._key(client_data, client)), salt)
        draws = Noise(source).call("sums of features of networks", examples.x, examples.y)
        return Sender(examples, classes, self.rate(len(examples), classes), sigma, draws)

    def shorter(self) -> tuple["NDPDC", float]:
        """Return a variant with at most 3 steps, and the factor by which ``self`` takes longer than the variant.

        The factor is the ratio of the two numbers of steps, because all steps take the same time.
        """
        few = min(self.iterations, 3)
        return replace(self, iterations=few), self.iterations / few

    def salts(self, client_data: ClientDatasets) -> list[bytes]:
        """Return the secret salt of the noise in each client's messages (see ``Salted``); empty without noise."""
        has_noise = self.noise_multiplier != 0
        return [self._salt(client_data, client) for client in range(len(client_data.clients))] if has_noise else []

    def _key(self, client_data: ClientDatasets, client: int) -> str:
        decides = {**constants(self, ("per_class", "lr")), "classes": client_data.n_classes, "flip": client_data.flip}
        return noisy_sums.key_of_client(client_data, client, decides)

    def _salt(self, client_data: ClientDatasets, client: int) -> bytes:
        """Return the secret salt of the noise in a client's messages.

        If two different messages had equal noise, their difference would be disclosed. So the salt depends on all facts
        that decide the client's messages, among them the version ``DRAWS`` of the code.
        """
        n, classes = client_data.clients.sizes[client], client_data.n_classes or 0
        really = {
            "draws": DRAWS,
            "q": self.rate(n, classes),
            "sigma": self.sigma(n, classes),
            "iterations": self.iterations,
            "features": self.networks(client_data).digest,
        }
        return salts.of_artifact(f"{key_of({'asked': self._key(client_data, client), **really})}-ndpdc")

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return one privacy ledger entry per client, for the client's T noisy messages (one per step)."""
        classes = client_data.n_classes or 0
        event = Release(0, (SUMS,), mechanism=SAMPLED_GAUSSIAN, sensitivity=1.0, steps=self.iterations)
        events = [
            replace(event, q=self.rate(n, classes), sigma=self.sigma(n, classes)) for n in client_data.clients.sizes
        ]
        return contributed, noisy_sums.with_clients(events, client_data)

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign all fitted images to all clients. ``nbytes`` counts T messages sent up and the images sent down."""
        up = 4 * self.iterations * (client_data.n_classes or 0) * self.networks(client_data).size
        return noisy_sums.assign_to_all(client_data, released, up)

    def beforehand(self, client_data: ClientDatasets) -> list[str]:
        """Report two noise-to-signal ratios: of the clients' total in one step, and of the mean total of T steps.

        A ratio is the norm of the noise in a class's total, divided by the largest possible norm of the exact total.
        """
        if self.noise_multiplier == 0:
            return []
        sigmas = [self.sigma(n, client_data.n_classes or 0) for n in client_data.clients.sizes]
        noise = sqrt(sum(sigma**2 for sigma in sigmas) * self.networks(client_data).size)
        ratio = noise / self.expected(client_data)
        return [
            f"ndpdc: the norm of the noise in the sum of a class is {ratio:.2g} times the largest possible norm of "
            f"that sum in a step, and {ratio / sqrt(self.iterations):.2g} times in the mean of "
            f"{self.iterations:,} steps."
        ]
