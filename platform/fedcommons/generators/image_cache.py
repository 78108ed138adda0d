"""Clients' synthetic images as artifacts, which are generated once and stored with a receipt of their protection.

Fedssyn (Li et al., TMLR 2024, arXiv:2306.13263), algorithm I, lines 2 to 4: every client trains a generator on a part
of its data and draws labelled images from the generator.
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
from fedcommons.errors import ClientError, require_type, user_code_context
from fedcommons.generators.generator import Receipt, TrainedGenerator
from fedcommons.generators.requests import Contribution, GenerationRequest, largest_remainder, takes, takes_noise
from fedcommons.runtime.gpu_memory import with_room
from fedcommons.storage.artifact_store import Store, constants, key_of


@dataclass(frozen=True)
class Job:
    """One training of a generator, the requested images after some epochs, and the generators already stored.

    trained: the stored generators, by number of epochs.
    """

    requests: list[GenerationRequest]
    stored: dict[int, TrainedGenerator]

    @property
    def epochs(self) -> list[int]:
        """Return the numbers of epochs whose weights are missing; empty if no training is needed."""
        return sorted({need.epochs for need in self.requests} - self.stored.keys())


@dataclass(frozen=True)
class JobResult:
    """The result of a job: the missing generators by number of epochs, and the images for each of its needs."""

    generators: dict[int, TrainedGenerator]
    images: list[Tensor]


Step = Callable[[int, int, str], None]
"""A function that is called after each step with (steps done, total steps, name of the task)."""


@fresh_torch()
def make(job: Job, step: Step | None = None) -> JobResult:
    """Train the generator if weights are missing, and draw the images.

    ``step`` is called after each step if the generator reports its progress. If the generator cannot sample from stored
    weights, because names or shapes differ, the weights are trained again.

    Raises:
        ClientError: the images do not have the type and shape of the real images.
    """
    try:
        return with_room(partial(_run_job, job, step))
    except Exception:  # the error type depends on the generator
        if not job.stored:
            raise
    return with_room(partial(_run_job, Job(job.requests, {}), step))


def _telling(function: Callable[..., Any], step: Step | None, what: str) -> dict[str, Any]:
    """Return the argument ``progress`` for a generator's function that has this parameter, if ``step`` is not None."""
    if step is None or not takes(function, "progress"):
        return {}
    return {"progress": lambda number, total: step(number, total, what)}


def _run_job(job: Job, step: Step | None) -> JobResult:
    first = job.requests[0]
    shape, new = tuple(first.examples.x.shape[1:]), {}
    client = f"client {first.client}"
    if job.epochs:
        with user_code_context(first.recipe.generator, "fit", client):
            new = _fitted(first, job.epochs, step)
    trained, images = {**job.stored, **new}, []
    for need in job.requests:
        part, weights = need.recipe.generator, trained[need.epochs].weights
        with user_code_context(part, "sample", client):
            telling = _telling(part.sample, step, "sampling")
            synthetic = part.sample(weights, shape, need.n_classes, need.labels, need.seed, **telling)
            images.append(require_type(Tensor, synthetic))
        require_like(need.examples.x, need.recipe.name, len(need.labels), images[-1])
    return JobResult(new, images)


def _fitted(need: GenerationRequest, epochs: Sequence[int], step: Step | None) -> dict[int, TrainedGenerator]:
    """Train and return the generators after each number of ``epochs``.

    Raises:
        ValueError: ``fit`` returns another type or not all epochs.
    """
    generator, what = need.recipe.generator, "a TrainedGenerator for each of the epochs"
    noise = {"noise": need.noise} if takes_noise(generator) else {}
    more = noise | _telling(generator.fit, step, "training")
    generators = generator.fit(need.examples, need.n_classes, need.seed, epochs, flip=need.flip, **more)
    generators = dict(require_type(Mapping, generators, what))
    if missing_epochs := [epoch for epoch in epochs if epoch not in generators]:
        raise ValueError(f"it must give {what}, and gives none of epoch {missing_epochs[0]}")
    for trained in generators.values():
        weights = require_type(TrainedGenerator, trained, what).weights
        for tensor in require_type(Mapping, weights, "tensors by name as weights").values():
            require_type(Tensor, tensor, "tensors by name as weights")
        if trained.receipt is not None:
            require_type(Receipt, trained.receipt, "a Receipt or None as receipt")
    return generators


