"""The ledger of runs: metrics stay with the experimenter, class counts are a release, all rounds add up; FedDM."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import Digits

from fedcommons import Clients, Examples, Facts, Flat, LocalSGD, State, UserError, flatten, load_rounds, load_runs
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddm import FedDM
from fedcommons.config import presets
from fedcommons.privacy.accountants import composed, epsilon
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.ledger import Ledger, read
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.privacy.statement import in_short, statement
from fedcommons.runs.assemble import assemble
from fedcommons.runs.build import build
from fedcommons.runs.experiment import run
from fedcommons.tracking.run_folder import read_rounds

COUNTS = "class counts (read by the method or the straggler rule)"
PRIVATE = LocalSGD(1, 5, dp=DPSGD(2.0, 1.0))


def late_by_counts(joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
    assert facts.counts is not None
    return {i: 0.0 for i in joined if facts.counts()[i, 0]}


class Asks(FedAvg):
    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        assert facts.counts is not None
        return {"model": model, "counts": facts.counts()}


@pytest.mark.long
def test_class_counts_that_are_read_are_a_release_of_every_client_once(digits: Digits) -> None:
    federation = digits().training(PRIVATE)
    for method, late in ((Asks(), None), (FedAvg(), late_by_counts)):
        played = federation.run(method, plan := federation.plan(3, late=late))
        for now, _ in played:
            assert now.ledger.uncovered == {COUNTS: 5}
            assert now.ledger.epsilon_of_all(0, 1e-5) is None
            assert now.traffic.once == 5 * 10 * 8
        assert plan.facts.counts_nbytes == 400
    quiet = federation.run(FedAvg(), federation.plan(2))[-1][0]
    assert quiet.ledger.uncovered == {}
    assert quiet.traffic.once == 0


def test_what_is_tried_before_a_run_reads_no_class_counts() -> None:
    ready = assemble(build(presets.experiment("smoke", "digits", {"algorithm": "feddm"})))  # tries start
    assert ready.plan.facts.counts_nbytes == 0


def test_the_epsilon_of_rounds_is_that_of_updates_and_of_what_they_put_into_a_commons() -> None:
    event = Release(
        0, ("images",), mechanism=SAMPLED_GAUSSIAN, q=0.25, sigma=1.0, sensitivity=5.0, steps=4, commons=True
    )
    update = replace(event, what=("delta",), q=0.5, steps=3, commons=False)
    ledger = Ledger.before_rounds([event, replace(event, client=1)]).after([event, update]).after([update])
    assert ledger.epsilon_of_rounds(0, 1e-5) == composed(((0.25, 1.0, 4), (0.5, 1.0, 6)), 1e-5)
    assert ledger.epsilon_of_rounds(1, 1e-5) == ledger.epsilon_of_rounds(2, 1e-5) == 0.0
    assert ledger.largest_epsilon_of_rounds(1e-5) == ledger.epsilon_of_rounds(0, 1e-5)
    assert ledger.epsilon_of_all(0, 1e-5) == composed(((0.25, 1.0, 8), (0.5, 1.0, 6)), 1e-5)
    assert read(ledger.record()) == ledger
    assert Ledger().largest_epsilon_of_rounds(1e-5) == 0.0
    only_updates = Ledger().after([update])
    assert only_updates.largest_epsilon_of_rounds(1e-5) == epsilon(0.5, 1.0, 3, 1e-5)


def test_no_epsilon_is_stated_of_a_client_once_its_training_is_not_covered(digits: Digits) -> None:
    """Client 1, of 16 examples, releases in round 2 a gradient without noise."""

    class Leaks(FedAvg):
        def client(self, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
            if round == 2 and len(data) == 16:
                work.gradient(work.initial, data)
            return super().client(work, message, memory, data, round, seed)

    federation = digits().training(PRIVATE)
    ledgers = [now.ledger for now, _ in federation.run(Leaks(), federation.plan(3))]
    reports = [statement(ledger, 5, 1e-5, rejected=0, local=True, secret=True) for ledger in ledgers]
    each = [report["epsilon_local_training"]["of_each_client"] for report in reports]
    assert each[0][1] > 0
    assert all(epsilons[1] is None and min(epsilons[0], *epsilons[2:]) > 0 for epsilons in each[1:])
    assert [report["epsilon_local_training"]["largest"] for report in reports] == [max(each[0]), None, None]
    assert [report["epsilon_of_messages"] for report in reports[1:]] == [None, None]
    assert in_short(reports[2])["epsilon_local_training"] == "none"
    assert [read(ledger.record()) for ledger in ledgers] == ledgers


def test_where_nothing_is_covered_no_epsilon_is_stated(tmp_path: Path) -> None:
    fields = {"algorithm": "fedproto", "evaluate.clients": True, "federation.buffers": "keep", "dp.local": True}
    few = {"federation.rounds": 1, "data.limit": 60, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off"}
    config = presets.experiment("smoke", "digits", {**few, **fields})
    summary = run(config, tmp_path / "run", say=lambda _: None)
    spent, column = summary["privacy"]["epsilon_local_training_if_secret"], "privacy/epsilon_local_training_if_secret"
    assert spent == {"largest": None, "of_each_client": [None] * summary["n_clients"]}
    assert [line[column] for line in read_rounds(tmp_path / "run")] == [0.0, None]
    assert "epsilon_local_training_if_secret" not in load_runs(tmp_path).iloc[0]
    assert load_rounds(tmp_path)[column].isna().tolist() == [False, True]


@pytest.mark.long
def test_without_noise_and_at_the_papers_noise_level_nothing_is_covered_and_the_ledger_says_why(digits: Digits) -> None:
    federation = digits(sizes=(30, 30))
    for sigma, why in ((0.0, "images"), (3.0, "images (noise level 3")):
        ledger = federation.run(FedDM(sigma=sigma), federation.plan(2))[-1][0].ledger
        assert not ledger.commons.covered
        assert sorted(ledger.uncovered.values()) == [2, 4, 4]  # class counts are read once, before round 1
        assert any(name.startswith(why) for name in ledger.uncovered)
        assert "labels" in ledger.uncovered
        assert ledger.n_disclosed == {0: 30, 1: 30}
        assert ledger.epsilon_of_all(0, 1e-5) is None


def test_per_example_noise_is_charged_the_steps_of_the_smallest_class(digits: Digits) -> None:
    federation = digits(sizes=(40, 30)).training(LocalSGD(1, 5, dp=DPSGD(2.0, 1.0)))
    method = FedDM(init="noise", iterations=3, match_batch=4, least=5)
    now = federation.run(method, federation.plan(2))[-1][0]
    smallest = [int(torch.bincount(rows.y)[rows.y.unique()].min()) for rows in federation.data.clients]
    assert now.ledger.commons.covered == {i: {(4 / n, 2.0): 6} for i, n in enumerate(smallest)}
    assert {name.partition(" (")[0] for name in now.ledger.uncovered} == {"labels", "class counts"}
    assert now.ledger.commons.epsilon(0, 1e-5) == composed(((4 / smallest[0], 2.0, 6),), 1e-5)
    bare = federation.run(replace(method, init="real"), federation.plan(1))[-1][0].ledger
    assert not bare.commons.covered  # it starts from real images
    assert "images" in bare.uncovered


def test_no_client_discloses_more_than_its_own_data(tmp_path: Path) -> None:
    fields = {"algorithm": "feddm", "federation.rounds": 1, "measure.every": 0, "tracking.wandb": "off"}
    config = presets.experiment("smoke", "digits", {**fields, "sharing.setting": "raw_copies", "sharing.c": 0.5})
    summary = run(config, tmp_path / "run", say=lambda _: None)
    assert summary["disclosed"] == 1
    assert f"{COUNTS}, released {summary['n_clients']} times" in " ".join(summary["privacy"]["uncovered"])


def test_a_class_that_no_client_sends_is_refused() -> None:
    store = Examples(torch.zeros(31, 4), torch.tensor([0] * 12 + [1] * 9 + [1] * 7 + [2] * 3))
    two, model = Clients(store, [np.arange(21), np.arange(21, 31)]), flatten({"w": torch.zeros(2)})
    facts = Facts(2, [21, 10], 1, counts=partial(two.counts, 3))
    FedDM(ipc=20, init="noise").check({"dp.local": True})  # any number of images can start from noise
    FedDM().start(model, facts, 0)  # the second has no class of ten, so it sends its seven and its three
    with pytest.raises(UserError, match=r"no client has feddm\.least = 7 images of class 2"):
        FedDM(least=7).start(model, facts, 0)
