"""Clients' synthetic images as artifacts: made once, stored with the receipt of their protection, read back.

Fedssyn (Li et al., TMLR 2024, arXiv:2306.13263), algorithm I, lines 2 to 4: every client trains a generator on a part
of its data and draws labelled images from it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.core.worker import fresh_torch
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, given, somebodys
from fedcommons.generators.generator import Receipt, TrainedGenerator
from fedcommons.generators.requests import Contribution, Need, largest_remainder, takes, takes_noise
from fedcommons.runtime.gpu_memory import with_room
from fedcommons.storage.artifact_store import Store, constants, key_of


@dataclass(frozen=True)
class Job:
    """One training, the sets of images to draw after some of its epochs, and the generators already stored.

    trained: the stored generators, by their epochs.
    """

    needs: list[Need]
    trained: dict[int, TrainedGenerator]

    @property
    def epochs(self) -> list[int]:
        """The epochs whose weights are missing; empty where there is nothing to train."""
        return sorted({need.epochs for need in self.needs} - self.trained.keys())


@dataclass(frozen=True)
class JobResult:
    """The result of a job: the missing generators by number of epochs, and the images for each of its needs."""

    trained: dict[int, TrainedGenerator]
    images: list[Tensor]


Step = Callable[[int, int, str], None]
"""Told after a step how many are done, of how many, and of what."""


@fresh_torch()
def make(job: Job, step: Step | None = None) -> JobResult:
    """Train the generator if weights are missing, and draw the images; ``step``: told how far, if the part tells.

    Stored weights that it cannot draw from, as they have other names or shapes than its own, are trained anew.

    Raises:
        ClientError: the images are not of the type and shape of the real ones.
    """
    try:
        return with_room(partial(_made, job, step))
    except Exception:  # whatever a generator raises at weights of another one
        if not job.trained:
            raise
    return with_room(partial(_made, Job(job.needs, {}), step))


def _telling(function: Callable[..., Any], step: Step | None, what: str) -> dict[str, Any]:
    """The argument ``progress`` of a generator's function, where it has one and somebody asks."""
    if step is None or not takes(function, "progress"):
        return {}
    return {"progress": lambda number, of: step(number, of, what)}


def _made(job: Job, step: Step | None) -> JobResult:
    first = job.needs[0]
    shape, new = tuple(first.examples.x.shape[1:]), {}
    of = f"client {first.client}"
    if job.epochs:
        with somebodys(first.recipe.generator, "fit", of):
            new = _fitted(first, job.epochs, step)
    trained, images = {**job.trained, **new}, []
    for need in job.needs:
        part, weights = need.recipe.generator, trained[need.epochs].weights
        with somebodys(part, "sample", of):
            telling = _telling(part.sample, step, "sampling")
            drawn = part.sample(weights, shape, need.n_classes, need.labels, need.seed, **telling)
            images.append(given(Tensor, drawn))
        require_like(need.examples.x, need.recipe.name, len(need.labels), images[-1])
    return JobResult(new, images)


def _fitted(need: Need, epochs: Sequence[int], step: Step | None) -> dict[int, TrainedGenerator]:
    """The generators after these epochs.

    Raises:
        ValueError: ``fit`` gives something else.
    """
    generator, what = need.recipe.generator, "a TrainedGenerator for each of the epochs"
    noise = {"noise": need.noise} if takes_noise(generator) else {}
    more = noise | _telling(generator.fit, step, "training")
    found = generator.fit(need.examples, need.n_classes, need.seed, epochs, flip=need.flip, **more)
    found = dict(given(Mapping, found, what))
    if lacking := [epoch for epoch in epochs if epoch not in found]:
        raise ValueError(f"it must give {what}, and gives none of epoch {lacking[0]}")
    for trained in found.values():
        weights = given(TrainedGenerator, trained, what).weights
        for tensor in given(Mapping, weights, "tensors by name as weights").values():
            given(Tensor, tensor, "tensors by name as weights")
        if trained.receipt is not None:
            given(Receipt, trained.receipt, "a Receipt or None as receipt")
    return found


