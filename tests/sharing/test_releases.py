"""Releases that cannot be true, receipts about others' data, and what is seen to leave against what is declared."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from five_clients import ONE_ROUND, RECEIPT, N, images, make_data, stated

from fedcommons import Assigned, ClientDatasets, Clients, Common, Contribution, Contributions, Release, UserError
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.config import presets
from fedcommons.privacy.accountants import epsilon
from fedcommons.privacy.ledger import Ledger, read, require_small_delta
from fedcommons.runs.experiment import run
from fedcommons.sharing.disclosure import sent
from fedcommons.sharing.exchange import share, share_by_method
from fedcommons.sharing.real import Real
from fedcommons.sharing.synthetic import ShuffledSynthetic

FLAWS: list[tuple[str, Any]] = [
    *(("steps", value) for value in (0, 3.0, True, 10**12 + 1)),
    *(("sigma", value) for value in (inf, nan, 0.9999e-4, 1.0001e6)),
    *(("q", value) for value in (0.0, nan, 1 + 1e-9, "0.1")),
    *(("sensitivity", value) for value in (nan, 0.0)),
]


@dataclass(frozen=True)
class Declares(ShuffledSynthetic):
    events: tuple[Any, ...] | Callable[[], Iterator[Any]] = ()

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> tuple[Contributions, Any]:
        return contributed, self.events if isinstance(self.events, tuple) else self.events()


@pytest.mark.parametrize(("name", "value"), FLAWS)
def test_a_release_whose_numbers_cannot_be_true_is_uncovered_and_has_the_reason(name: str, value: Any) -> None:
    receipt = replace(RECEIPT, **{name: value})
    event = receipt.release(0, "delta")
    assert not event.covered
    assert event.named == (f"delta ({event.flaw})",)
    report = stated([event, *(RECEIPT.release(i, "delta") for i in range(1, N))])
    assert report["overall"] == "none"
    assert f"(its {name} must be" in report["uncovered"][-1]


@pytest.mark.parametrize("values", [{"steps": 1}, {"steps": 10**12}, {"sigma": 1e-4}, {"sigma": 1e6}, {"q": 1}])
def test_the_limits_themselves_are_covered(values: dict[str, Any]) -> None:
    assert replace(RECEIPT, **values).release(0, "delta").covered
    for true in ({"sigma": 0.0}, {"sensitivity": inf}, {"mechanism": None}):  # they need no reason
        event = replace(RECEIPT, **true).release(0, "delta")
        assert (event.covered, event.flaw, event.named) == (False, "", ("delta",))


def test_numbers_of_numpy_are_numbers() -> None:
    values: Any = {"q": np.float32(0.25), "sigma": np.float64(1.0), "steps": np.int64(3)}
    event: Any = replace(RECEIPT, **values).release(0, "images")
    ledger = Ledger.before_rounds([replace(event, client=np.int64(0), n_disclosed=np.int32(4))])
    assert ledger.epsilon_of_all(0, 1e-5) == epsilon(0.25, 1.0, 3, 1e-5)
    assert read(json.loads(json.dumps(ledger.record()))) == ledger  # as in checkpoints


EVENTS = tuple(RECEIPT.release(client, "synthetic images") for client in range(N))


class Sure(Release):
    covered: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]


@pytest.mark.parametrize(
    ("event", "why"),
    [(replace(EVENTS[4], client=N), "a release of client 5"),
     (replace(EVENTS[4], client=-1), "a release of client -1"),
     (Sure(4, ("synthetic images",)), "must declare the data that leave a client as Release"),
     (replace(EVENTS[4], what="images"), "a tuple of names"),
     (Release(4, ("images",), n_disclosed=-5), "whole number of at least 0, got -5")],
    ids=["a client too many", "nobody", "a class of its own", "a text", "less than none"],
)  # fmt: skip
def test_events_of_nobody_or_of_another_class_are_refused(event: Release, why: str) -> None:
    events = (*EVENTS[:4], event)
    with pytest.raises(UserError, match=rf"sharing stage Declares .*{why}"):
        share(Declares(events=events), make_data(), images())
    with pytest.raises(UserError, match=rf"Sharing\.share .*{why}"):
        share_by_method(share(Real(), make_data()), Sharing(events), 10, 0)


@dataclass(frozen=True)
class Sharing:
    """A method that shares one image and declares these events."""

    events: tuple[Any, ...]

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        return Common(clients.store[slice(0, 1)], 0, self.events)


def test_a_real_example_that_a_method_shares_is_raw_whatever_it_declares() -> None:
    start = make_data()
    events = tuple(replace(EVENTS[0], client=i, what=("means",)) for i in range(len(start.clients)))
    shared = share_by_method(share(Real(), start), Sharing(events), 10, 0)
    (raw,) = [release for release in shared.releases if not release.covered]
    assert 0 in start.clients.rows[raw.client]
    assert (raw.n_disclosed, shared.disclosed) == (1, 1)
    assert len(share_by_method(share(Real(), start), FedMix(), 10, 0).releases) == N


def test_events_that_can_be_read_once_are_read_once() -> None:
    assert list(share(Declares(events=lambda: iter(EVENTS)), make_data(), images()).releases) == list(EVENTS)
    unnamed = share(Declares(events=(*EVENTS, Release(what=("a hint",)))), make_data(), images()).releases
    without_steps = share(ShuffledSynthetic(), make_data(), images(replace(RECEIPT, steps=0))).releases
    assert stated(unnamed)["overall"] == stated(without_steps)["overall"] == "none"


def _run(tmp_path: Path, **values: Any) -> dict[str, Any]:
    plain = {"sharing.setting": "user_parts:Peeks", "generator.name": "user_parts:WithReceipt", "data.limit": 60,
             "generator.label_noise": 5.0, "artifacts": str(tmp_path / "store"), **ONE_ROUND}  # fmt: skip
    config = presets.experiment("smoke", "digits", plain | {n.replace("__", "."): v for n, v in values.items()})
    return run(config, tmp_path / "run", say=lambda text: None)


@pytest.mark.parametrize(
    ("sees", "why"),
    [("another's", "this client's own"), ("one eight times", "own"), ("two generators", "one private generator")],
)
def test_a_private_generator_sees_its_clients_own_examples_once(sees: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"stage Peeks .*{why}"):
        _run(tmp_path, sharing__sees=sees)


@pytest.mark.parametrize(("steps", "pool"), [(20, "covered"), (0, "uncovered")])
def test_a_receipt_is_stored_and_read_and_one_of_no_steps_covers_nothing(steps: int, pool: str, tmp_path: Path) -> None:
    privacy = _run(tmp_path, generator__steps=steps)["privacy"]
    assert privacy["commons"] == pool
    assert (privacy.get("pool_epsilon_max_if_secret") is None) == (steps == 0)


def test_the_default_delta_is_refused_to_many_examples_only_where_something_is_covered() -> None:
    many = [150_000, 10]
    for quiet in (Ledger(), Ledger.before_rounds([Release(0, ("images",), n_disclosed=3)])):
        require_small_delta(quiet, 1e-5, many)
    for ledger in (Ledger.before_rounds(EVENTS), Ledger().after([RECEIPT.release(1, "delta")])):
        require_small_delta(ledger, 1e-5, [50_000, 10])
        with pytest.raises(UserError, match=r"dp\.delta .* 6\.67e-06, .*client 0"):
            require_small_delta(ledger, 1e-5, many)


def raw(releases: Sequence[Release]) -> dict[int, int]:
    """Map each client to the number of its raw examples that the engine saw leave."""
    return {r.client: r.n_disclosed for r in releases if r.what == ("raw examples",) and not r.covered}


@dataclass(frozen=True)
class AmongTheMade(ShuffledSynthetic):
    """Puts real rows among the images of private generators; ``of``: the client that it says they came from."""

    owner: int | None = None

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        pool = Contributions.from_generated(client_data, generated)
        real = [client_data.clients.rows[client][:3] for client in (1, 3)]
        owners = np.repeat([1, 3] if self.owner is None else [self.owner] * 2, 3)
        return replace(pool, rows=np.concatenate([pool.rows, *real]), owners=np.concatenate([pool.owners, owners]))


@pytest.mark.parametrize("owner", [None, 0])
def test_real_rows_among_what_generators_made_are_raw_whatever_the_receipt(owner: int | None) -> None:
    client_data = make_data()
    shared = share(AmongTheMade(owner=owner), client_data, images())
    assert raw(shared.releases) == {1: 3, 3: 3}
    assert shared.disclosed == 6
    assert Ledger.before_rounds(shared.releases).n_disclosed == {1: 3, 3: 3}
    report = stated(shared.releases)
    assert (report["overall"], report.get("pool_epsilon_max_if_secret")) == ("none", None)
    assert shared.owners is not None
    assert (shared.owners[client_data.clients.rows[3]] == 3).all()
    honest = share(ShuffledSynthetic(), client_data, images()).releases
    assert raw(honest) == {}
    assert stated(honest)["overall"] == pytest.approx(epsilon(0.1, 1.5, 20, 1e-5))


def test_a_made_row_that_its_client_keeps_is_not_sent() -> None:
    rows, owners = [np.array([0, 2]), np.array([1])], np.array([0, 1, 0])
    assert sent(rows, (), np.array([0, 1, 2]), (), owners, 2).tolist() == [0, 1]


@dataclass(frozen=True)
class SendsRealRows(ShuffledSynthetic):
    """Sends two real rows of client 3 to client 0 or to the pool; ``seen``: the number that its release counts."""

    where: str = "received"
    seen: int | None = None

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> tuple[Contributions, Any]:
        _, events = super().release(client_data, contributed)
        return contributed, [*events, *(Release(3, ("the weather",), n_disclosed=n) for n in [self.seen] if n)]

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        whole = super().assign(client_data, released)
        rows = client_data.clients.rows[3][:2]
        if self.where == "pool":
            return replace(whole, pool=[rows, *whole.pool])
        parts = list(getattr(whole, self.where))
        return replace(whole, **{self.where: [np.concatenate([parts[0], rows]), *parts[1:]]})


@pytest.mark.parametrize("where", ["received", "own_rows", "pool"])
def test_real_rows_that_reach_another_client_or_the_pool_are_raw_beside_covered_events(where: str) -> None:
    shared = share(SendsRealRows(where=where), make_data(), images())
    assert raw(shared.releases) == {3: 2}
    assert shared.disclosed == 2
    assert stated(shared.releases)["overall"] == "none"
    for seen, more in ((1, {3: 2}), (2, {})):  # as many as the stage says are not reported twice
        assert raw(share(SendsRealRows(where=where, seen=seen), make_data(), images()).releases) == more


@pytest.mark.long
def test_a_run_with_repeated_rows_stops_where_something_private_leaves(tmp_path: Path) -> None:
    values = {"sharing.setting": "user_parts:ManyTimes", "data.limit": 60, **ONE_ROUND}
    assert run(presets.experiment("smoke", "digits", values), tmp_path / "plain", say=lambda text: None)["p"] > 0
    private = presets.experiment("smoke", "digits", values | {"dp.local": True})
    with pytest.raises(UserError, match=r"stage ManyTimes .* 1 rows of client 0 up to 2 times"):
        run(private, tmp_path / "private", say=lambda text: None)
    assert not list((tmp_path / "private").glob("checkpoints/*"))
    hints = values | {"algorithm": "user_parts:Hints"}  # whether a round releases something private is seen after it
    with pytest.raises(UserError, match="ManyTimes must list no real row twice"):
        run(presets.experiment("smoke", "digits", hints), tmp_path / "hints", say=lambda text: None)
