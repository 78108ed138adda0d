"""Methods that are one another: bit for bit where only zeros are added, else to rounding.

On digits with dropout and augmentation on, so that a method which draws one random number more is found out.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fedmix import FedMix, mean_images
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local import LocalSGD
from fedcommons.federation.rounds import Standing
from fedcommons.tensors import Flat, flat

if TYPE_CHECKING:
    from fedcommons.testing.federations import Federation, LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

LOCAL = LocalSGD(epochs=2, batch_size=5, augment=True)
FULL = 1000  # a batch size above every client's number of examples: one batch an epoch
both_weightings = pytest.mark.parametrize("weighting", ["uniform", "samples"])


def _federation(digits: "Digits", weighting: str, local: LocalSGD = LOCAL, **options: float) -> "Federation":
    federation = digits(**{"dropout": 0.3, **options}).training(local, weighting)
    clients = federation.data.clients
    clients = clients.with_commons(mean_images(clients, 4, 10, seed=0))
    return replace(federation, data=replace(federation.data, clients=clients))


def _play(federation: "Federation", algorithm: Algorithm, rounds: int, participation: float = 1.0) -> list[Standing]:
    return [now for now, _ in federation.play(algorithm, federation.plan(rounds, participation))]


def _bits(x: Flat) -> bytes:
    return x.buffer.numpy().tobytes()


WITHOUT: "dict[str, Algorithm]" = {
    "FedProx(mu=0)": FedProx(mu=0.0),
    "FedPVR(layers=())": FedPVR(layers=""),
    "MOON(mu=0)": MOON(mu=0.0),
}
FIRST_ROUND: "dict[str, Algorithm]" = {
    "SCAFFOLD, option 1": SCAFFOLD(option=1),
    "SCAFFOLD, option 2": SCAFFOLD(option=2),
    "FedPVR": FedPVR(),
}


@both_weightings
@pytest.mark.parametrize("name", WITHOUT)
def test_without_its_term_a_method_is_fedavg_bit_for_bit(name: str, weighting: str, digits: "Digits") -> None:
    """In every round, also for clients that sat out in between."""
    federation = _federation(digits, weighting)
    ours = _play(federation, WITHOUT[name], 3, 0.6)
    theirs = _play(federation, FedAvg(), 3, 0.6)
    assert [_bits(now.model) for now in ours] == [_bits(now.model) for now in theirs]


@both_weightings
@pytest.mark.parametrize("box", [False, True])
def test_fedmix_that_mixes_nothing_is_fedavg(box: bool, weighting: str, digits: "Digits") -> None:
    """To rounding: it differentiates twice, and a CPU may have other kernels for that."""
    federation = _federation(digits, weighting)
    ours = _play(federation, FedMix(mix=0.0, box=box), 3, 0.6)
    theirs = _play(federation, FedAvg(), 3, 0.6)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.model.buffer, b.model.buffer, rtol=0, atol=1e-6)


@both_weightings
@pytest.mark.parametrize("name", FIRST_ROUND)
def test_controls_that_are_zero_change_no_bit_of_the_first_round(name: str, weighting: str, digits: "Digits") -> None:
    federation = _federation(digits, weighting)
    ours = _play(federation, FIRST_ROUND[name], 2)
    theirs = _play(federation, FedAvg(), 2)
    assert _bits(ours[0].model) == _bits(theirs[0].model)
    assert _bits(ours[1].model) != _bits(theirs[1].model)


@both_weightings
def test_fedpvr_on_all_layers_is_scaffold_bit_for_bit(weighting: str, digits: "Digits") -> None:
    """Models, server's and clients' controls."""
    federation = _federation(digits, weighting)
    ours = _play(federation, FedPVR(layers="*"), 4, 0.6)
    theirs = _play(federation, SCAFFOLD(), 4, 0.6)
    for a, b in zip(ours, theirs, strict=True):
        assert _bits(a.model) == _bits(b.model)
        assert _bits(flat(a.state, "control")) == _bits(flat(b.state, "control"))
        kept, expected = ({i: _bits(flat(m, "control")) for i, m in now.memory.items()} for now in (a, b))
        assert kept == expected


@both_weightings
def test_dropout_augmentation_and_weights_are_at_work_in_these_tests(weighting: str, digits: "Digits") -> None:
    def ends(local: LocalSGD, weighting: str, dropout: float = 0.3) -> bytes:
        return _bits(_play(_federation(digits, weighting, local, dropout=dropout), FedAvg(), 1)[0].model)

    found = {
        ends(LOCAL, weighting),
        ends(LOCAL, "samples" if weighting == "uniform" else "uniform"),
        ends(LOCAL, weighting, dropout=0.0),
        ends(replace(LOCAL, augment=False), weighting),
    }
    assert len(found) == 4


@both_weightings
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_is_fedavg_where_all_take_equally_many_steps(momentum: float, weighting: str, digits: "Digits") -> None:
    """To rounding: a_i is divided out and multiplied in again."""
    federation = _federation(digits, weighting, LocalSGD(3, FULL, augment=True), momentum=momentum)
    ours, theirs = (_play(federation, method(), 2)[-1].model for method in (FedNova, FedAvg))
    assert torch.allclose(ours.buffer, theirs.buffer, rtol=0, atol=2e-6)
    federation = federation.training(LOCAL, weighting)
    unequal = [_play(federation, method(), 1)[0].model for method in (FedNova, FedAvg)]
    assert (unequal[0].buffer - unequal[1].buffer).abs().max() > 1e-3


@both_weightings
def test_the_first_round_of_feddyn_is_fedprox_with_the_servers_step_doubled(weighting: str, digits: "Digits") -> None:
    """With everybody, g_i = 0 and no clipping: h/alpha is minus the mean step, which is thus taken twice."""
    federation, alpha = _federation(digits, weighting), 0.3
    prox = _play(federation, FedProx(mu=alpha), 1)[0].model
    dyn = _play(federation, FedDyn(alpha=alpha, clip=None), 1)[0]
    step = prox.buffer - federation.model.buffer
    assert torch.allclose(dyn.model.buffer - federation.model.buffer, 2 * step, rtol=0, atol=1e-6)
    assert torch.allclose(flat(dyn.state, "model/mean").buffer, prox.buffer, rtol=0, atol=1e-6)
    assert step.abs().max() > 1e-2


@both_weightings
def test_the_first_round_of_moon_is_that_of_fedavg(weighting: str, digits: "Digits") -> None:
    """Server and previous model are both the initial one: l_con = log 2 at every local model, without a gradient."""
    federation = _federation(digits, weighting)
    moon, fedavg = MOON(mu=5.0), FedAvg()
    (ours, one), (theirs, other) = (federation.play(a, federation.plan(1))[0] for a in (moon, fedavg))
    assert torch.allclose(ours.model.buffer, theirs.model.buffer, rtol=0, atol=1e-6)
    assert one["train/loss"] == pytest.approx(other["train/loss"] + 5 * log(2), abs=1e-5)
    later = [_play(federation, a, 2)[-1].model.buffer for a in (moon, fedavg)]
    assert (later[0] - later[1]).abs().max() > 1e-3


ONE_STEP: "dict[str, Algorithm]" = {
    "FedAvg": FedAvg(),
    "FedProx": FedProx(mu=10.0),  # its pull is zero at y = x
    "FedNova": FedNova(),
    "FedPVR(layers=())": FedPVR(layers=""),
    "FedPVR(all layers)": FedPVR(layers="*"),
    "SCAFFOLD, option 1": SCAFFOLD(option=1),
    "SCAFFOLD, option 2": SCAFFOLD(option=2),
}


@both_weightings
@pytest.mark.parametrize("name", ONE_STEP)
def test_one_local_step_with_everybody_is_a_central_step(name: str, weighting: str, least_squares: "Problem") -> None:
    """In every round: on sum_i n_i f_i, the loss of the pooled data, or on sum_i f_i.

    For SCAFFOLD and FedPVR because the weighted mean of c_i is c, so corrections cancel. It does not hold for FedDyn
    (a doubled first step), nor for MOON after its first round (z_prev pulls), nor for FedMix (another loss).
    """
    problem = least_squares(sizes=(2, 9, 4, 17))
    federation = problem.federation(0.2).training(LocalSGD(1, FULL), weighting)
    played = _play(federation, ONE_STEP[name], 5)
    w = np.array([2, 9, 4, 17]) / 32 if weighting == "samples" else np.full(4, 1 / 4)
    x = np.zeros(3)
    for now in played:
        x = x - 0.2 * w @ problem.gradients(x)
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-14)
