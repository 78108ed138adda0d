"""FedDDPM, one-shot Fedssyn and FedVAE: SGD of the server on the pool, and what is federated of an autoencoder."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedcommons import ClientDatasets, Contribution, Examples, LocalSGD, Receipt, generator, seed_for
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedddpm import FedDDPM
from fedcommons.algorithms.fedvae import FedVAE
from fedcommons.algorithms.one_shot import OneShot
from fedcommons.flat_tensors import data, scalar, sub
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.release import SAMPLED_GAUSSIAN
from fedcommons.privacy.statement import statement
from fedcommons.sharing.exchange import share
from fedcommons.sharing.synthetic import ServerSynthetic
from fedcommons.testing import Federation, digits
from lightning_modules import Classifier

LR, N = 0.05, 30
"""Of the server; images a client gives to the pool."""


def on_pool(federation: Federation, images: Examples, model: torch.Tensor, number: int, epochs: int) -> torch.Tensor:
    """SGD on the images in batches of 16, in round ``number``: softmax regression, as a loop of its own."""
    module = federation.module()
    assert isinstance(module, Classifier)
    x = module.normalise(images.x).flatten(1).double()
    weight, bias = model.double()[:640].reshape(10, 64).clone(), model.double()[640:].clone()
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=generator(seed_for(0, "merge", number), "order", epoch))
        for rows in order.split(16):
            error = F.softmax(x[rows] @ weight.T + bias, 1) - F.one_hot(images.y[rows], 10)
            weight -= LR * error.T @ x[rows] / len(rows)
            bias -= LR * error.mean(0)
    return torch.cat([weight.flatten(), bias])


@pytest.fixture
def federation() -> Federation:
    return digits(linear=True, lr=LR, method=FedDDPM()).training(LocalSGD(1, 16))


def test_a_round_of_fedddpm_is_fedavgs_and_then_sgd_on_the_pool(federation: Federation) -> None:
    averaged = federation.run(FedAvg(), federation.plan(1))[0][0]
    corrected = federation.run(FedDDPM(server_epochs=2), federation.plan(1))[0][0]
    expected = on_pool(federation, federation.data.clients.store, data(averaged.model), 1, 2)
    torch.testing.assert_close(data(corrected.model).double(), expected, rtol=0, atol=2e-6)


def test_the_plus_corrects_once_after_the_first_slow_round(federation: Federation) -> None:
    plan, store = federation.plan(4), federation.data.clients.store
    plain = [data(now.model) for now, _ in federation.run(FedAvg(), plan)]
    often = [now for now, _ in federation.run(FedDDPM(correct="slow", slow=0.99), plan)]
    assert [int(scalar(now.state, "corrections")) for now in often] == [0, 1, 1, 1]
    assert torch.equal(data(often[0].model), plain[0])
    expected = on_pool(federation, store, plain[1], 2, 1)
    torch.testing.assert_close(data(often[1].model).double(), expected, rtol=0, atol=2e-6)
    never = [now for now, _ in federation.run(FedDDPM(correct="slow", slow=0.0), plan)]
    assert all(torch.equal(data(now.model), x) for now, x in zip(never, plain, strict=True))


COVERED = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=2.0, sensitivity=1.0, steps=50)


@pytest.mark.parametrize(
    ("epochs", "receipt", "of_labels"),
    [(None, COVERED, COVERED), (3, COVERED, Receipt()), (None, None, None)],
    ids=["private", "counts", "plain"],
)
def test_one_shot_is_sgd_on_the_pool(epochs: int | None, receipt: Receipt | None, of_labels: Receipt | None) -> None:
    """No update leaves a client, so the guarantee of all messages is that of the pool."""
    federation, draws, contributions = digits(linear=True, lr=LR), generator(0, "images of a test"), []
    for _ in range(len(federation.data.real)):
        x = torch.randint(0, 256, (N, 1, 8, 8), generator=draws, dtype=torch.uint8)
        contributions.append(Contribution(Examples(x, torch.arange(N) % 10), receipt, 1, of_labels))
    shared = share(ServerSynthetic(), ClientDatasets(federation.data.real, 10, False, 0), contributions)
    of_pool = replace(shared.data, sets=federation.data.sets, n_classes=10)
    federation = replace(federation, data=of_pool).training(LocalSGD(2, 16))
    plan = federation.plan(2)
    start = replace(federation.start(OneShot(epochs), plan), ledger=Ledger.before_rounds(shared.releases))
    played = federation.run(OneShot(epochs), plan, start=start)
    x = torch.cat([c.examples.x for c in contributions])
    model, images = data(federation.model), Examples(x, (torch.arange(N) % 10).repeat(5))
    for number in (1, 2):
        model = on_pool(federation, images, model, number, epochs or 2)
    torch.testing.assert_close(data(played[-1][0].model).double(), model, rtol=0, atol=2e-6)
    assert [facts["clients"] for _, facts in played] == [0, 0]
    assert (shared.traffic + played[-1][0].traffic).total == 5 * N * 65
    report, is_finite = statement(played[-1][0].ledger, 5, 1e-5, 0, local=False, secret=True), of_labels is COVERED
    assert report["overall"] == (report["pool_epsilon_max"] if is_finite else "none")
    assert (report["epsilon_of_messages"] is not None) == is_finite


@pytest.mark.long
def test_fedvaes_learning_rate_decays_after_every_ten_epochs() -> None:
    """With 4 epochs a round, rounds 1 to 6 begin after 0, 4, 8, 12, 16 and 20 epochs."""
    federation = digits(method=FedVAE()).training(LocalSGD(4, 20))
    plan = federation.plan(6)
    halved = [now for now, _ in federation.run(FedVAE(decay=0.5), plan)]
    assert all(change.any() for change in sub(halved[0].model, federation.model).values())  # every part learns
    before = replace(federation.start(FedVAE(), plan), state=halved[2].state, round=3)
    for first, now, rate in ((before, halved[3], 0.05), (halved[4], halved[5], 0.025)):
        slow = digits(method=FedVAE(), lr=rate).training(LocalSGD(4, 20))
        plain = slow.run(FedVAE(), replace(plan, facts=replace(plan.facts, rounds=now.round)), start=first)
        assert torch.equal(plain[-1][0].model.buffer, now.model.buffer)
