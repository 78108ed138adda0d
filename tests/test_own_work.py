"""User-defined methods and stages that count their work: ``--dry-run`` prices them as it does the package's own."""

import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import parts, presets
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

POLISH = '''
from dataclasses import dataclass, replace

from fedcommons.core.algorithm import Message, Reply
from fedcommons.tensors import Flat, flat, scale

SECONDS = [0.0]  # a clock


@dataclass(frozen=True)
class Task:
    model: Flat
    steps: int

    @property
    def nbytes(self):
        return self.model.buffer.nbytes


def polish(worker, task, seed):
    SECONDS[0] += 2.0 * task.steps
    return task.model


@dataclass(frozen=True)
class Polish:
    """FedAvg whose server takes steps, more for more replies, and none without a reply."""

    epochs: int = 50
    lr: float = 0.1

    def start(self, model, facts, seed):
        return {"model": model}

    def down(self, state, round, client):
        return Message({"model": state["model"]})

    def client(self, work, message, memory, data, round, seed):
        y, metrics, spent = work.local(flat(message.common, "model"), data, seed)
        SECONDS[0] += 1.0 + 0.5 * metrics["steps"] + 0.01 * work.loop.epochs * len(data)
        return Reply({"model": scale(y, 1.0)}, metrics=metrics, releases=[spent.of("model")])

    def merge(self, executor, state, total, replies, round, seed):
        mean = scale(flat(total, "model"), 1 / len(replies))
        mean = Flat(mean.layout, mean.buffer.float())
        return {"model": executor.map(polish, Task(mean, self.epochs * (1 + len(replies))), [seed])[0]}

    def pieces(self, facts, loop, round, clients):
        return {"server_steps": self.epochs * (1 + len(clients))}

    def smaller(self, times):
        return [(replace(self, epochs=e, lr=0.1), n) for e, n in ((1, 4), (1 + times, 4), (1 + times, 16))]
'''

MIXES = '''
from dataclasses import dataclass, replace
from fedcommons.sharing.stage import Assigned, Contributions

PLAYED = []


@dataclass(frozen=True)
class Mixes:
    """Every client gives its first examples, after a training of so many epochs."""

    epochs: int = 500

    def make(self, dealt, drawn):
        PLAYED.extend(range(self.epochs))
        return Contributions.of_own(dealt, [rows[:3] for rows in dealt.own.rows])

    def release(self, dealt, contributed):
        return contributed, contributed.releases("examples")

    def assign(self, dealt, released):
        given = released.of_each(len(dealt.own))
        return Assigned(dealt.own.rows, [given[i - 1] for i in range(len(given))])

    def shorter(self):
        return replace(self, epochs=2), self.epochs / 2
'''


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has these components."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "polish.py").write_text(POLISH)
    (tmp_path / "mixes.py").write_text(MIXES)
    return tmp_path


def played(kind: str, name: str) -> list[int]:
    """Return what a component of the lab has done, as it notes it itself; the notes are cleared."""
    notes = sys.modules[parts.find(kind, name).__module__].PLAYED
    found = list(notes)
    notes.clear()
    return found


def _config(values: dict[str, Any]) -> Experiment:
    tiny = {
        "data.limit": 120, "partition.n_clients": 4, "federation.rounds": 3, "client.epochs": 3, "measure.every": 0,
        "client.batch_size": 8, "tracking.wandb": "off",
    }  # fmt: skip
    return choose({**presets.preset("smoke", "digits"), **tiny, **values})


def ready(values: dict[str, Any]) -> Assembled:
    return build.assemble(build.prepare(_config(values)))


UNEQUAL = {"federation.participation": 0.7, "partition.name": "dirichlet_niid", "straggler.q": 0.3}


def test_cells_share_prices_if_the_smaller_variants_are_equal() -> None:
    few = {"ipc": 2, "least": 3, "iterations": 3, "server_epochs": 2, "match_batch": 4, "server_batch": 4}

    def shape(**values: float) -> object:
        return cost.shape_of(ready({"algorithm": "feddm", **{f"feddm.{n}": v for n, v in {**few, **values}.items()}}))

    one = shape()
    assert shape(ipc=3, image_lr=0.3, iterations=9, server_epochs=7, radius=2.0) == one
    assert shape(sigma=1.0) == shape(sigma=3.0) != one


def test_a_prediction_is_exact_by_a_clock_that_only_the_method_moves(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds: 2 of a step of the server, 1 of a training of a client, 0.5 + 0.01 B of a local step of B examples."""
    own = {"algorithm": "polish.py:Polish", **UNEQUAL}
    mine = ready(own)
    clock = sys.modules[type(mine.algorithm).__module__].SECONDS
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    prices = cost.measure(mine)
    assert prices.pieces == {"server_steps": pytest.approx(2.0)}
    found = (prices.step, prices.half, prices.training, prices.round, prices.checkpoint)
    assert found == pytest.approx((0.58, 0.54, 1.0, 0.0, 0.0))
    before = clock[0]
    experiment.run(_config(own), lab / "run", say=lambda _: None)
    assert prices.seconds(counted(mine), 8) == pytest.approx(clock[0] - before)


def test_a_stage_that_takes_long_is_priced_by_a_shorter_one(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = "mixes.py:Mixes"
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=count(0.0, 3.0).__next__))  # all takes 3 seconds
    for epochs in (500, 2):
        prepared = build.prepare(_config({"sharing.setting": stage, "sharing.epochs": epochs}))
        contributed, seconds = cost.contribute(prepared, [])
        assert seconds == 3 * epochs / 2
        assert len(played("sharing", stage)) == 2
        assert len(contributed.rows) == 4 * 3
    assert shorter_of(Real()) == (Real(), 1.0)


@dataclass(frozen=True)
class Shortened(Real):
    value: Any = None

    def shorter(self) -> Any:
        return self.value


@dataclass(frozen=True)
class Counted(FedAvg):
    """FedAvg with these pieces and variants."""

    value: Any = None

    def pieces(self, *arguments: Any) -> Any:
        return self.value

    def smaller(self, times: int) -> Any:
        return self.value


@pytest.mark.parametrize("value", [None, Shortened(), (Shortened(), 0), (Shortened(), float("nan")), (Real(), 2.0)])
def test_a_wrong_shorter_stage_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"Shortened\.shorter must give a Shortened .* above 0.*got "):
        shorter_of(Shortened(value))


@pytest.mark.parametrize("value", [None, {"a": -1}, {"a": float("inf")}, {"a": "many"}, {1: 2.0}])
def test_wrong_pieces_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"Counted\.pieces must give numbers of at least 0.*got "):
        pieces_of(Counted(value), Facts(1, [1.0], 1), LocalSGD(1, 8), 1, [0])


@pytest.mark.parametrize(
    "value",
    [None, [], [Counted()], [(Counted(), 0)], [(Counted(), 1.5)], [(FedAvg(), 4)], [(Counted(), 4), (Counted(), -1)]],
)
def test_wrong_variants_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"Counted\.smaller must give pairs.*at least 1, got "):
        smaller_of(Counted(value), 2)  # pyright: ignore[reportArgumentType]
