"""Methods whose clients have models of their own: closed forms on least squares, and plain loops on images."""

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, descended, quadratic, reply_of, smooth_module
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.nn import functional as F

from fedcommons import Clients, Examples, LocalSGD, RunData, seed_for
from fedcommons.algorithms.apfl import APFL
from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedbabu import FedBABU
from fedcommons.algorithms.fedbn import FedBN
from fedcommons.algorithms.fedper import FedPer
from fedcommons.algorithms.fedproto import FedProto
from fedcommons.algorithms.fedrep import FedRep
from fedcommons.algorithms.perfedavg import PerFedAvg
from fedcommons.algorithms.pfedme import PFedMe
from fedcommons.core.algorithm import BUFFERS, Algorithm
from fedcommons.core.client_worker import module_with
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.features import Head
from fedcommons.core.step_gradients import gradient_at
from fedcommons.federation.personal_evaluation import evaluate_personal, personal_model
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import EMPTY, Flat, data, flat, put, select
from fedcommons.testing.federations import Federation


def read_personal(algorithm: Algorithm, now: Standing, client: int) -> np.ndarray:
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
        assert np.allclose([read_personal(algorithm, now, i) for i in range(4)], v, rtol=0, atol=1e-13)
        assert torch.equal(now.model.buffer, other.model.buffer)
        x = now.model.buffer.numpy()
    if lam == 0:
        now, facts = federation.run(FedPer("*"), plan)[-1]
        assert np.allclose([read_personal(FedPer("*"), now, i) for i in range(4)], v, rtol=0, atol=1e-13)
        assert facts["comm/up_bytes"] == facts["comm/down_bytes"] == 0


@pytest.mark.parametrize("algorithm", [FedPer(""), FedBN()])
def test_with_no_layer_of_their_own_it_is_fedavg(algorithm: Algorithm, least_squares: Problem) -> None:
    federation = least_squares().federation(0.1)
    (now, facts), (other, others) = (federation.run(m, federation.plan(3))[-1] for m in (algorithm, FedAvg()))
    assert torch.equal(flat(now.state, "shared").buffer, other.model.buffer)
    assert all(np.array_equal(read_personal(algorithm, now, i), other.model.buffer.numpy()) for i in range(4))
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
        for i, rows in enumerate(federation.data.clients):
            y = work.local(put(put(federation.model, x), heads[i]), rows, seed_for(0, "client", now.round, i)).model
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
    for i, rows in enumerate(federation.data.real):
        whole = put(put(federation.model, shared), flat(now.memory[i], "own"))
        module = module_with(federation.module(), whole, statistics[i]).eval()
        with torch.no_grad():
            assert result["loss"][i] == pytest.approx(F.cross_entropy(module(rows.x), rows.y).item(), rel=1e-5)
        assert result["n"][i] == len(rows)


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
        result, counts = data(now.state["prototypes"]), data(now.state["known"])
        for label in range(10):
            rows = torch.cat([z[i][federation.data.real[i].y == label] for i in z])
            assert (counts[label] > 0) == (len(rows) > 0)
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
        prototypes, counts = data(now.state["prototypes"]), data(now.state["known"])
        for i, rows in enumerate(federation.data.real):
            model, _ = personal_model(algorithm, now, i, keep_buffers=False)
            with torch.no_grad():
                by_head = module_with(federation.module(), model, EMPTY).eval()(rows.x).argmax(1)
            expected = by_head
            if predict == "prototype" and now.round:
                far = torch.cdist(embeddings(federation, model, rows.x), prototypes)
                expected = far.masked_fill(counts == 0, float("inf")).argmin(1)
            assert result["accuracy"][i] == pytest.approx((expected == rows.y).float().mean().item())
            differ += int((expected != by_head).sum())
    assert (differ > 0) == (predict == "prototype")


@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_a_step_of_fedproto_is_that_of_its_loss(lam: float, digits: Digits) -> None:
    """y - eta grad (CE + lam mean ||z - C^label||^2 / d), by autograd on the module itself; no model travels."""
    federation, algorithm = digits(lr=0.1).training(LocalSGD(1, FULL)), FedProto(lam)
    (first, _), (second, facts) = federation.run(algorithm, federation.plan(2))
    assert facts["comm/up_bytes"] == 5 * 4 * (10 * 16 + 10)
    prototypes = data(first.state["prototypes"])
    for i, rows in enumerate(federation.data.real):
        module = module_with(federation.module(), flat(first.memory[i], "own"), EMPTY).train()
        head = Head(module)
        with head.watched():
            loss = F.cross_entropy(module(rows.x), rows.y)
        (loss + lam * F.mse_loss(head.inputs, prototypes[rows.y])).backward()
        for name, weight in module.named_parameters():
            stepped = weight.detach() - 0.1 * (torch.zeros(()) if weight.grad is None else weight.grad)
            assert torch.allclose(flat(second.memory[i], "own")[name], stepped, rtol=0, atol=1e-5)


