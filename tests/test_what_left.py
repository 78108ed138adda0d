"""What the engine sees leave the clients, against stages, methods and generators that declare something else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from five_clients import DATASET, ONE_ROUND, N, dealt, images, stated

from fedcommons.accounting.privacy import Ledger
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.config import presets
from fedcommons.core.accountants import epsilon
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.release import Release
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.runs.experiment import run
from fedcommons.seeds import set_default_generator
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.local_synthetic import LocalSynthetic
from fedcommons.sharing.raw_copies import RawCopies
from fedcommons.sharing.real import Real
from fedcommons.sharing.shuffled_real import ShuffledReal
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import Assigned, Contribution, Contributions, require_once, share, share_by_method
from lightning_modules import Classifier
from lightning_modules.networks import Linear


def raw(releases: Sequence[Release]) -> dict[int, int]:
    """Client to the number of raw examples that the engine saw leave it."""
    return {r.client: r.seen for r in releases if r.what == ("raw examples",) and not r.covered}


@dataclass(frozen=True)
class AmongTheMade(ShuffledSynthetic):
    """Puts real rows among the images of private generators; ``of``: the client that it says they came from."""

    of: int | None = None

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        made = Contributions.of_made(dealt, drawn)
        real = [dealt.own.rows[client][:3] for client in (1, 3)]
        owners = np.repeat([1, 3] if self.of is None else [self.of] * 2, 3)
        return replace(made, rows=np.concatenate([made.rows, *real]), owners=np.concatenate([made.owners, owners]))


@pytest.mark.parametrize("of", [None, 0])
def test_real_rows_among_what_generators_made_are_raw_whatever_the_receipt(of: int | None) -> None:
    """And they are those of the clients that hold them, whoever is named."""
    given = dealt()
    shared = share(AmongTheMade(of=of), given, images())
    assert raw(shared.releases) == {1: 3, 3: 3}
    assert shared.disclosed == 6
    assert Ledger.of(shared.releases).given_away == {1: 3, 3: 3}
    told = stated(shared.releases)
    assert (told["overall"], told.get("pool_epsilon_max_if_secret")) == ("none", None)
    assert shared.owners is not None
    assert (shared.owners[given.own.rows[3]] == 3).all()
    honest = share(ShuffledSynthetic(), given, images()).releases
    assert raw(honest) == {}
    assert stated(honest)["overall"] == pytest.approx(epsilon(0.1, 1.5, 20, 1e-5))


@dataclass(frozen=True)
class Beside(ShuffledSynthetic):
    """Hands two real rows of client 3 to client 0, or into the pool, beside the covered images."""

    where: str = "received"

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        whole = super().assign(dealt, released)
        rows = dealt.own.rows[3][:2]
        if self.where == "pool":
            return replace(whole, pool=[rows, *whole.pool])
        parts = list(getattr(whole, self.where))
        return replace(whole, **{self.where: [np.concatenate([parts[0], rows]), *parts[1:]]})


@pytest.mark.parametrize("where", ["received", "kept", "pool"])
def test_real_rows_that_reach_another_client_or_the_pool_are_raw_beside_covered_events(where: str) -> None:
    shared = share(Beside(where=where), dealt(), images())
    assert raw(shared.releases) == {3: 2}
    assert shared.disclosed == 2
    assert stated(shared.releases)["overall"] == "none"


@dataclass(frozen=True)
class Understated(Beside):
    """Has an uncovered event of its own that speaks of one example."""

    seen: int = 1

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        _, events = super().release(dealt, contributed)
        return contributed, [*events, Release(3, ("the weather",), seen=self.seen)]


def test_more_raw_rows_than_a_stage_says_are_counted_and_as_many_are_not_told_twice() -> None:
    assert raw(share(Understated(seen=1), dealt(), images()).releases) == {3: 2}
    assert raw(share(Understated(seen=2), dealt(), images()).releases) == {}


@pytest.mark.parametrize("seed", range(5))
def test_no_stage_of_ours_is_accused(seed: int) -> None:
    """What they declare is what is seen to leave, so the engine adds nothing and refuses nothing, also under DP-SGD."""
    given = replace(dealt(), seed=seed)
    stages = [Real(), ShuffledReal(0.3), RawCopies(0.3, 2), RawCopies(0.5, 4, "optimal"), ShuffledSynthetic(0.2),
              LocalSynthetic(0.2)]  # fmt: skip
    for stage in stages:
        made = images() if isinstance(stage, ShuffledSynthetic | LocalSynthetic) else []
        contributed = stage.make(given, made)
        declared = list(stage.release(given, contributed)[1])
        shared = share(stage, given, made)
        assert shared.releases == declared
        require_once(stage, shared)
    assert len(share_by_method(share(Real(), given), FedMix(), 10, seed).releases) == N


@dataclass(frozen=True)
class Repeats(ShuffledSynthetic):
    """Lists one row of client 2 eight times."""

    where: str = "kept"

    def check(self, fields: Mapping[str, Any]) -> None:
        """Nothing is refused."""

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        whole = super().assign(dealt, released)
        parts = list(getattr(whole, self.where))
        parts[2] = np.concatenate([parts[2], *[dealt.own.rows[2][:1]] * 7])
        return replace(whole, **{self.where: parts})


@pytest.mark.parametrize("where", ["kept", "received"])
def test_a_row_that_is_listed_eight_times_is_refused_under_dp_sgd(where: str) -> None:
    stage = Repeats(where=where)
    shared = share(stage, dealt(), images())
    with pytest.raises(UserError, match=r"stage Repeats .* 1 rows of client 2 up to 8 times"):
        require_once(stage, shared)


def test_a_run_with_repeated_rows_stops_before_its_first_round_only_under_dp_sgd(tmp_path: Path) -> None:
    values = {"sharing.setting": "user_parts:ManyTimes", "data.limit": 60, **ONE_ROUND}
    assert run(presets.experiment("smoke", "digits", values), tmp_path / "plain", say=lambda text: None)["p"] > 0
    private = presets.experiment("smoke", "digits", values | {"dp.local": True})
    with pytest.raises(UserError, match=r"stage ManyTimes .* 1 rows of client 0 up to 2 times"):
        run(private, tmp_path / "private", say=lambda text: None)
    assert not list((tmp_path / "private").glob("checkpoints/*"))


def test_a_run_with_repeated_rows_stops_where_rounds_release_something_private(tmp_path: Path) -> None:
    """As FedDPMS does with its noisy means: whether a method will is seen after its round."""
    values = {"algorithm": "user_parts:Hints", "data.limit": 60, **ONE_ROUND}
    found = run(presets.experiment("smoke", "digits", values), tmp_path / "once", say=lambda text: None)["privacy"]
    assert found["pool_epsilon_max_if_secret"] == pytest.approx(epsilon(0.1, 1.5, 20, 1e-5))
    many = presets.experiment("smoke", "digits", values | {"sharing.setting": "user_parts:ManyTimes"})
    with pytest.raises(UserError, match="ManyTimes must list no real row twice"):
        run(many, tmp_path / "many", say=lambda text: None)


def test_made_rows_may_repeat_as_their_receipt_covers_all_that_is_made_of_them() -> None:
    @dataclass(frozen=True)
    class Doubled(ShuffledSynthetic):
        def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
            whole = super().assign(dealt, released)
            return replace(whole, received=[np.concatenate([rows, rows]) for rows in whole.received])

    require_once(Doubled(), share(Doubled(), dealt(), images()))


@pytest.mark.parametrize("weight", [1.0, 1e6])
def test_weights_do_not_change_what_an_example_may_do_under_dp_sgd(weight: float) -> None:
    """The gradient of one weighted loss is clipped to C all the same: one example moves the sum by C at most."""
    set_default_generator("weights of the tests")
    module = Classifier(Linear((1, 8, 8), 10), lr=1.0, mean=DATASET.mean, std=DATASET.std)
    work = Work(module, torch.device("cpu"), LocalSGD(1, 6, dp=DPSGD(1e-6, 0.5)))
    examples = DATASET.train[slice(0, 6)]
    blank = torch.ones(6)
    moved = []
    for of_first in (0.0, weight):
        blank[0] = of_first
        data = ClientData(examples.x, examples.y, blank.clone())
        start = work.snapshot()
        moved.append(work.local(start, data, seed=1).model.buffer - start.buffer)
        work.load(start)
    change = float((moved[1] - moved[0]).norm()) * 6  # the sum is divided by B = 6
    assert 0.1 < change < 0.5 * (1 + 1e-3)
