"""FedDF against a loop of its own, its identities, and the public examples that its server gets."""

from dataclasses import replace
from math import cos, pi

import pytest
import torch
from closed_forms import Digits
from torch import Tensor
from torch.nn import functional as F

from fedcommons import LocalSGD, generator, seed_for
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddf import FedDF
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Flat, data
from fedcommons.testing.federations import Federation
from lightning_modules import Classifier

LOOP = LocalSGD(epochs=1, batch_size=8)


def doubled(federation: Federation, weighting: str) -> Federation:
    """The same federation in float64."""
    module = federation.module
    return replace(federation, module=lambda: module().double()).training(LOOP, weighting)


def started(federation: Federation, algorithm: FedAvg | FedDF, rounds: int) -> Standing:
    start = federation.start(algorithm, federation.plan(rounds))
    return replace(start, buffers=federation.work().initial_buffers)


def filled(federation: Federation, model: Tensor, buffers: Tensor) -> Classifier:
    """A module of its own with these weights and BatchNorm's statistics, in evaluation mode."""
    work = federation.work()
    work.load(Flat(work.params.layout, model))
    work.load_buffers(Flat(work.buffers.layout, buffers))
    assert isinstance(work.module, Classifier)
    return work.module.eval()


@pytest.mark.parametrize(
    ("method", "weighting"),
    [(FedDF(server_steps=7, server_batch=16, server_lr=0.01), "uniform"),
     (FedDF("pool", server_steps=3, server_batch=1000, server_lr=0.1), "samples")],
    ids=["public", "pool"],
)  # fmt: skip
def test_a_round_is_fedavgs_and_then_adam_towards_mean_logits(digits: Digits, method: FedDF, weighting: str) -> None:
    """Adam and the cosine by their formulas; each client alone in a federation sends the model that it sends here."""
    sizes = (9, 7, 8)
    federation = doubled(digits(sizes, batch_norm=True, method=method), weighting)
    plan = federation.plan(1)
    averaged = federation.run(FedAvg(), plan, start=started(federation, FedAvg(), 1))[0][0]
    models = list[Classifier]()
    for client in range(len(sizes)):
        others = {i: 0.0 for i in range(len(sizes)) if i != client}
        late = federation.plan(1, late=lambda joined, facts, round, seed, others=others: others)
        alone = federation.run(FedAvg(), late, start=started(federation, FedAvg(), 1))[0][0]
        models.append(filled(federation, alone.model.buffer, alone.buffers.buffer))
    student = filled(federation, averaged.model.buffer, averaged.buffers.buffer)
    store = federation.data.clients.store if method.rows == "pool" else federation.data.public
    assert store is not None
    x = store.x
    weights = list(student.parameters())
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    seed, losses = seed_for(0, "merge", 1), list[float]()
    passes = [torch.randperm(len(x), generator=generator(seed_for(seed, e), "order")) for e in range(3)]
    batches = [rows for one in passes for rows in one.split(method.server_batch)][: method.server_steps]
    for j, rows in enumerate(batches):
        teacher = torch.stack([model(x[rows]) for model in models]).mean(0).detach()
        loss = F.kl_div(student(x[rows]).log_softmax(1), teacher.softmax(1), reduction="batchmean")
        losses.append(float(loss.detach()))
        eta = method.server_lr * (1 + cos(pi * j / method.server_steps)) / 2
        for k, (w, g) in enumerate(zip(weights, torch.autograd.grad(loss, weights), strict=True)):
            m[k], v[k] = 0.9 * m[k] + 0.1 * g, 0.999 * v[k] + 0.001 * g**2
            w.data -= eta * m[k] / (1 - 0.9 ** (j + 1)) / ((v[k] / (1 - 0.999 ** (j + 1))).sqrt() + 1e-8)
    now, facts = federation.run(method, plan, start=started(federation, method, 1))[0]
    expected = torch.cat([w.detach().reshape(-1) for w in weights])
    torch.testing.assert_close(now.model.buffer, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(averaged.model.buffer, expected, atol=1e-3)
    assert facts["server/distillation_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert now.traffic == averaged.traffic  # a model is sent once, and no example


def test_without_steps_it_is_fedavg_bit_for_bit(digits: Digits) -> None:
    federation = digits(batch_norm=True).training(LOOP, "samples")
    plan = federation.plan(2, participation=0.6)
    ours, theirs = (federation.run(method, plan)[-1][0] for method in (FedDF(server_steps=0), FedAvg()))
    assert data(ours.model).equal(data(theirs.model))
    assert data(ours.buffers).equal(data(theirs.buffers))
    assert (ours.traffic, ours.ledger) == (theirs.traffic, theirs.ledger)


def test_the_mean_of_linear_models_has_nothing_to_learn(digits: Digits) -> None:
    """Its logits are the ensemble's: loss and gradient are rounding errors, which later steps of Adam would enlarge."""
    federation = doubled(digits(linear=True), "uniform")
    now, facts = federation.run(FedDF(server_steps=1), federation.plan(1))[0]
    mean = federation.run(FedAvg(), federation.plan(1))[0][0]
    assert abs(facts["server/distillation_loss"]) < 1e-12
    torch.testing.assert_close(now.model.buffer, mean.model.buffer, rtol=0, atol=1e-9)
