"""One-shot Fedssyn: SGD on the pool, no client in any round, and a guarantee that is the pool's."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedcommons.accounting.privacy import Ledger
from fedcommons.accounting.statement import statement
from fedcommons.algorithms.one_shot import OneShot
from fedcommons.config import presets
from fedcommons.core.algorithm import Facts
from fedcommons.core.local import LocalSGD
from fedcommons.core.release import SAMPLED_GAUSSIAN
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.generator import Receipt
from fedcommons.runs.build import prepare
from fedcommons.seeds import generator, seed_for
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.server_synthetic import ServerSynthetic
from fedcommons.sharing.stage import Contribution, Shared, share
from fedcommons.tensors import data
from fedcommons.testing import Federation, digits
from lightning_modules import Classifier

N = 30  # images a client


def shared_by(federation: Federation, receipt: Receipt | None = None, of_labels: Receipt | None = None) -> Shared:
    """Each client contributes ``N`` random images."""
    dealt, draws = Dealt(federation.data.own, 10, False, 0), generator(0, "images of a test")
    drawn = []
    for _ in range(len(federation.data.own)):
        x = torch.randint(0, 256, (N, 1, 8, 8), generator=draws, dtype=torch.uint8)
        drawn.append(Contribution(Examples(x, torch.arange(N) % 10), receipt, 1, of_labels))
    return share(ServerSynthetic(), dealt, drawn)


def with_pool(shared: Shared, federation: Federation) -> Federation:
    """The federation after sharing, two epochs of batches of 16."""
    data = replace(shared.data, sets=federation.data.sets, n_classes=10)
    return replace(federation, data=data).training(LocalSGD(2, 16))


@pytest.mark.parametrize("epochs", [None, 3])
def test_it_is_sgd_on_the_pool(epochs: int | None) -> None:
    """Against a loop that knows the pool, the model and the order of batches: two rounds, softmax regression."""
    lr = 0.05
    federation = digits(linear=True, lr=lr)
    shared = shared_by(federation)
    federation = with_pool(shared, federation)
    method, plan = OneShot(epochs), federation.plan(2)
    model = data(federation.play(method, plan)[-1][0].model).double()
    pool = shared.data.pool
    assert pool is not None
    images, labels = pool.store.x[pool.rows.flat], pool.store.y[pool.rows.flat]
    module = federation.module()
    assert isinstance(module, Classifier)
    x = module.normalise(images).flatten(1).double()
    weight, bias = (p.detach().double().clone() for p in module.parameters())
    for number in (1, 2):
        seed = seed_for(plan.seed, "merge", number)
        for epoch in range(epochs or 2):
            order = torch.randperm(len(labels), generator=generator(seed, "order", epoch))
            for rows in order.split(16):
                error = F.softmax(x[rows] @ weight.T + bias, 1) - F.one_hot(labels[rows], 10)
                weight -= lr * error.T @ x[rows] / len(rows)
                bias -= lr * error.mean(0)
    torch.testing.assert_close(model, torch.cat([weight.flatten(), bias]), rtol=0, atol=2e-6)


def test_nobody_takes_part_and_only_the_pool_travels() -> None:
    """5 clients times N images of 64 pixels and a label, up, once."""
    federation = digits(linear=True)
    shared = shared_by(federation)
    played = with_pool(shared, federation).play(OneShot(), federation.plan(3))
    assert [(facts["clients"], facts["comm/up_bytes"], facts["comm/down_bytes"]) for _, facts in played] == [
        (0, 0, 0)
    ] * 3
    assert (shared.traffic + played[-1][0].traffic).total == 5 * N * 65


COVERED = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=2.0, sensitivity=1.0, steps=50)


@pytest.mark.parametrize(("receipt", "of_labels", "is_finite"),
    [(COVERED, COVERED, True), (COVERED, Receipt(), False), (None, None, False)], ids=["private", "counts", "plain"],
)  # fmt: skip
def test_the_release_of_the_pool_decides_the_overall_guarantee(
    receipt: Receipt | None, of_labels: Receipt | None, is_finite: bool
) -> None:
    """No update leaves a client, so the guarantee of all messages is that of the commons."""
    federation = digits(linear=True)
    shared = shared_by(federation, receipt, of_labels)
    plan = federation.plan(2)
    start = replace(with_pool(shared, federation).start(OneShot(), plan), ledger=Ledger.of(shared.releases))
    end = with_pool(shared, federation).play(OneShot(), plan, start=start)[-1][0]
    said = statement(end.ledger, 5, 1e-5, rejected=0, local=False, secret=True)
    assert said["overall"] == (said["pool_epsilon_max"] if is_finite else "none")
    assert (said["epsilon_of_messages"] is not None) == is_finite
    assert ("Overall guarantee: epsilon = " in said["in_words"][1]) == is_finite


@pytest.mark.parametrize("setting", ["real", "shuffled_synthetic", "local_synthetic"])
def test_a_setting_that_gives_the_server_no_pool_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=r"gives it none: use sharing.setting server_synthetic"):
        prepare(presets.experiment("smoke", "digits", {"algorithm": "one_shot", "sharing": setting}))


def test_batch_norm_is_refused() -> None:
    values = {"algorithm": "one_shot", "sharing": "server_synthetic", "model.batch_norm": True}
    with pytest.raises(UserError, match="OneShot is not defined for a model with BatchNorm"):
        prepare(presets.experiment("smoke", "digits", values))


def test_its_steps_are_those_of_the_pool() -> None:
    facts = Facts(5, [9] * 5, 1, pool=150)
    assert OneShot(3).pieces(facts, LocalSGD(2, 16), 1, []) == {"server_steps": 3 * 10}
    assert OneShot().pieces(facts, LocalSGD(2, 16), 1, []) == {"server_steps": 2 * 10}
