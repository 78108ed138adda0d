"""FedGEN beside an independent slow loop, FedAvg, and its closed forms."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from closed_forms import Digits
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons import LocalSGD, State, generator
from fedcommons.algorithms.feature_generator import label_weights, labels_at
from fedcommons.algorithms.fedgen import FedGEN, in_chunks
from fedcommons.flat_tensors import Flat, add, data, flat, flatten
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.testing.federations import Federation
from lightning_modules import Classifier

TINY = FedGEN(iterations=4, noise_size=3, hidden=8, batch_size=6)
NO_ORDER = LocalSGD(epochs=2, batch_size=100)
"""One batch holds all examples of a client, so two loops need not agree on an order."""

OPTIONS = {
    "as the paper": TINY,
    "as the released code": replace(TINY, kl=10.0, labels="uniform", weight_decay=0.01, lr_decay=0.98),
    "equation 4": replace(TINY, ensemble="mean", noise="normal", first=1, diversity=0.3, decay=0.7),
}


class _Slow:
    """The paper's equations one after another, in modules of torch, for clients that train on all examples at once."""

    def __init__(self, federation: Federation, method: FedGEN, g: Flat) -> None:
        self.method, self.clients, self.server = method, [*federation.data.clients], federation.module()
        self.counts = [torch.bincount(rows.y, minlength=10).double() for rows in self.clients]
        self.first, self.norm = nn.Linear(method.noise_size + 10, method.hidden), nn.BatchNorm1d(method.hidden)
        self.last, self.seen = nn.Linear(method.hidden, 16), torch.zeros(10)
        self.g = nn.ModuleDict({"first": self.first, "norm": self.norm, "last": self.last}).double()
        with torch.no_grad():
            for name, parameter in self.g.named_parameters():
                parameter.copy_(g[name])
        self.adam = torch.optim.Adam(self.g.parameters(), method.server_lr, weight_decay=method.weight_decay)

    def make(self, eps: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(torch.cat([eps, F.one_hot(y, 10).double()], 1))
        return self.last(F.relu(self.norm(hidden)))

    def classes(self, counts: Tensor, places: Tensor) -> Tensor:
        """The class in whose interval each place lies."""
        shares = (counts > 0).double() if self.method.labels == "uniform" else counts.double()
        shares = shares / shares.sum()
        return torch.tensor([next(c for c in range(10) if u < shares[: c + 1].sum()) for u in places.tolist()])

    def noise(self, shape: tuple[int, ...], draws: torch.Generator) -> Tensor:
        return (torch.rand if self.method.noise == "uniform" else torch.randn)(*shape, generator=draws).double()

    def play(self, joined: list[int], round: int, seed: int) -> None:
        trained = [self.train(client, round, seed + client) for client in joined]
        self.teach([module.network.last for module in trained], joined, round, seed)
        mean = {n: sum(m.state_dict()[n] for m in trained) / len(joined) for n in self.server.state_dict()}
        self.server.load_state_dict(mean)
        self.seen = self.seen + sum(self.counts[i] for i in joined)

    def train(self, client: int, round: int, seed: int) -> Any:
        method, rows, module = self.method, self.clients[client], deepcopy(self.server)
        assert isinstance(module, Classifier)
        head: Any = module.network.last
        sgd, factor = torch.optim.SGD(module.parameters(), 0.1), method.decay**round
        self.g.eval()
        for step in range(2):
            loss = F.cross_entropy(module(rows.x), rows.y)
            if round >= method.first:
                draws = generator("features", seed, step)
                counts = self.seen if self.seen.any() else torch.ones(10)
                y = self.classes(counts, torch.rand(method.batch_size, generator=draws))
                z = self.make(self.noise((method.batch_size, method.noise_size), draws), y).detach()
                loss = loss + method.weight * factor * F.cross_entropy(head(z), y)
                eps = self.noise((100, method.noise_size), generator("kl", seed, step))[: len(rows)]
                wanted = F.softmax(head(self.make(eps, rows.y)), 1).detach()
                logs, is_seen = F.log_softmax(module(rows.x), 1), counts[rows.y] > 0
                loss = loss + method.kl * factor * ((wanted * (wanted.log() - logs)).sum(1) * is_seen).mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        return module

    def teach(self, heads: list[nn.Linear], joined: list[int], round: int, seed: int) -> None:
        method, draws, counts = self.method, generator(seed, "features"), [self.counts[i] for i in joined]
        shape = method.iterations, method.batch_size
        places = torch.rand(shape, generator=draws)
        noises = self.noise((*shape, method.noise_size), draws)
        self.g.train()
        self.adam.param_groups[0]["lr"] = method.server_lr * method.lr_decay ** (round - 1)
        for u, eps in zip(places, noises, strict=True):
            y = self.classes(torch.stack(counts).sum(0), u)
            z = self.make(eps, y)
            loss = torch.zeros(())
            for b, c in enumerate(y.tolist()):
                if method.ensemble == "mean":
                    mean = torch.stack([head(z[b]) for head in heads]).mean(0)
                    loss = loss - mean.log_softmax(0)[c] / len(y)
                else:
                    for head, n in zip(heads, counts, strict=True):
                        loss = loss - n[c] / sum(m[c] for m in counts) * head(z[b]).log_softmax(0)[c] / len(y)
            far = torch.stack([(e - f).square().mean() * (a - b).abs().mean()
                               for e, a in zip(eps, z, strict=True) for f, b in zip(eps, z, strict=True)])  # fmt: skip
            loss = loss + method.diversity * torch.exp(-far.mean())
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()


def _round(federation: Federation, method: FedGEN, state: State, joined: list[int], round: int, seed: int) -> State:
    """A round as the engine plays it, with seeds of ours."""
    work, total = federation.work(), {}
    replies = {}
    for i in joined:
        reply = method.client(work, method.down(state, round, i), {}, federation.data.clients[i], round, seed + i)
        total = {name: add(flat(reply.sums, name), flat(total, name)) if total else x for name, x in reply.sums.items()}
        replies[i] = reply
    return method.merge(federation.serial(method), state, total, replies, round, seed)


@pytest.mark.parametrize("name", OPTIONS)
def test_three_rounds_agree_with_the_papers_equations_one_by_one(name: str, digits: Digits) -> None:
    """In round 1 client 1 is away, so in round 2 its classes are new to the generator, and in round 3 others are."""
    tiny, method = digits(sizes=(5, 6, 4)).training(NO_ORDER), OPTIONS[name]
    federation = replace(tiny, module=lambda: tiny.module().double())
    state = method.start(federation.model, federation.plan(3).facts, 0)
    slow = _Slow(federation, method, flat(state, "generator"))
    for round, joined in enumerate([[0, 2], [0, 1, 2], [0, 1]], 1):
        state = _round(federation, method, state, joined, round, 100 * round)
        slow.play(joined, round, 100 * round)
        g = slow.g.state_dict() | {"norm.variance": slow.norm.running_var}
        result = {name: values for name, values in flat(state, "generator").items() if name in g}
        pairs = [(flat(state, "model").buffer, flatten(dict(slow.server.named_parameters())).buffer)]
        for ours, theirs in [*pairs, *((values, g[name]) for name, values in result.items())]:
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
        assert len(result) == 7


def test_a_class_that_no_client_has_is_left_out() -> None:
    counts = torch.tensor([[3, 0, 1], [1, 0, 0]])
    assert torch.allclose(label_weights(counts).double(), torch.tensor([[0.75, 0, 1], [0.25, 0, 0]]).double())
    shares = torch.tensor([0, 0.75, 0, 0.25, 0]).double().cumsum(0)
    assert labels_at(shares, torch.tensor([0.0, 0.74, 0.76, 1 - 2**-24]).double()).tolist() == [1, 1, 3, 3]


def test_bytes_are_two_models_and_a_generator_and_class_counts_a_round(digits: Digits) -> None:
    """DP-SGD covers the model and not the counts."""
    federation = digits().training(LocalSGD(1, 8, dp=DPSGD(1.0, 1.0)))
    standing = federation.run(TINY, federation.plan(2))[-1][0]
    inputs, hidden, width = 3 + 10, 8, 16
    g = 4 * (inputs * hidden + hidden + 4 * hidden + hidden * width + width + 10)  # the shares of ten classes too
    expected = 2 * 5 * (2 * data(federation.model).nbytes + g + 8 * 10)
    assert standing.traffic.down + standing.traffic.up == expected
    assert list(standing.ledger.uncovered) == ["counts"]
    assert standing.ledger.updates.covered


def test_an_examples_weight_is_one_of_its_kl_term(digits: Digits) -> None:
    """With one step of all examples and without the term of the features, the step is linear in the weights."""
    federation = digits(sizes=(6, 6)).training(LocalSGD(1, 100))
    rows, method = federation.data.clients[0], replace(TINY, kl=10.0, weight=0.0)
    message = method.down(method.start(federation.model, federation.plan(2).facts, 0), 2, 0)

    def step(weight: Tensor | None, method: FedGEN = method) -> Tensor:
        reply = method.client(federation.work(), message, {}, replace(rows, weight=weight), 2, 0)
        return torch.cat([flat(reply.sums, name).buffer for name in ("body", "head")])

    each, w = [step(6 * row) for row in torch.eye(6)], torch.rand(6, generator=generator("weights"))
    for weight in (None, w):
        mean = sum(a * b for a, b in zip(each, (torch.ones(6) if weight is None else weight).tolist(), strict=True))
        assert torch.allclose(step(weight), torch.as_tensor(mean) / 6, rtol=0, atol=1e-6)
    assert (step(None) - step(None, replace(method, kl=0.0))).abs().max() > 1e-4


def test_steps_in_chunks_do_not_depend_on_how_many_were_expected() -> None:
    def make(steps: Any) -> tuple[Tensor]:
        return (torch.stack([torch.rand(2, generator=generator("chunk", step)) for step in steps]),)

    expected, fewer = (in_chunks(steps, make) for steps in (150, 3))
    for step in range(150):
        assert expected(step)[0].equal(fewer(step)[0])
