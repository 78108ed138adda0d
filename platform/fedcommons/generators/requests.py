"""Generation requests: the synthetic images that clients need, and all facts on which the images depend.

The numbers of labels are proportional to the class counts n_k of the images on which the generator is trained. With
``label_noise`` s, they are proportional to n_k + N(0, s^2), with negative values set to zero. This noise is a Gaussian
mechanism of sensitivity 1, because blanking out one image changes one count by 1. Without ``label_noise`` the exact
counts leave the client.

rho: share of a client's images on which its generator is trained;  n_i: images of client i;
n~: synthetic images that client i contributes;  p = n~/(n_i + n~);  N: clients;  n_total: images of all clients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.config.fields import parameters_of
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import UserError, require_type, user_code_context
from fedcommons.generators.generator import Generator, Receipt, for_client
from fedcommons.privacy import salts
from fedcommons.privacy.noise import Noise, Source
from fedcommons.privacy.release import SAMPLED_GAUSSIAN
from fedcommons.runtime import memory_limit
from fedcommons.seeding import numpy_generator, seed_for, wide_key
from fedcommons.storage.artifact_store import constants, key_of
from fedcommons.storage.atomic_files import sha256

VERSION = 1
"""Version of the code that trains and samples. Increase it if a change of code or defaults changes the images."""


NOISE = 2
"""Version of the noise of private generators. Generators that were stored with another version are not reused."""


DRAWS = 2
"""Version of the code that draws random numbers, such as augmentations, in private generators. Each version has other
secret salts: if sums of gradients of two versions had equal noise, the difference of the sums would be disclosed."""


@dataclass(frozen=True)
class GeneratorRecipe:
    """The specification of the clients' generators: the component, and the share rho of images on which it is trained.

    digest: hash of the code of a user-defined component, which ``VERSION`` does not cover; None if it is built in.
    label_noise: standard deviation of the noise on class counts; 0: no noise.
    is_secret: whether the run's noise comes from secret salts, so that an attacker cannot draw it again.
    """

    name: str
    generator: Generator
    rho: float
    digest: str | None = None
    label_noise: float = 0.0
    is_secret: bool = False

    @property
    def of_counts(self) -> Receipt:
        """Return the privacy protection (receipt) of the class counts from which labels are drawn."""
        if not self.label_noise:
            return Receipt()
        return Receipt(SAMPLED_GAUSSIAN, q=1.0, sigma=self.label_noise, sensitivity=1.0, steps=1)

    def facts(self, less: Sequence[str] = ()) -> dict[str, Any]:
        """Return the generator's name, code hash (if user-defined) and constants (except those in ``less``), by key."""
        of_source = {} if self.digest is None else {"digest": self.digest}
        return {"name": self.name, **of_source, "constants": constants(self.generator, less)}


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for one client's synthetic images: all facts on which the images and their generator depend."""

    client: int
    recipe: GeneratorRecipe
    flip: bool
    n_classes: int
    examples: Examples  # the client's images on which the generator is trained
    labels: Tensor  # (m,) labels of the m images to draw
    seed: int
    n: int  # number of drawn images that the client contributes
    salt: bytes = field(default=b"", repr=False)  # secret salt of the generator's noise; b"": no secret noise

    @property
    def epochs(self) -> int:
        """Return the number of epochs of training after which the images are drawn."""
        return self.recipe.generator.epochs

    @property
    def course_facts(self) -> dict[str, Any]:
        """Return all facts on which the training depends, by name, except the number of epochs."""
        return self._training("epochs")

    @property
    def generator_facts(self) -> dict[str, Any]:
        """Return all facts on which the trained weights depend, by name, including the number of epochs."""
        return self._training()

    @property
    def noise(self) -> Noise:
        """Return the random noise for DP-SGD in the training; it does not depend on the number of epochs."""
        facts = {name: value for name, value in self.course_facts.items() if name not in ("noise", "salt")}
        return Noise(Source(wide_key("generator", key_of(facts)), self.salt))

    @property
    def images_facts(self) -> dict[str, Any]:
        """Return all facts on which the drawn images depend: hash of the generator, sampling constants, labels."""
        generator = self.recipe.generator
        chosen = constants(generator)
        return {
            "generator": key_of(self.generator_facts),
            "sampling": {name: chosen[name] for name in generator.sampling if name in chosen},
            "labels": sha256(self.labels.numpy().tobytes()),
        }

    @cached_property
    def images_key(self) -> str:
        """Return the key of the synthetic images in the artifact store."""
        return key_of(self.images_facts)

    @cached_property
    def _examples_hash(self) -> str:
        return sha256(self.examples.x.numpy().tobytes() + self.examples.y.numpy().tobytes())

    def _training(self, *less: str) -> dict[str, Any]:
        return {
            "version": VERSION,
            "generator": self.recipe.facts((*self.recipe.generator.sampling, *less)),
            "flip": self.flip,
            "n_classes": self.n_classes,
            "examples": self._examples_hash,
            "seed": self.seed,
            **({"noise": NOISE} if takes_noise(self.recipe.generator) else {}),
            **({"draws": DRAWS} if self.recipe.is_secret and takes_noise(self.recipe.generator) else {}),
            **({"salt": salts.name_of(self.salt)} if self.salt else {}),
        }


