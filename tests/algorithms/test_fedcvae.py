"""FedCVAE against its code's rules: an independent slow server, counts, codes, labels, bytes, resuming, refusals."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil, floor
from typing import Any

import pytest
import torch
from closed_forms import Digits
from torch import Tensor
from torch.nn import functional as F

from fedcommons import Facts, LocalSGD, generator, seed_for, set_default_generator
from fedcommons.algorithms.fedcvae import FedCVAE
from fedcommons.algorithms.fedcvae_decoders import Drawing, Networks, draw, quotas
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Flat, data, flat, flatten
from fedcommons.testing.federations import Federation
from lightning_modules.cvae import CVAE, Decoder, truncated_normal

SMALL = FedCVAE(
    latent=3, channels=(4, 6), hidden=16, local_epochs=3, samples=20, batch_size=8, decoder_epochs=2, server_batch=6
)
VARIANTS = [SMALL, replace(SMALL, variant="kd")]
LOOP = LocalSGD(epochs=1, batch_size=8)
EPSILON = 1e-4
"""of Adam, in the comparison with the slow server"""


@pytest.fixture
def three(digits: Digits) -> Federation:
    """Three clients of unequal size, who hold classes 0 and 1, 2 and 3, 4 and 5."""
    return digits((9, 7, 8)).training(LOOP)


@pytest.fixture
def worker(three: Federation) -> Worker:
    return three.serial(SMALL).worker


def _in_numbers(decoder: Decoder) -> Flat:
    return flatten({name: t for name, t in decoder.state_dict().items() if t.is_floating_point()})


def _decoder(seed: int, networks: Networks) -> Flat:
    torch.manual_seed(seed)
    return _in_numbers(networks.decoder())


def _decoded(networks: Networks, weights: Flat, z: Tensor, y: Tensor) -> Tensor:
    """Pixels of these codes by a walk through the layers, one image after another, in evaluation."""
    names = iter(weights.values())
    linear, bias, first, first_bias, gain, shift, mean, variance, last, last_bias = names
    result = []
    for code, label in zip(z, y.tolist(), strict=True):
        h = F.relu(linear @ torch.cat([code, torch.eye(networks.n_classes)[label]]) + bias).view(1, 6, 2, 2)
        h = F.conv_transpose2d(h, first, first_bias, stride=2, padding=1)[0]
        scale = (gain / (variance + 1e-3).sqrt()).view(-1, 1, 1)
        h = F.relu((h - mean.view(-1, 1, 1)) * scale + shift.view(-1, 1, 1))
        result.append(1 / (1 + torch.exp(-F.conv_transpose2d(h[None], last, last_bias, stride=2, padding=1)[0])))
    return torch.stack(result)


def _slow_images(method: FedCVAE, sent: list[Any], seed: int) -> tuple[Tensor, Tensor]:
    """The images and labels of the server, client after client; of the package only keys, codes and new weights."""
    networks, n = Networks((1, 8, 8), 10, method.channels, method.latent), sum(int(e["size"]) for e in sent)
    w, zs, ys, xs = (1.0 if method.variant == "kd" else 3.0), [], [], []
    for i, each in enumerate(sent):
        share = int(method.samples * int(each["size"]) / n)
        m = share if i < len(sent) - 1 else method.samples - sum(map(len, ys))
        draws = generator(seed, "codes and classes", i)
        ys.append(torch.multinomial(each["histogram"].double(), m, replacement=True, generator=draws))
        zs.append(truncated_normal(m, method.latent, w, draws))
        xs.append(_decoded(networks, flat(each, "decoder"), zs[-1], ys[-1]))
    z, y, x = torch.cat(zs), torch.cat(ys), torch.cat(xs)
    if method.variant == "ens":
        return (255 * x).round().to(torch.uint8), y
    set_default_generator(seed, "the server's decoder")
    student = networks.decoder()
    adam = torch.optim.Adam(student.parameters(), method.decoder_lr)
    draws = generator(seed_for(seed, "the server's decoder"), "order")
    orders = [torch.randperm(len(y), generator=draws) for _ in range(method.decoder_epochs)]
    for rows in [rows for order in orders for rows in order.split(method.batch_size)]:
        p = student(z[rows], y[rows]).sigmoid()
        loss = -(x[rows] * p.log() + (1 - x[rows]) * (1 - p).log()).sum() / len(rows)
        adam.zero_grad()
        loss.backward()
        adam.step()
    draws = generator(seed, "codes and uniform classes")
    y = torch.randint(10, (method.samples,), generator=draws)
    z = truncated_normal(method.samples, method.latent, w, draws)
    return (255 * _decoded(networks, _in_numbers(student), z, y)).round().to(torch.uint8), y


def _slow_classifier(federation: Federation, method: FedCVAE, x: Tensor, y: Tensor, rounds: range) -> Tensor:
    """The classifier after these rounds."""
    module: Any = federation.module()
    adam = torch.optim.Adam(module.parameters(), method.server_lr)
    for number in rounds:
        draws = generator(seed_for(0, "merge", number), "order")
        for rows in torch.randperm(len(y), generator=draws).split(method.server_batch):
            adam.zero_grad()
            (-module(x[rows]).log_softmax(1)[range(len(rows)), y[rows]].mean()).backward()
            adam.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def _slow_decoder(method: FedCVAE, x: Tensor, y: Tensor, seed: int) -> Flat:
    """A client's decoder from the paper's loss; of the package only the networks and the keys of the draws."""
    set_default_generator(seed, "initial weights")
    vae = CVAE(shape=(1, 8, 8), n_classes=10, channels=method.channels, hidden=method.hidden, latent=method.latent,
               batch_norm=True)  # fmt: skip
    adam = torch.optim.Adam(vae.parameters(), method.local_lr)
    eps = torch.randn(method.local_epochs, len(y), method.latent, generator=generator(seed, "codes"))
    draws = generator(seed, "order")
    for of_epoch in eps:
        for rows in torch.randperm(len(y), generator=draws).split(method.batch_size):
            rows = rows if len(rows) > 1 else rows.repeat(2)
            pixels, n = x[rows] / 255, len(rows)
            mean, v = vae.encoder(pixels)
            p = vae.decoder(mean + (v / 2).exp() * of_epoch[rows], y[rows]).sigmoid()
            bce = -(pixels * p.log() + (1 - pixels) * (1 - p).log()).sum() / n
            adam.zero_grad()
            (bce + method.beta * (mean**2 + v.exp() - 1 - v).sum() / 2 / n).backward()
            adam.step()
    return _in_numbers(vae.decoder)


def test_a_clients_decoder_is_that_of_an_independent_loop(three: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine images in batches of eight the last is alone, and stands twice."""
    monkeypatch.setattr(torch.optim, "Adam", partial(torch.optim.Adam, eps=10 * EPSILON))
    method, rows = replace(SMALL, beta=30.0, local_lr=0.02), three.data.clients[0]
    start = method.start(three.model, three.plan(1).facts, 0)
    sent = method.client(three.work(), method.down(start, 1, 0), {}, rows, 1, 5).each
    expected = _slow_decoder(method, rows.x, rows.y, 5).buffer
    assert torch.allclose(flat(sent, "decoder").buffer, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", VARIANTS, ids=["ens", "kd"])
def test_rounds_are_an_independent_servers(three: Federation, method: FedCVAE, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bias before BatchNorm has no gradient but rounding errors, other ones on each CPU, of which Adam with its
    # epsilon of 1e-8 makes whole steps. With this epsilon they are nothing.
    monkeypatch.setattr(torch.optim, "Adam", partial(torch.optim.Adam, eps=EPSILON))
    plan = three.plan(3)
    played = [now for now, _ in three.run(method, plan)]
    work = three.work()
    start = method.start(three.model, plan.facts, 0)
    sent = [
        method.client(work, method.down(start, 1, i), {}, three.data.clients[i], 1, seed_for(0, "client", 1, i)).each
        for i in range(3)
    ]
    assert method.bound == (1.0 if method.variant == "kd" else 3.0)
    images, labels = _slow_images(method, sent, seed_for(0, "merge", 1))
    state = played[-1].state
    assert data(state["labels"]).equal(labels)
    assert (data(state["images"]).int() - images.int()).abs().max() <= 1
    assert (data(state["images"]) != images).float().mean() < 0.01
    wanted = _slow_classifier(three, method, data(state["images"]), labels, range(1, 4))
    assert torch.allclose(played[-1].model.buffer, wanted, rtol=0, atol=1e-5)
    assert (wanted - played[0].model.buffer).abs().max() > 1e-3


def test_a_client_makes_its_share_and_the_last_one_the_rest() -> None:
    for samples, sizes in ((5000, [1, 2, 4]), (7, [1000, 1, 1]), (10, [3]), (1, [1, 5, 1])):
        result, n = quotas(samples, sizes), sum(sizes)
        assert result[:-1] == [floor(samples * size / n) for size in sizes[:-1]]
        assert sum(result) == samples
        assert ceil(samples * sizes[-1] / n) <= result[-1] < ceil(samples * sizes[-1] / n) + len(sizes)


@pytest.mark.parametrize(("shape", "loss"), [((1, 28, 28), "cross_entropy"), ((3, 32, 32), "squares")])
def test_any_image_size_is_drawn_and_colours_fit_by_squares(shape: tuple[int, ...], loss: str, worker: Worker) -> None:
    """With a client that is too small to make an image."""
    networks, classes = Networks(shape, 4, (4, 4, 4), 3), torch.tensor([[30, 10, 0, 0], [0, 0, 1, 0], [0, 0, 9, 50]])
    decoders = [_decoder(number, networks) for number in range(3)]
    sent = [
        {"decoder": decoder, "size": torch.tensor(size), "histogram": histogram}
        for decoder, size, histogram in zip(decoders, (40, 1, 59), classes, strict=True)
    ]
    for variant in ("ens", "kd"):
        method = replace(SMALL, variant=variant, samples=3, truncate=3.0, decoder_epochs=1, batch_size=5)
        images, y = draw(worker, Drawing(method, networks, sent), 0)
        assert (images.shape, images.dtype, networks.loss) == ((3, *shape), torch.uint8, loss)
        assert variant == "kd" or (y < 2).tolist() == [True, False, False]


def test_decoders_sizes_and_histograms_cross_the_wire_once_and_nothing_covers_them(three: Federation) -> None:
    played = three.run(SMALL, three.plan(3))
    linear = (3 + 10) * 24 + 24
    first, norm, last = 6 * 4 * 16 + 4, 4 * 4, 4 * 16 + 1
    up = 4 * (linear + first + norm + last) + 8 + 8 * 10
    sent = [(facts["comm/up_bytes"], facts["comm/down_bytes"]) for _, facts in played]
    assert sent == [(3 * up, 3 * 8), (0, 0), (0, 0)]
    ledger = played[-1][0].ledger
    assert ledger.commons.uncovered == {"decoder": 3, "size": 3, "histogram": 3}
    assert ledger.n_disclosed == {0: 9, 1: 7, 2: 8}
    assert played[-1][0].traffic.once == 0
    papers = _decoder(0, Networks((1, 32, 32), 10, FedCVAE().channels, 100))  # with 2 (64 + 32 + 32) statistics
    assert papers.buffer.numel() == 144_001 + 2 * (64 + 32 + 32)


def test_the_server_asks_again_until_a_decoder_has_come(three: Federation) -> None:
    def late(joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        return {i: 0.0 for i in joined if round < 3 or i == 1}

    played = three.run(SMALL, three.plan(4, late=late))
    assert [facts["clients"] for _, facts in played] == [3, 3, 3, 0]
    models = [three.model.buffer, *(now.model.buffer for now, _ in played)]
    assert [a.equal(b) for a, b in pairwise(models)] == [True, True, False, False]
    assert set(data(played[-1][0].state["labels"]).tolist()) <= {0, 1, 4, 5}  # none of the late client's


def test_half_the_work_is_half_the_steps(three: Federation) -> None:
    work, state = three.work(), SMALL.start(three.model, three.plan(1).facts, 0)

    def sent(epochs: int, share: float) -> Tensor:
        work.share = share
        method = replace(SMALL, local_epochs=epochs)
        reply = method.client(work, method.down(state, 1, 0), {}, three.data.clients[1], 1, 5)
        return flat(reply.each, "decoder").buffer

    assert not sent(2, 0.5).equal(sent(2, 1.0))
    assert sent(2, 0.25).equal(sent(2, 0.5))  # one step of two: a client of seven images has one an epoch