def require_like(x: Tensor, name: str, n: int, expected: Tensor) -> None:
    """Check that the generator ``name`` drew n examples of the type and shape of the real examples x.

    Raises:
        ClientError: number, type or shape of the drawn examples differ, or they have no dense values.
    """
    if expected.dtype != x.dtype or expected.shape != (n, *x.shape[1:]):
        raise ClientError(
            f"generator {name} drew {expected.dtype} {tuple(expected.shape)} for {n} labels, and examples are "
            f"{x.dtype} {tuple(x.shape[1:])}: its sample must return these."
        )
    if expected.is_meta or expected.layout != torch.strided:
        raise ClientError(f"generator {name} drew examples that are sparse, or without values on the device meta.")


def missing(store: Store, wanted: Iterable[GenerationRequest]) -> list[Job]:
    """Return the jobs for the images that the store lacks; equal requests of several configurations become one job.

    Requests whose generators differ only in their epochs share one training.
    """
    images = {key_of(need.images_facts): need for need in wanted}
    courses: dict[str, list[GenerationRequest]] = {}
    for need in images.values():
        if _images(store, need) is None:
            courses.setdefault(key_of(need.course_facts), []).append(need)
    return [Job(needs, _stored(store, needs)) for needs in courses.values()]


def _images(store: Store, need: GenerationRequest) -> Contribution | None:
    """Return the stored images of a generation request, or None."""
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


def _stored(store: Store, needs: Sequence[GenerationRequest]) -> dict[int, TrainedGenerator]:
    each = {need.epochs: key_of(need.generator_facts) for need in needs}
    artifacts = {epochs: store.get("generators", key) for epochs, key in each.items()}
    return {
        epochs: TrainedGenerator(a.tensors, _receipt(a.findings)) for epochs, a in artifacts.items() if a is not None
    }


def keep(store: Store, job: Job, result: JobResult) -> None:
    """Store a job's generators and images, each with its receipt."""
    for epochs, trained in result.generators.items():
        facts = next(need for need in job.requests if need.epochs == epochs).generator_facts
        store.put("generators", dict(trained.weights), facts, _findings(trained))
    trained = {**job.stored, **result.generators}
    for need, images in zip(job.requests, result.images, strict=True):
        tensors = {"images": images, "labels": need.labels}
        store.put("images", tensors, need.images_facts, _findings(trained.get(need.epochs)))


def _findings(trained: TrainedGenerator | None) -> dict[str, Any]:
    """Return a generator's receipt as plain values; empty if the receipt states no protection."""
    if trained is None or trained.receipt is None:
        return {}
    if not trained.receipt.release(0).covered:
        return {"receipt": {}}
    return {"receipt": {name: _plain(value) for name, value in constants(trained.receipt).items()}}


def _plain(value: Any) -> Any:
    """Convert a number of any library to a Python number for JSON."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _receipt(findings: Mapping[str, Any]) -> Receipt | None:
    """Return the receipt in stored findings; None if there is no receipt or its form is unknown."""
    receipt = findings.get("receipt")
    if not isinstance(receipt, dict) or not receipt.keys() <= {field.name for field in fields(Receipt)}:
        return None
    return Receipt(**receipt)


def read(store: Store, need: GenerationRequest) -> Contribution:
    """Return the images that a client contributes: a part of its stored images, with their class shares.

    Raises:
        LookupError: the images have not been generated.
    """
    contribution = _images(store, need)
    if contribution is None:
        raise LookupError(f"the synthetic images of client {need.client} have not been made: not in {store.folder}")
    available = np.bincount(contribution.examples.y.numpy(), minlength=need.n_classes)
    counts = largest_remainder(available, need.n)
    starts = np.cumsum(available) - available
    some = np.concatenate([np.arange(s, s + k) for s, k in zip(starts, counts, strict=True)])
    receipt = contribution.receipt
    if need.recipe.is_secret and not takes_noise(need.recipe.generator):
        receipt = None  # such a generator's noise, if any, is seeded and not secret
    return Contribution(contribution.examples[some], receipt, len(need.examples), need.recipe.of_counts)
