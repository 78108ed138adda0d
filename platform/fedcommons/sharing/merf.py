"""FedMERF: each client once releases noisy sums of random features per class; the server fits images to their total.

Harder, Adamczewski and Park, "DP-MERF: differentially private mean embeddings with random features for practical
privacy-preserving data generation", AISTATS 2021, arXiv:2002.11603, with sums over clients.
v(x, y): matrix with [phi(x), 1]/sqrt(2) in row y and zeros elsewhere (phi: ``random_features``), |v| <= 1;  N: clients;
z_i ~ N(0, I);  sigma: noise multiplier;  sigma_i: noise multiplier of client i;  t: clients that may be missing.

    client i sends  S_i = sum_j v(x_j, y_j) + sigma_i z_i        noise local:   sigma_i = sigma
    the server adds S = sum_i S_i and fits images to it          noise summed:  sigma_i = sigma / sqrt(N - t)

Neighbouring data sets differ by one image that is replaced by a blank image, which adds nothing. So the sensitivity is
1, and a message is one Gaussian mechanism (sampling rate q = 1). Sums add up over clients, so the partition of labels
does not matter. The images are computed from S, so they cost no further privacy. All clients get all images.

Noise local: a party that sees a message learns at most the target epsilon. Noise summed: the target epsilon holds only
for a party that sees nothing but S, by secure aggregation or because a trusted server computes the sum. ``views``
states the privacy against each party.

The constant ``fit`` chooses what is fitted to S: the images, or the paper's generator (``merf_generator``), which then
draws the images.

Departs from the paper: clients send sums and counts instead of a mean over a public number of examples. Neighbouring
data sets differ by a blank example. (In the paper an example is replaced, which changes the sum by up to sqrt(2).) The
squared length scale s is public, not the median of the data. By default images are fitted, not a generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod, sqrt
from typing import Annotated, ClassVar

import numpy as np
import torch

from fedcommons.core.capabilities import Capabilities
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError
from fedcommons.generators.requests import Contribution
from fedcommons.privacy import gaussian, salts
from fedcommons.privacy.dp_sgd import NoisySum
from fedcommons.privacy.noise import Noise, Source
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.seeding import seed_for, wide_key
from fedcommons.sharing import noisy_sums
from fedcommons.sharing.merf_generator import generate_images
from fedcommons.sharing.random_features import Fourier, fit_images, sums
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases
from fedcommons.storage.artifact_store import constants, key_of

TAUGHT = ((0.35, 91), (0.7, 88), (1, 86), (1.6, 79), (2.4, 65), (4, 31))
"""Pairs (noise ratio of ``MERF.beforehand``, test accuracy in % after training on 200 fitted images).

