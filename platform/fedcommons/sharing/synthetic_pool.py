"""Fedssyn's pool: every client trains a generator on a part of its data and contributes labelled synthetic images.

Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
TMLR 2024, arXiv:2306.13263, algorithm I.   rho: share of a client's images its generator sees;  n~: images a client
contributes and receives;  p = n~/(n_i + n~).

Departs from the paper: nothing known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.artifacts import Store, key_of
from fedcommons.config import experiment as config
from fedcommons.core.worker import fresh_torch
from fedcommons.data.datasets import Dataset, Examples
from fedcommons.data.partition import Partitioned
from fedcommons.errors import UserError
from fedcommons.files import sha256
from fedcommons.generators.ddpm import DDPMGenerator
from fedcommons.generators.generator import Generator, Weights
from fedcommons.seeds import numpy_generator, seed_for

GENERATORS: dict[str, Callable[[config.Generator, bool], Generator]] = {"ddpm": DDPMGenerator}

VERSION = 1
"""Of the code that trains and samples: to be raised when a change of it changes the images."""

_FITTING = ("name", "epochs", "batch_size", "lr", "channels", "ema_decay", "timesteps", "schedule")


@dataclass(frozen=True)
class Need:
    """One client's synthetic images and the generator they come from: all that both depend on."""

    client: int
    settings: config.Generator
    flip: bool
    n_classes: int
    examples: Examples  # the rho n_i images the generator sees
    labels: Tensor  # of the images to draw
    seed: int

    @property
    def generator(self) -> Generator:
        return GENERATORS[self.settings.name](self.settings, self.flip)

    @property
    def course_facts(self) -> dict[str, Any]:
        """What the course of the training depends on, however long it is."""
        facts = self.generator_facts
        return facts | {"fitting": {name: v for name, v in facts["fitting"].items() if name != "epochs"}}

    @property
    def generator_facts(self) -> dict[str, Any]:
        """What the trained weights depend on."""
        content = self.examples.x.numpy().tobytes() + self.examples.y.numpy().tobytes()
        fitting = {k: v for k, v in asdict(self.settings).items() if k in _FITTING}
        return {
            "version": VERSION,
            "fitting": fitting,
            "flip": self.flip,
            "n_classes": self.n_classes,
            "examples": sha256(content),
            "seed": self.seed,
        }

    @property
    def images_facts(self) -> dict[str, Any]:
        """What the drawn images depend on."""
        s = self.settings
        return {
            "generator": key_of(self.generator_facts),
            "sampler": s.sampler,
            "steps": s.sampling_steps,
            "labels": sha256(self.labels.numpy().tobytes()),
        }


@dataclass(frozen=True)
class Job:
    """One training, the sets of images to draw after some of its epochs, and the weights that are there already.

    weights: epochs to weights.
    """

    needs: list[Need]
    weights: dict[int, Weights]

    @property
    def epochs(self) -> list[int]:
        """After how many epochs weights are missing: none where there is nothing to train."""
        return sorted({need.settings.epochs for need in self.needs} - self.weights.keys())


@dataclass(frozen=True)
class Made:
    """What a job made: the weights that were missing, by their epochs, and images for each of its needs."""

    weights: dict[int, Weights]
    images: list[Tensor]


def contribution(config: config.Experiment, n_total: int, n_own: int) -> int:
    """n~: images a client receives; n_total/N (the paper), or p n_i/(1 - p) where ``sharing.p`` is set."""
    p = config.sharing.p
    if p is None:
        return max(1, round(n_total / config.partition.n_clients))
    return round(p * n_own / (1 - p))


