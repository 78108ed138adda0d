"""The cache of clients' synthetic images and trained generators, each stored with its privacy protection (receipt).

Fedssyn (Li et al., TMLR 2024, arXiv:2306.13263), algorithm I, lines 2 to 4: every client trains a generator on the
share rho of its data and draws labelled images from the generator. Runs that need equal images share the stored images.
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
    """One training of a generator and the drawing of all images that are requested from it.

    requests: generation requests that differ only in the number of epochs and in the images to draw.
    stored: number of epochs -> generator that the cache already has.
    """

    requests: list[GenerationRequest]
    stored: dict[int, TrainedGenerator]

    @property
    def epochs(self) -> list[int]:
        """Return the requested numbers of epochs for which no generator is stored; empty if no training is needed."""
        return sorted({need.epochs for need in self.requests} - self.stored.keys())


@dataclass(frozen=True)
class JobResult:
    """The result of a job: the newly trained generators by number of epochs, and one tensor of images per request."""

    generators: dict[int, TrainedGenerator]
    images: list[Tensor]


Step = Callable[[int, int, str], None]
"""A function that is called after each step with (steps done, total steps, "training" or "sampling")."""


@fresh_torch()
def make(job: Job, step: Step | None = None) -> JobResult:
    """Train a job's generator for the epochs that are not stored, and draw the requested images.

    ``step`` is called after each step if the generator reports its progress. If the job uses stored weights
    and fails, for example because the code now uses other names or shapes, the generator is trained again.

    Raises:
        ClientError: the images do not have the type and shape of the real images.
    """
    try:
        return with_room(partial(_run_job, job, step))
    except Exception:  # a user-defined generator may raise any type of error
        if not job.stored:
            raise
    return with_room(partial(_run_job, Job(job.requests, {}), step))


def _telling(function: Callable[..., Any], step: Step | None, what: str) -> dict[str, Any]:
    """Return keyword arguments for ``function``: a ``progress`` that calls ``step`` with (done, total, ``what``).

    If ``step`` is None or ``function`` has no parameter ``progress``, return {}.
    """
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
    """Call the generator's ``fit``, check the result, and return the trained generator for each number of epochs.

    Raises:
        ValueError: ``fit`` did not return a mapping with a TrainedGenerator for each of ``epochs``.
    """
    generator, what = need.recipe.generator, "a TrainedGenerator for each of the epochs"
    noise = {"noise": need.noise} if takes_noise(generator) else {}
    more = noise | _telling(generator.fit, step, "training")
    generators = generator.fit(need.examples, need.n_classes, need.seed, epochs, flip=need.flip, **more)
    generators = dict(require_type(Mapping, generators, what))
    if missing_epochs := [epoch for epoch in epochs if epoch not in generators]:
        raise ValueError(f"it must return {what}, but returned none for epoch {missing_epochs[0]}")
    for trained in generators.values():
        weights = require_type(TrainedGenerator, trained, what).weights
        for tensor in require_type(Mapping, weights, "tensors by name as weights").values():
            require_type(Tensor, tensor, "tensors by name as weights")
        if trained.receipt is not None:
            require_type(Receipt, trained.receipt, "a Receipt or None as receipt")
    return generators


def require_like(x: Tensor, name: str, n: int, expected: Tensor) -> None:
    """Check that a generator drew n examples whose type and shape are those of the real examples x.

    name: the generator's name. expected: the examples that the generator drew, which are checked.

    Raises:
        ClientError: number, type or shape of the drawn examples are wrong, or the tensor is sparse or has no values.
    """
    if expected.dtype != x.dtype or expected.shape != (n, *x.shape[1:]):
        raise ClientError(
            f"generator {name} drew {expected.dtype} {tuple(expected.shape)} for {n} labels, but real examples are "
            f"{x.dtype} {tuple(x.shape[1:])}: its sample must return one such example per label."
        )
    if expected.is_meta or expected.layout != torch.strided:
        raise ClientError(f"generator {name} drew examples that are sparse, or have no values (device meta).")


def missing(store: Store, wanted: Iterable[GenerationRequest]) -> list[Job]:
    """Return the jobs for the requested images that the store does not contain.

    Requests whose generators differ only in their epochs form one job, with one training. Equal requests, such as those
    of several trials of a sweep, are processed once.
    """
    images = {need.images_key: need for need in wanted}
    courses: dict[str, list[GenerationRequest]] = {}
    for need in images.values():
        if _images(store, need) is None:
            courses.setdefault(key_of(need.course_facts), []).append(need)
    return [Job(needs, _stored(store, needs)) for needs in courses.values()]


def _images(store: Store, need: GenerationRequest) -> Contribution | None:
    """Return the images stored for a generation request; None if the store has none or they are malformed."""
    artifact = store.get("images", need.images_key)
    if artifact is None:
        return None
    images, labels = artifact.tensors.get("images"), artifact.tensors.get("labels")
    x, n = need.examples.x, len(need.labels)
    is_like_real = images is not None and images.shape == (n, *x.shape[1:]) and images.dtype == x.dtype
    if images is None or labels is None or not is_like_real or not torch.equal(labels, need.labels):
        store.say(
            f"synthetic images of client {need.client} in {store.folder} are malformed; they will be built again."
        )
        return None
    return Contribution(Examples(images, labels), _receipt(artifact.findings))


def _stored(store: Store, needs: Sequence[GenerationRequest]) -> dict[int, TrainedGenerator]:
    each = {need.epochs: key_of(need.generator_facts) for need in needs}
    artifacts = {epochs: store.get("generators", key) for epochs, key in each.items()}
    return {
        epochs: TrainedGenerator(a.tensors, _receipt(a.findings)) for epochs, a in artifacts.items() if a is not None
    }


def keep(store: Store, job: Job, result: JobResult) -> None:
    """Store a job's newly trained generators and all its images, each with the generator's privacy receipt."""
    for epochs, trained in result.generators.items():
        facts = next(need for need in job.requests if need.epochs == epochs).generator_facts
        store.put("generators", dict(trained.weights), facts, _findings(trained))
    trained = {**job.stored, **result.generators}
    for need, images in zip(job.requests, result.images, strict=True):
        tensors = {"images": images, "labels": need.labels}
        store.put("images", tensors, need.images_facts, _findings(trained.get(need.epochs)))


def _findings(trained: TrainedGenerator | None) -> dict[str, Any]:
    """Return {"receipt": fields of the receipt for JSON, none without a guarantee}; {} if there is no receipt."""
    if trained is None or trained.receipt is None:
        return {}
    if not trained.receipt.release(0).covered:
        return {"receipt": {}}
    return {"receipt": {name: _plain(value) for name, value in constants(trained.receipt).items()}}


def _plain(value: Any) -> Any:
    """Convert a number of any library to a Python int or float for JSON; return other values unchanged."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _receipt(findings: Mapping[str, Any]) -> Receipt | None:
    """Return the receipt that ``_findings`` stored; None if there is no receipt or its fields are unknown."""
    receipt = findings.get("receipt")
    if not isinstance(receipt, dict) or not receipt.keys() <= {field.name for field in fields(Receipt)}:
        return None
    return Receipt(**receipt)


def read(store: Store, need: GenerationRequest) -> Contribution:
    """Return the client's contribution: ``need.n`` of the stored images, with the class shares of all stored images.

    Raises:
        LookupError: the images are not in the store.
    """
    contribution = _images(store, need)
    if contribution is None:
        raise LookupError(
            f"the synthetic images of client {need.client} have not been generated: not in {store.folder}"
        )
    available = np.bincount(contribution.examples.y.numpy(), minlength=need.n_classes)
    counts = largest_remainder(available, need.n)
    starts = np.cumsum(available) - available
    some = np.concatenate([np.arange(s, s + k) for s, k in zip(starts, counts, strict=True)])
    receipt = contribution.receipt
    if need.recipe.is_secret and not takes_noise(need.recipe.generator):
        receipt = None  # no protection: the generator used seeded noise, which an attacker could draw again
    return Contribution(contribution.examples[some], receipt, len(need.examples), need.recipe.of_counts)
