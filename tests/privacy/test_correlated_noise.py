"""CAPE's correlated noise and DP-CDA's mixtures: sums, variances, sensitivity, and the epsilon against each party."""

import tracemalloc
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from cut_clients import SHAPE, clients, some
from torch import Tensor

from fedcommons import ClientDatasets, Contributions, Examples
from fedcommons.privacy import gaussian
from fedcommons.privacy.accountants import epsilon
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.noise import CipherStream
from fedcommons.privacy.statement import statement
from fedcommons.seeding import wide_generator
from fedcommons.sharing.dpcda import DPCDA, Correlated, exposure

WHOLE = DPCDA(noise_multiplier=2.0, per_class=2, mix=100.0)
"""A strategy that samples every image (q = 1)."""


def messages(stage: DPCDA, start: ClientDatasets, step: int = 0) -> Tensor:
    return stage.messages(start, stage.draws(start), step).values


def noise(stage: DPCDA, start: ClientDatasets) -> Tensor:
    return messages(stage, start) - messages(replace(stage, noise_multiplier=0.0), start)


def test_noise_is_that_of_one_draw_but_secret_noise_needs_little_more_memory_than_its_array() -> None:
    """The correlated part sums to 0, and one client alone has none."""
    for size in ((7, 3, 40), (1, 3, 40)):
        z, independent = wide_generator("noise of the test").standard_normal((2, *size))
        e = 50 * (z - z.mean(0))
        result = Correlated(wide_generator("noise of the test"), 50.0).standard_normal(size)
        assert np.abs(result - (e + 50 * independent / sqrt(size[0]))).max() < 1e-12
        assert np.abs((result - 50 * independent / sqrt(size[0])).sum(0)).max() < 1e-11
    assert np.abs(e).max() == 0
    secret = Correlated(CipherStream(bytes(32)), 1.0)
    tracemalloc.start()
    size_of_noise = secret.standard_normal((20, 10, 500)).nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * size_of_noise


@pytest.mark.parametrize("n", [1, 2, 5])
def test_noise_has_the_variance_tau_squared_in_a_message_and_in_the_total(n: int) -> None:
    """Over 400 seeds, to four standard errors; two messages have the covariance -tau^2/S."""
    streams = [Correlated(wide_generator("noise of the test", seed), 3.0) for seed in range(400)]
    samples = np.stack([stream.standard_normal((n, 4)) for stream in streams])
    assert samples.sum(1).var() == pytest.approx(9.0, rel=4 * sqrt(2 / 1600))
    assert samples[:, 0].var() == pytest.approx(9.0, rel=4 * sqrt(2 / 1600))
    if n > 1:
        assert (samples[:, 0] * samples[:, 1]).mean() == pytest.approx(-9 / n, abs=4 * 9 * sqrt((1 + 1 / n**2) / 1600))


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_exposure_is_that_of_all_that_a_party_knows_together(n: int, server: bool) -> None:
    """Reference: v^T Sigma^+ v of messages (or their sum), the mean of z, and the colluding clients' z and z'."""
    identity, mean = np.eye(n), np.full((n, n), 1 / n)
    sent = np.hstack([identity - mean, identity / sqrt(n)])  # as a function of (z, z')
    for unknown in range(1, n + 1):
        seen = [sent if server else sent.sum(0, keepdims=True), np.hstack([mean[:1], 0 * mean[:1]])]
        seen += [np.eye(2 * n)[unknown:n], np.eye(2 * n)[n + unknown :]]
        knowledge = np.vstack(seen)
        v = np.eye(len(knowledge))[0]
        assert exposure(n, unknown, server) == pytest.approx(v @ np.linalg.pinv(knowledge @ knowledge.T) @ v, rel=1e-6)