def needs(config: config.Experiment, dataset: Dataset, partition: Partitioned) -> list[Need]:
    """What must be made for ``config``: the same for every learning rate and, up to n_total/N images, every p."""
    paper = -(-len(dataset.train) // config.partition.n_clients)
    result = []
    for client, rows in enumerate(partition.rows):
        n_seen = int(config.generator.rho * len(rows))
        if n_seen < 1:
            raise UserError(
                f"generator.rho = {config.generator.rho:g} of client {client}'s {len(rows)} images is not one image."
            )
        order = numpy_generator(config.seed, "generator subset", client).permutation(len(rows))
        examples = dataset.train[rows[order[:n_seen]]]  # a prefix: a smaller rho sees a part of the same images
        wanted = contribution(config, len(dataset.train), len(rows))
        n_drawn = paper * max(1, -(-wanted // paper))  # the same set for every p up to 1/2
        counts = np.bincount(examples.y.numpy(), minlength=dataset.n_classes)
        labels = np.repeat(np.arange(dataset.n_classes), largest_remainder(counts, n_drawn))
        result.append(
            Need(
                client,
                config.generator,
                dataset.augment and config.data.name.startswith("cifar"),
                dataset.n_classes,
                examples,
                torch.from_numpy(labels),
                seed_for(config.seed, "generator", client),
            )
        )
    return result


@fresh_torch()
def make(job: Job) -> Made:
    """Train the generator as far as weights are missing, and draw the images."""
    first = job.needs[0]
    shape = tuple(first.examples.x.shape[1:])
    new = first.generator.fit(first.examples, first.n_classes, first.seed, job.epochs) if job.epochs else {}
    weights = {**job.weights, **new}
    images = [
        need.generator.sample(weights[need.settings.epochs], shape, need.n_classes, need.labels, need.seed)
        for need in job.needs
    ]
    return Made(dict(new), images)


def missing(store: Store, wanted: Iterable[Need]) -> list[Job]:
    """Jobs for what the store lacks: each training once and each set of images once, however many cells need them.

    Cells whose generators differ in their epochs alone take them from one training.
    """
    images = {key_of(need.images_facts): need for need in wanted}
    courses: dict[str, list[Need]] = {}
    for need in images.values():
        if _images(store, need) is None:
            courses.setdefault(key_of(need.course_facts), []).append(need)
    return [Job(needs, _stored(store, needs)) for needs in courses.values()]


def _images(store: Store, need: Need) -> Examples | None:
    """The images that the store has for this need, or None."""
    found = store.get("images", key_of(need.images_facts))
    if found is None:
        return None
    images, labels = found.get("images"), found.get("labels")
    shape = (len(need.labels), *need.examples.x.shape[1:])
    if images is None or images.shape != shape or images.dtype != torch.uint8:
        images = None
    if images is None or labels is None or not torch.equal(labels, need.labels):
        store.say(f"the synthetic images of client {need.client} in {store.folder} are malformed; to be built again.")
        return None
    return Examples(images, labels)


def _stored(store: Store, needs: Sequence[Need]) -> dict[int, Weights]:
    each = {need.settings.epochs: key_of(need.generator_facts) for need in needs}
    return {epochs: found for epochs, key in each.items() if (found := store.get("generators", key)) is not None}


def keep(store: Store, job: Job, made: Made) -> None:
    """Put what a job made into the store."""
    for epochs, weights in made.weights.items():
        facts = next(need for need in job.needs if need.settings.epochs == epochs).generator_facts
        store.put("generators", dict(weights), facts)
    for need, images in zip(job.needs, made.images, strict=True):
        store.put("images", {"images": images, "labels": need.labels}, need.images_facts)


def read(store: Store, need: Need, n: int) -> Examples:
    """``n`` of a client's stored images, classes apportioned as in its generator's training data.

    Raises:
        LookupError: they have not been made.
    """
    everything = _images(store, need)
    if everything is None:
        raise LookupError(f"the synthetic images of client {need.client} have not been made: not in {store.folder}")
    available = np.bincount(everything.y.numpy(), minlength=need.n_classes)
    counts = largest_remainder(available, n)
    starts = np.cumsum(available) - available
    return everything[np.concatenate([np.arange(s, s + k) for s, k in zip(starts, counts, strict=True)])]


def largest_remainder(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that sum to ``total``, in proportion to ``weights`` (not all zero); ties to the lower index."""
    exact = weights * (total / weights.sum())
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def shuffle(sets: Sequence[Examples], sizes: Sequence[int], seed: int) -> tuple[Examples, list[np.ndarray]]:
    """Pool all sets, permute the pool once, cut it into parts of these sizes (which sum to the pool)."""
    pool = Examples(torch.cat([s.x for s in sets]), torch.cat([s.y for s in sets]))
    order = numpy_generator(seed, "pool").permutation(len(pool))
    return pool, np.split(order, np.cumsum(sizes)[:-1])