def require_like(x: Tensor, name: str, n: int, drawn: Tensor) -> None:
    """See that the generator ``name`` drew n examples of the type and shape of the real ones, x.

    Raises:
        ClientError: it did not.
    """
    if drawn.dtype != x.dtype or drawn.shape != (n, *x.shape[1:]):
        raise ClientError(
            f"generator {name} drew {drawn.dtype} {tuple(drawn.shape)} for {n} labels, and examples are "
            f"{x.dtype} {tuple(x.shape[1:])}: its sample must return these."
        )
    if drawn.is_meta or drawn.layout != torch.strided:
        raise ClientError(f"generator {name} drew examples that are sparse, or without values on the device meta.")


def missing(store: Store, wanted: Iterable[Need]) -> list[Job]:
    """Jobs for what the store lacks. Each training and each set of images is made once, however many cells need it.

    Cells whose generators differ only in their epochs share one training.
    """
    images = {key_of(need.images_facts): need for need in wanted}
    courses: dict[str, list[Need]] = {}
    for need in images.values():
        if _images(store, need) is None:
            courses.setdefault(key_of(need.course_facts), []).append(need)
    return [Job(needs, _stored(store, needs)) for needs in courses.values()]


def _images(store: Store, need: Need) -> Contribution | None:
    """The images that the store has for this need, or None."""
    artifact = store.get("images", key_of(need.images_facts))
    if artifact is None:
        return None
    images, labels = artifact.tensors.get("images"), artifact.tensors.get("labels")
    shape = (len(need.labels), *need.examples.x.shape[1:])
    if images is None or images.shape != shape or images.dtype != need.examples.x.dtype:
        images = None
    if images is None or labels is None or not torch.equal(labels, need.labels):
        store.say(f"the synthetic images of client {need.client} in {store.folder} are malformed; to be built again.")
        return None
    return Contribution(Examples(images, labels), _receipt(artifact.findings))


def _stored(store: Store, needs: Sequence[Need]) -> dict[int, TrainedGenerator]:
    each = {need.epochs: key_of(need.generator_facts) for need in needs}
    artifacts = {epochs: store.get("generators", key) for epochs, key in each.items()}
    return {
        epochs: TrainedGenerator(a.tensors, _receipt(a.findings)) for epochs, a in artifacts.items() if a is not None
    }


def keep(store: Store, job: Job, result: JobResult) -> None:
    """Put a job's generators and images into the store, each with its receipt."""
    for epochs, trained in result.trained.items():
        facts = next(need for need in job.needs if need.epochs == epochs).generator_facts
        store.put("generators", dict(trained.weights), facts, _findings(trained))
    trained = {**job.trained, **result.trained}
    for need, images in zip(job.needs, result.images, strict=True):
        tensors = {"images": images, "labels": need.labels}
        store.put("images", tensors, need.images_facts, _findings(trained.get(need.epochs)))


def _findings(trained: TrainedGenerator | None) -> dict[str, Any]:
    """A receipt as plain values; an empty one for a receipt that covers nothing, whose numbers mean nothing."""
    if trained is None or trained.receipt is None:
        return {}
    if not trained.receipt.release(0).covered:
        return {"receipt": {}}
    return {"receipt": {name: _plain(value) for name, value in constants(trained.receipt).items()}}


def _plain(value: Any) -> Any:
    """A number of any library as one that JSON has."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _receipt(findings: Mapping[str, Any]) -> Receipt | None:
    """The receipt in stored findings; None where there is none, or one of another form."""
    receipt = findings.get("receipt")
    if not isinstance(receipt, dict) or not receipt.keys() <= {field.name for field in fields(Receipt)}:
        return None
    return Receipt(**receipt)


def read(store: Store, need: Need) -> Contribution:
    """The images that a client contributes, taken from its stored ones in proportion to their classes.

    Raises:
        LookupError: they have not been made.
    """
    drawn = _images(store, need)
    if drawn is None:
        raise LookupError(f"the synthetic images of client {need.client} have not been made: not in {store.folder}")
    available = np.bincount(drawn.examples.y.numpy(), minlength=need.n_classes)
    counts = largest_remainder(available, need.n)
    starts = np.cumsum(available) - available
    some = np.concatenate([np.arange(s, s + k) for s, k in zip(starts, counts, strict=True)])
    receipt = drawn.receipt
    if need.recipe.is_secret and not takes_noise(need.recipe.generator):
        receipt = None  # its noise, if it has any, follows from its seed
    return Contribution(drawn.examples[some], receipt, len(need.examples), need.recipe.of_counts)