def test_an_image_moves_one_row_of_its_clients_message_by_one_at_most() -> None:
    """Blanked, and relabelled: out of one row, into another. Bright images are darkened to norm 1."""
    silent, start = replace(WHOLE, noise_multiplier=0.0, clip=0.3), clients(20, 40)
    before, largest = messages(silent, start), 0.0
    for i in range(60):
        x, y = some(60).x.clone(), some(60).y.clone()
        x[i] = 0
        moved = (messages(silent, clients(20, 40, data=Examples(x, y))) - before).norm(dim=2)
        y[i] = (y[i] + 1) % 10
        relabelled = (messages(silent, clients(20, 40, data=Examples(some(60).x, y))) - before).norm(dim=2)
        assert moved.nonzero().tolist() == [[i // 20, int(some(60).y[i])]]
        assert sorted(relabelled.nonzero().tolist()) == sorted([[i // 20, int(some(60).y[i])], [i // 20, int(y[i])]])
        largest = max(largest, moved.max().item(), relabelled.max().item())
    assert 1 - 1e-5 < largest <= 1 + 1e-12


@pytest.mark.parametrize("clip", [0.4, 1.0])
def test_without_noise_and_with_every_image_a_mixture_is_the_scaled_mean_of_a_class(clip: float) -> None:
    """Image by image in numpy; the number of images per class is the public 60/10 for all classes."""
    start = clients(7, 31)
    images = replace(WHOLE, noise_multiplier=0.0, clip=clip).make(start, ()).store[slice(60, None)]
    assert sorted(images.y.tolist()) == sorted([*range(10)] * 2)
    for x, c in zip(images.x, images.y.tolist(), strict=True):
        total = np.zeros(SHAPE)
        for real in start.clients.store.x[start.clients.store.y == c].numpy() / 255:
            total += real * min(1, clip / np.sqrt((real**2).mean()))
        assert np.abs(x.numpy() - np.clip(255 * total / 6, 0, 255)).max() <= 1


def test_a_class_that_a_client_lacks_has_as_much_noise_as_others_at_the_same_rate() -> None:
    data = Examples(some(60).x, torch.arange(60) // 6)  # client 0 has class 0 only
    start, stage = clients(6, data=data), replace(WHOLE, mix=1.0)
    assert stage.rate(start) == pytest.approx(1 / 3)
    of_missing = messages(stage, start)[0, 1:]
    assert of_missing.std().item() == pytest.approx(stage.tau(start), rel=4 / sqrt(2 * of_missing.numel()))


def test_a_change_of_one_client_renews_the_noise_of_all_and_each_mixture_has_its_own() -> None:
    """With a part of the noise kept, the difference of two runs would disclose z of the changed client."""
    x = some(60).x.clone()
    x[50] = 0
    start, changed = clients(20, 40), clients(20, 40, data=Examples(x, some(60).y))
    noises = [noise(WHOLE, start), noise(WHOLE, changed)]
    assert torch.equal(noises[0], noise(WHOLE, start))
    both = torch.stack([each.flatten() for each in (*noises, messages(WHOLE, start, 1) - messages(WHOLE, start))])
    assert torch.corrcoef(both[:2])[0, 1].abs() < 4 / sqrt(both.shape[1])
    assert both[2].std() > 1.2 * WHOLE.tau(start)


@pytest.mark.parametrize(("n", "k", "mix"), [(3, None, 0.5), (3, 0, 100.0), (2, 0, 100.0), (1, None, 2.0), (3, 2, 2.0)])
def test_the_promise_is_the_accountants_epsilon_against_the_server_with_k_clients(n: int, k: Any, mix: float) -> None:
    """Other parties have the epsilon of their own multiplier tau/sqrt(X), and larger ones are listed."""
    start = clients(*range(20, 20 * n, 20), n=20 * n)
    stage = DPCDA(target_epsilon=3.0, per_class=7, mix=mix, colluding=k)
    stage.check_data(start)
    most, q = stage.n_colluding(n), min(1.0, mix / 2)
    _, events = stage.release(start, Contributions.none(start))
    ledger, views = Ledger.before_rounds([replace(e, commons=True) for e in events]), stage.views(start)
    for client in range(n):
        assert ledger.commons.epsilon(client, 1e-5) == epsilon(q, stage.sigma(start), 7, 1e-5)
    assert ledger.commons.largest_epsilon(1e-5) == pytest.approx(3.0, abs=0.011)
    spent = {party: gaussian.epsilon(mu, 1e-5) for party, mu in views.items()}
    promised = f"the server and {most} of {n} clients together" if most else "the server"
    assert spent[promised] == pytest.approx(ledger.commons.largest_epsilon(1e-5), rel=1e-6)
    assert spent["outsiders, who see images"] == pytest.approx(epsilon(q, stage.tau(start), 7, 1e-5), rel=1e-6)
    result = statement(ledger, n, 1e-5, 0, local=True, secret=True, views=views)
    closer = [line for line in result["uncovered"] if "larger epsilons" in line]
    assert bool(closer) == ("the server and all other clients together" in views) == (most < n - 1)
    assert all(("another client" in line) == (k == 0 and n == 2) for line in closer)
    assert ("parties against which" in result["in_words"][-1]) == bool(closer)
    assert not any("see more" in line for line in (*closer, *result["in_words"]))  # another client sees less
    assert f"sees only the mean of the clients' noise z and at most {most} clients" in result["in_words"][0]


def test_by_default_at_least_one_client_and_less_than_a_third_may_collude() -> None:
    assert [WHOLE.n_colluding(n) for n in (1, 2, 3, 6, 7, 9, 10, 100)] == [0, 1, 1, 1, 2, 2, 3, 33]


def test_what_is_said_before_a_run_is_the_noise_of_a_pixel() -> None:
    stage, start = replace(WHOLE, clip=0.1), clients(20, 40)
    (sentence,) = stage.beforehand(start)
    deviation = float(sentence.partition("deviation ")[2].partition(" per")[0])
    total = messages(stage, start).sum(0) - messages(replace(stage, noise_multiplier=0.0), start).sum(0)
    assert deviation == pytest.approx((total / 6 * 0.1 * 8).std().item(), rel=0.15)
    assert replace(stage, noise_multiplier=0.0).beforehand(start) == []
