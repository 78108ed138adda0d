"""Clients that are trained at once, beside the same clients one after another."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from fedcommons.core import vmap_clients
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local_training import LocalSGD
from fedcommons.flat_tensors import data
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import Federation, digits
from fedcommons.testing.spy import Spy

MOST = 1e-5
"""The largest relative difference of what a client sends."""


def clients_at_once_train_as_one_after_another(algorithm: Algorithm, local: LocalSGD) -> None:
    """In each of four rounds, from the same state, clients send with ``client.batched`` what they send without.

    Up to rounding, which a server's own training may carry far; so states are not compared. So may a ReLU or a pool,
    where rounding decides on which side of a kink a number lies: the module is softmax regression, which has none. One
    that cannot be batched is left out, as such a run is refused.
    """
    federation = digits(sizes=(13, 20, 20, 7, 16), linear=True, method=algorithm).training(local)
    if vmap_clients.flaw(federation.work(), tuple(column[:2] for column in federation.data.clients[0].columns)):
        return
    for name, off in differences(algorithm, federation, federation.training(replace(local, batched=True))):
        require(
            off <= MOST,
            f"{name} of a client trained at once with others is {off:.2g} away from that of one trained alone: its "
            "client function is played twice and must do the same both times, and a Correction must be a function of "
            "its tensors alone",
        )


def differences(
    algorithm: Algorithm, one: Federation, other: Federation, rounds: int = 4
) -> Iterator[tuple[str, float]]:
    """What clients send in each of so many rounds, which begin from the same state: by name, ||x - y|| / ||x||."""
    spies, plan = (Spy(algorithm), Spy(algorithm)), one.plan(rounds, blocks=1)
    standing = one.start(algorithm, plan)
    for now, _ in one.play(spies[0], plan):
        other.play(spies[1], replace(plan, facts=replace(plan.facts, rounds=now.round)), start=standing)
        standing = now
    for a, b in zip(spies[0].calls, spies[1].calls, strict=True):
        for here, there in ((a.reply.sums, b.reply.sums), (a.reply.each, b.reply.each)):
            for name in here:
                x, y = data(here[name]).double(), data(there[name]).double()
                yield name, float(torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(x).clamp(min=1e-30))
