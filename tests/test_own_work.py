"""User-defined methods and stages that count their work: ``--dry-run`` prices them as it does the package's own."""

import sys
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import choose
from fedcommons.core.algorithm import Facts
from fedcommons.core.local import LocalSGD
from fedcommons.core.pieces import pieces_of, smaller_of
from fedcommons.errors import UserError
from fedcommons.runs import build, cost, experiment
from fedcommons.runs.build import Assembled
from fedcommons.runs.counting import counted
from fedcommons.sharing.real import Real
from fedcommons.sharing.stage import shorter_of
from fedcommons.tensors import Flat

PLAYED: list[int] = []
SECONDS = [0.0]
"""A clock that only the method moves."""


@dataclass(frozen=True)
class Task:
    model: Flat
    steps: int

    @property
    def nbytes(self) -> int:
        return self.model.buffer.nbytes


def polish(worker: Any, task: Task, seed: int) -> Flat:
    PLAYED.extend(range(task.steps))
    SECONDS[0] += 2.0 * task.steps
    return task.model


@dataclass(frozen=True)
class Polish(FedAvg):
    """FedAvg whose server takes steps, more for more replies, and none without a reply."""

    epochs: int = 50

    def client(self, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
        reply = super().client(work, message, memory, data, round, seed)
        SECONDS[0] += 1.0 + 0.5 * reply.metrics["steps"] + 0.01 * work.loop.epochs * len(data)
        return reply

    def merge(self, executor: Any, state: Any, total: Any, replies: Any, round: int, seed: int) -> Any:
        state = super().merge(executor, state, total, replies, round, seed)
        steps = self.epochs * (1 + len(replies)) if replies else 0
        executor.map(polish, Task(state["model"], steps), [seed])
        return state

    def pieces(self, facts: Any, loop: Any, round: int, clients: Any) -> dict[str, float]:
        return {"server_steps": self.epochs * (1 + len(clients)) if len(clients) else 0}

    def smaller(self, times: int) -> list[tuple["Polish", int]]:
        return [(replace(self, epochs=e), n) for e, n in ((1, 4), (1 + times, 4), (1 + times, 16))]


@dataclass(frozen=True)
class Mixes(Real):
    """A stage that trains for so many epochs."""

    epochs: int = 500
    played: ClassVar[list[int]] = []

    def make(self, dealt: Any, drawn: Any) -> Any:
        self.played.append(self.epochs)
        return super().make(dealt, drawn)

    def shorter(self) -> tuple["Mixes", float]:
        return replace(self, epochs=2), self.epochs / 2


def module_of(part: object) -> Any:
    """Return the module of a component that an experiment has loaded."""
    return sys.modules[type(part).__module__]


def played(part: object) -> list[int]:
    """Return the server's steps, as the method notes them itself; the notes are cleared."""
    steps = list(module_of(part).PLAYED)
    module_of(part).PLAYED.clear()
    return steps


def _config(values: dict[str, Any]) -> Experiment:
    tiny = {
        "data.limit": 120, "partition.n_clients": 4, "federation.rounds": 3, "client.epochs": 3, "measure.every": 0,
        "client.batch_size": 8, "tracking.wandb": "off",
    }  # fmt: skip
    return choose({**presets.preset("smoke", "digits"), **tiny, **values})


def ready(values: dict[str, Any]) -> Assembled:
    return build.assemble(build.prepare(_config(values)))


UNEQUAL = {"federation.participation": 0.7, "partition.name": "dirichlet_niid", "straggler.q": 0.3}


@pytest.mark.long
def test_a_server_that_trains_is_counted_beside_its_clients(tmp_path: Path) -> None:
    own = {"algorithm": "test_own_work:Polish", "federation.rounds": 6, **UNEQUAL, "straggler.q": 0.7}
    mine = ready(own)
    counts, average = counted(mine), counted(ready({**own, "algorithm": "fedavg"}))
    assert replace(counts, pieces={}) == average
    experiment.run(_config(own), tmp_path / "run", say=lambda _: None)
    assert counts.pieces == {"server_steps": len(played(mine.algorithm))}
    assert cost.shape_of(ready({**own, "polish.epochs": 7})) == cost.shape_of(mine)
    assert cost.measure(mine).pieces.keys() == {"server_steps"}
    assert max(played(mine.algorithm)) < 2 * 2 * (1 + cost.MORE)  # the 50 epochs were not played


def test_a_prediction_is_exact_by_a_clock_that_only_the_method_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds: 2 of a step of the server, 1 of a training of a client, 0.5 + 0.01 B of a local step of B examples."""
    own = {"algorithm": "test_own_work:Polish", **UNEQUAL}
    mine = ready(own)
    clock = module_of(mine.algorithm).SECONDS
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    prices = cost.measure(mine)
    assert prices.pieces == {"server_steps": pytest.approx(2.0)}
    found = (prices.step, prices.half, prices.training, prices.round, prices.checkpoint)
    assert found == pytest.approx((0.58, 0.54, 1.0, 0.0, 0.0))
    before = clock[0]
    experiment.run(_config(own), tmp_path / "run", say=lambda _: None)
    assert prices.seconds(counted(mine), 8) == pytest.approx(clock[0] - before)


def test_a_stage_that_takes_long_is_priced_by_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=count(0.0, 3.0).__next__))  # all takes 3 seconds
    for epochs in (500, 2):
        prepared = build.prepare(_config({"sharing.setting": "test_own_work:Mixes", "sharing.epochs": epochs}))
        assert cost.contribute(prepared, [])[1] == 3 * epochs / 2
        assert {*module_of(prepared.stage).Mixes.played} == {2}
    assert shorter_of(Real()) == (Real(), 1.0)


@dataclass(frozen=True)
class Counted(FedAvg):
    """FedAvg with these pieces and variants."""

    of_round: Any = None
    variants: Any = None

    def pieces(self, *given: Any) -> Any:
        return self.of_round

    def smaller(self, times: int) -> Any:
        return self.variants


@dataclass(frozen=True)
class Shortened(Real):
    answer: Any = None

    def shorter(self) -> Any:
        return self.answer


PIECES = [None, 3.0, {"a": -1}, {"a": float("nan")}, {"a": float("inf")}, {"a": "many"}, {1: 2.0}]
VARIANTS = [None, [], [Counted()], [(Counted(), 0)], [(Counted(), 1.5)], [(FedAvg(), 4)], "ab"]
SHORTER = [None, 3, Shortened(), (Shortened(), 0), (Shortened(), float("nan")), (Shortened(), -1.0), (Real(), 2.0)]


def test_wrong_pieces_variants_and_shorter_stages_are_refused() -> None:
    facts = Facts(1, [1.0], 1)
    for wrong in PIECES:
        with pytest.raises(UserError, match=r"Counted\.pieces must give numbers of at least 0.*got "):
            pieces_of(Counted(wrong), facts, LocalSGD(1, 8), 1, [0])
    for wrong in VARIANTS:
        with pytest.raises(UserError, match=r"Counted\.smaller must give pairs.*at least 1, got "):
            smaller_of(Counted({}, wrong), 2)  # pyright: ignore[reportArgumentType]
    for wrong in SHORTER:
        with pytest.raises(UserError, match=r"Shortened\.shorter must give a Shortened .* above 0.*got "):
            shorter_of(Shortened(wrong))
