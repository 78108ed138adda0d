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

The e_i cancel in the total, whose noise is tau, as if one party had all images; with independent noise it is
tau sqrt(S). Clients and server get mean_j z_j by secure aggregation of the z_j, which is assumed and not simulated. All
parties follow the protocol.

Privacy: neighbouring data sets differ by one image that is replaced by a blank (black) image, which adds nothing. An
image has one class, so the sensitivity is 1. A party that does not know the z and z' of H clients (at least one) sees
an image of theirs under noise of the multiplier tau/sqrt(X):

    X = S/H + (1 - 1/H) S/(S + 1)   the server, which sees all messages and mean_j z_j
    X = S/H                         clients or outsiders, who see images and mean_j z_j

The ledger states the epsilon against the server together with k = S - H = ``colluding`` clients, so
tau = sigma sqrt(X), and a client's messages are T steps of the sampled Gaussian mechanism with q and sigma. ``views``
states the epsilon against each party. With k = S - 1, only g_i protects a client, as much as independent noise.
Messages, images and sampling rates contain no class counts. A client without images of a class sends noise. Messages
must arrive from all clients: a missing e_i adds noise to the total, and costs no privacy.

All noise has one key, a hash of all clients' examples and the constants. If only a changed client drew new noise in
another run, the changed mean_j z_j would disclose the change of its z, and only the g_i would protect the client.

Departs from the papers: of DP-CDA only the abstracts could be read, so the federated mixture, the normalisation and the
accounting are ours. Samples are Poisson samples at a public rate, and totals are divided by the public R; so a mixture
has l images per client and class only on average, and a rare class is darker. The class of a mixture is public, and
labels have no noise. Clients of different sizes have the same q and tau. Images are uint8.
CAPE's code (hafizimtiaz/cape) has this X for k = 0; for k > 0 it has a smaller X (S = 10, k = 3: 1.24, not 2.21),
because its covariance treats the colluding clients' z as unknown.
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
from fedcommons.sharing.random_features import pixels
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases
from fedcommons.storage.artifact_store import constants, key_of

DRAWS = 1
"""Version of the code for messages, samples and noise. Each version has separate secret salts."""


@dataclass(frozen=True, eq=False)
class Correlated:
    """A stream of CAPE's noise for S clients; the numbers of a client have the standard deviation ``scale``."""

    stream: Stream
    scale: float

    def standard_normal(self, size: Size, dtype: type = np.float64) -> np.ndarray:
        """Return scale (z_i - mean_j z_j + z'_i/sqrt(S)) for all clients i: an array of shape ``size`` = (S, ...)."""
        z, own = self.stream.standard_normal((2, *np.atleast_1d(size).tolist()), dtype)
        return self.scale * (z - z.mean(0) + own / sqrt(len(own)))

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
    """sigma against the server with ``colluding`` clients, over the sensitivity (1); 0: no noise and no guarantee"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of the (target_epsilon, delta) guarantee; a run has one delta, so it must be dp.delta"""
    colluding: Annotated[int | None, "[0, 1e6]"] = None
    """k, clients that may tell the server their noise; default: ceil(S/3) - 1 (CAPE's code), but at least 1 if S > 1"""
    per_class: Annotated[int, "[1, 1e6]"] = 20
    """T, number of mixtures (synthetic images) per class; all together have the target epsilon"""
    mix: Annotated[float, "(0, 1e9]"] = 5.0
    """l, expected number of images per client and class in a mixture, on average over clients and classes"""
    clip: Annotated[float, "(0, 1]"] = 0.5
    """b, bound on an image's root mean square pixel in [0, 1], a public number; brighter images are darkened to it"""

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
        self.sigma(client_data)

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
        draws, classes = self.draws(client_data), client_data.n_classes or 0
        unit = self.clip * sqrt(prod(client_data.shape)) / self.expected(client_data)
        mixtures = []
        for step in range(self.per_class):
            total = torch.zeros(classes, prod(client_data.shape), dtype=torch.float64)
            for message in self.messages(client_data, draws, step).values.float():  # sent as float32
                total += message  # in client order, in float64
            mixtures.append((255 * unit * total).clamp(0, 255).round().to(torch.uint8))
        images = torch.stack(mixtures, 1).view(-1, *client_data.shape)
        labels = torch.arange(classes).repeat_interleave(self.per_class)
        return noisy_sums.contribute(client_data, Examples(images, labels))

    def vectors(self, images: Tensor) -> Tensor:
        """Return x^ for n images x: (n, d) float32 with norms of at most 1."""
        x = pixels(images)
        return x / x.norm(dim=1, keepdim=True).clamp_min(self.clip * sqrt(x.shape[1]))

    def expected(self, client_data: ClientDatasets) -> float:
        """Return R, the expected number of images in a mixture, computed from public numbers only."""
        return self.rate(client_data) * sum(client_data.clients.sizes) / (client_data.n_classes or 1)

    def messages(self, client_data: ClientDatasets, draws: Draws, step: int) -> NoisySum:
        """Return all clients' messages M_t of mixture t = ``step``, (S, classes, d) float64."""
        clients, classes = client_data.clients, client_data.n_classes or 0
        owners = np.repeat(np.arange(len(clients)), clients.sizes)
        sample = np.flatnonzero(draws.stream("sample", step).random(len(owners)) < self.rate(client_data))
        images = clients.store[clients.rows.flat[sample]]
        x, cell = self.vectors(images.x).double(), torch.from_numpy(owners[sample]) * classes + images.y
        exact = torch.zeros(len(clients) * classes, x.shape[1], dtype=torch.float64).index_add_(0, cell, x)
        exact = exact.view(len(clients), classes, -1)
        total = NoisySum(torch.zeros_like(exact), clip=1.0)
        total.add(exact, norm=1.0)
        if sigma := self.sigma(client_data):
            total.blur(sigma, Correlated(draws.stream_for(exact, "noise", step), self.tau(client_data) / sigma))
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
        what = f"{MIXTURES}, if at most {most} clients collude with the server" if sigma else MIXTURES
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
        expected = self.expected(client_data)
        noise = self.tau(client_data) * self.clip * sqrt(prod(client_data.shape)) / expected
        sentence = (
            f"dpcda: a mixture is the mean of about {expected:.3g} images, and its noise has the standard deviation"
        )
        return [f"{sentence} {noise:.2g} per pixel, where pixels are in [0, 1]."] * (noise > 0)

    def views(self, client_data: ClientDatasets) -> dict[str, float]:
        """Return per party the mu of an unsampled Gaussian mechanism with the party's epsilon at ``delta``."""
        n, q, tau = len(client_data.clients), self.rate(client_data), self.tau(client_data)
        k = self.n_colluding(n)
        parties = {"outsiders, who see images": (n, False)}
        parties |= {"another client, which knows its own noise": (n - 1, False)} if n > 1 else {}
        parties |= {"the server": (n, True)}
        parties |= {f"the server and {k} of {n} clients together": (n - k, True)} if k else {}
        parties |= {"the server and all other clients together": (1, True)} if k < n - 1 else {}
        spent = {
            party: epsilon(q, tau / sqrt(exposure(n, *seen)), self.per_class, self.delta)
            for party, seen in parties.items()
        }
        return {party: 1 / gaussian.noise_for(value, self.delta) for party, value in spent.items()}


MIXTURES = "noisy mixtures of images"
"""Name of the clients' messages in the privacy ledger."""
