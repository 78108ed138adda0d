"""Stages and methods that rewrite the clients' data, or give out rows whose owner is not known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from five_clients import ONE_ROUND, N, images, make_data

from fedcommons import ClientDatasets, Clients, Common, Contribution, Examples, UserError, experiment
from fedcommons.runs.experiment import run
from fedcommons.sharing.exchange import share, share_by_method
from fedcommons.sharing.real import Real
from fedcommons.sharing.stage import Assigned, Contributions
from fedcommons.sharing.synthetic import LocalSynthetic, ShuffledSynthetic


def _swapped(start: ClientDatasets, store: Examples) -> Examples:
    ours, theirs = start.clients.rows[0], start.clients.rows[1]
    ours[0], theirs[0] = theirs[0], ours[0]
    return store


def _written(write: Callable[[Examples], object], of_start: bool = True) -> Callable[..., Examples]:
    def change(start: ClientDatasets, store: Examples) -> Examples:
        write(start.clients.store if of_start else store)
        return store

    return change


REWRITES: dict[str, Callable[[ClientDatasets, Examples], Examples]] = {
    "through numpy": _written(lambda e: np.bitwise_xor(e.x.numpy()[7], 1, out=e.x.numpy()[7])),
    "labels": _written(lambda e: e.y[7:8].add_(1).remainder_(10)),
    "the owners of rows": _swapped,
    "a shorter store": lambda start, store: store[slice(0, len(start.clients.store) - 1)],
    "its first rows": _written(lambda e: e.x[0].add_(1), of_start=False),
    "another type": lambda start, store: Examples(store.x.int(), store.y),
}


@dataclass(frozen=True)
class Rewrites(ShuffledSynthetic):
    how: str = ""

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> tuple[Contributions, Any]:
        store = REWRITES[self.how](client_data, contributed.store)
        if self.how == "a shorter store":
            contributed = replace(contributed, rows=contributed.rows[:0], owners=contributed.owners[:0])
        return replace(contributed, store=store), contributed.releases("synthetic images")


@pytest.mark.parametrize("how", REWRITES)
def test_a_stage_that_changes_the_clients_data_is_refused_by_name(how: str) -> None:
    with pytest.raises(UserError, match=r"stage Rewrites (must not change|must give a store|gives own_rows outside)"):
        share(Rewrites(how=how), make_data(), images())


@dataclass(frozen=True)
class RewritesEarly(Real):
    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        client_data.clients.store.x[:] = client_data.clients.store.x.float().mean(0).to(torch.uint8)
        return Contributions.none(client_data)


@pytest.mark.long
def test_a_run_whose_stage_rewrites_its_data_stops_and_so_do_others_in_that_process(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="RewritesEarly must not change"):
        share(RewritesEarly(), make_data())
    for number, stage in enumerate((f"{__file__}:RewritesEarly", "real")):
        config = experiment("smoke", "digits", ONE_ROUND | {"data.limit": 57, "sharing.setting": stage})
        with pytest.raises(UserError, match=r"must not change .*ran before"):
            run(config, tmp_path / str(number), say=lambda text: None)


@dataclass(frozen=True)
class RewritingMethod:
    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        clients.store.y.zero_()
        return Common(clients.store[slice(0, 1)], 0)


def test_a_method_that_rewrites_what_clients_hold_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"RewritingMethod\.share must not change"):
        share_by_method(share(Real(), make_data()), RewritingMethod(), 10, 0)


@dataclass(frozen=True)
class Assigns(ShuffledSynthetic):
    contribution: Callable[[Contributions], Contributions] = lambda c: c
    change: Callable[[Assigned, Contributions], Assigned] = lambda assigned, c: assigned

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> tuple[Contributions, Any]:
        return self.contribution(contributed), contributed.releases("synthetic images")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        parts = np.split(np.arange(len(client_data.clients.store), len(released.store)), N)
        rows, sizes = client_data.clients.rows, client_data.clients.sizes
        return self.change(Assigned(rows, parts, n_own=sizes, pool=parts), released)


def _without_owner(c: Contributions) -> Contributions:
    """Client 4's images stay in the store and are no contribution."""
    return replace(c, rows=c.rows[:-2], owners=c.owners[:-2])


