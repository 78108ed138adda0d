"""NDPDC: clients release noisy sums of features under a sequence of random networks; images are fitted to their totals.

Zheng and Li, "Differentially private dataset condensation", NDSS 2024 workshop; the steps as Dosser has them
(humansensinglab/Dosser), with sums over clients.   phi_t: features of step t's random network, |phi_t| <= 1
(``condensation``);  B_tic: a Poisson sample of client i's images of class c at rate q_i;  z: N(0, I);  sigma_i: the
noise multiplier;  S_c: ipc images;  L: real images of a class expected in a step;  R = sum_i q_i n_i/classes.

    client i sends, T times   M_tic = sum_{x in B_tic} phi_t(x, c) + sigma_i z
    the server steps down     sum_c | L/R sum_i M_tic - L/ipc sum_k phi_t(S_ck, c) |^2

An image has one class, and one that is blanked out adds nothing: the sensitivity of a step is 1, and a client's
messages are T steps of the sampled Gaussian at q_i and sigma_i. Whoever sees them sees no more than epsilon.
No message depends on the images, so they follow from the messages and cost no privacy. Everybody gets all.

q_i = min(1, L classes/n_i), as if a client's classes were equally large: how many it has of each is private, and n_i is
public. Every example is drawn at this one rate whatever its class. ``class_size`` is a public number in its place.
Noise is drawn once, by a key of all that decides the messages: the same run sends the same bits. A step's messages are
added up and gone.

Departs from the paper: real and fitted images are not augmented (``augment``; there both are, alike in a step); q =
L/n_c there, of the smallest class; ours are the neighbours that the ledger has; the distance is over (R/L)^2, so that
the rate means the same for any number of clients; images become uint8 in the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Annotated, Any

import torch
from torch import Tensor

from fedcommons.core.communication import images_nbytes
from fedcommons.data.examples import Examples
from fedcommons.data.federated import Dealt
from fedcommons.errors import UserError
from fedcommons.generators.condensation import Networks, Phi, Sender, condensed
from fedcommons.generators.requests import Contribution
from fedcommons.privacy import salts
from fedcommons.privacy.accountants import noise_for, require_reachable
from fedcommons.privacy.noise import Noise, Source
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.seeding import seed_for, wide_key
from fedcommons.sharing import privacy_target
from fedcommons.sharing.stage import Assigned, Contributions
from fedcommons.storage.artifact_store import constants, key_of
from fedcommons.storage.atomic_files import sha256

SUMS = "noisy sums of features of random networks"

DRAWS = 1
"""Version of how messages are computed and samples and noise drawn; another one has other secret salts."""


@dataclass(frozen=True)
class NDPDC:
    """D_i and the images that match all clients' noisy sums, under every network of a random sequence."""

    serves_pool = True

    target_epsilon: Annotated[float | None, "[0.001, 1000]"] = None
    """epsilon of what every client releases. Either this or noise_multiplier"""
    noise_multiplier: Annotated[float | None, "[0, 1e6]"] = None
    """sigma, standard deviation of the noise over the sensitivity 1; 0: none, and no guarantee"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of target_epsilon; a run has one delta, so it must be dp.delta"""
    iterations: Annotated[int, "[1, 1e6]"] = 1000
    """T, networks, each with a message and a step on the pixels (paper: 10,000)"""
    per_class: Annotated[int, "[1, 1e6]"] = 10
    """ipc, images of each class that are fitted (paper: 10 and 50)"""
    batch: Annotated[int, "[1, 1e9]"] = 50
    """L, real images of a class that a client expects in a step"""
    class_size: Annotated[int | None, "[1, 1e9]"] = None
    """a client's images of a class, by which q = L/class_size: a public number; default: n_i over the classes"""
    width: Annotated[int, "[1, 1e4]"] = 128
    """channels of the random ConvNets"""
    depth: Annotated[int | None, "[1, 3]"] = None
    """blocks of the random ConvNets, if images can be halved so often; default: as leave 4x4 places (paper: 3)"""
    lr: Annotated[float, "(0, 1e38]"] = 1.0
    """learning rate of the pixels"""
    augment: Annotated[str, "none | translation | all"] = "none"
    """what both real and fitted images go through (the paper augments them); all: colour, translation and cutout"""

    check = privacy_target.check

    def check_dealt(self, dealt: Dealt) -> None:
        """See ``Stage``. It solves for every client's noise, so that what cannot be reached is refused before work."""
        if dealt.n_classes is None:
            raise UserError("setting ndpdc sums features by class, and the labels of this data set are no classes.")
        if dealt.own.store.x.dtype != torch.uint8 or len(dealt.shape) != 3 or min(dealt.shape[1:]) < 2:
            what = "images (C, H, W) of at least 2x2 whole numbers 0 to 255 (uint8)"
            raise UserError(f"setting ndpdc fits {what}, and these examples are others.")
        for n in {*dealt.own.sizes}:
            self.sigma(n, dealt.n_classes)

    def rate(self, n: int, classes: int) -> float:
        """q of a client with n examples, from public numbers."""
        return min(1.0, self.batch / self.class_size if self.class_size else self.batch * classes / max(n, 1))

    def sigma(self, n: int, classes: int) -> float:
        """The noise multiplier of a client with n examples.

        Raises:
            UserError: even much noise does not reach the target.
        """
        if self.target_epsilon is None:
            return self.noise_multiplier or 0.0
        course = self.rate(n, classes), self.iterations, self.delta
        require_reachable(self.target_epsilon, *course)
        return noise_for(self.target_epsilon, *course)

    def effective_constants(self, dealt: Dealt) -> dict[str, Any]:
        """Return the noise multiplier and the class size of each client, and the depth that was used."""
        sizes, classes = dealt.own.sizes, dealt.n_classes or 1
        return {
            "noise_multiplier": [self.sigma(n, classes) for n in sizes],
            "class_size": [self.class_size or n / classes for n in sizes],
            "depth": self.networks(dealt).blocks,
        }

    def networks(self, dealt: Dealt) -> Networks:
        """phi_1, ..., phi_T, which everybody can draw."""
        return Networks(
            shape=dealt.shape,
            n_classes=dealt.n_classes or 0,
            width=self.width,
            depth=self.depth,
            augment=self.augment,
            flip=dealt.flip,
            seed=seed_for(dealt.seed, "ndpdc"),
        )

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        """The clients' messages, their totals and the images, step by step; who contributes which does not matter."""
        n = len(dealt.own)
        senders = [self.sender(dealt, client) for client in range(n)]

        def total(phi: Phi, step: int) -> Tensor:
            return torch.stack([one.message(phi, step).values.float() for one in senders]).sum(0)  # as they travel

        images = condensed(
            self.networks(dealt), total, self.iterations, self.per_class, self.expected(dealt), self.batch, self.lr
        )
        images = Examples(images.x.to(dealt.own.store.x.dtype), images.y)
        return Contributions.of_made(dealt, [Contribution(images[slice(i, None, n)]) for i in range(n)])

    def expected(self, dealt: Dealt) -> float:
        """R, from public numbers."""
        classes = dealt.n_classes or 1
        return sum(self.rate(n, classes) * n / classes for n in dealt.own.sizes)

    def sender(self, dealt: Dealt, client: int) -> Sender:
        """The client, who sends T messages (classes, D)."""
        own, classes = dealt.own.store[dealt.own.rows[client]], dealt.n_classes or 0
        sigma = self.sigma(len(own), classes)
        salt = self._salt(dealt, client) if dealt.is_secret and sigma else dealt.salt
        source = Source(wide_key("ndpdc", self._key(dealt, client)), salt)
        draws = Noise(source).call("sums of features of networks", own.x, own.y)
        return Sender(own, classes, self.rate(len(own), classes), sigma, draws)

    def shorter(self) -> tuple["NDPDC", float]:
        """See ``TakesLong``: all steps cost the same."""
        few = min(self.iterations, 3)
        return replace(self, iterations=few), self.iterations / few

    def salts(self, dealt: Dealt) -> list[bytes]:
        """See ``Salted``: of each client's messages."""
        has_noise = self.noise_multiplier != 0
        return [self._salt(dealt, client) for client in range(len(dealt.own))] if has_noise else []

    def _key(self, dealt: Dealt, client: int) -> str:
        """Of what is asked for, by which samples and noise are drawn."""
        own = dealt.own.store[dealt.own.rows[client]]
        content = sha256(own.x.numpy().tobytes() + own.y.numpy().tobytes())
        decides = {**constants(self, ("per_class", "lr")), "classes": dealt.n_classes, "flip": dealt.flip}
        return key_of({"seed": dealt.seed, "client": client, "own": content, **decides})

    def _salt(self, dealt: Dealt, client: int) -> bytes:
        """Of what the messages really are, as salts outlive what computes them: the same noise on others would tell."""
        n, classes = dealt.own.sizes[client], dealt.n_classes or 0
        really = {
            "draws": DRAWS,
            "q": self.rate(n, classes),
            "sigma": self.sigma(n, classes),
            "iterations": self.iterations,
            "features": self.networks(dealt).digest,
        }
        return salts.of_artifact(f"{key_of({'asked': self._key(dealt, client), **really})}-ndpdc")

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        """T noisy values a client."""
        event, classes = Release(0, (SUMS,), mechanism=SAMPLED_GAUSSIAN, sensitivity=1.0), dealt.n_classes or 0
        events = []
        for client, n in enumerate(dealt.own.sizes):
            how = {"q": self.rate(n, classes), "sigma": self.sigma(n, classes), "steps": self.iterations}
            sent = replace(event, client=client, **how)
            events.append(replace(sent, seen=0 if sent.covered else n))
        return contributed, events

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        """All get all images: T messages go up, images come down."""
        n = len(dealt.own)
        up = 4 * self.iterations * (dealt.n_classes or 0) * self.networks(dealt).size
        down = images_nbytes(len(released.rows), dealt.shape, dealt.itemsize, dealt.label_nbytes)
        return Assigned(
            dealt.own.rows, [released.rows] * n, n_own=dealt.own.sizes, pool=released.of_each(n), once=n * (up + down)
        )  # fmt: skip

    def beforehand(self, dealt: Dealt) -> list[str]:
        """What can be hoped for: the noise in a total, over how long it can be, and over the root of T."""
        if self.noise_multiplier == 0:
            return []
        classes = dealt.n_classes or 0
        noise = sqrt(sum(self.sigma(n, classes) ** 2 for n in dealt.own.sizes) * self.networks(dealt).size)
        ratio = noise / self.expected(dealt)
        return [
            f"ndpdc: the noise in a step's sum of a class is {ratio:.2g} times as long as that sum can be, and in the "
            f"mean of {self.iterations:,} steps {ratio / sqrt(self.iterations):.2g} times."
        ]