def require_constants(generator: Generator) -> None:
    """Check that a generator's ``epochs`` is a positive integer and its ``sampling`` is a tuple of names.

    Raises:
        ClientError: ``epochs`` or ``sampling`` has another value.
    """
    with user_code_context(generator, "epochs"):
        if index(generator.epochs) < 1:
            raise ValueError(f"it must be a whole number of at least 1, got {generator.epochs}")
    with user_code_context(generator, "sampling"):
        for name in require_type(tuple, generator.sampling, "a tuple of names"):
            require_type(str, name, "a tuple of names")


def takes_noise(generator: Generator) -> bool:
    """Return whether the generator's ``fit`` has the parameter ``noise``, which every private generator needs."""
    return takes(generator.fit, "noise")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether ``function`` has a parameter called ``name``."""
    return name in parameters_of(getattr(function, "__func__", function))


def salt_facts(needs: Sequence[GenerationRequest]) -> list[str]:
    """Return the names of the generators' secret salts, and hashes of the facts on which the images depend.

    A resumed run compares this list with the list that the run stored. The lists differ if a salt was lost.
    """
    names = ([salts.name_of(need.salt)] if need.salt else [] for need in needs)
    return [key for name, need in zip(names, needs, strict=True) for key in (*name, need.images_key)]


def n_seen(rho: float, n_own: int) -> int:
    """Return int(rho n_own), the number of images on which the generator of a client with n_own images is trained."""
    return int(rho * n_own)


def contribution(p: float | None, n_total: int, n_clients: int, n_own: int) -> int:
    """Return the rounded number of images that a client contributes.

    If p is None, the number is n_total/n_clients, otherwise p n_own/(1 - p).
    p: share of synthetic images, or None. n_total, n_own: number of real images of all clients, and of the client.
    """
    if p is None:
        return max(1, round(n_total / n_clients))
    return round(p * n_own / (1 - p))


def contributions(p: float | None, client_data: ClientDatasets) -> list[int]:
    """Return each client's number of synthetic images; p: share of synthetic images, None: see ``contribution``."""
    return [contribution(p, client_data.n_total, len(client_data.clients), n) for n in client_data.clients.sizes]


def check_contributions(p: float | None, client_data: ClientDatasets) -> None:
    """Check that the share p is 0 or makes some client contribute an image, and that all images fit into memory.

    Raises:
        UserError: p > 0, but no client would contribute an image, or the images do not fit into memory.
    """
    sizes, largest = contributions(p, client_data), max(client_data.clients.sizes)
    if p and max(sizes) < 1:
        least = 1 / (2 * largest + 1)
        raise UserError(
            f"sharing.p = {p:g} of {largest} images is not one image: it must be 0 or more than {least:.2g}."
        )
    n, numbers = sum(sizes), int(np.prod(client_data.shape))
    # 8: bytes of the label of an image, an int64
    memory_limit.require(f"{n:,} synthetic images", n * (numbers * client_data.itemsize + 8), "sharing.p")


