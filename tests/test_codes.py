"""What FedDPMS does with codes: who helps whom, which draws are kept, what a mean hides, what a client trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from closed_forms import Digits

from fedcommons.algorithms import codes
from fedcommons.algorithms.feddpms import FedDPMS
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.seeds import generator
from lightning_modules import VAEClassifier

SIZES = (30, 40, 36, 50, 28)


@pytest.mark.parametrize(
    ("scarce", "given", "expected"),
    [
        ([1, 2], {0: [1, 2]}, []),  # never itself, though it fits best
        ([1, 2], {0: [1, 2], 3: [2, 9]}, [3]),
        ([1, 2], {1: [3, 4], 2: []}, []),  # no overlap gives none
        ([1, 2, 3], {4: [1], 2: [2, 3], 1: [3]}, [2, 1]),  # the best first
        ([1, 2, 3], {4: [1, 2], 2: [2, 3], 3: [1, 3]}, [2, 3]),  # ties to the lowest numbers
        ([1, 2, 3], {1: [3, 3, 3, 3], 2: [1, 2]}, [2, 1]),  # classes count, not codes
        ([1, 2, 3], {4: [1, 2], 2: [7], 3: [3]}, [4, 3]),  # 2 stays behind, as it has nothing to give
    ],
)
def test_matching(scarce: Sequence[int], given: Mapping[int, Sequence[int]], expected: list[int]) -> None:
    assert codes.assistants(0, scarce, given, 2) == expected
    assert codes.assistants(0, scarce, given, 1) == expected[:1]


def test_abundant_and_scarce_classes(digits: Digits) -> None:
    clients = digits(SIZES).data.clients
    assert clients.counts(10).tolist() == [client.y.bincount(minlength=10).tolist() for client in clients]
    counts = torch.tensor([5, 0, 9, 5, 1])
    assert codes.abundant(counts, 3) == [2, 0, 3]
    assert codes.abundant(counts, 5) == [2, 0, 3, 4]  # a class without examples is not abundant
    assert codes.scarce(torch.stack([counts, counts.flip(0)]), 3).tolist() == [[1, 4, 0], [3, 0, 1]]


def test_the_learning_rate_decays_after_every_ten_epochs(digits: Digits) -> None:
    """With three epochs a round, rounds 1 to 8 begin after 0, 3, ..., 21 epochs."""
    work = digits(lr=0.2).training(LocalSGD(3, 5)).work()
    rates = [codes.decayed(work, 0.5, round) for round in range(1, 9)]
    assert rates == pytest.approx([0.2] * 4 + [0.1] * 3 + [0.05])
    assert codes.decayed(work, 1.0, 8) is None


@pytest.fixture
def work(digits: Digits) -> Work:
    return digits(SIZES, method=FedDPMS()).work()


@pytest.fixture
def module(work: Work) -> VAEClassifier:
    assert isinstance(work.module, VAEClassifier)
    return work.module


@pytest.fixture
def seen(module: VAEClassifier) -> list[int]:
    """The number of codes that were decoded in each call."""
    result: list[int] = []
    module.decoder.register_forward_hook(lambda layer, inputs, out: result.append(len(inputs[0])))
    return result


def test_the_quota_is_exact_and_every_code_kept_is_recognised(
    work: Work, module: VAEClassifier, seen: list[int]
) -> None:
    """With a class that three in five draws are taken for, so that the last try finds more than are missing."""
    spread, label, centre, draws = 3.0, 4, torch.zeros(8), generator("a test")
    with codes.looking(work):
        logits = module(module.decoder(spread * torch.randn(500, 8, generator=generator("others"))))
        behind = logits[:, torch.arange(10) != label].max(1).values - logits[:, label]
        work.named["classifier.bias"][label] += behind.quantile(0.6)
    seen.clear()
    result, labels = codes.recognised(work, [(label, centre)], spread, 7, 100, generator("a test"))
    assert (result.shape, labels) == ((7, 8), [label] * 7)
    assert 1 < len(seen) < 100
    drawn = torch.cat([spread * torch.randn(7, 8, generator=draws) for _ in seen])
    with codes.looking(work):
        wanted = drawn[module(module.decoder(drawn)).argmax(1) == label]
    assert len(wanted) > 7
    assert torch.equal(wanted[:7], result)  # the first ones, in the order of the draws


def test_each_mean_has_a_quota_and_a_bounded_number_of_tries(
    work: Work, module: VAEClassifier, seen: list[int]
) -> None:
    with codes.looking(work):
        label = int(module(module.decoder(torch.zeros(1, 8))).argmax())
    centres = [(label, torch.zeros(8)), (label, torch.full((8,), 1e-3))]  # of two helpers
    result, labels = codes.recognised(work, centres, 0.0, 3, 2, generator("a test"))
    assert labels == [label] * 6
    assert torch.equal(result, torch.stack([centre for _, centre in centres]).repeat_interleave(3, 0))
    seen.clear()
    result, labels = codes.recognised(work, [((label + 1) % 10, torch.zeros(8))], 0.0, 5, 6, generator("a test"))
    assert seen == [5] * 6
    assert (result.shape, labels) == ((0, 8), [])


def test_it_trains_on_as_many_points_as_it_has_drawn_from_its_own_and_the_decoded(digits: Digits) -> None:
    own = digits(SIZES).data.clients[0]
    images, labels = torch.full((300, 1, 8, 8), 255, dtype=torch.uint8), torch.full((300,), 9)
    bar = codes.augmented(own, images, labels, 3)
    assert (len(bar), bar.size, bar.n_own) == (30, 330.0, own.n_own)
    decoded = (bar.x == 255).flatten(1).all(1)
    assert torch.equal(bar.y == 9, decoded)
    assert len(bar.x[~decoded].flatten(1).unique(dim=0)) == (~decoded).sum()  # nothing twice
    shares = [(codes.augmented(own, images, labels, seed).y == 9).float().mean().item() for seed in range(50)]
    assert np.mean(shares) == pytest.approx(300 / 330, abs=4 * 0.05 / 50**0.5)
    assert not torch.equal(codes.augmented(own, images, labels, 4).y, bar.y)


def test_weights_of_examples_go_with_them_and_a_decoded_image_weighs_one(digits: Digits) -> None:
    own = digits((4,)).data.clients[0]
    own = replace(own, weight=torch.tensor([0.5, 0.5, 1.5, 1.5]), total=2.0)  # raw weights 1/4, 1/4, 3/4, 3/4
    bar = codes.augmented(own, torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.full((4,), 9), 1)
    assert bar.weight is not None
    assert bar.size == 6.0
    assert bar.weight.mean() == pytest.approx(1)
    raw = {float(w) for w in bar.weight / bar.weight[bar.y == 9][0]}
    assert {1.0} < raw <= {1.0, 0.25, 0.75}


def test_a_noisy_mean_is_of_clipped_codes_with_the_noise_that_is_stated() -> None:
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [60.0, 80.0]])  # norms 5, 1/2, 0, 100
    clean = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]]).mean(0)
    draws = [codes.noisy_mean(z, 1.0, 2.0, np.random.default_rng(s))[0] for s in range(2000)]
    noise = torch.stack(draws) - clean
    assert noise.mean().abs() < 4 * 0.5 / 4000**0.5
    assert noise.std().item() == pytest.approx(2.0 / 4, rel=4 / 8000**0.5)  # sigma C / m
    release = codes.noisy_mean(z, 1.0, 2.0, np.random.default_rng(0))[1]
    assert (release.sigma, release.sensitivity, release.steps, release.q) == (2.0, 1.0, 1, 1.0)
    for j in range(4):  # one image blanked out, its place kept: the sum moves by at most C
        blank = z.clone()
        blank[j] = 0
        a, b = (codes.noisy_mean(one, 1.0, 2.0, np.random.default_rng(0))[0] for one in (z, blank))
        assert 4 * (a - b).norm() <= 1 + 1e-6