def runs(algorithm: Algorithm, problem: Problem, steps: int, lr: float = 0.1, rounds: int = 3) -> list[Standing]:
    federation = problem().federation(lr).training(LocalSGD(steps, FULL))
    return [now for now, _ in federation.run(algorithm, federation.plan(rounds))]


@pytest.mark.parametrize(("start", "adaptive"), [(0.0, False), (0.6, False), (1.0, False), (0.6, True)])
def test_apfl_is_algorithm_1_in_numpy(start: float, adaptive: bool, least_squares: Problem) -> None:
    """With alpha 0 it is FedAvg, with 1 clients train alone; the trained alphas differ between clients."""
    problem, lr, algorithm = least_squares(), 0.2, APFL(start, adaptive)
    x, v, alpha = np.zeros(3), [np.zeros(3)] * 4, [start] * 4
    for now in runs(algorithm, least_squares, 5, lr):
        ends = []
        for i in range(4):
            hessian, c = quadratic(problem, i)
            w = x
            for _ in range(5):
                slope = hessian @ (alpha[i] * v[i] + (1 - alpha[i]) * w) - c
                towards = float((v[i] - w) @ slope) if adaptive else 0.0
                w, v[i] = w - lr * (hessian @ w - c), v[i] - lr * alpha[i] * slope
                alpha[i] = min(1.0, max(0.0, alpha[i] - lr * towards))
            ends.append(w)
        x = np.mean(ends, 0)
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-12)
        for i, a in enumerate(alpha):
            assert np.allclose(read_personal(algorithm, now, i), a * v[i] + (1 - a) * x, rtol=0, atol=1e-12)
    assert len(set(alpha)) == (4 if adaptive else 1)


@pytest.mark.parametrize("method", [PFedMe(2.0, 3, 0.15, beta=0.7), PFedMe(10.0, 1, 0.02)])
def test_pfedme_is_algorithm_1_in_numpy(method: PFedMe, least_squares: Problem) -> None:
    """With one inner step and eta lam = 1 it is FedAvg at the inner rate."""
    problem, lr = least_squares(), 0.1
    x = np.zeros(3)
    for now in runs(method, least_squares, 4, lr):
        ends = []
        for i in range(4):
            hessian, c = quadratic(problem, i)
            w = theta = x
            for _ in range(4):
                for _ in range(method.inner_steps):
                    theta = theta - method.inner_lr * (hessian @ theta - c + method.lam * (theta - w))
                w = w - lr * method.lam * (w - theta)
            assert np.allclose(read_personal(method, now, i), theta, rtol=0, atol=1e-12)
            ends.append(w)
        x = (1 - method.beta) * x + method.beta * np.mean(ends, 0)
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-12)


def test_perfedavg_is_the_first_order_step_on_two_halves_in_numpy(least_squares: Problem) -> None:
    """Which half is D changes from client to client; the personal model is a gradient step on all examples."""
    problem, lr, algorithm = least_squares((8, 7, 8, 1)), 0.1, PerFedAvg(alpha=0.3)
    federation, w0, first = problem.federation(lr), np.array([0.5, -1.0, 2.0]), set()
    x = Flat(federation.model.layout, torch.from_numpy(w0))

    def slope(w: np.ndarray, i: int, rows: slice) -> np.ndarray:
        a, b = problem.a[i][rows], problem.b[i][rows]
        return a.T @ (a @ w - b) / len(b)

    for i, rows in enumerate(federation.data.clients):
        two = [(slice(k, None, 2), slice(1 - k, None, 2)) for k in (0, 1)]
        halves = two if len(rows) > 1 else [(slice(1), slice(1))]
        ends = [w0 - lr * slope(w0 - 0.3 * slope(w0, i, d), i, other) for d, other in halves]
        for seed in range(6):
            delta = flat(reply_of(algorithm, federation.module(), rows, x=x, seed=seed).sums, "delta")
            near = [np.allclose(w0 + delta.buffer.numpy(), end, rtol=0, atol=1e-12) for end in ends]
            assert sum(near) == 1
            first.add((len(rows) > 1, near.index(True)))
        adapted = algorithm.adapt(federation.work(), x, rows, 0).buffer.numpy()
        assert np.allclose(adapted, w0 - 0.3 * slope(w0, i, slice(None)), rtol=0, atol=1e-12)
    assert first == {(True, 0), (True, 1), (False, 0)}


