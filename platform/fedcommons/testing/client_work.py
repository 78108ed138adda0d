"""Checks of the clients' work: what a method declares of it, and that clients trained together do the same work."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedcommons.core import vmap_clients
from fedcommons.core.algorithm import Algorithm, repeats_of
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.errors import UserError
from fedcommons.flat_tensors import data
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import Federation, digits
from fedcommons.testing.spy import Spy, before_each_call

MOST = 1e-5
"""Maximum relative difference (Euclidean norm) between a client's tensors with and without ``client.batched``."""


def clients_at_once_train_as_one_after_another(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check that clients send equal tensors, up to rounding, with and without ``client.batched`` in four rounds.

    Each round starts from the same server state in both runs. The states after a round are not compared, because
    training on the server may amplify rounding errors. The module is softmax regression, because ReLU and pooling
    layers may amplify rounding errors too. A method or module that the engine cannot train with vmap is not checked.
    """
    federation = digits(sizes=(13, 20, 20, 7, 16), linear=True, method=algorithm).training(local)
    if vmap_clients.flaw(federation.work(), tuple(column[:2] for column in federation.data.clients[0].columns)):
        return
    for name, off in differences(algorithm, federation, federation.training(replace(local, batched=True))):
        cause = "a second call of client does something else, or a Correction depends on more than its tensors"
        require(off <= MOST, f"{name} of a client trained together with others differs by {off:.2g}: {cause}")


def differences(
    algorithm: Algorithm, first: Federation, second: Federation, rounds: int = 4
) -> Iterator[tuple[str, float]]:
    """Yield name and ||x - y|| / ||x|| of each tensor that clients send as x in ``first`` and as y in ``second``.

    Vectors of whole numbers, such as positions of the largest values, depend on rounding errors if values are almost
    equal. If such vectors differ, only the magnitudes of the client's other tensors are compared, in sorted order.
    """
    spies, plan = (Spy(algorithm), Spy(algorithm)), first.plan(rounds, blocks=1)
    standing = first.start(algorithm, plan)
    for now, _ in first.run(spies[0], plan):
        second.run(spies[1], replace(plan, facts=replace(plan.facts, rounds=now.round)), start=standing)
        standing = now
    for a, b in zip(spies[0].calls, spies[1].calls, strict=True):
        payloads = (a.reply.sums, b.reply.sums), (a.reply.each, b.reply.each)
        sent = [(name, data(x), data(other[name])) for payload, other in payloads for name, x in payload.items()]
        is_reordered = any(_is_vector_of_integers(x) and not x.equal(y) for _, x, y in sent)
        for name, x, y in sent:
            if is_reordered and _is_vector_of_integers(x):
                continue
            x, y = x.double(), y.double()
            if is_reordered:
                x, y = x.abs().flatten().sort().values, y.abs().flatten().sort().values
            yield name, float(torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(x).clamp(min=1e-30))


def _is_vector_of_integers(x: Tensor) -> bool:
    return x.numel() > 1 and not x.is_floating_point()


def its_work_can_be_priced(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check the work that a method declares for the time estimate of ``--dry-run``.

    ``repeats`` must name constants that are whole numbers or None. If ``trains_locally`` is False, clients must not
    call ``work.local``.
    """
    try:
        repeats_of(algorithm)
    except UserError as error:  # because ``check_algorithm`` treats a UserError as a fault of the machine
        raise AssertionError(str(error)) from error
    if not capabilities_of(algorithm).trains_locally:
        federation, trainings = digits(method=algorithm).training(local), list[None]()
        executor = federation.serial(algorithm)
        before_each_call(executor.worker.work, "local", lambda: trainings.append(None))
        federation.run(algorithm, federation.plan(2), executor)
        require(not trainings, "trains_locally is False, but clients call work.local")
