"""Checks of other frameworks' clients (``adapters``): special checks, and the checks of ``contract`` that apply.

Clients train softmax regression with full batches, so the order of the examples has no effect.
"""

import random
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedcommons.core.algorithm import Message
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, add, copy, flat, norm, sub
from fedcommons.seeding import generator
from fedcommons.testing import contract
from fedcommons.testing.adapters import Adapted
from fedcommons.testing.comparing import NotJudged, listed, require
from fedcommons.testing.federations import Federation, digits

FULL = LocalSGD(epochs=2, batch_size=1000)
"""Settings of local training with two full-batch steps."""

ALMOST_ZERO = 1e-6
"""A learning rate at which weights hardly change; a learning rate of 0 could cause a division by 0."""

NOT_JUDGED = {
    "keyed seeds": "the adapter seeds the generators of torch, numpy and Python before each training, so equal bits "
    "would not show how the client handles seeds",
    "privacy": "the client declares no noise, so all values that it sends count as unprotected (uncovered)",
    "state": "attributes that the adapter cannot keep, such as optimizers, are built anew in each round, and a warning "
    "names those that changed (--exact may fail for this reason)",
    "personal models": "the adapter sees no personal model. The special case compares server models, so a method "
    "without a server model, such as fedper, cannot be the special case",
}
"""Properties of another framework's client that no check can judge, each with the reason."""

NO_LOSS = "it takes no loss=, so it cannot train on least squares, where exact solutions and rates are known"


def it_counts_its_examples(algorithm: Adapted, local: LocalSGD) -> None:
    federation = _federation()
    for i, data in enumerate(federation.data.clients):
        n = int(_trained(algorithm, federation, i)[1])
        require(n == len(data), f"a client of {len(data)} examples reports {n} examples, which become its weight")


def it_begins_at_the_weights_that_it_is_given(algorithm: Adapted, local: LocalSGD) -> None:
    """Check that a client returns the server model unchanged at a learning rate of almost zero.

    Raises:
        NotJudged: only some layers change. The client may keep them as personal layers.
    """
    federation = _federation(ALMOST_ZERO)
    for round in (1, 2):
        x = _another(federation.model, round)
        y = _trained(algorithm, federation, 0, x)[0]
        off = norm(sub(y, x)) / norm(x)
        others = [name for name in x if (y[name] - x[name]).norm() > 1e-3 * x[name].norm()]
        message = f"at learning rate {ALMOST_ZERO:g} the client returns other weights, {100 * off:.2g} % away"
        message += ": it does not begin at the weights of the server's message"
        if len(others) not in (0, len(x)):
            raise NotJudged(f"{message} in {listed(others)}, which is right only for personal layers")
        require(off <= 1e-3, message)


def its_training_lowers_its_loss(algorithm: Adapted, local: LocalSGD) -> None:
    federation = _federation()
    data, work, x = federation.data.clients[0], federation.work(), federation.model
    y, _ = _trained(algorithm, federation, 0, work=work)
    _require_a_change(algorithm, federation, y)
    before, after, mirrored = (_loss(work, weights, data) for weights in (x, y, add(x, sub(y, x), -1)))
    cause = ": does the client return its update with the wrong sign?" if mirrored < before else ""
    require(after < before, f"local training changes a client's loss from {before:.3f} to {after:.3f}{cause}")


def no_client_shows_in_the_next(algorithm: Adapted, local: LocalSGD) -> None:
    """Check that a client returns the same model before and after the worker has trained another client."""
    federation = _federation()
    x, work = federation.model, federation.work()
    first, _ = _trained(algorithm, federation, 0, work=work)
    _require_a_change(algorithm, federation, first)
    _trained(algorithm, federation, 1, _another(x, 1), work)
    again, _ = _trained(algorithm, federation, 0, work=work)
    off = norm(sub(again, first)) / norm(sub(first, x))
    change = f"after another client has trained, its model differs by {100 * off:.2g} %"
    require(off <= 1e-3, f"{change}: clients share a value")


