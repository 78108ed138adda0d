"""FedDM against its formulas in float64: losses, pixel gradients, the ball, equation 15, message sizes."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from closed_forms import Digits, reply_of, smooth_module
from torch import Tensor, nn

from fedcommons import ClientData, Message, Reply, generator
from fedcommons.algorithms import feddm_matching
from fedcommons.algorithms.ball import around, project
from fedcommons.algorithms.feddm import FedDM
from fedcommons.core.features import Head
from fedcommons.flat_tensors import Flat, Layout, data, norm, sub
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import SEED_ALONE, Draws
from lightning_modules import Classifier

COUNTS = (4, 6, 5)  # real images of three classes
IPC = 3


def _module() -> Classifier:
    return smooth_module(0.1).eval()


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _case() -> tuple[Classifier, Tensor, Tensor]:
    """A module, real images, and synthetic ones of every class."""
    return _module(), _draw(sum(COUNTS), 4), _draw(3 * IPC, 4, seed=1).requires_grad_()


def _u(module: Classifier, x: Tensor) -> Tensor:
    head = Head(module)
    with head.watched():
        return feddm_matching.features(module, head, x)


def _loss_of_class(module: Classifier, real: Tensor, synthetic: Tensor) -> Tensor:
    """Equation 9, one class by itself, h and z apart."""
    first, last = module.network[:2], module.network[2]  # pyright: ignore[reportIndexIssue]
    pairs = [(first(x), last(first(x))) for x in (real, synthetic)]
    return torch.stack([(a.mean(0) - b.mean(0)).square().sum() for a, b in zip(*pairs, strict=True)]).sum()


def _all_losses(module: Classifier, real: Tensor, images: Tensor) -> Tensor:
    mask = torch.block_diag(*(torch.ones(1, n) for n in COUNTS))
    return feddm_matching.losses(_u(module, images), feddm_matching.means(_u(module, real), mask).detach())


def test_the_losses_of_all_classes_at_once_are_those_of_each_by_itself_with_their_gradient() -> None:
    module, real, images = _case()
    result = _all_losses(module, real, images)
    pairs = zip(real.split(COUNTS), images.split(IPC), strict=True)
    wanted = torch.stack([_loss_of_class(module, *pair) for pair in pairs])
    gradient, expected = (torch.autograd.grad(losses.sum(), images)[0] for losses in (result, wanted))
    assert torch.allclose(result, wanted, rtol=1e-12)
    assert torch.allclose(gradient, expected, rtol=1e-10)
    assert gradient.abs().max() > 0.1


def test_an_example_held_twice_at_half_weight_changes_no_mean() -> None:
    u, mask = _draw(5, 7), torch.tensor([[1.0, 1, 1, 0, 0], [0, 0, 0, 1, 1]])
    more = torch.cat([u, u[:1]]), torch.cat([mask, mask[:, :1]], 1), torch.tensor([0.5, 1, 1, 1, 1, 0.5])
    assert torch.allclose(feddm_matching.means(*more), feddm_matching.means(u, mask), rtol=1e-12)


def test_samples_lie_in_the_ball_and_projection_gives_its_nearest_point() -> None:
    draws = generator("ball")

    def off(dim: int, radius: float, times: int) -> Tensor:
        x = Flat(Layout(("w",), ((dim,),)), _draw(dim))
        return torch.stack([around(x, radius, draws).buffer - x.buffer for _ in range(times)])

    far = off(20_000, 5.0, 20)  # in high dimension all lie on the sphere
    assert torch.allclose(far.norm(dim=1), torch.tensor(5.0, dtype=torch.float64), rtol=1e-12)
    near = off(2, 1.5, 2000).norm(dim=1)
    assert near.max() <= 1.5 * (1 + 1e-12)
    inside = float((near < 1.4999).double().mean())  # P(||g|| < rho) = 1 - exp(-rho^2/2) in the plane; sd 0.0105
    assert inside == pytest.approx(1 - 2.718281828 ** -(1.5**2 / 2), abs=0.045)
    x, out = _draw(50), _draw(50, seed=1)
    for distance, expected in ((3.0, 0.5), (0.4, 0.4)):
        w = x + distance * out / out.norm()
        project(w, x, 0.5)
        assert torch.allclose(w, x + expected * out / out.norm(), rtol=1e-12)


def _private(module: Classifier, of_class: Sequence[Tensor], images: Tensor, dp: DPSGD) -> Tensor:
    return feddm_matching.private_gradients(images, _u(module, images), of_class, COUNTS, dp, Draws(SEED_ALONE), 0)[0]


def test_without_noise_and_clipping_the_private_gradient_is_the_plain_one() -> None:
    module, real, images = _case()
    (gradient,) = torch.autograd.grad(_all_losses(module, real, images).sum(), images)
    of_class = list(_u(module, real).detach().split(COUNTS))
    assert torch.allclose(_private(module, of_class, images, DPSGD(0.0, 1e9)), gradient, rtol=1e-9)
    empty = [features[:0] for features in of_class]
    assert not _private(module, empty, images, DPSGD(0.0, 1.0)).any()


@pytest.mark.parametrize("variant", ["paper", "per example"])
def test_the_noise_has_the_standard_deviation_sigma_c_over_b(variant: str) -> None:
    """2,000 numbers a class: the sample's is off by about 1.6 %."""
    if variant == "paper":
        result = feddm_matching.add_noise_level(torch.zeros(1500, 4), COUNTS, 3.0, 0.5, generator("noise"))
    else:
        images = _draw(3 * 500, 4).requires_grad_()
        result = _private(_module(), [_draw(0, 8)] * 3, images, DPSGD(3.0, 0.5))
    for part, n in zip(result.chunk(3), COUNTS, strict=True):
        assert float(part.std()) == pytest.approx(3 * 0.5 / n, rel=0.08)


