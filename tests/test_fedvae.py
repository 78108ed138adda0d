"""FedVAE is FedAvg of a whole autoencoder with its joint loss."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedvae import FedVAE
from fedcommons.config import presets
from fedcommons.core.local import LocalSGD
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.tensors import sub

if TYPE_CHECKING:
    from fedcommons.testing.federations import Federation

    Digits = Callable[..., Federation]

LOCAL = LocalSGD(2, 5)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_it_is_fedavg_on_the_autoencoder_bit_for_bit(weighting: str, digits: "Digits") -> None:
    federation = digits(dropout=0.3, method=FedVAE()).training(LOCAL, weighting)
    plan = federation.plan(3)
    ours, theirs = (federation.play(method, plan)[-1][0] for method in (FedVAE(), FedAvg()))
    assert torch.equal(ours.model.buffer, theirs.model.buffer)
    assert ours.traffic == theirs.traffic


def test_every_part_of_the_model_learns_and_travels(digits: "Digits") -> None:
    federation = digits(method=FedVAE()).training(LOCAL)
    played = federation.play(FedVAE(), federation.plan(1))
    for name, change in sub(played[0][0].model, federation.model).items():
        assert change.any(), name
    assert played[0][1]["comm/up_bytes"] == 5 * federation.model.buffer.nbytes


@pytest.mark.long
def test_the_rate_decays_after_every_ten_epochs(digits: "Digits") -> None:
    """With 4 epochs a round, rounds 1 to 6 begin after 0, 4, 8, 12, 16 and 20 epochs."""
    federation = digits(method=FedVAE()).training(LocalSGD(4, 5))
    plan = federation.plan(6)
    halved = [now for now, _ in federation.play(FedVAE(decay=0.5), plan)]
    before = replace(federation.start(FedVAE(), plan), state=halved[2].state, round=3)
    for first, now, rate in ((before, halved[3], 0.05), (halved[4], halved[5], 0.025)):
        slow = digits(method=FedVAE(), lr=rate).training(LocalSGD(4, 5))
        plain = slow.play(FedVAE(), replace(plan, facts=replace(plan.facts, rounds=now.round)), start=first)
        assert torch.equal(plain[-1][0].model.buffer, now.model.buffer)


def test_a_model_that_cannot_decode_is_refused_with_how_to_give_one() -> None:
    with pytest.raises(UserError) as error:
        prepare(presets.experiment("smoke", values={"algorithm": "fedvae"}))
    said = str(error.value)
    assert said.startswith("FedVAE needs a model with an attribute encode, and Classifier has none: encode(images)")
    assert "model.name vae" in said
    prepare(presets.experiment("smoke", values={"algorithm": "fedvae", "model.name": "vae"}))