def requests_of_clients(
    p: float | None, client_data: ClientDatasets, recipe: GeneratorRecipe
) -> list[GenerationRequest]:
    """Return one generation request per client.

    The drawn images do not depend on the learning rate. All runs in which a client contributes at most the default
    number of images, n_total/N, use the same images. Labels have the class shares of the images on which the generator
    is trained.

    Raises:
        UserError: the labels are not classes, or the share rho of a client's images is less than one image.
    """
    if client_data.n_classes is None:
        raise UserError("generators draw examples of chosen classes, but the labels of this data set are not classes.")
    paper = -(-client_data.n_total // len(client_data.clients))
    result = []
    for client, (rows, wanted) in enumerate(zip(client_data.clients.rows, contributions(p, client_data), strict=True)):
        seen = n_seen(recipe.rho, len(rows))
        if seen < 1:
            raise UserError(f"generator.rho = {recipe.rho:g} of client {client}'s {len(rows)} images is not one image.")
        order = numpy_generator(client_data.seed, "generator subset", client).permutation(len(rows))
        examples = client_data.clients.store[rows[order[:seen]]]  # a smaller share rho gives a subset of the images
        # Round up to a multiple of the default contribution, so that runs with different p use the same images.
        n_drawn = paper * max(1, -(-wanted // paper))
        counts = _counts(examples, client, client_data, recipe)
        labels = np.repeat(np.arange(client_data.n_classes), largest_remainder(counts, n_drawn))
        need = GenerationRequest(
            client=client,
            recipe=replace(recipe, generator=for_client(recipe.generator, seen)),
            flip=client_data.flip,
            n_classes=client_data.n_classes,
            examples=examples,
            labels=torch.from_numpy(labels),
            seed=seed_for(client_data.seed, "generator", client),
            n=wanted,
        )
        if recipe.is_secret and takes_noise(recipe.generator):
            need = replace(need, salt=salts.of_artifact(key_of(need.course_facts)))
        result.append(need)
    return result


def _counts(examples: Examples, client: int, client_data: ClientDatasets, recipe: GeneratorRecipe) -> np.ndarray:
    """Return the class counts (classes,) of ``examples``, with noise if ``label_noise`` > 0.

    If all noisy counts are 0, return ones.
    """
    counts = np.bincount(examples.y.numpy(), minlength=client_data.n_classes or 0)
    if not recipe.label_noise:
        return counts
    facts = {"seed": client_data.seed, "client": client, "rho": recipe.rho, "label_noise": recipe.label_noise}
    key = key_of({**facts, "sizes": list(map(int, client_data.clients.sizes))})
    salt = salts.of_artifact(f"{key}-{sha256(examples.x.numpy().tobytes())[:24]}") if recipe.is_secret else b""
    draws = Noise(Source(wide_key("class counts", key), salt)).call("class counts", examples.x, examples.y).stream()
    noisy = np.maximum(counts + recipe.label_noise * draws.standard_normal(len(counts)), 0)
    return noisy if noisy.any() else np.ones(len(counts))


def largest_remainder(weights: np.ndarray, total: int) -> np.ndarray:
    """Return integers with the sum ``total``, in proportion to ``weights`` (not all 0); ties favour low indices."""
    exact = weights * (total / weights.sum())
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


@accepts_old_names(seen="n_sources")
@dataclass(frozen=True)
class Contribution:
    """Synthetic examples that a client contributes, with their privacy protection.

    receipt: protection of the examples; None: no protection. n_sources: number of the client's real examples on which
    the generator was trained. of_labels: protection of the class counts from which labels are drawn; None: labels have
    the same protection as the examples.
    """

    examples: Examples
    receipt: Receipt | None = None
    n_sources: int = 0
    of_labels: Receipt | None = None
