"""DENSE, Co-Boosting and FedDF against independent slow servers; terms by hand, bytes, rounds, public examples."""

from collections.abc import Sequence
from dataclasses import replace
from math import cos, pi
from typing import Any

import pytest
import torch
from closed_forms import Digits
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons import Facts, LocalSGD, generator, seed_for, set_default_generator
from fedcommons.algorithms.coboosting import CoBoosting
from fedcommons.algorithms.dense import DENSE
from fedcommons.algorithms.ensemble import Upsampler, set_training_mode
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddf import FedDF
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Flat, data
from fedcommons.testing.federations import Federation
from lightning_modules import Classifier

Method = DENSE | CoBoosting
SMALL = DENSE(generator_steps=3, generated=6, width=2, latent=5, server_batch=4, server_lr=0.01, temperature=3.0)
BOOSTING = CoBoosting(generator_steps=3, generated=6, width=2, latent=5, server_batch=4, weight_step=0.05)
LOOP = LocalSGD(epochs=1, batch_size=8)


def _kl(teacher: Tensor, student: Tensor, t: float) -> Tensor:
    """t^2 KL of each row, by torch."""
    return t**2 * F.kl_div((student / t).log_softmax(1), (teacher / t).softmax(1), reduction="none").sum(1)


def _filled(federation: Federation, model: Tensor, buffers: Tensor) -> Classifier:
    """A module of its own with these weights and BatchNorm's statistics."""
    work = federation.work()
    work.load(Flat(work.params.layout, model))
    work.load_buffers(Flat(work.buffers.layout, buffers))
    assert isinstance(work.module, Classifier)
    return work.module.eval()


def _slow(federation: Federation, state: Any, start: Tensor, method: Method) -> tuple[Tensor, Tensor, Tensor]:
    """Return the model, the pool and the weights after three rounds, with the package's generator network and keys."""
    w, sent, statistics = state["weights"].double(), state["ensemble"], state["statistics"].double()
    clients = [_filled(federation, a, b) for a, b in zip(sent, statistics, strict=True)]
    student = _filled(federation, start, w @ statistics)
    decay = method.server_decay if isinstance(method, CoBoosting) else 0.0
    sgd = torch.optim.SGD(student.parameters(), method.server_lr, method.server_momentum, weight_decay=decay)
    pool, labels = torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    epochs = 3 * method.server_epochs

    def ensemble(x: Tensor, w: Tensor) -> Tensor:
        total: Any = sum(a * f(x) for a, f in zip(w, clients, strict=True))
        return total / w.sum()

    def step(optimizer: torch.optim.Optimizer, loss: Tensor, module: nn.Module) -> None:
        optimizer.zero_grad()
        loss.backward()
        if isinstance(method, CoBoosting):
            torch.nn.utils.clip_grad_norm_(module.parameters(), method.clip)
        optimizer.step()

    for e in range(epochs):
        number, n = method.warmup_rounds + 1 + e // method.server_epochs, len(pool)
        key = seed_for(seed_for(0, "merge", number), "epoch", e)
        draws = generator(key, "noise and labels")
        set_default_generator(key, "generator")
        network = Upsampler((1, 8, 8), method.latent, method.width).double()
        z = torch.randn(method.generated, method.latent, generator=draws).double().requires_grad_()
        y = torch.randint(10, (method.generated,), generator=draws)
        adam = torch.optim.Adam([*network.parameters(), z], method.generator_lr, betas=(0.5, 0.999))
        best, lowest = torch.zeros(0), float("inf")
        for _ in range(method.generator_steps):
            pixels = network(z)
            x = student.normalise(255 * pixels)
            f, logits = ensemble(x, w), student(x)
            if isinstance(method, CoBoosting):
                hard = 1 - f.softmax(1)[torch.arange(len(y)), y].detach()
                loss, apart = (hard * F.cross_entropy(f, y, reduction="none")).mean(), torch.ones(len(y))
            else:
                loss = F.cross_entropy(f, y)
                if method.bn == "paper":
                    loss = loss + sum(_gap(client, x) for client in clients) / len(clients)
                apart = (f.argmax(1) != logits.argmax(1)).double()
            loss = loss - method.boundary * (apart * _kl(f, logits, method.boundary_temperature)).mean()
            if float(loss.detach()) < lowest:
                best, lowest = pixels.detach().clone(), float(loss.detach())
            step(adam, loss, network)
        if n and isinstance(method, CoBoosting):
            for rows in torch.randperm(n, generator=generator(seed_for(key, "weights"), "order")).split(4):
                v = w.clone().requires_grad_()
                F.cross_entropy(ensemble(student.normalise(pool[rows].double()), v), labels[rows]).backward()
                assert v.grad is not None
                w = (w - method.weight_step * 0.99**e * v.grad.sign()).clip(0, 1)
        pool, labels = torch.cat([pool, (best * 255).round().to(torch.uint8)]), torch.cat([labels, y])
        if isinstance(method, CoBoosting):
            u = 2 * torch.rand(len(pool), 10, generator=generator(key, "directions")) - 1
            if method.server_schedule == "cosine":
                sgd.param_groups[0]["lr"] = method.server_lr * (1 + cos(pi * e / epochs)) / 2
        for rows in torch.randperm(len(pool), generator=generator(key, "order")).split(method.server_batch):
            x = student.normalise(pool[rows].double())
            if isinstance(method, CoBoosting):
                pixels = (pool[rows].double() / 255).requires_grad_()
                scores = (ensemble(student.normalise(255 * pixels), w) / method.temperature).softmax(1)
                (slope,) = torch.autograd.grad((u[rows] * scores).sum(), pixels)  # pyright: ignore[reportPossiblyUnbound]
                x = student.normalise(255 * (pixels.detach() + method.move / 255 * slope.sign()))
            step(sgd, _kl(ensemble(x, w).detach(), student(x), method.temperature).mean(), student)
    return torch.cat([p.detach().reshape(-1) for p in student.parameters()]), pool, w