Weights = dict[str, np.ndarray]


def descend(
    p: Weights, x: np.ndarray, y: np.ndarray, names: str, steps: int, lr: float = 0.3, decay: float = 0.1
) -> Weights:
    """Return the weights of ``smooth_module`` after steps on the parameters whose name begins with a word of names."""
    for _ in range(steps):
        z = np.tanh(x @ p["network.0.weight"].T + p["network.0.bias"])
        logits = z @ p["network.2.weight"].T + p["network.2.bias"]
        odds = np.exp(logits - logits.max(1, keepdims=True))
        out = (odds / odds.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)
        inner = (out @ p["network.2.weight"]) * (1 - z**2)
        grads = {"network.0.weight": inner.T @ x, "network.0.bias": inner.sum(0),
                 "network.2.weight": out.T @ z, "network.2.bias": out.sum(0)}  # fmt: skip
        moved = [name for name in p if name.startswith(tuple(names.split()))]
        p = p | {name: p[name] - lr * (grads[name] + decay * p[name]) for name in moved}
    return p


@pytest.mark.parametrize("name", ["fedrep", "fedbabu all", "fedbabu head", "fedbabu body"])
def test_head_and_body_by_turns_in_numpy(name: str) -> None:
    """Two layers with weight decay, which a frozen layer does not feel either."""
    draw, tuned = np.random.default_rng(1), name.partition(" ")[2]
    algorithm = FedBABU(tune=tuned, tune_epochs=2) if tuned else FedRep(head_epochs=3)
    x, y = draw.normal(size=(15, 4)), draw.integers(3, size=15)
    clients = Clients(Examples(torch.from_numpy(x), torch.from_numpy(y)), [np.arange(7), np.arange(7, 15)])

    def module() -> LightningModule:
        net = smooth_module(0.3)
        net.weight_decay = 0.1
        return net

    federation = Federation(RunData(clients, clients, {"train": clients.store}), module).training(LocalSGD(2, FULL))
    executor = federation.serial(algorithm)
    body = ["network.0.weight", "network.0.bias"]
    initial = {n: t.numpy() for n, t in federation.model.items()}
    heads = [initial, initial]
    shared = {n: initial[n] for n in body}
    for now, _ in federation.run(algorithm, federation.plan(3), executor):
        ends = []
        for i, rows in enumerate((slice(7), slice(7, 15))):
            p = heads[i] | shared
            if not tuned:
                p = heads[i] = descend(p, x[rows], y[rows], "network.2", 3)
            ends.append(descend(p, x[rows], y[rows], "network.0", 2))
        shared = {n: np.mean([p[n] for p in ends], 0) for n in body}
        of_clients = evaluate_personal(algorithm, executor, ModelTask(EMPTY), now, federation.plan(3), on_tests=False)
        for i, rows in enumerate((slice(7), slice(7, 15))):
            p = heads[i] | shared
            result, _ = personal_model(algorithm, now, i, keep_buffers=False)
            assert all(np.allclose(result[n].numpy(), p[n], rtol=0, atol=1e-12) for n in p)
            moved = {"all": "network", "head": "network.2", "body": "network.0"}.get(tuned, "")
            p = descend(p, x[rows], y[rows], moved, 2) if tuned else p
            logits = np.tanh(x[rows] @ p[body[0]].T + p[body[1]]) @ p["network.2.weight"].T + p["network.2.bias"]
            loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), y[rows]]
            assert of_clients["loss"][i] == pytest.approx(loss.mean(), abs=1e-10)


def test_a_gradient_at_other_weights_in_bf16_does_not_use_earlier_weights(digits: Digits) -> None:
    """``torch.autocast`` casts a weight once in a step, and the module's weights change within the step."""
    federation = digits()
    work, batch = federation.work(), federation.data.clients[0].columns
    points = [Flat(federation.model.layout, federation.model.buffer * (1 + k)) for k in range(3)]

    def gradients(each: list[Flat]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            result = [gradient_at(work, x, batch, 0)[1].buffer for x in each]
            loss = work.module.training_step(batch, 0)
        assert isinstance(loss, Tensor)
        return [*result, *torch.autograd.grad(loss, list(work.named.values()))]

    together, single = gradients(points), [gradients([x]) for x in points]
    assert all(torch.equal(g, alone[0]) for g, alone in zip(together, single, strict=False))
    assert not torch.equal(together[0], together[1])
    assert all(torch.equal(g, alone) for g, alone in zip(together[3:], single[0][1:], strict=True))
