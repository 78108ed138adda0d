"""Stages and methods that rewrite the clients' data, or give out rows whose owner is not known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.config import presets
from fedcommons.config.sections import Data, Partition
from fedcommons.core.algorithm import Common
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.generator import Receipt
from fedcommons.runs import inputs
from fedcommons.runs.experiment import run
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.local_synthetic import LocalSynthetic
from fedcommons.sharing.real import Real
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import Assigned, Contribution, Contributions, share, share_by_method

DATASET = inputs.load(Data())
N = 5
RECEIPT = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=1.5, sensitivity=1.0, steps=20)


def clients() -> Dealt:
    """The digits of five clients, in memory of their own, so that nothing here harms the other tests."""
    rows = inputs.deal(Partition("iid", n_clients=N), DATASET.train.y.numpy(), 10, 0).rows
    train = Examples(DATASET.train.x.clone(), DATASET.train.y.clone())
    return Dealt(Clients(train, rows), 10, DATASET.flip, 0)


def images() -> list[Contribution]:
    """Two images a client."""
    x = torch.zeros(2, *DATASET.shape, dtype=torch.uint8)
    return [Contribution(Examples(x + client, torch.arange(2)), RECEIPT, seen=10) for client in range(N)]


def _swapped(start: Dealt, store: Examples) -> Examples:
    mine, theirs = start.own.rows[0], start.own.rows[1]
    mine[0], theirs[0] = theirs[0], mine[0]
    return store


def _written(write: Callable[[Tensor, Tensor], object], of_start: bool = True) -> Callable[[Dealt, Examples], Examples]:
    def change(start: Dealt, store: Examples) -> Examples:
        which = start.own.store if of_start else store
        write(which.x, which.y)
        return store

    return change


REWRITES: dict[str, Callable[[Dealt, Examples], Examples]] = {
    "in place": _written(lambda x, y: x[7, 0, 0, 0].bitwise_xor_(1)),
    "through numpy": _written(lambda x, y: np.bitwise_xor(x.numpy()[7], 1, out=x.numpy()[7])),
    "labels": _written(lambda x, y: y[7:8].add_(1).remainder_(10)),
    "the owners of rows": _swapped,
    "another store": lambda start, store: Examples(store.x.flip(0), store.y.flip(0)),
    "a shorter store": lambda start, store: store[slice(0, len(start.own.store) - 1)],
    "its first rows": _written(lambda x, y: x[0].add_(1), of_start=False),
    "another type": lambda start, store: Examples(store.x.int(), store.y),
    "nothing": lambda start, store: store,
}


@dataclass(frozen=True)
class Rewrites(ShuffledSynthetic):
    """Changes the real data, in place or in the store that it returns."""

    how: str = ""

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        events = contributed.releases("synthetic images")
        store = REWRITES[self.how](dealt, contributed.store)
        if self.how == "a shorter store":
            contributed = replace(contributed, rows=contributed.rows[:0], owners=contributed.owners[:0])
        return replace(contributed, store=store), events


@pytest.mark.parametrize("how", REWRITES)
def test_a_stage_that_changes_the_clients_data_is_refused_by_name(how: str) -> None:
    if how == "nothing":
        share(Rewrites(how=how), clients(), images())
    else:
        with pytest.raises(UserError, match=r"stage Rewrites (must not change|must give a store|gives kept outside)"):
            share(Rewrites(how=how), clients(), images())


@dataclass(frozen=True)
class RewritesEarly(Real):
    """Averages its clients' images in ``make``, before anything is released."""

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        dealt.own.store.x[:] = dealt.own.store.x.float().mean(0).to(torch.uint8)
        return Contributions.none(dealt)


@pytest.mark.long
def test_a_run_whose_stage_rewrites_its_data_stops_and_so_do_others_in_that_process(tmp_path: Path) -> None:
    """The data set is read once for all runs of a process, so a later one must not train on what was changed."""
    with pytest.raises(UserError, match="RewritesEarly must not change"):
        share(RewritesEarly(), clients())
    values = {"data.limit": 57, "federation.rounds": 1, "client.epochs": 1, "tracking.wandb": "off", "measure.every": 0}
    for number, stage in enumerate((f"{__file__}:RewritesEarly", "real")):
        config = presets.experiment("smoke", "digits", values | {"sharing.setting": stage})
        with pytest.raises(UserError, match=r"must not change .*ran before"):
            run(config, tmp_path / str(number), say=lambda text: None)
    quiet = presets.experiment("smoke", "digits", values | {"data.limit": 58})
    run(quiet, tmp_path / "other data", say=lambda text: None)


@dataclass(frozen=True)
class RewritingMethod:
    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        clients.store.y.zero_()
        return Common(clients.store[slice(0, 1)], 0)


def test_a_method_that_rewrites_what_clients_hold_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"RewritingMethod\.share must not change"):
        share_by_method(share(Real(), clients()), RewritingMethod(), 10, 0)


@dataclass(frozen=True)
class Assigns(ShuffledSynthetic):
    """Changes what it contributes and assigns; each client gets the images of its own generator."""

    contribution: Callable[[Contributions], Contributions] = lambda c: c
    change: Callable[[Assigned, Contributions], Assigned] = lambda assigned, c: assigned

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        return self.contribution(contributed), contributed.releases("synthetic images")

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        parts = np.split(np.arange(len(dealt.own.store), len(released.store)), N)
        return self.change(Assigned(dealt.own.rows, parts, n_own=dealt.own.sizes, pool=parts), released)


def _without_owner(c: Contributions) -> Contributions:
    """Client 4's images stay in the store and are no contribution."""
    return replace(c, rows=c.rows[:-2], owners=c.owners[:-2])


