"""FedDPMS: who gives when, who receives from whom, what is kept, and what it comes to without an exchange."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import Digits

from fedcommons.accounting.statement import statement
from fedcommons.algorithms import codes
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddpms import FedDPMS
from fedcommons.core.accountants import composed, epsilon
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.noise import Draws, Noise
from fedcommons.core.work import Work
from fedcommons.federation.participation import participants
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.stragglers import Independent
from fedcommons.tensors import Flat, data, flat, select
from fedcommons.testing.spy import Spy
from lightning_modules import VAEClassifier
from papers.feddpms import costs as feddpms_costs

LOCAL = LocalSGD(4, 5)
NEAR = FedDPMS(preliminary_rounds=2, quota=4, sigma=0.1, tries=100)
SIZES = (30, 40, 36, 50, 28)


@cache
def _play(
    digits: Digits, method: FedDPMS, *given: Any, weighting: str = "uniform", **options: Any
) -> tuple[list[Standing], Spy, Plan]:
    federation = digits(sizes=SIZES, method=method, lr=0.2).training(LOCAL, weighting)
    plan, spy = federation.plan(*given, **options), Spy(method)
    return [now for now, _ in federation.play(spy, plan)], spy, plan


def _decoder(model: Flat) -> Flat:
    return select(model, [name for name in model if name.startswith("decoder.")])


@pytest.mark.parametrize(("helpers", "weighting"), [(1, "uniform"), (2, "samples")])
@pytest.mark.long
def test_all_give_after_the_first_round_of_stage_two_and_receive_in_the_next(
    helpers: int, weighting: str, digits: Digits
) -> None:
    """From then on clients weigh by their data with the images that joined, or alike."""
    played, spy, _ = _play(digits, replace(NEAR, helpers=helpers), 6, weighting=weighting)
    calls = {(call.round, client): call for call, client in zip(spy.calls, 6 * [0, 1, 2, 3, 4], strict=False)}
    given = {client: data(calls[3, client].reply.each["labels"]).tolist() for client in range(5)}
    assert sum(map(bool, given.values())) >= 3
    received = 0
    for (round, client), call in calls.items():
        assert ("decoder" in call.message.own) == ("codes" in call.reply.each) == (round == 3)
        scarce = data(played[0].state["scarce"])[client].tolist()
        from_whom = codes.assistants(client, scarce, given, helpers)
        assert ("codes" in call.message.own) == (round == 4 and from_whom != [])
        if "codes" in call.message.own:
            received += len(from_whom)
            theirs = torch.cat([data(calls[3, j].reply.each["codes"]) for j in from_whom])
            assert torch.equal(data(call.message.own["codes"]), theirs)
            assert call.reply.memory is not None
            assert len(data(call.reply.memory["images"])) == len(theirs) == sum(len(given[j]) for j in from_whom)
            assert call.reply.weight == (SIZES[client] + len(theirs) if weighting == "samples" else 1)
    assert received >= 3 * helpers  # some have two
    assert sorted(data(played[-1].state["received"]).tolist()) == sorted(
        client for client in range(5) if "codes" in calls[4, client].message.own
    )


@pytest.mark.parametrize("rule", [None, Independent(0.4)], ids=["all reply", "some are late"])
@pytest.mark.long
def test_with_partial_participation_each_gives_at_its_first_selection_and_receives_at_the_first_it_can(
    rule: Independent | None, digits: Digits
) -> None:
    """Against the rule played by hand over who answered in which round; a lost reply is as if not selected."""
    method = replace(NEAR, preliminary_rounds=1)
    played, spy, plan = _play(digits, method, 12, participation=0.4, seed=5, late=rule)
    given: dict[int, list[int]] = {}
    received: set[int] = set()
    late = 0
    for round in range(2, 13):
        answers = [i for i in participants(5, 0.4, 5, round)]
        if plan.late:
            answers = [i for i in answers if i not in plan.late(answers, plan.facts, round, 5)]
        calls = dict(zip(answers, (call for call in spy.calls if call.round == round), strict=True))
        if not data(played[round - 2].state["second"]):
            continue
        before = dict(given)
        for client, call in calls.items():
            assert ("decoder" in call.message.own) == (client not in before)
            scarce = data(played[0].state["scarce"])[client].tolist()
            expected = client not in received and codes.assistants(client, scarce, before, 1) != []
            assert ("codes" in call.message.own) == expected
            if expected:
                received.add(client)
                late += client in before
            if client not in before:
                given[client] = data(call.reply.each["labels"]).tolist()
    assert len(received) >= 2
    assert late


def test_stage_one_goes_on_until_a_decoder_has_arrived(digits: Digits) -> None:
    """With this seed no client answers in round 2, the last of stage I."""
    method = replace(NEAR, preliminary_rounds=2)
    for seed in range(100):
        federation = digits(sizes=SIZES, method=method).training(LocalSGD(1, 50))
        plan = federation.plan(4, participation=0.4, seed=seed, late=Independent(0.7))
        silent = [facts["stragglers"] == facts["clients"] for _, facts in federation.play(FedAvg(), plan)]
        if silent[1:3] == [True, False]:
            break
    played = [now for now, _ in federation.play(method, plan)]  # pyright: ignore[reportPossiblyUnboundVariable]
    assert [bool(data(now.state["second"])) for now in played] == [False, False, True, True]


@pytest.mark.long
def test_the_decoder_is_the_mean_of_the_clients_after_stage_one_and_never_changes_again(digits: Digits) -> None:
    played, spy, _ = _play(digits, NEAR, 6)
    initial = _decoder(digits(sizes=SIZES, method=NEAR, lr=0.2).model)
    assert torch.equal(_decoder(played[0].model).buffer, initial.buffer)
    own = [flat(call.reply.memory or {}, "decoder").buffer for call in spy.calls if call.round == 2]
    mean = _decoder(played[1].model).buffer
    torch.testing.assert_close(mean, torch.stack(own).mean(0))
    assert not torch.equal(own[0], own[1])
    for now in played[2:]:
        assert torch.equal(_decoder(now.model).buffer, mean)
    up = [sum(data(x).nbytes for x in call.reply.sums.values()) for call in spy.calls[::5]]
    whole, rest = played[0].model.buffer.nbytes, played[0].model.buffer.nbytes - initial.buffer.nbytes
    assert up == [rest, whole, rest, rest, rest, rest]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.long
def test_without_lambda_and_exchange_it_is_fedavg_bit_for_bit(weighting: str, digits: Digits) -> None:
    """Through both stages: codes that are given in the last round reach no client."""
    local = LocalSGD(1, 10)
    federation = digits(SIZES, dropout=0.3, method=NEAR).training(local, weighting)
    make = federation.module

    def module() -> VAEClassifier:
        made = make()
        assert isinstance(made, VAEClassifier)
        made.trade_off = 0.0
        return made

    federation = replace(federation, module=module)
    plan = federation.plan(4)
    ours, theirs = (federation.play(m, plan) for m in (replace(NEAR, preliminary_rounds=3, tries=5), FedAvg()))
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert torch.equal(a.model.buffer, b.model.buffer)
    joint = digits(SIZES, dropout=0.3, method=NEAR).training(local, weighting).play(FedAvg(), plan)
    assert not torch.equal(joint[-1][0].model.buffer, theirs[-1][0].model.buffer)  # lambda has a say


@pytest.mark.parametrize(("second", "alike"), [(True, True), (False, False)])
def test_only_in_stage_one_the_autoencoders_loss_has_a_say(second: bool, alike: bool, digits: Digits) -> None:
    federation = digits(SIZES, method=NEAR).training(LOCAL)
    rows, result = federation.data.clients[0], []
    for trade_off in (0.05, 5.0):
        work = federation.work()
        assert isinstance(work.module, VAEClassifier)
        work.module.trade_off = trade_off
        state = {**NEAR.start(federation.model, federation.plan(4).facts, 0), "second": torch.tensor(second)}
        result.append(data(NEAR.client(work, NEAR.down(state, 1, 0), {}, rows, 1, 7).sums["delta"]))
    assert torch.equal(*result) == alike


SOUND = FedDPMS(preliminary_rounds=1, quota=4, privacy="sound", sigma=2.0, clip=3.0, spread=0.5)


class OfNoData(Noise):
    """The same noise for any data."""

    def call(self, purpose: str, *data: torch.Tensor) -> Draws:
        return super().call(purpose)


def test_private_means_are_made_with_the_servers_encoder_which_has_not_seen_the_clients_data(
    digits: Digits,
) -> None:
    """Another image of one class changes that class's mean alone: not the others', through the trained encoder.

    Other data have other noise, so both are played with the noise of neither.
    """
    federation = digits(SIZES, method=SOUND, lr=0.2).training(LOCAL)
    work, own = federation.work(), federation.data.clients[0]
    state = {**SOUND.start(federation.model, federation.plan(2).facts, 0), "second": torch.tensor(True)}
    first = int(own.y[0])
    other = replace(own, x=torch.cat([255 - own.x[:1], own.x[1:]]))
    replies = []
    for rows in (own, other):
        work.noise = OfNoData(work.source)
        replies.append(SOUND.client(work, SOUND.down(state, 2, 0), {}, rows, 2, 7))
    labels = data(replies[0].each["labels"])
    assert sorted(labels.tolist()) == [0, 1]
    same = (data(replies[0].each["codes"]) == data(replies[1].each["codes"])).all(1)
    assert same.tolist() == (labels != first).tolist()
    assert not torch.equal(data(replies[0].sums["delta"]), data(replies[1].sums["delta"]))


def test_sound_charges_one_gaussian_release_beside_dp_sgd_and_only_classes_are_uncovered(digits: Digits) -> None:
    dp = LocalSGD(2, 5, dp=DPSGD(1.0, 1.0))
    federation = digits(method=SOUND).training(dp, "samples")
    spy = Spy(replace(SOUND, tries=5))
    ledger = federation.play(spy, federation.plan(3))[-1][0].ledger
    assert any("codes" in call.message.own for call in spy.calls)
    for client, n in enumerate((9, 16, 12, 20, 7)):
        assert ledger.updates.covered[client] == {(5 / n, 1.0): 6 * -(-n // 5)}
        assert ledger.commons.covered[client] == {(1.0, 2.0): 1}
    assert not ledger.updates.uncovered
    said = statement(ledger, 5, 1e-3, 0, local=True, secret=True)
    assert said["epsilon_local_training"]["largest"] == pytest.approx(composed(((5 / 7, 1.0, 12), (1.0, 2.0, 1)), 1e-3))
    counts, classes = ledger.commons.uncovered  # which classes a client has most of, so nothing is overall
    assert classes.startswith("labels (abundant and scarce classes")
    assert counts.startswith("class counts (read by the method")
    assert said["pool_epsilon_max"] is said["epsilon_of_messages"] is None
    assert f"for codes alone epsilon = {epsilon(1.0, 2.0, 1, 1e-3):.4g}" in said["in_words"][0]


@pytest.mark.long
def test_as_printed_nothing_is_certified_and_the_ledger_says_why(digits: Digits) -> None:
    dp = LocalSGD(2, 5, dp=DPSGD(1.0, 1.0))
    federation = digits(method=NEAR).training(dp)
    ledger = federation.play(replace(NEAR, tries=20), federation.plan(3))[-1][0].ledger
    uncovered = {name.partition(" (")[0]: times for name, times in ledger.uncovered.items()}
    assert uncovered == {"codes": 5, "labels": 5, "class counts": 5}
    assert ledger.given_away  # the images of classes of which a code was recognised
    assert all(0 < n <= (9, 16, 12, 20, 7)[i] for i, n in ledger.given_away.items())
    said = statement(ledger, 5, 1e-3, 0, local=True, secret=True)
    assert said["epsilon_of_messages"] is None
    assert "not certified: codes are not bounded" in " ".join(said["uncovered"])


@pytest.mark.parametrize("helpers", [1, 3])
@pytest.mark.long
def test_with_sound_the_receiver_keeps_what_the_servers_model_recognises(helpers: int, digits: Digits) -> None:
    """Of each mean at most the quota."""
    method = replace(SOUND, sigma=0.1, preliminary_rounds=2, helpers=helpers)
    played, spy, _ = _play(digits, method, 4)
    module = digits(sizes=SIZES, method=method).module()
    work, result, agreed = Work(module, torch.device("cpu")), 0, 0
    most = 0  # the largest number of latent means that one client received
    work.load(played[2].model)
    for call in (call for call in spy.calls if call.round == 4 and "codes" in call.message.own):
        kept = call.reply.memory or {}
        assert bool(data(call.reply.each["served"])) == ("images" in kept)
        if "images" not in kept:
            continue
        images, labels = data(kept["images"]), data(kept["labels"])
        means = data(call.message.own["labels"]).bincount(minlength=10)
        assert (labels.bincount(minlength=10) <= 4 * means).all()
        most = max(most, int(means.sum()))
        with codes.looking(work):
            agreed += int((work.module(images).argmax(1) == labels).sum())
        result += len(labels)
    assert agreed > 0.9 * result > 0  # pixels were rounded since
    assert (most > 2) == (helpers > 1)  # each gives two


@pytest.mark.long
def test_with_sound_who_got_nothing_that_is_recognised_is_helped_again_until_it_does(digits: Digits) -> None:
    """With this much noise some clients recognise nothing at first; no client is helped after it was served."""
    method = replace(SOUND, sigma=2.0, spread=0.1, quota=1, tries=1)
    played, spy, _ = _play(digits, method, 9)
    served: dict[int, list[bool]] = {}
    for call, client in zip(spy.calls, 9 * [0, 1, 2, 3, 4], strict=False):
        if "codes" in call.message.own:
            served.setdefault(client, []).append(bool(data(call.reply.each["served"])))
            assert served[client][-1] == ("images" in (call.reply.memory or {}))
            assert served[client][-1] or "decoder" in (call.reply.memory or {})  # it decodes the next ones
    assert any(len(tries) > 1 and tries[-1] for tries in served.values())  # in vain at first, then not
    assert all(not any(tries[:-1]) for tries in served.values())
    done = sorted(client for client, tries in served.items() if tries[-1])
    assert sorted(data(played[-1].state["received"]).tolist()) == done


@pytest.mark.long
def test_in_the_ablations_clients_get_the_givers_own_images_or_nothing(digits: Digits) -> None:
    """At most the quota of each class; what is given raw counts as given away."""
    federation = digits(sizes=SIZES, method=NEAR)
    own = [{x.numpy().tobytes() for x in federation.data.clients[i].x} for i in range(5)]
    played, spy, _ = _play(digits, replace(NEAR, receive="real"), 4)
    calls = [call for call in spy.calls if call.round == 3]
    for i, call in enumerate(calls):
        images, labels = (data(call.reply.each[name]) for name in ("codes", "labels"))
        assert {x.numpy().tobytes() for x in images} <= own[i]
        assert (labels.bincount() <= NEAR.quota).all()
    received = [call for call in spy.calls if call.round == 4 and "codes" in call.message.own]
    assert received
    for call in received:
        assert torch.equal(data((call.reply.memory or {})["images"]), data(call.message.own["codes"]))
    assert played[-1].ledger.given_away
    *_, nothing = _play(digits, replace(NEAR, receive="nothing"), 4)[1].calls
    assert "images" not in (nothing.reply.memory or {})


@pytest.mark.long
def test_the_bytes_are_the_closed_forms(digits: Digits) -> None:
    """Under full participation every client gets the decoder once, and sends it once; the rest are codes."""
    played, spy, _ = _play(digits, NEAR, 6)
    theta, decoder = len(played[0].model.buffer) - (w := len(_decoder(played[0].model).buffer)), w
    k, rounds, last, flags = 5, 6, 2, 1 + 4  # a byte to ask for decoders, one in each round of stage II
    sent = sum(len(data(c.reply.each["codes"])) for c in spy.calls if "codes" in c.reply.each)
    got = sum(len(data(c.message.own["codes"])) for c in spy.calls if "codes" in c.message.own)
    downloads = feddpms_costs.expected_downloads(rounds, last, k, k)
    assert downloads == k
    assert played[-1].traffic.down == 4 * (k * rounds * theta + downloads * decoder) + k * flags + got * (8 * 4 + 8)
    assert played[-1].traffic.up == 4 * (k * rounds * theta + k * decoder) + sent * (8 * 4 + 8)
    assert 4 * downloads * theta / (8 * k * rounds * theta) == feddpms_costs.of_decoder(rounds, last, k, k)
    quota = sum(len(data(c.reply.each["codes"])) == 8 for c in spy.calls if c.round == 3)
    assert quota  # clients have two classes here, of four codes each
    assert 8 * 8 / theta == feddpms_costs.of_codes(4, 2, 8, theta)


def test_the_expected_downloads_are_the_mean_number_of_clients_drawn_in_stage_two() -> None:
    clients, rounds, last = 20, 12, 5
    result = [
        len({i for round in range(last + 1, rounds + 1) for i in participants(clients, 0.2, seed, round)})
        for seed in range(400)
    ]
    expected = feddpms_costs.expected_downloads(rounds, last, clients, 4)
    assert np.mean(result) == pytest.approx(expected, abs=4 * np.std(result) / 400**0.5)
    assert feddpms_costs.of_codes(200, 3, 128, 10**6) == pytest.approx(0.0768)  # A.9's example


# Bad input