def it_draws_anew_in_each_round(algorithm: Adapted, local: LocalSGD) -> None:
    """Check that the client's code sets no fixed seed: each round has another seed and must give other numbers.

    After training with two seeds, the states of the random generators of torch, numpy and Python must differ.
    """
    federation, ends = _federation(), list[tuple[object, ...]]()

    @wraps(algorithm.build)
    def build(*args: Any, **values: Any) -> Any:
        theirs = algorithm.build(*args, **values)
        name = "fit" if hasattr(theirs, "fit") else "train"
        inner = getattr(theirs, name)

        @wraps(inner)
        def trained(*args: Any, **values: Any) -> Any:
            result = inner(*args, **values)
            ends.append((torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()))  # noqa: NPY002
            return result

        with suppress(AttributeError):  # an object with __slots__ cannot be patched, so the check skips it
            setattr(theirs, name, trained)
        return theirs

    for seed in (1, 2):
        message = Message({"model": federation.model})
        replace(algorithm, build=build).client(federation.work(), message, {}, federation.data.clients[0], 1, seed)
    for name, first, second in zip(("torch", "numpy", "Python"), *ends, strict=True) if ends else ():
        result = "draws equal numbers in every round and for every seed"
        require(first != second, f"it seeds {name}'s generator while it trains, so it {result}")


CHECKS = {
    check.__name__: check
    for check in (
        it_counts_its_examples,
        it_begins_at_the_weights_that_it_is_given,
        its_training_lowers_its_loss,
        no_client_shows_in_the_next,
        it_draws_anew_in_each_round,
        contract.two_rounds_keep_names_shapes_and_types,
        contract.the_loss_falls,
        contract.nothing_that_is_handed_in_is_changed,
        contract.clients_with_one_sample_take_part,
        contract.stragglers_change_nothing,
    )
}
"""The checks by name. Other checks of ``contract`` do not run, because they would test code of the adapter."""


def _federation(lr: float = 0.1) -> Federation:
    return digits(linear=True, lr=lr).training(FULL, "samples")


def _loss(work: Work, weights: Flat, data: ClientData) -> float:
    work.load(weights)
    with torch.no_grad():
        return float(F.cross_entropy(work.module(data.x), data.y))


def _require_a_change(algorithm: Adapted, federation: Federation, y: Flat) -> None:
    """Check that client 0, which returned the model ``y``, has changed the untrained model.

    Clients that drop incomplete batches have no batch here, so the client trains again with a batch of all examples.
    """
    x = federation.model
    if norm(sub(y, x)):
        return
    all_in_one = federation.training(replace(FULL, batch_size=len(federation.data.clients[0])), "samples")
    has_batch = norm(sub(_trained(algorithm, all_in_one, 0)[0], x))
    cause = ", because it drops an incomplete batch" if has_batch else ": it does not train, or returns other weights"
    require(False, f"the client returns the weights that it received{cause}")


def _another(x: Flat, number: int) -> Flat:
    """Return random weights from N(0, 1) with the names and shapes of ``x``. number: the seed."""
    result = copy(x)
    result.buffer.normal_(generator=generator("another", number))
    return result


def _trained(
    algorithm: Adapted, federation: Federation, client: int, x: Flat | None = None, work: Work | None = None
) -> tuple[Flat, float]:
    """Train a client from the weights ``x`` (None: untrained); return its model and its weight in the average.

    work: the training objects of a worker; None: of a new worker.
    """
    x = x or federation.model
    message, data = Message({"model": x}), federation.data.clients[client]
    reply = algorithm.client(work or federation.work(), message, {}, data, 1, 0)
    if "model" in reply.each:
        return flat(reply.each, "model"), reply.weight
    return add(x, flat(reply.sums, "delta"), 1 / reply.weight), reply.weight