def _client(method: FedDM, rows: ClientData, module: Classifier | None = None, seed: int = 0) -> Reply:
    return reply_of(method, module or _module(), rows, seed=seed)


def _rows(counts: Sequence[int]) -> ClientData:
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ClientData(_draw(len(y), 4), y)


@pytest.mark.parametrize(
    ("ipc", "least", "counts", "sent"),
    [(2, 5, (4, 6, 5), [1, 2]), (2, 5, (4, 0, 1), [0, 2]), (10, FedDM().least, (10, 9, 10), [0, 2])],
)
def test_only_classes_of_enough_images_are_sent(ipc: int, least: int, counts: tuple[int, ...], sent: list[int]) -> None:
    """Each as ``ipc`` images and a label, which gives the sizes of the paper's table 3."""
    reply = _client(FedDM(ipc=ipc, least=least, iterations=0), _rows(counts))
    images = data(reply.each["images"])
    assert data(reply.each["labels"]).tolist() == sent
    assert images.shape == (len(sent), ipc, 4)
    assert (reply.nbytes, len(reply.sums)) == (images.nbytes + 8 * len(sent), 0)


def test_images_start_as_different_real_ones_of_their_class_and_real_sends_them_as_they_are() -> None:
    rows, method = _rows((12, 15)), FedDM(ipc=10, iterations=0)
    first, other = (data(_client(method, rows, seed=seed).each["images"]) for seed in (0, 1))
    for c, images in enumerate(first):
        same = (images.unsqueeze(1) == rows.x[rows.y == c]).all(2)
        assert (same.sum(1) == 1).all()
        assert len(set(same.nonzero()[:, 1].tolist())) == 10
    assert not torch.equal(other, first)
    few = data(_client(method, _rows((3,))).each["images"])[0]
    assert sorted((few.unsqueeze(1) == few).all(2).sum(1).tolist()) == [3] * 6 + [4] * 4  # all three, equally often


@pytest.mark.parametrize("init", ["real", "noise"])
def test_matching_lowers_the_loss_at_weights_it_has_not_seen(init: str) -> None:
    rows, module = _rows((40, 60)), _module()
    mask = torch.block_diag(torch.ones(1, 40), torch.ones(1, 60))

    def loss(iterations: int) -> float:
        method = FedDM(ipc=4, radius=0.3, iterations=iterations, init=init, image_lr=0.3)
        images = data(_client(method, rows, module=_module()).each["images"]).flatten(0, 1)
        return feddm_matching.losses(_u(module, images), feddm_matching.means(_u(module, rows.x), mask)).sum().item()

    assert loss(100) < 0.05 * loss(0)


def test_a_step_draws_its_real_images_anew_if_a_class_has_more_than_a_batch() -> None:
    rows = {3: torch.arange(5), 7: torch.arange(5, 45)}
    batches, mask = feddm_matching.batches(rows, 8, 60, 0, torch.device("cpu"))
    assert batches.shape == (60, 13)
    assert mask.sum(1).tolist() == [5, 8]
    assert all(set(batch[:5].tolist()) == set(range(5)) for batch in batches)
    assert all(len(set(batch[5:].tolist())) == 8 for batch in batches)
    assert set(batches[:, 5:].flatten().tolist()) == set(range(5, 45))


def test_feddm_distils_images_with_dropout_layers_in_evaluation_mode(digits: Digits) -> None:
    ends = []
    for dropout in (0.0, 0.9):
        federation = digits(sizes=(30,), dropout=dropout)
        message, rows = Message({"model": federation.model}), federation.data.clients[0]
        ends.append(data(FedDM().client(federation.work(), message, {}, rows, 1, 0).each["images"]))
    assert torch.equal(*ends)


def test_a_step_of_the_server_goes_down_the_loss_of_all_images_with_its_weights(digits: Digits) -> None:
    """One epoch in one batch; ``examples``: an image weighs n_k / (n n_k^S), times the number of images."""
    federation = digits(sizes=(30, 12), linear=True)
    weights = {"images": torch.full((8,), 1 / 8), "examples": torch.tensor([30 / 4, 12 / 4]).repeat_interleave(4) / 42}
    for loss, weight in weights.items():
        method = FedDM(ipc=2, least=2, server_epochs=1, server_lr=0.1, server_decay=0.0, loss=loss, project=False)
        ((now, _),) = federation.run(method, federation.plan(1))
        images, labels = data(now.state["images"]), data(now.state["labels"])
        assert (images.shape, images.dtype) == ((8, 1, 8, 8), torch.float32)
        module = federation.module()
        value = (weight * nn.functional.cross_entropy(module(images), labels, reduction="none")).sum()
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(module.parameters()))])
        assert torch.allclose(now.model.buffer - federation.model.buffer, -0.1 * gradient, atol=1e-7)


def test_the_server_model_stays_in_the_ball_around_the_one_before(digits: Digits) -> None:
    federation = digits(linear=True)
    for keep in (True, False):
        method = FedDM(radius=0.05, server_lr=0.1, server_epochs=20, iterations=1, project=keep)
        models = [federation.model, *(now.model for now, _ in federation.run(method, federation.plan(2)))]
        steps = [norm(sub(after, before)) for before, after in pairwise(models)]
        assert (max(steps) <= 0.05 * (1 + 1e-5)) == keep
        assert min(steps) > 0.04