def _gap(client: Classifier, x: Tensor) -> Tensor:
    """The term of BatchNorm's statistics, by a walk through the CNN."""
    net: Any = client.network
    first = net.conv1(x)
    second = net.conv2(F.relu(F.max_pool2d(net.norm1(first), 2)))
    total = torch.zeros(())
    for norm, h in ((net.norm1, first), (net.norm2, second)):
        mean = h.mean((0, 2, 3))
        variance = ((h - mean[:, None, None]) ** 2).mean((0, 2, 3))
        total = total + (mean - norm.running_mean).norm() + (variance - norm.running_var).norm()
    return total


CASES: dict[str, tuple[Method, str]] = {
    "dense": (SMALL, "uniform"),
    "dense, all options": (
        replace(SMALL, server_epochs=2, start_from="server", boundary=2.0, boundary_temperature=3.0, bn="released"),
        "samples",
    ),
    "co-boosting": (BOOSTING, "uniform"),
    "co-boosting, all options": (
        replace(BOOSTING, warmup_rounds=1, server_epochs=2, generator_lr=0.05, boundary=3.0, boundary_temperature=0.5,
                clip=1e-3, server_schedule="constant"), "samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_are_those_of_an_independent_server(name: str, digits: Digits) -> None:
    """The weights start at the clients' shares, the server at their mean; epochs count from the end of the warm-up."""
    method, weighting = CASES[name]
    federation = doubled(digits((9, 7, 8), batch_norm=isinstance(method, DENSE)), weighting)
    plan = federation.plan(method.warmup_rounds + 3)
    start = replace(federation.start(method, plan), buffers=federation.work().initial_buffers)
    played = [now for now, _ in federation.run(method, plan, start=start)]
    first, last = played[method.warmup_rounds], played[-1]
    state = {name: data(x) for name, x in first.state.items()}
    before = replace(start, state=FedAvg().start(federation.model, plan.facts, 0))
    mean = federation.run(FedAvg(), federation.plan(method.warmup_rounds + 1), start=before)[-1][0].model.buffer
    shares = [9 / 24, 7 / 24, 8 / 24] if weighting == "samples" else [1 / 3] * 3
    assert state["weights"].tolist() == pytest.approx(shares)
    assert torch.allclose(state["weights"] @ state["ensemble"], mean, atol=1e-12)
    begun = mean if method.start_from == "average" else federation.model.buffer
    model, pool, w = _slow(federation, state, begun, method)
    assert data(last.state["images"]).equal(pool)
    assert torch.allclose(last.model.buffer, model, rtol=0, atol=1e-8)
    assert not torch.allclose(first.model.buffer, model, atol=1e-4)
    if isinstance(method, CoBoosting):
        assert torch.allclose(data(last.state["learned"]), w, rtol=0, atol=1e-9)
        assert not torch.allclose(w, w.mean())


def test_the_student_learns_with_dropout_and_with_the_statistics_that_it_has() -> None:
    layers = [nn.BatchNorm1d(2), nn.Dropout(), nn.BatchNorm2d(2)]
    set_training_mode(nn.Sequential(layers[0], nn.Sequential(*layers[1:])).eval())
    assert [layer.training for layer in layers] == [False, True, False]


def test_clients_train_for_epochs_of_their_own_in_the_last_round_alone_and_then_no_more(digits: Digits) -> None:
    federation = digits((9, 7, 8)).training(LOOP)
    played = federation.run(replace(SMALL, warmup_rounds=1, client_epochs=3), federation.plan(3))
    steps = played[0][1]["train/steps"]
    assert [facts.get("train/steps") for _, facts in played] == [steps, 3 * steps, None]
    size = federation.model.buffer.nbytes
    assert (played[-1][0].traffic.down, played[-1][0].traffic.up) == (2 * 3 * size,) * 2


@pytest.mark.parametrize(("method", "warmup"), [(SMALL, 0), (BOOSTING, 1)], ids=["dense", "coboosting"])
def test_the_server_asks_again_until_a_model_has_come(digits: Digits, method: Method, warmup: int) -> None:
    def late(joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        """All are late in two rounds, and all but client 1 in the next."""
        after = round - warmup
        return {i: 0.0 for i in joined if after in (1, 2) or (after == 3 and i != 1)}

    federation, method = digits((9, 7, 8)).training(LOOP), replace(method, warmup_rounds=warmup)
    played = federation.run(method, federation.plan(warmup + 5, late=late))
    assert [facts["clients"] for _, facts in played] == [3] * (warmup + 3) + [0, 0]
    models = [now.model.buffer for now, _ in played]
    assert models[warmup].equal(models[warmup + 1])
    assert models[0].equal(federation.model.buffer) == (warmup == 0)  # no model came: untrained
    assert not models[warmup + 2].equal(models[warmup + 3])
    assert data(played[-1][0].state["weights"]).tolist() == [1.0]
    assert len(data(played[-1][0].state["images"])) == 3 * method.generated


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 7)])
def test_the_generator_makes_images_of_any_size_and_has_the_papers_parameters(shape: tuple[int, ...]) -> None:
    images = Upsampler(shape, 4, 2)(torch.randn(3, 4))
    assert images.shape == (3, *shape)
    assert ((images > 0) & (images < 1)).all()
    weights = 257 * 128 * 64, 128 * 128 * 9 + 128, 128 * 64 * 9 + 64, 64 * 3 * 9 + 3  # linear, three convolutions
    of_the_paper = sum(p.numel() for p in Upsampler((3, 32, 32), 256, 64).parameters())
    assert of_the_paper == sum(weights) + 2 * (128 + 128 + 64)  # and norms


