"""Which synthetic images clients need, and everything that these depend on.

Labels of synthetic images follow the class counts n_k of the images that the generator sees. With ``label_noise`` they
follow n_k + N(0, s^2), those below zero counting as zero: a Gaussian mechanism, as blanking one image out changes one
count by 1. Without it the counts leave the client as they are.

s: ``label_noise``;  rho: share of a client's images that its generator is trained on;
n~: images that it contributes;  p = n~/(n_i + n~).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.data.federated import Dealt
from fedcommons.errors import UserError, given, somebodys
from fedcommons.generators.generator import Generator, Receipt, of_client
from fedcommons.privacy import salts
from fedcommons.privacy.noise import Noise, Source
from fedcommons.privacy.release import SAMPLED_GAUSSIAN
from fedcommons.runtime import memory_limit
from fedcommons.seeding import numpy_generator, seed_for, wide_key
from fedcommons.storage.artifact_store import constants, key_of
from fedcommons.storage.atomic_files import sha256

VERSION = 1
"""Version of the code that trains and samples: raise it when a change of code or defaults changes the images."""


NOISE = 2
"""Version of how private generators draw noise: one trained before was hidden by other noise."""


DRAWS = 2
"""Version of what else they draw where noise is secret. Another one has another salt: the same noise on a sum of other
draws would tell their difference."""


@dataclass(frozen=True)
class GeneratorRecipe:
    """How clients' generators are made: the part, its name, and rho.

    digest: of the code of a user's own part, which ``VERSION`` does not cover; None for one of ours.
    label_noise: standard deviation of the noise on class counts. is_secret: nobody can draw any of the noise again.
    """

    name: str
    generator: Generator
    rho: float
    digest: str | None = None
    label_noise: float = 0.0
    is_secret: bool = False

    @property
    def of_counts(self) -> Receipt:
        """What protects the class counts that labels follow."""
        if not self.label_noise:
            return Receipt()
        return Receipt(SAMPLED_GAUSSIAN, q=1.0, sigma=self.label_noise, sensitivity=1.0, steps=1)

    def facts(self, less: Sequence[str] = ()) -> dict[str, Any]:
        """What identifies the part, without the constants in ``less``; rho is left out, as it shows in the images."""
        of_source = {} if self.digest is None else {"digest": self.digest}
        return {"name": self.name, **of_source, "constants": constants(self.generator, less)}


@dataclass(frozen=True, kw_only=True)
class Need:
    """One client's synthetic images: all that they and their generator depend on."""

    client: int
    recipe: GeneratorRecipe
    flip: bool
    n_classes: int
    examples: Examples  # the rho n_i images the generator sees
    labels: Tensor  # of the images to draw
    seed: int
    n: int  # how many of the drawn images are contributed
    salt: bytes = field(default=b"", repr=False)  # of the generator's noise; empty: it is seeded, or there is none

    @property
    def epochs(self) -> int:
        """Epochs after which the generator draws the images."""
        return self.recipe.generator.epochs

    @property
    def course_facts(self) -> dict[str, Any]:
        """What the training depends on, apart from its length."""
        return self._training("epochs")

    @property
    def generator_facts(self) -> dict[str, Any]:
        """What the trained weights depend on: the whole part, without what only sampling uses."""
        return self._training()

    @property
    def noise(self) -> Noise:
        """The noise of the training, which does not depend on its length."""
        facts = {name: value for name, value in self.course_facts.items() if name not in ("noise", "salt")}
        return Noise(Source(wide_key("generator", key_of(facts)), self.salt))

    @property
    def images_facts(self) -> dict[str, Any]:
        """What the drawn images depend on."""
        generator = self.recipe.generator
        chosen = constants(generator)
        return {
            "generator": key_of(self.generator_facts),
            "sampling": {name: chosen[name] for name in generator.sampling if name in chosen},
            "labels": sha256(self.labels.numpy().tobytes()),
        }

    def _training(self, *less: str) -> dict[str, Any]:
        content = self.examples.x.numpy().tobytes() + self.examples.y.numpy().tobytes()
        return {
            "version": VERSION,
            "generator": self.recipe.facts((*self.recipe.generator.sampling, *less)),
            "flip": self.flip,
            "n_classes": self.n_classes,
            "examples": sha256(content),
            "seed": self.seed,
            **({"noise": NOISE} if takes_noise(self.recipe.generator) else {}),
            **({"draws": DRAWS} if self.recipe.is_secret and takes_noise(self.recipe.generator) else {}),
            **({"salt": salts.name_of(self.salt)} if self.salt else {}),
        }


def require_constants(generator: Generator) -> None:
    """See that ``epochs`` and ``sampling`` are what a generator must have.

    Raises:
        ClientError: they are not.
    """
    with somebodys(generator, "epochs"):
        if index(generator.epochs) < 1:
            raise ValueError(f"it must be a whole number of at least 1, got {generator.epochs}")
    with somebodys(generator, "sampling"):
        for name in given(tuple, generator.sampling, "a tuple of names"):
            given(str, name, "a tuple of names")


