"""CAPE-assisted DP-CDA: clients send sums of images of a class with anti-correlated noise; the totals are the images.

DP-CDA publishes mixtures of images of one class with Gaussian noise: Saha, Tonoy and Imtiaz, arXiv:2411.16121; with
clients: arXiv:2509.10385. CAPE (correlation assisted private estimation): Imtiaz et al., arXiv:1904.10059.
S: clients;  d: values of an image x in [0, 1]^d;  T: ``per_class``, mixtures per class;  l: ``mix``;  b: ``clip``;
N: images of all clients;  B_tic: Poisson sample of client i's images of class c for mixture t, at the sampling rate
q = min(1, l S classes/N);  R = q N/classes: expected images in a mixture;  z_i, z'_i ~ N(0, I), new for each t and c.

    x^         = x min(1, b sqrt(d)/|x|) / (b sqrt(d)),   |x^| <= 1
    client i sends, T times    M_tic = sum_{x in B_tic} x^ + e_i + g_i
                               e_i = tau (z_i - mean_j z_j),   sum_i e_i = 0;      g_i = tau z'_i / sqrt(S)
    the server's image         x~_tc = b sqrt(d)/R sum_i M_tic, rounded to whole numbers 0 to 255

The e_i cancel in the total, whose noise is tau, as if one party had all images; independent noise gives
tau sqrt(S). All parties follow the protocol. Secure aggregation, which is assumed and not simulated, shows all parties
mean_j z_j and no z_j: if the server saw z_i, only g_i would protect client i. The z_j of all S clients must enter the
mean, and the aggregation must abort otherwise. A message M_i that is missing later adds noise and costs no privacy.

Privacy: neighbouring data sets differ by one image that is replaced by a blank (black) image, which adds nothing. An
image has one class, so the sensitivity is 1. A party that does not know z and z' of H >= 1 clients sees an image of
such a client under noise with the multiplier tau/sqrt(X):

    X = S/H + (1 - 1/H) S/(S + 1)   the server, which sees all messages and mean_j z_j
    X = S/H                         clients or outsiders, who see images and mean_j z_j

The ledger states the epsilon against the server together with k = S - H = ``colluding`` clients, so
tau = sigma sqrt(X), and a client's messages are T steps of the sampled Gaussian mechanism with q and sigma. ``views``
states the epsilon against each party. With k = S - 1, the noise is as large as independent noise. No message, image or
rate contains class counts: a client without images of a class sends noise.

All noise has one key, a hash of all clients' examples and the constants. If only a changed client drew new noise in
another run, the changed mean_j z_j would disclose the change of its z.

Departs from the papers: of DP-CDA only the abstracts could be read, so the federated mixture, the normalisation and the
accounting are ours. Samples are Poisson samples, and totals are divided by the public R; so a mixture has l images per
client and class only on average, and a rare class is darker. The class of a mixture is public, and labels have no
noise. All clients have the same q and tau. CAPE's code (hafizimtiaz/cape) has this X for k = 0, but a smaller X for
k > 0 (S = 10, k = 3: 1.24, not 2.21), because it treats the colluding clients' z as unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod, sqrt
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedcommons.core.capabilities import Capabilities
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError
from fedcommons.generators.requests import Contribution
from fedcommons.privacy import gaussian, salts
from fedcommons.privacy.accountants import epsilon
from fedcommons.privacy.dp_sgd import NoisySum, Target
from fedcommons.privacy.noise import Draws, Noise, Size, Source, Stream
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.seeding import wide_key
from fedcommons.sharing import noisy_sums
from fedcommons.sharing.random_features import BLOCK, pixels
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases
from fedcommons.storage.artifact_store import constants, key_of

DRAWS = 2
"""Version of the code for messages, samples and noise. Each version has separate secret salts."""


@dataclass(frozen=True, eq=False)
class Correlated:
    """A stream of CAPE's noise for S clients; the numbers of a client have the standard deviation ``scale``."""

    stream: Stream
    scale: float

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """Return scale (z_i - mean_j z_j + z'_i/sqrt(S)) for all clients i: an array of shape ``size`` = (S, ...)."""
        noise = np.empty(size, dtype)
        rows = noise.reshape(-1, noise.shape[-1])  # views, drawn one by one: a secret draw needs much memory
        for row in rows:
            row[:] = self.stream.standard_normal(len(row), dtype)
        noise -= noise.mean(0)
        for row in rows:
            row += self.stream.standard_normal(len(row), dtype) / sqrt(len(noise))
        noise *= self.scale
        return noise

    def random(self, size: Size) -> np.ndarray:
        """Draw uniform numbers, which are independent; see ``Stream``."""
        return self.stream.random(size)


def exposure(n: int, unknown: int, server: bool) -> float:
    """Return X = tau^2 mu^2 for n clients and a party that does not know the noise of ``unknown`` clients (>= 1).

    mu: sensitivity divided by the standard deviation of the noise. server: whether the party sees the messages.
    """
    return n / unknown + (1 - 1 / unknown) * n / (n + 1) * server


