"""Releases, receipts and deltas that cannot be true, and generators whose receipts are about others' data."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from five_clients import ONE_ROUND, RECEIPT, N, dealt, images, stated

from fedcommons.accounting.privacy import Ledger, read, require_small_delta
from fedcommons.config import presets
from fedcommons.core.accountants import epsilon
from fedcommons.core.algorithm import Common
from fedcommons.core.release import Release
from fedcommons.data.clients import Clients
from fedcommons.errors import UserError
from fedcommons.runs.experiment import run
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.real import Real
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import Contributions, share, share_by_method

FLAWS: list[tuple[str, Any]] = [
    *(("steps", value) for value in (0, -3, 0.5, 3.0, True, "many", torch.tensor(3), 10**12 + 1, 10**400)),
    *(("sigma", value) for value in (inf, nan, -1.0, 0.9999e-4, 1e-160, 1.0001e6)),
    *(("q", value) for value in (-0.1, 0.0, nan, 1 + 1e-9, "0.1")),
    *(("sensitivity", value) for value in (nan, 0.0, -1.0)),
]


@dataclass(frozen=True)
class Declares(ShuffledSynthetic):
    """Declares what it is told to."""

    events: tuple[Any, ...] | Callable[[], Iterator[Any]] = ()

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Any]:
        return contributed, self.events if isinstance(self.events, tuple) else self.events()


@pytest.mark.parametrize(("name", "value"), FLAWS)
def test_a_release_whose_numbers_cannot_be_true_is_uncovered_and_has_the_reason(name: str, value: Any) -> None:
    receipt = replace(RECEIPT, **{name: value})
    event = receipt.release(0, "delta")
    assert not event.covered
    assert event.named == (f"delta ({event.flaw})",)
    told = stated([event, *(RECEIPT.release(i, "delta") for i in range(1, N))])
    assert told["overall"] == "none"
    assert f"(its {name} must be" in told["uncovered"][-1]


def test_a_receipt_whose_numbers_cannot_be_true_covers_no_images() -> None:
    assert stated(share(ShuffledSynthetic(), dealt(), images(replace(RECEIPT, steps=0))).releases)["overall"] == "none"


@pytest.mark.parametrize("values", [{"steps": 1}, {"steps": 10**12}, {"sigma": 1e-4}, {"sigma": 1e6}, {"q": 1}])
def test_the_limits_themselves_are_covered(values: dict[str, Any]) -> None:
    assert replace(RECEIPT, **values).release(0, "delta").covered


@pytest.mark.parametrize("values", [{"sigma": 0.0}, {"sensitivity": inf}, {"mechanism": None}])
def test_no_noise_and_no_bound_are_true_statements_that_need_no_reason(values: dict[str, Any]) -> None:
    event = replace(RECEIPT, **values).release(0, "delta")
    assert (event.covered, event.flaw, event.named) == (False, "", ("delta",))


def test_numbers_of_other_libraries_are_numbers() -> None:
    of_numpy = {"q": np.float32(0.25), "sigma": np.float64(1.0), "steps": np.int64(3)}
    for values in (of_numpy, {"q": Fraction(1, 4), "sigma": 1, "steps": 3}):
        event = replace(RECEIPT, **values).release(0, "images")
        ledger = Ledger.of([replace(event, client=np.int64(0))])
        assert ledger.of_all(0, 1e-5) == epsilon(0.25, 1.0, 3, 1e-5)
        seen = Ledger.of([Release(np.int64(1), ("images",), seen=np.int32(4))])  # pyright: ignore[reportArgumentType]
        for one in (ledger, seen):
            assert read(json.loads(json.dumps(one.record()))) == one  # as in checkpoints


EVENTS = tuple(RECEIPT.release(client, "synthetic images") for client in range(N))


class Sure(Release):
    """Is covered whatever its numbers are."""

    covered: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((*EVENTS[:4], replace(EVENTS[4], client=N)), "a release of client 5"),
        ((*EVENTS[:4], replace(EVENTS[4], client=-1)), "a release of client -1"),
        ((*EVENTS[:4], replace(EVENTS[4], client=4.0)), "a release of client 4"),
        ((*EVENTS[:4], Sure(4, ("synthetic images",))), "must declare what leaves as Release"),
        ((*EVENTS[:4], replace(EVENTS[4], what="images")), "a tuple of names"),
        ((*EVENTS[:4], RECEIPT), "must declare what leaves as Release"),
        ((*EVENTS[:4], Release(4, ("images",), seen=-5)), "-5 examples were seen"),
        ((*EVENTS[:4], Release(4, ("images",), seen=nan)), "nan examples were seen"),  # pyright: ignore[reportArgumentType]
    ],
    ids=["a client too many", "nobody", "a client that is a float", "a class of its own", "a text", "a receipt",
         "less than none", "as many as nan"],
)  # fmt: skip
def test_events_of_nobody_or_of_another_class_are_refused(events: tuple[Any, ...], why: str) -> None:
    with pytest.raises(UserError, match=rf"sharing stage Declares .*{why}"):
        share(Declares(events=events), dealt(), images())
    with pytest.raises(UserError, match=rf"Sharing\.share .*{why}"):
        share_by_method(share(Real(), dealt()), Sharing(events), 10, 0)


@dataclass(frozen=True)
class Sharing:
    """A method that shares one image and declares what it is told to."""

    events: tuple[Any, ...]

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        return Common(clients.store[slice(0, 1)], 0, self.events)


def test_events_that_can_be_read_once_are_read_once() -> None:
    """Read twice, they would cover the clients first and cost nothing afterwards."""
    assert list(share(Declares(events=lambda: iter(EVENTS)), dealt(), images()).releases) == list(EVENTS)


def test_names_without_a_client_may_be_counted() -> None:
    releases = share(Declares(events=(*EVENTS, Release(what=("a hint",)))), dealt(), images()).releases
    assert stated(releases)["overall"] == "none"


def _run(tmp_path: Path, **values: Any) -> dict[str, Any]:
    plain = {"sharing.setting": "user_parts:Peeks", "generator.name": "user_parts:WithReceipt", "data.limit": 60,
             "generator.label_noise": 5.0, "artifacts": str(tmp_path / "store"), **ONE_ROUND}  # fmt: skip
    config = presets.experiment("smoke", "digits", plain | {n.replace("__", "."): v for n, v in values.items()})
    return run(config, tmp_path / "run", say=lambda text: None)


@pytest.mark.parametrize(
    ("sees", "why"),
    [
        ("another's", "on examples of its own"),
        ("one eight times", "on examples of its own"),
        ("two generators", "one private generator a"),
    ],
)
def test_a_private_generator_sees_its_clients_own_examples_once(sees: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"stage Peeks .*{why}"):
        _run(tmp_path, sharing__sees=sees)


@pytest.mark.parametrize(("steps", "pool"), [(20, "covered"), (0, "uncovered")])
def test_a_receipt_is_stored_and_read_and_one_of_no_steps_covers_nothing(steps: int, pool: str, tmp_path: Path) -> None:
    found = _run(tmp_path, generator__steps=steps)["privacy"]
    assert found["commons"] == pool
    assert (found.get("pool_epsilon_max_if_secret") is None) == (steps == 0)


def test_the_default_delta_is_refused_to_many_examples_only_where_something_is_covered() -> None:
    many = [150_000, 10]
    for quiet in (Ledger(), Ledger.of([Release(0, ("images",), seen=3)])):
        require_small_delta(quiet, 1e-5, many)
    for ledger in (Ledger.of(EVENTS), Ledger().after([RECEIPT.release(1, "delta")])):
        require_small_delta(ledger, 1e-5, [50_000, 10])
        with pytest.raises(UserError, match=r"dp\.delta .* 6\.67e-06, .*client 0"):
            require_small_delta(ledger, 1e-5, many)


@pytest.mark.parametrize("covered", [False, True])
def test_a_run_of_many_examples_is_refused_its_epsilon_and_nothing_without_one(covered: bool, tmp_path: Path) -> None:
    values = {"data.limit": None, "partition.name": "iid", "partition.n_clients": 1, "model.name": "linear",
              "sharing.setting": "user_parts:Hint", "sharing.covered": covered, "client.batch_size": 50_000,
              **ONE_ROUND}  # fmt: skip
    config = presets.experiment("smoke", "user_parts:thousands", values)
    if covered:
        with pytest.raises(UserError, match=r"dp\.delta must be below 1/n_i"):
            run(config, tmp_path / "run", say=lambda text: None)
    else:
        assert run(config, tmp_path / "run", say=lambda text: None)["privacy"]["delta"] is None