def doubled(federation: Federation, weighting: str) -> Federation:
    """The same federation in float64."""
    module = federation.module
    return replace(federation, module=lambda: module().double()).training(LOOP, weighting)


def started(federation: Federation, algorithm: FedAvg | FedDF, rounds: int) -> Standing:
    start = federation.start(algorithm, federation.plan(rounds))
    return replace(start, buffers=federation.work().initial_buffers)


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
        models.append(_filled(federation, alone.model.buffer, alone.buffers.buffer))
    student = _filled(federation, averaged.model.buffer, averaged.buffers.buffer)
    store = federation.data.clients.store if method.rows == "pool" else federation.data.public
    assert store is not None
    x = store.x
    weights = list(student.parameters())
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    seed, losses = seed_for(0, "merge", 1), list[float]()
    passes = [torch.randperm(len(x), generator=generator(seed_for(seed, e), "order")) for e in range(3)]
    batches = [rows for order in passes for rows in order.split(method.server_batch)][: method.server_steps]
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
    assert (now.traffic, now.ledger) == (averaged.traffic, averaged.ledger)  # a model is sent once, and no example


def test_the_mean_of_linear_models_has_nothing_to_learn(digits: Digits) -> None:
    """Its logits are the ensemble's: loss and gradient are rounding errors, which later steps of Adam would enlarge."""
    federation = doubled(digits(linear=True), "uniform")
    now, facts = federation.run(FedDF(server_steps=1), federation.plan(1))[0]
    mean = federation.run(FedAvg(), federation.plan(1))[0][0]
    assert abs(facts["server/distillation_loss"]) < 1e-12
    torch.testing.assert_close(now.model.buffer, mean.model.buffer, rtol=0, atol=1e-9)
