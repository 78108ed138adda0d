"""FedDPMS: who gives and receives when, which draws are kept, what a mean hides, FedAvg without an exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from broken_noise import OfNoData
from closed_forms import Digits

from fedcommons import Facts, LocalSGD, generator
from fedcommons.algorithms import latents
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddpms import FedDPMS
from fedcommons.federation.client_sampling import participants
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.stragglers import Independent
from fedcommons.flat_tensors import Flat, data, flat, select
from fedcommons.privacy.accountants import composed, epsilon
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.statement import statement
from fedcommons.testing.spy import Spy
from papers.feddpms import costs

LOCAL = LocalSGD(4, 5)
PRIVATE = LocalSGD(2, 5, dp=DPSGD(1.0, 1.0))
NEAR = FedDPMS(preliminary_rounds=2, quota=4, sigma=0.1, tries=100)
SIZES = (30, 40, 36, 50, 28)


@cache
def _play(
    digits: Digits, method: FedDPMS, *arguments: Any, weighting: str = "uniform", **options: Any
) -> tuple[list[Standing], Spy, Plan]:
    federation = digits(sizes=SIZES, method=method, lr=0.2).training(LOCAL, weighting)
    plan, spy = federation.plan(*arguments, **options), Spy(method)
    return [now for now, _ in federation.run(spy, plan)], spy, plan


def _decoder(model: Flat) -> Flat:
    return select(model, [name for name in model if name.startswith("decoder.")])


COURSES: list[tuple[FedDPMS, int, dict[str, Any]]] = [
    (replace(NEAR, helpers=2), 5, {"weighting": "samples"}),
    (replace(NEAR, preliminary_rounds=1), 12, {"participation": 0.4, "seed": 5, "late": Independent(0.4)}),
]


@pytest.mark.parametrize(("method", "rounds", "options"), COURSES)
@pytest.mark.long
def test_each_client_gives_at_its_first_selection_and_receives_at_the_first_it_can(
    method: FedDPMS, rounds: int, options: dict[str, Any], digits: Digits
) -> None:
    """Against the rule played by hand; a lost reply is as if not selected. Images that joined count in the weights."""
    played, spy, plan = _play(digits, method, rounds, **options)
    contributions: dict[int, Any] = {}
    received: dict[int, bool] = {}  # by client: whether it had contributed before
    for round in range(1, rounds + 1):
        selection = participants(5, plan.participation, plan.seed, round)
        late = plan.straggler_rule(selection, plan.facts, round, plan.seed) if plan.straggler_rule else {}
        answers = [i for i in selection if i not in late]
        is_second = round > 1 and bool(data(played[round - 2].state["second"]))
        before = {i: data(each["labels"]).tolist() for i, each in contributions.items()}
        for client, call in zip(answers, (call for call in spy.calls if call.round == round), strict=True):
            individual, reply = call.message.individual, call.reply
            gives = is_second and client not in before
            assert ("decoder" in individual) == ("codes" in reply.each) == gives
            scarce, images = data(played[0].state["scarce"])[client].tolist(), (reply.memory or {}).get("images")
            helpers = latents.assistants(client, scarce, before, method.helpers) if client not in received else []
            assert ("codes" in individual) == (helpers != [])
            if helpers:
                received[client] = client in before
                theirs = torch.cat([data(contributions[j]["codes"]) for j in helpers])
                assert torch.equal(data(individual["codes"]), theirs)
                assert images is not None
                assert len(data(images)) == len(theirs)
                assert reply.weight == (SIZES[client] + len(theirs) if "weighting" in options else 1)
            contributions |= {client: reply.each} if gives else {}
    assert len(received) >= 2
    assert any(received.values())
    assert sorted(data(played[-1].state["received"]).tolist()) == sorted(received)


def test_stage_one_goes_on_until_a_decoder_has_arrived(digits: Digits) -> None:
    """No client answers in round 2, the last of stage I."""

    def late(joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        return {i: 0.0 for i in joined if round == 2}

    federation = digits(sizes=SIZES, method=NEAR).training(LocalSGD(1, 50))
    played = federation.run(NEAR, federation.plan(4, late=late))
    assert [bool(data(now.state["second"])) for now, _ in played] == [False, False, True, True]


@pytest.mark.long
def test_the_decoder_is_the_mean_of_the_clients_after_stage_one_and_bytes_are_closed_forms(digits: Digits) -> None:
    """After stage I the decoder is fixed; each client sends and gets it once; besides models, only codes travel."""
    method, rounds, options = COURSES[0]
    played, spy, _ = _play(digits, method, rounds, **options)
    initial = _decoder(digits(sizes=SIZES, method=NEAR, lr=0.2).model)
    assert torch.equal(_decoder(played[0].model).buffer, initial.buffer)
    decoders = [flat(call.reply.memory or {}, "decoder").buffer for call in spy.calls if call.round == 2]
    mean = _decoder(played[1].model).buffer
    torch.testing.assert_close(mean, torch.tensor(SIZES) / sum(SIZES) @ torch.stack(decoders))
    assert not torch.equal(decoders[0], decoders[1])
    assert all(torch.equal(_decoder(now.model).buffer, mean) for now in played[2:])
    decoder = len(initial.buffer)
    theta = len(played[0].model.buffer) - decoder
    up = [sum(data(x).nbytes for x in call.reply.sums.values()) for call in spy.calls[::5]]
    assert up == [4 * theta, 4 * (theta + decoder)] + 3 * [4 * theta]
    k, last, flags = 5, 2, 1 + 3  # a byte to ask for decoders, one in each round of stage II
    sent = sum(len(data(c.reply.each["codes"])) for c in spy.calls if "codes" in c.reply.each)
    got = sum(len(data(c.message.individual["codes"])) for c in spy.calls if "codes" in c.message.individual)
    assert costs.expected_downloads(rounds, last, k, k) == k
    assert played[-1].traffic.down == 4 * k * (rounds * theta + decoder) + k * flags + got * (8 * 4 + 8)
    assert played[-1].traffic.up == 4 * k * (rounds * theta + decoder) + sent * (8 * 4 + 8)
    assert costs.of_decoder(rounds, last, k, k) == 4 * k * theta / (8 * k * rounds * theta)
    assert any(len(data(c.reply.each["codes"])) == 8 for c in spy.calls if c.round == 3)  # two classes of four codes
    assert costs.of_codes(4, 2, 8, theta) == 8 * 8 / theta


@pytest.mark.long
def test_without_lambda_and_exchange_it_is_fedavg_bit_for_bit(digits: Digits) -> None:
    """Through both stages: codes that are sent in the last round reach no client."""
    federation = digits(SIZES, dropout=0.3, method=NEAR).training(LocalSGD(1, 10), "samples")
    make = federation.module

    def module() -> Any:
        created: Any = make()
        created.trade_off = 0.0
        return created

    federation = replace(federation, module=module)
    method = replace(NEAR, preliminary_rounds=2, tries=5)
    ours, theirs = (federation.run(m, federation.plan(3)) for m in (method, FedAvg()))
    assert all(torch.equal(a.model.buffer, b.model.buffer) for (a, _), (b, _) in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("second", "alike"), [(True, True), (False, False)])
def test_only_in_stage_one_the_autoencoders_loss_has_a_say(second: bool, alike: bool, digits: Digits) -> None:
    federation = digits(SIZES, method=NEAR).training(LOCAL)
    rows, result = federation.data.clients[0], []
    for trade_off in (0.05, 5.0):
        work: Any = federation.work()
        work.module.trade_off = trade_off
        state = {**NEAR.start(federation.model, federation.plan(4).facts, 0), "second": torch.tensor(second)}
        result.append(data(NEAR.client(work, NEAR.down(state, 1, 0), {}, rows, 1, 7).sums["delta"]))
    assert torch.equal(*result) == alike


SOUND = FedDPMS(preliminary_rounds=1, quota=4, privacy="sound", sigma=2.0, clip=3.0, spread=0.5)


def test_private_means_are_of_the_servers_encoder_which_has_not_seen_the_clients_data(digits: Digits) -> None:
    """Another image of one class changes that class's mean alone: not the others', through the trained encoder."""
    federation = digits(SIZES, method=SOUND, lr=0.2).training(LOCAL)
    work, client_data = federation.work(), federation.data.clients[0]
    state = {**SOUND.start(federation.model, federation.plan(2).facts, 0), "second": torch.tensor(True)}
    other = replace(client_data, x=torch.cat([255 - client_data.x[:1], client_data.x[1:]]))
    replies = []
    for rows in (client_data, other):
        work.noise = OfNoData(work.source)
        replies.append(SOUND.client(work, SOUND.down(state, 2, 0), {}, rows, 2, 7))
    labels = data(replies[0].each["labels"])
    assert sorted(labels.tolist()) == [0, 1]
    same = (data(replies[0].each["codes"]) == data(replies[1].each["codes"])).all(1)
    assert same.tolist() == (labels != client_data.y[0]).tolist()
    assert not torch.equal(data(replies[0].sums["delta"]), data(replies[1].sums["delta"]))


@pytest.mark.long
def test_sound_charges_one_gaussian_release_beside_dp_sgd_and_only_classes_are_uncovered(digits: Digits) -> None:
    federation = digits(method=SOUND).training(PRIVATE, "samples")
    spy = Spy(replace(SOUND, tries=5))
    ledger = federation.run(spy, federation.plan(3))[-1][0].ledger
    assert any("codes" in call.message.individual for call in spy.calls)
    for client, n in enumerate((9, 16, 12, 20, 7)):
        assert ledger.updates.covered[client] == {(5 / n, 1.0): 6 * -(-n // 5)}
        assert ledger.commons.covered[client] == {(1.0, 2.0): 1}
    assert not ledger.updates.uncovered
    stated = statement(ledger, 5, 1e-3, 0, local=True, secret=True)
    largest = composed(((5 / 7, 1.0, 12), (1.0, 2.0, 1)), 1e-3)
    assert stated["epsilon_local_training"]["largest"] == pytest.approx(largest)
    uncovered = [name.partition(" (")[0] for name in ledger.commons.uncovered]  # classes that a client has most of
    assert uncovered == ["class counts", "labels"]
    assert stated["pool_epsilon_max"] is stated["epsilon_of_messages"] is None
    assert f"for codes alone epsilon = {epsilon(1.0, 2.0, 1, 1e-3):.4g}" in stated["in_words"][0]


def test_as_printed_nothing_is_certified_and_the_ledger_says_why(digits: Digits) -> None:
    federation = digits(method=NEAR).training(PRIVATE)
    ledger = federation.run(replace(NEAR, tries=20), federation.plan(3))[-1][0].ledger
    uncovered = {name.partition(" (")[0]: times for name, times in ledger.uncovered.items()}
    assert uncovered == {"codes": 5, "labels": 5, "class counts": 5}
    assert ledger.n_disclosed  # the images of classes of which a code was recognised
    stated = statement(ledger, 5, 1e-3, 0, local=True, secret=True)
    assert stated["epsilon_of_messages"] is None
    assert "not certified" in " ".join(stated["uncovered"])


@pytest.mark.long
def test_a_client_that_recognised_nothing_is_helped_again_until_it_does(digits: Digits) -> None:
    """With this much noise some clients recognise nothing at first; no client is helped after it was served."""
    method = replace(SOUND, sigma=2.0, spread=0.1, quota=1, tries=1)
    played, spy, _ = _play(digits, method, 9)
    served: dict[int, list[bool]] = {}
    for call, client in zip(spy.calls, 9 * [0, 1, 2, 3, 4], strict=True):
        if "codes" in call.message.individual:
            served.setdefault(client, []).append(bool(data(call.reply.each["served"])))
            assert served[client][-1] == ("images" in (call.reply.memory or {}))
            assert served[client][-1] or "decoder" in (call.reply.memory or {})  # it decodes the next ones
    assert any(len(tries) > 1 and tries[-1] for tries in served.values())  # in vain at first, then not
    assert all(not any(tries[:-1]) for tries in served.values())
    done = sorted(client for client, tries in served.items() if tries[-1])
    assert sorted(data(played[-1].state["received"]).tolist()) == done


@pytest.mark.long
def test_in_the_ablations_clients_get_the_givers_own_images_or_nothing(digits: Digits) -> None:
    """A client sends at most the quota of each class; real images that it sends count as disclosed."""
    of_client = [{x.numpy().tobytes() for x in rows.x} for rows in digits(sizes=SIZES, method=NEAR).data.clients]
    method = replace(NEAR, preliminary_rounds=1)
    played, spy, _ = _play(digits, replace(method, receive="real"), 3)
    for client_images, call in zip(of_client, (call for call in spy.calls if call.round == 2), strict=True):
        images, labels = (data(call.reply.each[name]) for name in ("codes", "labels"))
        assert {x.numpy().tobytes() for x in images} <= client_images
        assert (labels.bincount() <= NEAR.quota).all()
    received = next(call for call in spy.calls if call.round == 3 and "codes" in call.message.individual)
    assert torch.equal(data((received.reply.memory or {})["images"]), data(received.message.individual["codes"]))
    assert played[-1].ledger.n_disclosed
    *_, nothing = _play(digits, replace(method, receive="nothing"), 3)[1].calls
    assert "images" not in (nothing.reply.memory or {})


@pytest.mark.parametrize(
    ("scarce", "offers", "expected"),
    [
        ([1, 2], {0: [1, 2], 1: [3, 4], 2: []}, []),  # never itself, though it fits best; no overlap gives none
        ([1, 2, 3], {4: [1, 2], 2: [2, 3], 3: [1, 3]}, [2, 3]),  # ties to the lowest numbers
        ([1, 2, 3], {1: [3, 3, 3, 3], 2: [1, 2]}, [2, 1]),  # the best first; classes count, not codes
        ([1, 2, 3], {4: [1, 2], 2: [7], 3: [3]}, [4, 3]),  # 2 stays behind, as it has nothing to give
    ],
)
def test_matching(scarce: Sequence[int], offers: Mapping[int, Sequence[int]], expected: list[int]) -> None:
    assert latents.assistants(0, scarce, offers, 2) == expected
    assert latents.assistants(0, scarce, offers, 1) == expected[:1]


def test_abundant_and_scarce_classes_and_the_decay_of_the_learning_rate(digits: Digits) -> None:
    """With three epochs a round, rounds 1 to 8 begin after 0, 3, ..., 21 epochs; the rate falls after every ten."""
    counts = torch.tensor([5, 0, 9, 5, 1])
    assert latents.abundant(counts, 3) == [2, 0, 3]
    assert latents.abundant(counts, 5) == [2, 0, 3, 4]  # a class without examples is not abundant
    assert latents.scarce(torch.stack([counts, counts.flip(0)]), 3).tolist() == [[1, 4, 0], [3, 0, 1]]
    work = digits(lr=0.2).training(LocalSGD(3, 5)).work()
    rates = [latents.decayed(work, 0.5, round) for round in range(1, 9)]
    assert rates == pytest.approx([0.2] * 4 + [0.1] * 3 + [0.05])
    assert latents.decayed(work, 1.0, 8) is None


def test_the_quota_is_exact_tries_are_bounded_and_every_code_kept_is_recognised(digits: Digits) -> None:
    """With a class that three in five draws are taken for, so that the last try finds more than are missing."""
    work, seen = digits(SIZES, method=FedDPMS()).work(), []
    module: Any = work.module
    module.decoder.register_forward_hook(lambda layer, inputs, out: seen.append(len(inputs[0])))
    spread, label, centre, draws = 3.0, 4, torch.zeros(8), generator("a test")
    with latents.evaluation_mode(work):
        logits = module(module.decoder(spread * torch.randn(500, 8, generator=generator("others"))))
        behind = logits[:, torch.arange(10) != label].max(1).values - logits[:, label]
        work.named["classifier.bias"][label] += behind.quantile(0.6)
        never = int(module(module.decoder(centre[None])).argmin())
    seen.clear()
    result, labels = latents.sample_recognised_codes(work, [(label, centre)], spread, 7, 100, generator("a test"))
    assert (result.shape, labels) == ((7, 8), [label] * 7)
    assert 1 < len(seen) < 100
    codes = torch.cat([spread * torch.randn(7, 8, generator=draws) for _ in seen])
    with latents.evaluation_mode(work):
        wanted = codes[module(module.decoder(codes)).argmax(1) == label]
    assert len(wanted) > 7
    assert torch.equal(wanted[:7], result)  # the first ones, in the order of the draws
    seen.clear()
    twice = [(never, centre)] * 2
    result, labels = latents.sample_recognised_codes(work, twice, 0.0, 5, 6, generator("a test"))
    assert seen == [5] * 6 * 2
    assert (result.shape, labels) == ((0, 8), [])


def test_it_trains_on_as_many_points_as_it_has_drawn_from_its_own_and_the_decoded(digits: Digits) -> None:
    rows = digits(SIZES).data.clients[0]
    images, labels = torch.full((300, 1, 8, 8), 255, dtype=torch.uint8), torch.full((300,), 9)
    bar = latents.augmented(rows, images, labels, 3)
    assert (len(bar), bar.size, bar.n_own) == (30, 330.0, rows.n_own)
    decoded = (bar.x == 255).flatten(1).all(1)
    assert torch.equal(bar.y == 9, decoded)
    assert len(bar.x[~decoded].flatten(1).unique(dim=0)) == (~decoded).sum()  # nothing twice
    shares = [(latents.augmented(rows, images, labels, seed).y == 9).float().mean().item() for seed in range(50)]
    assert np.mean(shares) == pytest.approx(300 / 330, abs=4 * 0.05 / 50**0.5)


def test_weights_of_examples_go_with_them_and_a_decoded_image_weighs_one(digits: Digits) -> None:
    rows = digits((4,)).data.clients[0]
    rows = replace(rows, weight=torch.tensor([0.5, 0.5, 1.5, 1.5]), total=2.0)  # raw weights 1/4, 1/4, 3/4, 3/4
    bar = latents.augmented(rows, torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.full((4,), 9), 1)
    assert bar.weight is not None
    assert bar.size == 6.0
    assert bar.weight.mean() == pytest.approx(1)
    raw = {float(w) for w in bar.weight / bar.weight[bar.y == 9][0]}
    assert {1.0} < raw <= {1.0, 0.25, 0.75}


def test_a_noisy_mean_is_of_clipped_codes_with_the_noise_that_is_stated() -> None:
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [60.0, 80.0]])  # norms 5, 1/2, 0, 100
    clean = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.6, 0.8]]).mean(0)
    draws = [latents.noisy_mean(z, 1.0, 2.0, np.random.default_rng(s))[0] for s in range(2000)]
    noise = torch.stack(draws) - clean
    assert noise.mean().abs() < 4 * 0.5 / 4000**0.5
    assert noise.std().item() == pytest.approx(2.0 / 4, rel=4 / 8000**0.5)  # sigma C / m
    release = latents.noisy_mean(z, 1.0, 2.0, np.random.default_rng(0))[1]
    assert (release.sigma, release.sensitivity, release.steps, release.q) == (2.0, 1.0, 1, 1.0)
    for j in range(4):  # one image blanked out, its place kept: the sum moves by at most C
        blank = z.clone()
        blank[j] = 0
        a, b = (latents.noisy_mean(codes, 1.0, 2.0, np.random.default_rng(0))[0] for codes in (z, blank))
        assert 4 * (a - b).norm() <= 1 + 1e-6


def test_the_expected_downloads_are_the_mean_number_of_clients_drawn_in_stage_two() -> None:
    result = [len({i for round in range(6, 13) for i in participants(20, 0.2, seed, round)}) for seed in range(400)]
    expected = costs.expected_downloads(12, 5, 20, 4)
    assert np.mean(result) == pytest.approx(expected, abs=4 * np.std(result) / 400**0.5)
    assert costs.of_codes(200, 3, 128, 10**6) == pytest.approx(0.0768)  # A.9's example