PLANTS: dict[str, tuple[dict[str, Any], str]] = {
    "rows without an owner to a client": (
        {"contribution": _without_owner, "change": lambda a, c: replace(a, pool=())},
        "2 made rows",
    ),
    "rows without an owner to the pool": (
        {"contribution": _without_owner, "change": lambda a, c: replace(a, received=(), pool=[a.pool[4][:1]])},
        "1 made rows",
    ),
    "a mask": (
        {"change": lambda a, c: replace(a, received=[np.ones(3, bool), *a.received[1:]])},
        "received .*whole numbers",
    ),
    "a mask that is contributed": (
        {"contribution": lambda c: replace(c, rows=np.ones(len(c.rows), bool)),
         "change": lambda a, c: replace(a, received=(), pool=())},
        "contributed rows .*whole numbers",
    ),
    "floats": (
        {"change": lambda a, c: replace(a, kept=[a.kept[0] + 0.9, *a.kept[1:]])},
        "kept .*whole numbers",
    ),
    "rows from the end": (
        {"change": lambda a, c: replace(a, received=[a.received[0] - len(c.store), *a.received[1:]])},
        "received outside of 0",
    ),
    "rows behind the end": (
        {"change": lambda a, c: replace(a, pool=[a.pool[0] + len(c.store)])},
        "pool outside of 0",
    ),
    "owners who are not there": (
        {"contribution": lambda c: replace(c, owners=c.owners - 1)},
        "owners outside of 0 ... 4",
    ),
    "fewer owners than rows": (
        {"contribution": lambda c: replace(c, owners=c.owners[1:]),
         "change": lambda a, c: replace(a, received=(), pool=())},
        "10 contributed rows and 9 owners",
    ),
    "a client left out": (
        {"change": lambda a, c: replace(a, kept=list(a.kept)[:4], received=a.received[:4], n_own=None)},
        "rows to each of 5 clients, got 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "why"), PLANTS.values(), ids=PLANTS)
def test_rows_that_cannot_be_followed_are_refused(plant: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"sharing stage Assigns .*{why}"):
        share(Assigns(**plant), clients(), images())


def test_clients_that_get_nothing_may_be_given_an_empty_list() -> None:
    nothing: Any = [np.array([])] * (N - 1)
    shared = share(Assigns(change=lambda a, c: replace(a, received=[c.rows[:2], *nothing])), clients(), images())
    assert [len(data) for data in shared.data.clients] == [261, 259, 259, 259, 259]


def _copies(noise: int = 0) -> list[Contribution]:
    """Images of which each client's first is a copy of a real one of its neighbour."""
    given = clients()
    made = images()
    for client, one in enumerate(made):
        one.examples.x[0] = given.own[(client + 1) % N].x[client]
        one.examples.x[0, 0, 0, 0] += noise
    return made


@pytest.mark.parametrize(("noise", "left"), [(0, N), (1, 0)])
def test_a_copy_of_a_real_example_is_no_made_one(noise: int, left: int) -> None:
    shared = share(ShuffledSynthetic(), clients(), _copies(noise))
    assert shared.disclosed == left
    assert share(LocalSynthetic(), clients(), _copies(noise)).disclosed == 0  # it stays with its client
    raw = {event.client: event.seen for event in shared.releases if not event.covered}
    assert raw == {client: 1 for client in range(N) if left}


def test_what_may_be_met_by_chance_is_no_copy() -> None:
    """An example that two rows have, or that is blank."""
    given, made = clients(), images()
    given.own.store.x[:2] = given.own.store.x[0].clone()
    given.own.store.x[2] = 0
    store = Examples(given.own.store.x.clone(), given.own.store.y)
    given = replace(given, own=Clients(store, given.own.rows))
    made[0].examples.x[0], made[1].examples.x[0] = given.own.store.x[0], given.own.store.x[2]
    assert share(ShuffledSynthetic(), given, made).disclosed == 0


@dataclass(frozen=True)
class Chooses(Real):
    """Keeps or weighs the clients' own rows."""

    rule: str = "all"

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        brightness, labels = dealt.own.store.x.float().mean((1, 2, 3)).numpy(), dealt.own.store.y.numpy()
        kept, weights = [np.asarray(rows) for rows in dealt.own.rows], None
        if self.rule == "kept":
            kept = [rows[brightness[rows] >= np.median(brightness)] for rows in kept]
        elif self.rule == "weights":
            weights = [1 + (brightness[rows] > brightness.mean()) for rows in kept]
        elif self.rule == "half":
            kept = [rows[::2] for rows in kept]
        elif self.rule == "fails" and not brightness.any():
            raise ZeroDivisionError
        elif self.rule == "labels":
            weights = [1 / (1 + labels[rows]) for rows in kept]
        return Assigned(kept, (), weights if weights or self.rule == "all" else [np.ones(len(rows)) for rows in kept])


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "follows"),
    [("all", False), ("half", False), ("labels", False), ("kept", True), ("weights", True), ("fails", True)],
)
def test_rows_and_weights_that_follow_examples_leave_nothing_covered(rule: str, follows: bool, tmp_path: Path) -> None:
    fields = {
        "dp.local": True, "sharing.setting": f"{__file__}:Chooses", "sharing.rule": rule, "data.limit": 60,
        "federation.rounds": 1, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off",
    }  # fmt: skip
    said = run(presets.experiment("smoke", "digits", fields), tmp_path / "run", say=lambda _: None)["privacy"]
    assert (said["epsilon_of_messages_if_secret"] is None) == follows
    assert any(name.startswith("rows and weights") for name in said["uncovered"]) == follows