@dataclass(frozen=True)
class DPCDA:
    """A strategy in which each client trains on its data and on noisy mixtures of all clients' images of a class."""

    capabilities: ClassVar[Capabilities] = Capabilities(serves_pool=True)

    target_epsilon: Annotated[float | None, "[0.001, 1000]"] = None
    """target epsilon of all messages of a client. The noise follows from either target_epsilon or noise_multiplier"""
    noise_multiplier: Annotated[float | None, "[0, 1e6]"] = None
    """sigma (for sensitivity 1) against the server with ``colluding`` clients; 0: no noise and no guarantee"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of the (target_epsilon, delta) guarantee; a run has one delta, so it must be dp.delta"""
    colluding: Annotated[int | None, "[0, 1e6]"] = None
    """k, clients that may send the server their noise; default: ceil(S/3) - 1 (CAPE's code), but at least 1 if S > 1"""
    per_class: Annotated[int, "[1, 1e6]"] = 20
    """T, number of mixtures (synthetic images) per class; all together have the target epsilon"""
    mix: Annotated[float, "(0, 1e9]"] = 5.0
    """l, expected number of images per client and class in a mixture, on average over clients and classes"""
    clip: Annotated[float, "(0, 1]"] = 0.5
    """b, bound on an image's root mean square pixel in [0, 1], a public number; brighter images are darkened to b"""

    check = noisy_sums.check

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the examples are uint8 images with classes, and that the noise of the clients can be computed."""
        n = len(client_data.clients)
        if client_data.n_classes is None:
            raise UserError("sharing.setting dpcda mixes images of a class, but the labels are not classes.")
        if client_data.clients.store.x.dtype != torch.uint8:
            raise UserError("sharing.setting dpcda mixes images of whole numbers 0 to 255 (uint8), but these are not.")
        if self.n_colluding(n) >= n:
            raise UserError(f"sharing.colluding must be below the number of clients, {n}, got {self.colluding}.")
        largest = exposure(n, 1, server=True) / exposure(n, n - self.n_colluding(n), server=True)
        least = sqrt(self.per_class * largest) * 10 / gaussian.MU[1]  # for ``views``
        if 0 < (sigma := self.sigma(client_data)) < least:
            least = f"0 or at least {1.01 * least:.3g} with {self.per_class} mixtures per class"
            raise UserError(f"sharing.noise_multiplier must be {least}, got {sigma:g}.")

    def n_colluding(self, n: int) -> int:
        """Return k, the number of clients, out of n, that may collude with the server."""
        return min(n - 1, max(1, ceil(n / 3) - 1)) if self.colluding is None else self.colluding

    def rate(self, client_data: ClientDatasets) -> float:
        """Return the sampling rate q of all clients, computed from public numbers only."""
        classes, sizes = client_data.n_classes or 1, client_data.clients.sizes
        return min(1.0, self.mix * len(sizes) * classes / max(1, sum(sizes)))

    def sigma(self, client_data: ClientDatasets) -> float:
        """Return the noise multiplier of a mixture against the server with ``colluding`` clients.

        Raises:
            UserError: even the largest noise multiplier does not reach the target epsilon.
        """
        if self.target_epsilon is None:
            return self.noise_multiplier or 0.0
        return Target(self.target_epsilon, self.delta, rounds=1).sigma(self.rate(client_data), self.per_class)

    def tau(self, client_data: ClientDatasets) -> float:
        """Return tau, the standard deviation of a client's noise and of the noise in the total."""
        n = len(client_data.clients)
        return self.sigma(client_data) * sqrt(exposure(n, n - self.n_colluding(n), server=True))

    def effective_constants(self, client_data: ClientDatasets) -> dict[str, Any]:
        """Return the values that replace unset constants: noise multiplier and number of colluding clients."""
        k = self.n_colluding(len(client_data.clients))
        return {"noise_multiplier": self.sigma(client_data), "colluding": k}

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Mix T images per class, and split the images arbitrarily into contributions of the clients."""
        draws, mixtures = self.draws(client_data), []
        for step in range(self.per_class):
            messages = self.messages(client_data, draws, step).values.float()  # sent as float32
            total = sum(messages, torch.zeros_like(messages[0], dtype=torch.float64))  # in client order
            mixtures.append((255 * self.unit(client_data) * total).clamp(0, 255).round().to(torch.uint8))
        images = torch.stack(mixtures, 1).view(-1, *client_data.shape)
        labels = torch.arange(client_data.n_classes or 0).repeat_interleave(self.per_class)
        return noisy_sums.contribute(client_data, Examples(images, labels))

    def vectors(self, images: Tensor) -> Tensor:
        """Return x^ for n images x: (n, d) float64 with norms of at most 1."""
        x = pixels(images).double()
        return x / x.norm(dim=1, keepdim=True).clamp_min(self.clip * sqrt(x.shape[1]))

    def expected(self, client_data: ClientDatasets) -> float:
        """Return R, the expected number of images in a mixture, computed from public numbers only."""
        return self.rate(client_data) * sum(client_data.clients.sizes) / (client_data.n_classes or 1)

    def unit(self, client_data: ClientDatasets) -> float:
        """Return b sqrt(d)/R, by which the total of the messages is multiplied."""
        return self.clip * sqrt(prod(client_data.shape)) / self.expected(client_data)

    def messages(self, client_data: ClientDatasets, draws: Draws, step: int) -> NoisySum:
        """Return all clients' messages M_t of mixture t = ``step``, (S, classes, d) float64."""
        clients, classes = client_data.clients, client_data.n_classes or 0
        owners = np.repeat(np.arange(len(clients)), clients.sizes)
        sample = np.flatnonzero(draws.stream("sample", step).random(len(owners)) < self.rate(client_data))
        exact = torch.zeros(len(clients) * classes, prod(client_data.shape), dtype=torch.float64)
        for part in np.array_split(sample, len(sample) // BLOCK + 1):
            images = clients.store[clients.rows.flat[part]]
            exact.index_add_(0, torch.from_numpy(owners[part]) * classes + images.y, self.vectors(images.x))
        total = NoisySum(exact.view(len(clients), classes, -1), clip=1.0)
        if sigma := self.sigma(client_data):
            stream = draws.stream_for(total.values, "noise", step)
            total.blur(sigma, Correlated(stream, self.tau(client_data) / sigma))
        return total

    def draws(self, client_data: ClientDatasets) -> Draws:
        """Return the random streams of all samples and all noise."""
        is_secret = client_data.is_secret and self.noise_multiplier != 0
        salt = self._salt(client_data) if is_secret else client_data.salt
        source = Source(wide_key("dpcda", self._key(client_data)), salt)
        return Noise(source).call("mixtures", client_data.clients.store.x, client_data.clients.store.y)

    def salts(self, client_data: ClientDatasets) -> list[bytes]:
        """Return the secret salt of all clients' noise (see ``Salted``); empty without noise."""
        return [self._salt(client_data)] if self.noise_multiplier != 0 else []

    def _key(self, client_data: ClientDatasets) -> str:
        facts = {"seed": client_data.seed, "all": client_data.before, "classes": client_data.n_classes}
        return key_of({**facts, **constants(self, ())})

    def _salt(self, client_data: ClientDatasets) -> bytes:
        really = {"draws": DRAWS, "q": self.rate(client_data), "tau": self.tau(client_data)}
        return salts.of_artifact(f"{key_of({'asked': self._key(client_data), **really})}-dpcda")

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return one privacy ledger entry per client: T mixtures, against the server with ``colluding`` clients."""
        sigma, most = self.sigma(client_data), self.n_colluding(len(client_data.clients))
        only = f"the server sees only the mean of the clients' noise z and at most {most} clients collude with it"
        what = f"{MIXTURES}, if {only}" if sigma else MIXTURES
        protected = Release(mechanism=SAMPLED_GAUSSIAN, sigma=sigma, sensitivity=1.0, steps=self.per_class)
        event = replace(protected, what=(what,), q=self.rate(client_data))
        return contributed, noisy_sums.with_clients([event] * len(client_data.clients), client_data)

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign all mixtures to all clients. ``nbytes``: M and z sent up, the mean of z and images sent down."""
        message = 4 * self.per_class * (client_data.n_classes or 0) * prod(client_data.shape)
        views = self.views(client_data) if self.sigma(client_data) else {}
        return noisy_sums.assign_to_all(client_data, released, 3 * message if views else message, views)

    def beforehand(self, client_data: ClientDatasets) -> list[str]:
        """Report the noise of a pixel, and the expected number of images in a mixture."""
        noise = self.tau(client_data) * self.unit(client_data)
        what = f"dpcda: a mixture is the mean of about {self.expected(client_data):.3g} images, and its noise has the"
        return [f"{what} standard deviation {noise:.2g} per pixel, where pixels are in [0, 1]."] * (noise > 0)

    def views(self, client_data: ClientDatasets) -> dict[str, float]:
        """Return per party the mu of an unsampled Gaussian mechanism with the party's epsilon at ``delta``."""
        n, q, tau = len(client_data.clients), self.rate(client_data), self.tau(client_data)
        k = self.n_colluding(n)
        parties = {"outsiders, who see images": (n, False), "the server": (n, True)}
        parties |= {"another client, which knows its own noise": (n - 1, False)} if n > 1 else {}
        parties |= {f"the server and {k} of {n} clients together": (n - k, True)} if k else {}
        parties |= {"the server and all other clients together": (1, True)} if k < n - 1 else {}

        def mu(multiplier: float) -> float:
            return 1 / gaussian.noise_for(epsilon(q, multiplier, self.per_class, self.delta), self.delta)

        return {party: mu(tau / sqrt(exposure(n, *seen))) for party, seen in parties.items()}


MIXTURES = "noisy mixtures of images"
"""Name of the clients' messages in the privacy ledger."""
