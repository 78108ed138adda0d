"""Methods that are one another: bit for bit where only zeros are added, else to rounding.

On digits with dropout and augmentation, so that a method which draws one random number more is detected.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, weights_of

from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedgen import FedGEN
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.fedvae import FedVAE
from fedcommons.algorithms.gradient_coding import GradientCoding
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.algorithms.server_optimizers import FedAvgM
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local import LocalSGD
from fedcommons.federation.rounds import Standing
from fedcommons.tensors import Flat, flat
from fedcommons.testing.federations import Federation

LOCAL = LocalSGD(epochs=2, batch_size=5, augment=True)


def tiny(
    digits: Digits, weighting: str, local: LocalSGD = LOCAL, method: Algorithm | None = None, **options: Any
) -> Federation:
    return digits(**{"dropout": 0.3, "method": method or FedAvg(), **options}).training(local, weighting)


def course(federation: Federation, algorithm: Algorithm, rounds: int, participation: float = 1.0) -> list[Standing]:
    return [now for now, _ in federation.play(algorithm, federation.plan(rounds, participation))]


def bits(x: Flat) -> bytes:
    return x.buffer.numpy().tobytes()


SMALL_GENERATOR = FedGEN(iterations=2, noise_size=3, hidden=8, batch_size=6, weight=0.0)
EXACT: "dict[str, Algorithm]" = {
    "FedProx(mu=0)": FedProx(mu=0.0),
    "FedPVR(layers=())": FedPVR(layers=""),
    "MOON(mu=0)": MOON(mu=0.0),
    "FedAvgM(0, 1)": FedAvgM(0.0, 1.0),
    "FedGEN(weight=0)": SMALL_GENERATOR,
    "FedVAE": FedVAE(),
    "Ditto's server": Ditto(),
}


@pytest.mark.parametrize("name", EXACT)
def test_without_its_term_a_method_is_fedavg_bit_for_bit(name: str, digits: Digits) -> None:
    """In every round, also for clients that sat out in between."""
    method = EXACT[name]
    for weighting in ("uniform", "samples"):
        federation = tiny(digits, weighting, method=method)
        ours, theirs = (course(federation, each, 3, 0.6) for each in (method, FedAvg()))
        assert [bits(now.model) for now in ours] == [bits(now.model) for now in theirs]


ROUNDED: "dict[str, tuple[Algorithm, LocalSGD]]" = {
    "FedMix(mix=0)": (FedMix(mix=0.0), LOCAL),  # it differentiates twice, and a CPU may have other kernels for that
    "FedMix(mix=0, box)": (FedMix(mix=0.0, box=True), LOCAL),
    "FedNova, equal steps": (FedNova(), LocalSGD(3, FULL, augment=True)),
}


@pytest.mark.parametrize(("momentum", "weighting"), [(0.0, "uniform"), (0.9, "samples")])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_method_is_fedavg_up_to_rounding(name: str, momentum: float, weighting: str, digits: Digits) -> None:
    method, local = ROUNDED[name]
    federation = tiny(digits, weighting, local, method, momentum=momentum)
    ours, theirs = (course(federation, each, 2, 0.6) for each in (method, FedAvg()))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.model.buffer, b.model.buffer, rtol=0, atol=2e-6)


def test_gradient_coding_without_stragglers_is_fedavg_weighted_by_sizes(digits: Digits) -> None:
    federation = digits().training(LocalSGD(3, 4), "samples")
    ours, theirs = (course(federation, method, 2)[-1].model.buffer for method in (GradientCoding(), FedAvg()))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [SCAFFOLD(option=1), SCAFFOLD(option=2), FedPVR()])
def test_controls_that_are_zero_change_no_bit_of_the_first_round(method: Algorithm, digits: Digits) -> None:
    federation = tiny(digits, "samples")
    ours, theirs = (course(federation, each, 2) for each in (method, FedAvg()))
    assert bits(ours[0].model) == bits(theirs[0].model)
    assert bits(ours[1].model) != bits(theirs[1].model)


def test_fedpvr_on_all_layers_is_scaffold_bit_for_bit(digits: Digits) -> None:
    """Models, server's and clients' controls."""
    federation = tiny(digits, "samples")
    ours, theirs = (course(federation, each, 3, 0.6) for each in (FedPVR(layers="*"), SCAFFOLD()))
    for a, b in zip(ours, theirs, strict=True):
        assert bits(a.model) == bits(b.model)
        assert bits(flat(a.state, "control")) == bits(flat(b.state, "control"))
        kept, expected = ({i: bits(flat(m, "control")) for i, m in now.memory.items()} for now in (a, b))
        assert kept == expected


def test_dropout_augmentation_and_weights_matter_in_these_tests(digits: Digits) -> None:
    def end(local: LocalSGD = LOCAL, weighting: str = "uniform", dropout: float = 0.3) -> bytes:
        return bits(course(tiny(digits, weighting, local, dropout=dropout), FedAvg(), 1)[0].model)

    assert len({end(), end(weighting="samples"), end(dropout=0.0), end(replace(LOCAL, augment=False))}) == 4


ONE_STEP: "dict[str, tuple[Algorithm, float]]" = {
    "FedAvg": (FedAvg(), 0.0),
    "FedProx": (FedProx(mu=10.0), 0.0),  # its pull is zero at y = x
    "FedNova": (FedNova(), 0.9),
    "FedPVR(layers=())": (FedPVR(layers=""), 0.0),
    "FedPVR(all layers)": (FedPVR(layers="*"), 0.0),
    "SCAFFOLD, option 1": (SCAFFOLD(option=1), 0.9),  # its control is a gradient at x, however the steps are taken
    "SCAFFOLD, option 2": (SCAFFOLD(option=2), 0.0),
    "Ditto": (Ditto(), 0.0),
}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("name", ONE_STEP)
def test_one_local_step_with_all_clients_is_a_central_step(name: str, weighting: str, least_squares: Problem) -> None:
    """In every round: on sum_i n_i f_i, the loss of the pooled data, or on sum_i f_i.

    For SCAFFOLD and FedPVR because the weighted mean of c_i is c, so corrections cancel. It does not hold for FedDyn
    (a doubled first step), nor for MOON after its first round (z_prev pulls), nor for FedMix (another loss).
    """
    sizes, (method, momentum) = (2, 9, 4, 17), ONE_STEP[name]
    problem = least_squares(sizes=sizes)
    federation = problem.federation(0.2, momentum).training(LocalSGD(1, FULL), weighting)
    w, x = weights_of(weighting, sizes), np.zeros(3)
    for now in course(federation, method, 5):
        x = x - 0.2 * w @ problem.gradients(x) / w.sum()
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-14)
