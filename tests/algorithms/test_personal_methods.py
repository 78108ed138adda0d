"""Methods whose clients have models of their own: closed forms on least squares, and plain loops on images."""

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, descended
from torch import Tensor
from torch.nn import functional as F

from fedcommons import LocalSGD, seed_for
from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedbn import FedBN
from fedcommons.algorithms.fedper import FedPer
from fedcommons.algorithms.fedproto import FedProto
from fedcommons.core.algorithm import BUFFERS, Algorithm
from fedcommons.core.client_worker import module_with
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.features import Head
from fedcommons.federation.personal_evaluation import evaluate_personal, personal_model
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import EMPTY, Flat, data, flat, put, select
from fedcommons.testing.federations import Federation


def own(algorithm: Algorithm, now: Standing, client: int) -> np.ndarray:
    return personal_model(algorithm, now, client, keep_buffers=False)[0].buffer.numpy()


@pytest.mark.parametrize("lam", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("steps", [1, 6])
def test_dittos_personal_models_in_closed_form(steps: int, lam: float, least_squares: Problem) -> None:
    """And its server model is FedAvg's, bit for bit. With lam = 0 clients train alone, as with FedPer on all layers."""
    problem, lr = least_squares(), 0.1
    federation = problem.federation(lr).training(LocalSGD(steps, FULL))
    algorithm, plan, x = Ditto(lam), federation.plan(3), np.zeros(3)
    v = [x] * 4
    played = zip(federation.run(algorithm, plan), federation.run(FedAvg(), plan), strict=True)
    for (now, _), (other, _) in played:
        v = [descended(problem, i, v[i], x, lam, lr, steps) for i in range(4)]
        assert np.allclose([own(algorithm, now, i) for i in range(4)], v, rtol=0, atol=1e-13)
        assert torch.equal(now.model.buffer, other.model.buffer)
        x = now.model.buffer.numpy()
    if lam == 0:
        now, facts = federation.run(FedPer("*"), plan)[-1]
        assert np.allclose([own(FedPer("*"), now, i) for i in range(4)], v, rtol=0, atol=1e-13)
        assert facts["comm/up_bytes"] == facts["comm/down_bytes"] == 0


@pytest.mark.parametrize("algorithm", [FedPer(""), FedBN()])
def test_with_no_layer_of_their_own_it_is_fedavg(algorithm: Algorithm, least_squares: Problem) -> None:
    federation = least_squares().federation(0.1)
    (now, facts), (other, others) = (federation.run(m, federation.plan(3))[-1] for m in (algorithm, FedAvg()))
    assert torch.equal(flat(now.state, "shared").buffer, other.model.buffer)
    assert all(np.array_equal(own(algorithm, now, i), other.model.buffer.numpy()) for i in range(4))
    assert facts == others


def test_a_client_of_ditto_that_never_took_part_has_the_server_model(digits: Digits) -> None:
    """And BatchNorm's statistics of the personal models are not in those that are averaged: these are FedAvg's."""
    algorithm, federation = Ditto(), digits(batch_norm=True)
    plan = federation.plan(1, participation=0.4)
    now, other = (federation.run(each, plan)[-1][0] for each in (algorithm, FedAvg()))
    assert torch.equal(now.buffers.buffer, other.buffers.buffer)
    for client in range(5):
        model, buffers = personal_model(algorithm, now, client, keep_buffers=False)
        is_shared = model.buffer.equal(now.model.buffer)
        assert is_shared == (client not in now.memory)
        assert buffers.buffer.equal(now.buffers.buffer) == is_shared


def test_fedper_is_the_plain_loop(digits: Digits) -> None:
    """Each client trains (x, h_i), the server takes the mean of the x; only these travel."""
    federation, algorithm = digits(), FedPer()
    plan, work = federation.plan(2, blocks=1), federation.work()
    head = ["network.last.weight", "network.last.bias"]
    body = [name for name in federation.model if name not in head]
    x, heads = select(federation.model, body), [select(federation.model, head)] * 5
    for now, facts in federation.run(algorithm, plan):
        ends = []
        for i, mine in enumerate(federation.data.clients):
            y = work.local(put(put(federation.model, x), heads[i]), mine, seed_for(0, "client", now.round, i)).model
            ends.append(select(y, body).buffer - x.buffer)
            heads[i] = select(y, head)
        x = Flat(x.layout, (x.buffer.double() + torch.stack(ends).double().mean(0)).float())
        assert torch.allclose(flat(now.state, "shared").buffer, x.buffer, rtol=0, atol=1e-7)
        for i, expected in enumerate(heads):
            result, _ = personal_model(algorithm, now, i, keep_buffers=False)
            assert torch.allclose(select(result, head).buffer, expected.buffer, rtol=0, atol=1e-6)
        assert facts["comm/up_bytes"] == 5 * x.buffer.nbytes


def test_fedbn_keeps_batch_norm_and_is_evaluated_with_its_clients_statistics(digits: Digits) -> None:
    algorithm = FedBN()
    federation = digits(method=algorithm)
    plan, executor = federation.plan(2), federation.serial(algorithm)
    now, facts = federation.run(algorithm, plan, executor)[-1]
    shared, inside = flat(now.state, "shared"), {name for name in federation.model if "norm" in name}
    assert inside == set(plan.facts.batch_norm) == federation.model.keys() - shared.keys() != set()
    assert facts["comm/up_bytes"] == 5 * shared.buffer.nbytes
    result = evaluate_personal(algorithm, executor, ModelTask(EMPTY), now, plan, on_tests=False)
    statistics = [flat(now.memory[i], BUFFERS) for i in range(5)]
    assert not torch.equal(statistics[0].buffer, statistics[1].buffer)
    for i, mine in enumerate(federation.data.real):
        whole = put(put(federation.model, shared), flat(now.memory[i], "own"))
        module = module_with(federation.module(), whole, statistics[i]).eval()
        with torch.no_grad():
            assert result["loss"][i] == pytest.approx(F.cross_entropy(module(mine.x), mine.y).item(), rel=1e-5)
        assert result["n"][i] == len(mine)


def embeddings(federation: Federation, model: Flat, x: Tensor) -> Tensor:
    module = module_with(federation.module(), model, EMPTY).eval()
    head = Head(module)
    with torch.no_grad(), head.watched():
        module(x)
    return head.inputs


def test_fedprotos_prototypes_are_means_over_all_examples_of_a_class(digits: Digits) -> None:
    """Of the clients that took part, under their models after the round; the rest stay as they were."""
    federation, algorithm = digits(), FedProto()
    before = torch.zeros(10, 16)
    for now, _ in federation.run(algorithm, federation.plan(3, participation=0.4)):
        z = {i: embeddings(federation, flat(m, "own"), federation.data.real[i].x) for i, m in now.memory.items()}
        result, known = data(now.state["prototypes"]), data(now.state["known"])
        for label in range(10):
            rows = torch.cat([z[i][federation.data.real[i].y == label] for i in z])
            assert (known[label] > 0) == (len(rows) > 0)
            # a class has one client here, and one that sat out left its prototype and its model as they were
            assert torch.allclose(result[label], rows.mean(0) if len(rows) else before[label], rtol=0, atol=1e-5)
        before = result


@pytest.mark.parametrize("predict", ["prototype", "head"])
def test_fedproto_predicts_the_class_of_the_nearest_prototype_or_by_the_head(predict: str, digits: Digits) -> None:
    """Equation 4, over the classes that have a prototype; before there is one, the head decides."""
    algorithm = FedProto(lam=0.01, predict=predict)
    federation = digits(method=algorithm)
    plan, executor = federation.plan(2, participation=0.4), federation.serial(algorithm)
    start = federation.start(algorithm, plan)
    differ = 0
    for now in (start, *(now for now, _ in federation.run(algorithm, plan, executor))):
        result = evaluate_personal(algorithm, executor, ModelTask(EMPTY), now, plan, on_tests=False)
        prototypes, known = data(now.state["prototypes"]), data(now.state["known"])
        for i, mine in enumerate(federation.data.real):
            model, _ = personal_model(algorithm, now, i, keep_buffers=False)
            with torch.no_grad():
                by_head = module_with(federation.module(), model, EMPTY).eval()(mine.x).argmax(1)
            expected = by_head
            if predict == "prototype" and now.round:
                far = torch.cdist(embeddings(federation, model, mine.x), prototypes)
                expected = far.masked_fill(known == 0, float("inf")).argmin(1)
            assert result["accuracy"][i] == pytest.approx((expected == mine.y).float().mean().item())
            differ += int((expected != by_head).sum())
    assert (differ > 0) == (predict == "prototype")


@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_a_step_of_fedproto_is_that_of_its_loss(lam: float, digits: Digits) -> None:
    """y - eta grad (CE + lam mean ||z - C^label||^2 / d), by autograd on the module itself; no model travels."""
    federation, algorithm = digits(lr=0.1).training(LocalSGD(1, FULL)), FedProto(lam)
    (first, _), (second, facts) = federation.run(algorithm, federation.plan(2))
    assert facts["comm/up_bytes"] == 5 * 4 * (10 * 16 + 10)
    prototypes = data(first.state["prototypes"])
    for i, mine in enumerate(federation.data.real):
        module = module_with(federation.module(), flat(first.memory[i], "own"), EMPTY).train()
        head = Head(module)
        with head.watched():
            loss = F.cross_entropy(module(mine.x), mine.y)
        (loss + lam * F.mse_loss(head.inputs, prototypes[mine.y])).backward()
        for name, weight in module.named_parameters():
            stepped = weight.detach() - 0.1 * (torch.zeros(()) if weight.grad is None else weight.grad)
            assert torch.allclose(flat(second.memory[i], "own")[name], stepped, rtol=0, atol=1e-5)
