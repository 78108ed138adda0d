"""What left is measured: metrics stay with the experimenter, class counts are a release, all rounds add up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcommons import load_rounds, load_runs
from fedcommons.accounting.privacy import Ledger, read
from fedcommons.accounting.statement import in_short, statement
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import parts, presets
from fedcommons.core.accountants import composed, epsilon
from fedcommons.core.algorithm import Facts, Replies, State
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.federation import checkpoint
from fedcommons.runs.build import assemble, prepare
from fedcommons.runs.counting import counted
from fedcommons.runs.experiment import run
from fedcommons.tensors import Flat, Payload
from fedcommons.testing import Federation
from fedcommons.tracking.run_folder import read_rounds

Digits = Callable[..., Federation]

COUNTS = "class counts (read by the method or the straggler rule)"
PRIVATE = LocalSGD(1, 5, dp=DPSGD(2.0, 1.0))


@dataclass(frozen=True)
class Listens(FedAvg):
    """It keeps whatever metrics reach the server."""

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        after = super().merge(executor, state, total, replies, round, seed)
        heard = [float(value) for reply in replies.values() for value in reply.metrics.values()]
        return {**after, "heard": torch.tensor(heard)}


def test_metrics_reach_the_record_and_never_the_server(digits: Digits) -> None:
    federation = digits()
    now, facts = federation.play(Listens(), federation.plan(2))[-1]
    assert len(now.state["heard"]) == 0
    assert facts["train/loss"] > 0


@dataclass(frozen=True)
class Asks(FedAvg):
    """It reads class counts in ``start``; ``later``: when the server merges, by the facts that it has kept."""

    later: bool = False

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        assert facts.counts is not None
        if self.later:
            object.__setattr__(self, "_facts", facts)
            return {"model": model}
        return {"model": model, "counts": facts.counts()}

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        after = super().merge(executor, state, total, replies, round, seed)
        if self.later and round == 2:
            self._facts.counts()  # pyright: ignore[reportAttributeAccessIssue]
        return after


@dataclass(frozen=True)
class LateByCounts:
    """Late is who has an example of the first class."""

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> dict[int, float]:
        assert facts.counts is not None
        return {i: 0.0 for i in joined if facts.counts()[i, 0]}


def test_class_counts_that_are_read_are_a_release_of_every_client_once(digits: Digits) -> None:
    federation = digits().training(PRIVATE)
    for method, late in ((Asks(), None), (FedAvg(), LateByCounts())):
        played = federation.play(method, plan := federation.plan(3, late=late))
        for now, _ in played:
            assert now.ledger.uncovered == {COUNTS: 5}
            assert now.ledger.of_all(0, 1e-5) is None
            assert now.traffic.once == 5 * 10 * 8
        assert plan.facts.counts_nbytes == 400
    quiet = federation.play(FedAvg(), federation.plan(2))[-1][0]
    assert quiet.ledger.uncovered == {}
    assert quiet.traffic.once == 0


def test_class_counts_that_are_read_later_count_from_then_on(digits: Digits) -> None:
    federation = digits().training(PRIVATE)
    played = federation.play(Asks(later=True), federation.plan(3))
    assert [now.ledger.uncovered for now, _ in played] == [{}, {COUNTS: 5}, {COUNTS: 5}]
    assert [now.traffic.once for now, _ in played] == [0, 400, 400]


def test_after_a_checkpoint_class_counts_are_not_sent_again(digits: Digits, tmp_path: Path) -> None:
    federation = digits().training(PRIVATE)
    plan, whole = federation.plan(3), federation.play(Asks(), federation.plan(3))
    checkpoint.save(tmp_path, whole[0][0])
    federation.start(Asks(), plan)  # a resumed run begins as a new one does
    rest = federation.play(Asks(), plan, start=checkpoint.load_latest(tmp_path))
    assert [now.ledger for now, _ in rest] == [now.ledger for now, _ in whole[1:]]
    assert [now.traffic for now, _ in rest] == [now.traffic for now, _ in whole[1:]]


def test_what_is_tried_before_a_run_reads_no_class_counts(tmp_path: Path) -> None:
    fields = {"algorithm": "feddm", "federation.rounds": 1, "measure.every": 0, "tracking.wandb": "off"}
    config = presets.experiment("smoke", "digits", fields)
    ready = assemble(prepare(config))  # tries start
    assert ready.plan.facts.counts_nbytes == 0
    counted(ready)
    summary = run(config, tmp_path / "run", say=lambda _: None)
    n = ready.plan.facts.n_clients
    assert sum(line.startswith(COUNTS) for line in summary["privacy"]["uncovered"]) == 1
    assert f"{COUNTS}, released {n} times" in " ".join(summary["privacy"]["uncovered"])
    assert read_rounds(tmp_path / "run")[0]["comm/once_bytes"] == n * 10 * 8


def test_the_epsilon_of_rounds_is_that_of_updates_and_of_what_they_put_into_a_commons() -> None:
    event = Release(
        0, ("images",), mechanism=SAMPLED_GAUSSIAN, q=0.25, sigma=1.0, sensitivity=5.0, steps=4, commons=True
    )
    update = replace(event, what=("delta",), q=0.5, steps=3, commons=False)
    ledger = Ledger.of([event, replace(event, client=1)]).after([event, update]).after([update])
    assert ledger.of_rounds(0, 1e-5) == composed(((0.25, 1.0, 4), (0.5, 1.0, 6)), 1e-5)
    assert ledger.of_rounds(1, 1e-5) == ledger.of_rounds(2, 1e-5) == 0.0
    assert ledger.largest_of_rounds(1e-5) == ledger.of_rounds(0, 1e-5)
    assert ledger.of_all(0, 1e-5) == composed(((0.25, 1.0, 8), (0.5, 1.0, 6)), 1e-5)
    assert read(ledger.record()) == ledger
    assert Ledger().largest_of_rounds(1e-5) == 0.0
    only_updates = Ledger().after([update])
    assert only_updates.largest_of_rounds(1e-5) == epsilon(0.5, 1.0, 3, 1e-5)


def test_a_ledger_of_an_earlier_version_is_read() -> None:
    record: Mapping[str, Any] = Ledger().after([Release(2, ("delta",))]).record()
    assert read({name: value for name, value in record.items() if name not in ("before", "outlived")}) == read(record)
    old = {name: value for name, value in record.items() if name not in ("leaks", "exposed")}
    assert read(old).largest_of_rounds(1e-5) is None  # it does not tell whose training was not covered
    assert read({**old, "updates": Ledger().record()["updates"]}).largest_of_rounds(1e-5) == 0.0


def _with_a_gradient(work: Any, data: Any, reply: Any) -> Any:
    work.gradient(work.initial, data)
    return reply


LEAKS: dict[str, Callable[..., Any]] = {
    "undeclared": lambda work, data, reply: replace(reply, each={"more": torch.ones(2)}),
    "withdrawn": lambda work, data, reply: replace(reply, releases=[Release(what=("delta",))]),
    "gradient": _with_a_gradient,
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_no_epsilon_is_stated_of_a_client_once_its_training_is_not_covered(
    leak: Callable[..., Any], digits: Digits
) -> None:
    """Client 1, of 16 examples, sends in round 2 what no noise covers."""

    class Leaks(FedAvg):
        def client(self, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
            reply = super().client(work, message, memory, data, round, seed)
            return leak(work, data, reply) if round == 2 and len(data) == 16 else reply

    federation = digits().training(PRIVATE)
    ledgers = [now.ledger for now, _ in federation.play(Leaks(), federation.plan(3))]
    said = [statement(ledger, 5, 1e-5, rejected=0, local=True, secret=True) for ledger in ledgers]
    each = [one["epsilon_local_training"]["of_each_client"] for one in said]
    assert each[0][1] > 0
    assert all(of[1] is None and min(of[0], *of[2:]) > 0 for of in each[1:])
    assert [one["epsilon_local_training"]["largest"] for one in said] == [max(each[0]), None, None]
    assert [one["epsilon_of_messages"] for one in said[1:]] == [None, None]
    assert in_short(said[2])["epsilon_local_training"] == "none"
    assert [read(ledger.record()) for ledger in ledgers] == ledgers


def test_where_nothing_is_covered_no_epsilon_is_stated(tmp_path: Path) -> None:
    """In the summary, rounds.jsonl and frames; it was 0.0."""
    fields = {"algorithm": "fedproto", "evaluate.clients": True, "federation.buffers": "keep", "dp.local": True}
    few = {"federation.rounds": 1, "data.limit": 60, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off"}
    config = presets.experiment("smoke", "digits", {**few, **fields})
    summary = run(config, tmp_path / "run", say=lambda _: None)
    spent, column = summary["privacy"]["epsilon_local_training_if_secret"], "privacy/epsilon_local_training_if_secret"
    assert spent == {"largest": None, "of_each_client": [None] * summary["n_clients"]}
    assert [line[column] for line in read_rounds(tmp_path / "run")] == [0.0, None]
    row = load_runs(tmp_path).iloc[0]
    assert "epsilon_local_training_if_secret" not in row
    assert column not in row
    assert load_rounds(tmp_path)[column].isna().tolist() == [False, True]


@pytest.mark.parametrize("name", ["fedgen", "feddpms"])
def test_what_is_declared_besides_a_covered_training_leaves_its_epsilon(name: str, digits: Digits) -> None:
    """Class counts and codes are no trainings: they are named, and there is no epsilon of all messages."""
    method = parts.make("algorithm", name, {"quota": 2, "tries": 2} if name == "feddpms" else {})
    federation = digits(sizes=(9, 16), method=method).training(PRIVATE)
    ledger = federation.play(method, federation.plan(2))[-1][0].ledger
    assert ledger.uncovered
    assert ledger.uncovered[COUNTS] == 2
    assert (ledger.largest_of_rounds(1e-5) or 0) > 0