They were measured on the data set digits with ten clients, 1,000 features and 3 seeds.
"""

DRAWS = 1
"""Version of the code that computes a message and draws its noise. Each version has separate secret salts."""

SCALE = 105 / 784
"""Squared length scale of the kernel per value of an image, as published for MNIST with pixels in [0, 1]."""


@dataclass(frozen=True)
class MERF:
    """A strategy in which each client trains on its data and on images fitted to the noisy sums of all clients."""

    capabilities: ClassVar[Capabilities] = Capabilities(serves_pool=True)

    target_epsilon: Annotated[float | None, "[0.001, 1000]"] = None
    """target epsilon of all messages of a client. The noise follows from either target_epsilon or noise_multiplier"""
    noise_multiplier: Annotated[float | None, "[0, 1e6]"] = None
    """sigma, standard deviation of the noise divided by the sensitivity (1); 0: no noise and no privacy guarantee"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of the (target_epsilon, delta) guarantee; a run has one delta, so it must be dp.delta"""
    noise: Annotated[str, "local | summed"] = "local"
    """local protects a client from all parties; summed, only from parties that see only the sum (secure aggregation)"""
    may_miss: Annotated[int, "[0, 1e6]"] = 0
    """t, number of clients whose messages may be missing from the sum; only with noise summed"""
    features: Annotated[int, "[4, 1e6]"] = 1000
    """D, number of random features of an image"""
    scale: Annotated[float | None, "[1e-9, 1e9]"] = None
    """s, squared length scale, a public number; default: 105/784 times the number of values of an image (MNIST)"""
    second_scale: Annotated[float | None, "[1e-9, 1e9]"] = None
    """squared length scale s of half of the features; default: all features have the same s"""
    per_class: Annotated[int, "[1, 1e6]"] = 20
    """number of synthetic images per class, which are fitted to the sum or drawn by the generator (paper: 6,000)"""
    steps: Annotated[int, "[1, 1e9]"] = 400
    """number of Adam steps of the fit (paper's generator: 3,000)"""
    fit: Annotated[str, "images | generator"] = "images"
    """object that is fitted to the sum: the images' pixels, or a small network (generator) that draws images"""
    norm_bias: bool = True
    """whether the generator has biases before BatchNorm; they have no effect, and Adam moves them by rounding noise"""

    check = noisy_sums.check

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the examples are uint8 images with classes and that the constants fit them (see ``Stage``)."""
        if not self.norm_bias and self.fit != "generator":
            raise UserError("sharing.norm_bias false changes nothing without sharing.fit generator.")
        shape, n = client_data.shape, len(client_data.clients)
        if client_data.n_classes is None:
            raise UserError("sharing.setting merf sums features by class, but the labels are not classes.")
        if client_data.clients.store.x.dtype != torch.uint8:
            raise UserError("sharing.setting merf fits images of whole numbers 0 to 255 (uint8), but these are not.")
        if self.fit == "generator" and len(shape) != 3:
            raise UserError(f"sharing.fit generator is for images (C, H, W), but the examples have the shape {shape}.")
        if self.may_miss and self.noise != "summed":
            raise UserError("sharing.may_miss is for sharing.noise summed: a local message has the full noise.")
        if self.may_miss >= n:
            raise UserError(f"sharing.may_miss must be below the number of clients, {n}: at least one must send.")

    @property
    def sigma(self) -> float:
        """Return sigma, the noise multiplier of each message (noise local) or of the sum of messages (noise summed)."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None
        return gaussian.noise_for(self.target_epsilon, self.delta)

    def effective_constants(self, client_data: ClientDatasets) -> dict[str, float]:
        """Return the values that replace unset constants: noise multiplier and squared length scales, by name."""
        scale = self.scale or SCALE * prod(client_data.shape)
        return {"noise_multiplier": self.sigma, "scale": scale, "second_scale": self.second_scale or scale}

    def sigma_of_each(self, n_clients: int) -> float:
        """Return sigma_i, the noise multiplier of one client's message, in a federation of ``n_clients``."""
        return self.sigma if self.noise == "local" else self.sigma / sqrt(n_clients - self.may_miss)

    def phi(self, client_data: ClientDatasets) -> Fourier:
        """Return the random feature map phi, which is public: every party can draw it from the run's seed."""
        d = prod(client_data.shape)
        scales = [self.scale or SCALE * d, *([self.second_scale] if self.second_scale else [])]
        return Fourier.draw(d, self.features, scales, client_data.seed)

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Sum the clients' messages, fit the images, and split the images arbitrarily into contributions."""
        phi, classes, n = self.phi(client_data), client_data.n_classes or 0, len(client_data.clients)
        total = torch.zeros(classes, phi.size + 1, dtype=torch.float64)
        for client in range(n):
            total += self.message(client_data, client, phi).values.float()  # rounded, as messages are sent as float32
        seed = seed_for(client_data.seed, "merf")
        fit = partial(generate_images, norm_bias=self.norm_bias) if self.fit == "generator" else fit_images
        images = fit(phi, total, client_data.shape, self.per_class, self.steps, seed)
        return noisy_sums.contribute(client_data, images)

    def message(self, client_data: ClientDatasets, client: int, phi: Fourier) -> NoisySum:
        """Return the client's message S_i: per class, noisy sums of D features and of 1, (classes, D + 1) float64."""
        examples = client_data.clients.store[client_data.clients.rows[client]]
        exact = sums(phi, examples, client_data.n_classes or 0)
        total = NoisySum(torch.zeros_like(exact), clip=1.0)
        total.add(exact, norm=1.0)
        if sigma := self.sigma_of_each(len(client_data.clients)):
            salt = self._salt(client_data, client, phi) if client_data.is_secret else client_data.salt
            source = Source(wide_key("merf", self._key(client_data, client)), salt)
            total.blur(sigma, Noise(source).call("sums of features", examples.x, examples.y).stream_for(exact))
        return total

    def shorter(self) -> tuple["MERF", float]:
        """Return a variant with at most 20 steps, and the factor by which ``self`` takes longer than the variant.

        The factor is the ratio of the two numbers of steps, because nearly all time is spent in the fit.
        """
        few = min(self.steps, 20)
        return replace(self, steps=few), self.steps / few

    def salts(self, client_data: ClientDatasets) -> list[bytes]:
        """Return the secret salt of the noise in each client's message (see ``Salted``); empty without noise."""
        phi = self.phi(client_data)
        return [self._salt(client_data, i, phi) for i in range(len(client_data.clients))] if self.sigma else []

    def _key(self, client_data: ClientDatasets, client: int) -> str:
        decides = constants(self, ("per_class", "steps", "fit", "norm_bias"))
        return noisy_sums.key_of_client(client_data, client, {"clients": len(client_data.clients), **decides})

    def _salt(self, client_data: ClientDatasets, client: int, phi: Fourier) -> bytes:
        """Return the secret salt of the noise in a client's message.

        If two different messages had equal noise, their difference would be disclosed. So each message has its own
        salt, which depends on all facts that decide the message, among them the version ``DRAWS`` of the code.
        """
        really = {"draws": DRAWS, "sigma": self.sigma_of_each(len(client_data.clients)), "features": phi.digest}
        return salts.of_artifact(f"{key_of({'asked': self._key(client_data, client), **really})}-merf")

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return one privacy ledger entry per client.

        If ``self.noise`` is "summed", the entry states a guarantee only for the sum S of all messages.
        """
        what = f"{SUMS}, seen added up over clients only" if self.sigma and self.noise == "summed" else SUMS
        event = Release(0, (what,), mechanism=SAMPLED_GAUSSIAN, sigma=self.sigma, sensitivity=1.0, steps=1)
        return contributed, noisy_sums.with_clients([event] * len(client_data.clients), client_data)

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign all fitted images to all clients. ``nbytes`` counts the sums sent up and the images sent down."""
        up = 4 * (self.phi(client_data).size + 1) * (client_data.n_classes or 0)
        views = self.views(len(client_data.clients)) if self.sigma else {}
        return noisy_sums.assign_to_all(client_data, released, up, views)

    def beforehand(self, client_data: ClientDatasets) -> list[str]:
        """Report the noise ratio sqrt(2 D) sigma_S/n_c of a class's mean features, and the accuracy to expect.

        D: number of features; sigma_S: standard deviation of the noise in the sum S; n_c: mean number of images per
        class, over all clients. The expected accuracy is interpolated in ``TAUGHT``.
        """
        if not self.sigma:
            return []
        n, classes = len(client_data.clients), client_data.n_classes or 1
        noise = self.sigma_of_each(n) * sqrt(n)
        ratio = sqrt(2 * self.features) * noise * classes / sum(client_data.clients.sizes)
        (least, best), (most, worst) = TAUGHT[0], TAUGHT[-1]
        ratios, accuracies = np.transpose(TAUGHT)
        result = f"some {np.interp(ratio, ratios, accuracies):.0f} %"
        if ratio < least:
            result = f"{best} % or more"
        elif ratio > most:
            result = f"at most {worst} %, and hardly more than chance at much larger ratios"
        measured = ", ".join(f"{at:g}: {taught} %" for at, taught in TAUGHT)
        return [
            f"merf: the norm of the noise in the mean features of a class is {ratio:.2g} times the largest possible "
            "norm of that mean. At this ratio, a classifier trained on such images of the data set digits reaches "
            f"{result} (measured at ratio {measured})."
        ]

    def views(self, n: int) -> dict[str, float]:
        """Return mu = 1/sigma per party, the privacy parameter of a client's data against that party.

        sigma is the noise multiplier of the noise that the party does not know. The messages of t of the n clients may
        be missing, so the sum has the noise of n - t clients. A party may know the noise of k clients, such as its own
        noise (k = 1). The noise of the other n - t - k clients (at least one) protects a client's data.
        """
        sigma, sent, many = self.sigma_of_each(n), n - self.may_miss, max(2, n // 2)
        seen = {"outsiders, who see images": 0, "the server under secure aggregation": 0}
        seen |= {"the server without it": sent - 1}
        if n > 1:
            seen |= {"another client, which knows its own noise": 1}
        if n > many:
            seen |= {f"{many} clients together": many}
        return {party: 1 / (sqrt(max(1, sent - n_known)) * sigma) for party, n_known in seen.items()}


SUMS = "noisy sums of features"
"""Name of the clients' messages in the privacy ledger."""
