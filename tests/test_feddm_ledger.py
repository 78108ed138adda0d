"""FedDM: what the ledger says of its images, and what it is not defined for."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons.algorithms.feddm import FedDM
from fedcommons.config import presets
from fedcommons.core.accountants import composed
from fedcommons.core.algorithm import Facts
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.noise import Source, Stream
from fedcommons.core.work import Work
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.federation.serial import Serial
from fedcommons.runs import experiment
from fedcommons.runs.build import prepare
from fedcommons.tensors import data, flatten
from fedcommons.testing import Federation

Digits = Callable[..., Federation]


def test_without_noise_and_at_the_papers_noise_level_nothing_is_covered_and_the_ledger_says_why(
    digits: Digits,
) -> None:
    federation = digits(sizes=(30, 30))
    for sigma, why in ((0.0, "images"), (3.0, "images (noise level 3")):
        ledger = federation.play(FedDM(sigma=sigma), federation.plan(2))[-1][0].ledger
        assert not ledger.commons.covered
        assert sorted(ledger.uncovered.values()) == [2, 4, 4]  # class counts are read once, before round 1
        assert any(name.startswith(why) for name in ledger.uncovered)
        assert "labels" in ledger.uncovered
        assert ledger.given_away == {0: 30, 1: 30}
        assert ledger.of_all(0, 1e-5) is None


def test_per_example_noise_is_charged_the_steps_of_the_smallest_class(digits: Digits) -> None:
    federation = digits(sizes=(40, 30)).training(LocalSGD(1, 5, dp=DPSGD(2.0, 1.0)))
    method = FedDM(init="noise", iterations=3, match_batch=4, least=5)
    now = federation.play(method, federation.plan(2))[-1][0]
    smallest = [int(torch.bincount(rows.y)[rows.y.unique()].min()) for rows in federation.data.clients]
    assert now.ledger.commons.covered == {i: {(4 / n, 2.0): 6} for i, n in enumerate(smallest)}
    assert {name.partition(" (")[0] for name in now.ledger.uncovered} == {"labels", "class counts"}
    assert now.ledger.commons.of(0, 1e-5) == composed(((4 / smallest[0], 2.0, 6),), 1e-5)
    bare = federation.play(replace(method, init="real"), federation.plan(1))[-1][0].ledger
    assert not bare.commons.covered  # it starts from real images
    assert "images" in bare.uncovered


class BareAtFirst(DPSGD):
    """Its first steps, of so many batches in all, have no noise."""

    batches = 0

    def sample(self, n: int, batch_size: int, draws: Stream) -> torch.Tensor:
        object.__setattr__(self, "batches", self.batches - 1)
        object.__setattr__(self, "noise_multiplier", 0.0 if self.batches >= 0 else 2.0)
        return super().sample(n, batch_size, draws)


@pytest.mark.parametrize("bare_steps", [0, 1])
def test_a_step_on_the_pixels_without_noise_among_others_uncovers_the_images(bare_steps: int, digits: Digits) -> None:
    """The first one, so that it is not the last that decides."""
    dp = BareAtFirst(2.0, 1.0)
    federation = digits(sizes=(40,)).training(LocalSGD(1, 5, dp=dp))
    classes = int((torch.bincount(federation.data.clients[0].y) >= 5).sum())
    object.__setattr__(dp, "batches", bare_steps * classes)
    method = FedDM(init="noise", iterations=3, match_batch=4, least=5)
    ledger = federation.play(method, federation.plan(1))[-1][0].ledger
    assert bool(ledger.commons.covered) == (bare_steps == 0)
    assert ("images" in ledger.commons.uncovered) == (bare_steps == 1)


def test_noise_has_the_experiments_key(digits: Digits) -> None:
    method, sent = FedDM(init="noise", iterations=2), []
    federation = digits(sizes=(30,)).training(LocalSGD(1, 5, dp=DPSGD(2.0, 1.0)))
    for key in (0, 0, 1):
        build = partial(_worker, federation, method, Source(key))
        played = federation.play(method, federation.plan(1), Serial(build, federation.data))
        sent.append(data(played[-1][0].state["images"]))
    assert torch.equal(sent[0], sent[1])
    assert not torch.equal(sent[0], sent[2])


def _worker(federation: Federation, method: FedDM, source: Source, clients: RunData) -> Worker:
    work = Work(federation.module(), torch.device("cpu"), federation.loop, source=source)
    return Worker(work, method, clients)


def test_no_client_discloses_more_than_its_own_data(tmp_path: Path) -> None:
    """It also shows copies of others' images, which it holds."""
    fields = {"algorithm": "feddm", "federation.rounds": 1, "measure.every": 0, "tracking.wandb": "off"}
    config = presets.experiment("smoke", "digits", {**fields, "sharing.setting": "raw_copies", "sharing.c": 0.5})
    assert experiment.run(config, tmp_path / "run", say=lambda _: None)["disclosed"] == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"feddm.radius": 0.0}, ["feddm.radius", "(0, 1e38]", "got 0"]),
        ({"feddm.ipc": 11}, ["feddm.ipc", "feddm.least = 10", "got 11"]),
        ({"feddm.init": "nois"}, ["feddm.init", "'noise'"]),
        ({"dp.local": True}, ["dp.local", "feddm.init noise"]),
        ({"dp.local": True, "feddm.init": "noise", "feddm.sigma": 1.0}, ["feddm.sigma 0"]),
        ({"dp.local": True, "feddm.init": "noise", "feddm.iterations": 0}, ["feddm.iterations of at least 1"]),
        ({"feddm.sigma": 1.0, "feddm.iterations": 0}, ["feddm.sigma must be 0"]),
        ({"feddm.least": 70, "partition.name": "iid", "partition.n_clients": 2}, ["feddm.least = 70 images of class"]),
    ],
)
def test_what_it_is_not_defined_for_is_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        prepare(presets.experiment("small", "digits", {"algorithm": "feddm", **values}))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_any_number_of_images_can_start_from_noise() -> None:
    FedDM(ipc=20, init="noise").check({"dp.local": True})


def test_a_class_that_no_client_sends_is_refused() -> None:
    store = Examples(torch.zeros(31, 4), torch.tensor([0] * 12 + [1] * 9 + [1] * 7 + [2] * 3))
    two, model = Clients(store, [np.arange(21), np.arange(21, 31)]), flatten({"w": torch.zeros(2)})
    for n_classes in (3, 4):  # of the fourth there is nothing to be seen
        facts = Facts(2, [21, 10], 1, counts=partial(two.counts, n_classes))
        FedDM().start(model, facts, 0)  # the second has no class of ten, so it sends its seven and its three
        with pytest.raises(UserError, match=r"no client holds feddm\.least = 7 images of class 2"):
            FedDM(least=7).start(model, facts, 0)