def takes_noise(generator: Generator) -> bool:
    """Whether its ``fit`` asks for noise, as that of a private generator does."""
    return takes(generator.fit, "noise")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function of a generator has this parameter."""
    return name in signature(function).parameters


def salts_told(needs: Sequence[Need]) -> list[str]:
    """What tells the secret salts of these generators and of their class counts: names, and keys of their images."""
    names = ([salts.name_of(need.salt)] if need.salt else [] for need in needs)
    return [told for name, need in zip(names, needs, strict=True) for told in (*name, key_of(need.images_facts))]


def n_seen(rho: float, n_own: int) -> int:
    """Images that the generator of a client with ``n_own`` of them sees."""
    return int(rho * n_own)


def contribution(p: float | None, n_total: int, n_clients: int, n_own: int) -> int:
    """n~: n_total/N (the paper) if p is None, else p n_i/(1 - p)."""
    if p is None:
        return max(1, round(n_total / n_clients))
    return round(p * n_own / (1 - p))


def contributions(p: float | None, dealt: Dealt) -> list[int]:
    """n~ of each client."""
    return [contribution(p, dealt.n_total, len(dealt.own), n) for n in dealt.own.sizes]


def check_contributions(p: float | None, dealt: Dealt) -> None:
    """Refuse a p > 0 that gives no client an image, and more images than this machine can hold.

    Raises:
        UserError: p is refused, or memory would not hold the images.
    """
    sizes, largest = contributions(p, dealt), max(dealt.own.sizes)
    if p and max(sizes) < 1:
        least = 1 / (2 * largest + 1)
        raise UserError(
            f"sharing.p = {p:g} of {largest} images is not one image; it must be 0 or more than {least:.2g}."
        )
    n, numbers = sum(sizes), int(np.prod(dealt.shape))
    memory_limit.require(f"{n:,} synthetic images", n * (numbers * dealt.itemsize + 8), "sharing.p")  # and 8 a label


def needs(p: float | None, dealt: Dealt, recipe: GeneratorRecipe) -> list[Need]:
    """What must be made. It is the same for every learning rate, and for every p of up to n_total/N images a client.

    Labels have the class shares of the images that the generator sees.

    Raises:
        UserError: a client's share rho of images is less than one image.
    """
    if dealt.n_classes is None:
        raise UserError("generators draw examples of given classes, and the labels of this data set are no classes.")
    paper = -(-dealt.n_total // len(dealt.own))
    result = []
    for client, (rows, wanted) in enumerate(zip(dealt.own.rows, contributions(p, dealt), strict=True)):
        seen = n_seen(recipe.rho, len(rows))
        if seen < 1:
            raise UserError(f"generator.rho = {recipe.rho:g} of client {client}'s {len(rows)} images is not one image.")
        order = numpy_generator(dealt.seed, "generator subset", client).permutation(len(rows))
        examples = dealt.own.store[rows[order[:seen]]]  # a prefix, so that a smaller rho sees a subset
        n_drawn = paper * max(1, -(-wanted // paper))  # the same set for every p up to 1/2
        counts = _counts(examples, client, dealt, recipe)
        labels = np.repeat(np.arange(dealt.n_classes), largest_remainder(counts, n_drawn))
        need = Need(
            client=client,
            recipe=replace(recipe, generator=of_client(recipe.generator, seen)),
            flip=dealt.flip,
            n_classes=dealt.n_classes,
            examples=examples,
            labels=torch.from_numpy(labels),
            seed=seed_for(dealt.seed, "generator", client),
            n=wanted,
        )
        if recipe.is_secret and takes_noise(recipe.generator):
            need = replace(need, salt=salts.of_artifact(key_of(need.course_facts)))
        result.append(need)
    return result


def _counts(examples: Examples, client: int, dealt: Dealt, recipe: GeneratorRecipe) -> np.ndarray:
    """(classes,), what the labels of a client's synthetic images follow; all classes alike if noise left none."""
    counts = np.bincount(examples.y.numpy(), minlength=dealt.n_classes or 0)
    if not recipe.label_noise:
        return counts
    facts = {"seed": dealt.seed, "client": client, "rho": recipe.rho, "label_noise": recipe.label_noise}
    key = key_of({**facts, "sizes": list(map(int, dealt.own.sizes))})
    salt = salts.of_artifact(f"{key}-{sha256(examples.x.numpy().tobytes())[:24]}") if recipe.is_secret else b""
    draws = Noise(Source(wide_key("class counts", key), salt)).call("class counts", examples.x, examples.y).stream()
    noisy = np.maximum(counts + recipe.label_noise * draws.standard_normal(len(counts)), 0)
    return noisy if noisy.any() else np.ones(len(counts))


def largest_remainder(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that sum to ``total``, in proportion to ``weights`` (not all zero); ties favour the lower index."""
    exact = weights * (total / weights.sum())
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


@dataclass(frozen=True)
class Contribution:
    """Examples that were made for a client, and what protects them; None: nothing.

    seen: how many of the client's examples they were made from. of_labels: what protects the class counts that labels
    follow; None: labels are as well protected as the examples.
    """

    examples: Examples
    receipt: Receipt | None = None
    seen: int = 0
    of_labels: Receipt | None = None