PLANTS: dict[str, tuple[dict[str, Any], str]] = {
    "rows without an owner to a client": (
        {"contribution": _without_owner, "change": lambda a, c: replace(a, pool=())}, "2 synthetic rows"),
    "a mask": (
        {"change": lambda a, c: replace(a, received=[np.ones(3, bool), *a.received[1:]])}, "received .*whole numbers"),
    "rows from the end": (
        {"change": lambda a, c: replace(a, received=[a.received[0] - len(c.store), *a.received[1:]])},
        "received outside of 0"),
    "rows behind the end": (
        {"change": lambda a, c: replace(a, pool=[a.pool[0] + len(c.store)])}, "pool outside of 0"),
    "owners who are not there": (
        {"contribution": lambda c: replace(c, owners=c.owners - 1)}, "owners outside of 0 ... 4"),
    "a client left out": (
        {"change": lambda a, c: replace(a, own_rows=list(a.own_rows)[:4], received=a.received[:4], n_own=None)},
        "rows to each of 5 clients, got 4"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "why"), PLANTS.values(), ids=PLANTS)
def test_rows_that_cannot_be_followed_are_refused(plant: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"sharing stage Assigns .*{why}"):
        share(Assigns(**plant), make_data(), images())


@pytest.mark.parametrize(("noise", "n"), [(0, N), (1, 0)])
def test_a_copy_of_a_real_example_is_no_made_one(noise: int, n: int) -> None:
    start, copies = make_data(), images()
    x, rows = start.clients.store.x.clone(), start.clients.rows[3]
    x[rows[8]], x[rows[9]] = x[rows[7]].clone(), 0  # two that are alike and a blank one may be met by chance
    start = replace(start, clients=Clients(Examples(x, start.clients.store.y), start.clients.rows))
    copies[2].examples.x[1], copies[0].examples.x[1] = x[rows[7]], 0
    for client, copy in enumerate(copies):
        copy.examples.x[0] = start.clients[(client + 1) % N].x[client]
        copy.examples.x[0, 0, 0, 0] += noise
    shared = share(ShuffledSynthetic(), start, copies)
    assert shared.disclosed == n
    assert share(LocalSynthetic(), make_data(), copies).disclosed == 0
    raw = {event.client: event.n_disclosed for event in shared.releases if not event.covered}
    assert raw == {client: 1 for client in range(N) if n}


@dataclass(frozen=True)
class Chooses(Real):
    rule: str = "labels"

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        store = client_data.clients.store
        brightness, labels = store.x.float().mean((1, 2, 3)).numpy(), store.y.numpy()
        parts, weights = [np.asarray(rows) for rows in client_data.clients.rows], None
        if self.rule == "kept":
            parts = [rows[brightness[rows] >= np.median(brightness)] for rows in parts]
        elif self.rule == "weights":
            weights = [1 + (brightness[rows] > brightness.mean()) for rows in parts]
        elif self.rule == "fails" and not brightness.any():
            raise ZeroDivisionError
        elif self.rule == "labels":
            weights = [1 / (1 + labels[rows]) for rows in parts]
        return Assigned(parts, (), weights or [np.ones(len(rows)) for rows in parts])


@pytest.mark.long
@pytest.mark.parametrize(("rule", "follows"), [("labels", False), ("kept", True), ("weights", True), ("fails", True)])
def test_rows_and_weights_that_follow_examples_leave_nothing_covered(rule: str, follows: bool, tmp_path: Path) -> None:
    fields = {"dp.local": True, "sharing.setting": f"{__file__}:Chooses", "sharing.rule": rule, "data.limit": 60}
    config = experiment("smoke", "digits", ONE_ROUND | fields)
    privacy = run(config, tmp_path / "run", say=lambda _: None)["privacy"]
    assert (privacy["epsilon_of_messages_if_secret"] is None) == follows
    assert any(name.startswith("rows and weights") for name in privacy["uncovered"]) == follows
