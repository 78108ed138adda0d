"""Replies that are rejected are told, and of a model that one client blew up that client is named."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING

import pandas as pd
import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override, same_results
from fedcommons.core.algorithm import Message, Replies, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError, UserError
from fedcommons.federation import checkpoint, rejections
from fedcommons.federation.rejections import Largest, Rejected
from fedcommons.federation.rounds import Standing
from fedcommons.reports import tables
from fedcommons.runs import experiment
from fedcommons.runs.build import prepare
from fedcommons.sweeping import grids
from fedcommons.sweeping import sweep as tuning
from fedcommons.sweeping.display import Display
from fedcommons.tensors import Flat, Layout, Payload, data, flat, norm
from fedcommons.testing import Federation
from fedcommons.testing.comparing import bits
from fedcommons.testing.spy import Spy
from papers.fedssyn import table1 as of_table1

if TYPE_CHECKING:
    from conftest import LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

LAYOUT = Layout(("w",), ((4,),))


def _all(reply: Reply, value: float) -> Reply:
    delta = flat(reply.sums, "delta")
    return replace(reply, sums={"delta": Flat(delta.layout, torch.full_like(delta.buffer, value))})


@dataclass(frozen=True)
class Spoilt(FedAvg):
    """FedAvg in which ``spoil`` sees the replies of clients ``who`` in rounds ``when``."""

    spoil: Callable[[Reply], Reply] = lambda reply: _all(reply, 1e30)
    who: tuple[int, ...] = (3,)
    when: tuple[int, ...] = (2,)

    def down(self, state: State, round: int, client: int) -> Message:
        return replace(super().down(state, round, client), own={"where": torch.tensor([round, client])})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply, where = super().client(work, message, memory, data, round, seed), message.own["where"]
        assert isinstance(where, Tensor)
        client = where.tolist()[1]
        return self.spoil(reply) if round in self.when and client in self.who else reply


def _norms(algorithm: FedAvg, federation: Federation, round: int) -> list[float]:
    """Of what the clients send in this round, in their order."""
    spy = Spy(algorithm)
    federation.play(spy, federation.plan(round))
    return [norm(flat(call.reply.sums, "delta")) for call in spy.calls if call.round == round]


# A client that blows up the model


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("value", [1e30, 1e19])
def test_a_client_that_blows_up_the_model_is_named_in_its_round(value: float, blocks: int, digits: "Digits") -> None:
    """Every number is finite; their squares are not."""
    federation = digits()
    algorithm = Spoilt(spoil=lambda reply: _all(reply, value))
    with pytest.raises(ClientError, match=r"round 2, Spoilt: the merged model has a norm of .* overflows") as caught:
        federation.play(algorithm, federation.plan(3, blocks=blocks))
    assert (caught.value.client, caught.value.round) == (3, 2)
    size = value * federation.model.layout.size**0.5
    others = median(n for i, n in enumerate(_norms(replace(algorithm, who=()), federation, 2)) if i != 3)
    said = f"in round 2 the largest was client 3's, of norm {size:.3g}; the median of the others was {others:.3g}"
    assert said in caught.value.sentence


def test_it_is_named_where_the_numbers_of_the_model_are_wide(least_squares: "Problem") -> None:
    """In float64 1e30 has a square; yet nothing is left of what the others sent."""
    federation = least_squares().federation(0.1)
    with pytest.raises(ClientError, match=r"round 2, Spoilt: the merged model .* client 3's") as caught:
        federation.play(Spoilt(), federation.plan(3))
    assert (caught.value.client, caught.value.round) == (3, 2)


@pytest.mark.parametrize("stopped", [False, True], ids=["in one go", "after a resumption"])
def test_a_client_is_named_whose_update_shows_only_in_the_next_round(
    stopped: bool, digits: "Digits", tmp_path: Path
) -> None:
    """1e15: the model is finite and usable, and whatever anybody trains from it is not."""
    federation, algorithm = digits(), Spoilt(spoil=lambda reply: _all(reply, 1e15))
    start = federation.start(algorithm, federation.plan(4))
    if stopped:
        start = federation.play(algorithm, federation.plan(2))[-1][0]
        checkpoint.save(tmp_path, start)
        start = checkpoint.load_latest(tmp_path)
        assert start is not None
    with pytest.raises(
        ClientError, match="round 3, Spoilt: no reply was finite; of the replies in round 2 the"
    ) as caught:
        federation.play(algorithm, federation.plan(4), start=start)
    assert (caught.value.client, caught.value.round) == (3, 2)
    assert "the largest was client 3's" in caught.value.sentence


@dataclass(frozen=True)
class Singly(Spoilt):
    """What its clients send travels singly, and some of it is used."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        return Reply({}, {"mine": reply.sums["delta"], "steps": torch.tensor(1e6)}, metrics=reply.metrics)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        mean = sum(flat(r.each, "mine").buffer for r in replies.values()) / len(replies)
        model = flat(state, "model")
        return {"model": Flat(model.layout, model.buffer + mean)}


def test_of_what_travels_singly_the_sender_is_named_too(digits: "Digits") -> None:
    federation = digits()
    with pytest.raises(ClientError, match=r"round 2, Singly: the merged model .* client 3's") as caught:
        federation.play(Singly(), federation.plan(3))
    assert (caught.value.client, caught.value.round) == (3, 2)


def test_who_was_not_averaged_in_is_not_named(digits: "Digits") -> None:
    """Client 1 sends still larger numbers, under another name."""

    def spoil(reply: Reply) -> Reply:
        return replace(_all(reply, 1e30), weight=1.0) if reply.weight == 1 else reply

    class Two(Spoilt):
        def client(
            self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int
        ) -> Reply:
            reply = super().client(work, message, memory, data, round, seed)
            if message.own["where"].tolist() == [2, 1]:  # pyright: ignore[reportAttributeAccessIssue]
                return replace(reply, sums={"gradient": _all(reply, 1e33).sums["delta"]})
            return reply

    federation = digits()
    with pytest.raises(ClientError, match="client 3's, of norm") as caught:
        federation.play(Two(spoil=spoil), federation.plan(3, blocks=1))
    assert caught.value.client == 3


def test_all_of_the_state_is_looked_at(digits: "Digits") -> None:
    class Hoarder(Spoilt):
        """Keeps the sum in another place than the model."""

        def merge(
            self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
        ) -> State:
            return {"model": state["model"], "rounds": torch.tensor(2), "held": total["delta"]}

    federation = digits()
    with pytest.raises(ClientError, match=r"the merged held has a norm of .* client 3's"):
        federation.play(Hoarder(), federation.plan(3))


def test_what_is_unusable() -> None:
    assert rejections.unusable({"x": torch.tensor([1e19, 1e19]), "n": torch.tensor(2**62)}) is None
    assert (
        rejections.unusable({"x": torch.tensor([1e19, 1.6e19])}) == "x has a norm of 1.89e+19, whose square overflows"
    )
    for value in (math.nan, math.inf):
        assert rejections.unusable({"x": torch.tensor([1.0, value])}) == "x has values that are not finite"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_norm_overflows_only_where_a_value_does(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert norm(torch.tensor([most / 4, 0, -most / 4], dtype=dtype)) == pytest.approx(most / 4 * 2**0.5, rel=1e-3)
    assert norm(Flat(LAYOUT, torch.tensor([3, 0, 0, 4], dtype=dtype))) == 5
    assert norm(torch.zeros(0, dtype=dtype)) == 0
    assert math.isinf(norm(torch.tensor([1, -math.inf], dtype=dtype)))
    assert math.isnan(norm(torch.tensor([1, math.nan], dtype=dtype)))


# federation.max_norm


def _rejected_above(algorithm: FedAvg | SCAFFOLD | FedNova, federation: Federation, norms: Sequence[float]) -> None:
    """Client i is rejected where its norm is above the bound, for a reason that says so, and no other is."""
    for bound in sorted(norms)[:-1]:
        plan = replace(federation.plan(1), max_norm=bound * (1 + 1e-5))
        ((now, facts),) = federation.play(algorithm, plan)
        assert set(now.rejected) == {i for i, size in enumerate(norms) if size > bound * (1 + 1e-5)}
        assert facts["rejected"] == len(now.rejected)
        for i, found in now.rejected.items():
            assert found == Rejected(
                1, f"its update has norm {norms[i]:.4g}, above federation.max_norm {bound * (1 + 1e-5):g}"
            )


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("kind", [FedAvg, SCAFFOLD, FedNova])
def test_the_norm_is_of_all_sums_over_the_weight(kind: type, weighting: str, digits: "Digits") -> None:
    """SCAFFOLD's delta and control together; of FedNova not the count of steps, a number."""
    federation = replace(digits(batch_norm=True), weighting=weighting)
    algorithm = kind()
    spy = Spy(algorithm)
    federation.play(spy, federation.plan(1))
    norms = []
    for call in spy.calls:
        update = [data(x).double() / call.reply.weight for x in call.reply.sums.values() if isinstance(x, Flat)]
        norms.append(float(torch.cat(update).norm()))
    _rejected_above(algorithm, federation, norms)


def test_a_client_above_max_norm_is_as_if_it_had_not_been_there(least_squares: "Problem") -> None:
    problem = least_squares()
    federation, algorithm = problem.federation(0.1), Spoilt(when=(1, 2, 3))
    plan = replace(federation.plan(3, blocks=1), max_norm=100.0)
    now = federation.play(algorithm, plan)[-1][0]
    assert now.rejected == {3: Rejected(3, "its update has norm 1.732e+30, above federation.max_norm 100")}
    three = type(problem)(problem.a[:3], problem.b[:3]).federation(0.1)
    assert bits(now) == bits(three.play(algorithm, three.plan(3, blocks=1))[-1][0])


def test_where_all_are_above_it_the_run_stops(digits: "Digits") -> None:
    federation = digits()
    with pytest.raises(
        ClientError,
        match=r"every reply was rejected; client 0: its update has norm .*, above federation.max_norm 0.001",
    ):
        federation.play(FedAvg(), replace(federation.plan(2), max_norm=1e-3))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_max_norm_must_be_a_positive_number(value: float) -> None:
    with pytest.raises(UserError, match=r"federation\.max_norm must lie in \(0, inf\)"):
        prepare(override(Experiment(), {"federation.max_norm": value}))


def test_cells_keep_the_names_they_have_had_since_only_what_was_chosen_is_hashed() -> None:
    """A cell with another value has another name; so has preset small's since it trains without oneDNN."""
    today = presets.experiment("small", "digits")
    assert tuning.cell(today, grids.VARIED).name == "fedavg-real-alpha0.1-N10-C1-lr0.04-seed0-9d1870"
    small = override(today, {"client.onednn": True})
    assert tuning.cell(small, grids.VARIED).name == "fedavg-real-alpha0.1-N10-C1-lr0.04-seed0-30dd58"
    names = {tuning.cell(override(small, {"federation.max_norm": n}), grids.VARIED).name for n in (None, 1.0, 2.0)}
    assert len(names) == 3
    assert "federation.max_norm" in same_results(small, override(small, {"federation.max_norm": 1.0}))


# What is told


def test_what_is_told() -> None:
    one = rejections.counted({}, {2: "its weight is nan"})
    assert rejections.told(rejections.records(one)) == "1 reply was rejected (client 2: its weight is nan)"
    more = rejections.counted(one, {2: "another reason"})
    assert (
        rejections.told(rejections.records(more)) == "2 replies of 1 client were rejected (client 2: its weight is nan)"
    )
    many = rejections.counted(more, {i: "why" for i in (9, 7, 1, 0)})
    assert rejections.told(rejections.records(many)) == (
        "6 replies of 5 clients were rejected (client 0: why; client 1: why; client 2: its weight is nan; and 2 more)"
    )
    assert rejections.read(json.loads(json.dumps(rejections.records(many)))) == many
    assert one == {2: Rejected(1, "its weight is nan")}  # as it was


def test_a_checkpoint_holds_who_was_rejected_and_the_largest_reply(tmp_path: Path) -> None:
    for largest in (None, Largest(4, 3, 1e15, 0.1), Largest(4, 3, 2.0, None)):
        rejected = {12: Rejected(3, "its weight is nan"), 3: Rejected(1, "why")}
        standing = Standing(4, {"model": Flat(LAYOUT, torch.ones(4))}, rejected=rejected, largest=largest)
        checkpoint.save(tmp_path, standing)
        found = checkpoint.load_latest(tmp_path)
        assert found is not None
        assert (found.rejected, found.largest) == (rejected, largest)


@pytest.fixture
def bounded(tmp_path: Path) -> Experiment:
    """Of its four clients the first has updates of norm 0.8 to 0.96, the others smaller ones."""
    fields = {"federation.rounds": 4, "federation.checkpoint_every": 2, "client.epochs": 2, "measure.every": 0,
              "tracking.wandb": "off", "federation.max_norm": 0.85, "artifacts": str(tmp_path)}  # fmt: skip
    return presets.experiment("smoke", "digits", fields)


def test_a_run_says_what_was_rejected_and_its_summary_has_it(bounded: Experiment, tmp_path: Path) -> None:
    """Broken off and resumed too, though the rejections are of both parts."""

    class PowerCut(Exception):
        pass

    def cut(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == 3:
            raise PowerCut

    said: list[str] = []
    summary = experiment.run(bounded, tmp_path / "whole", say=said.append)
    (found,) = summary["rejected"]
    lines = [json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()]
    assert found["client"] == 0
    assert found["replies"] == sum(line.get("rejected", 0) for line in lines) == 4
    assert found["why"].startswith("its update has norm 0.95")
    assert said == [
        f"round 1: 1 reply was rejected (client 0: {found['why']}); what is rejected later is counted",
        f"4 replies of 1 client were rejected (client 0: {found['why']}), "
        f"see rejected in {tmp_path / 'whole' / 'summary.json'}",
    ]
    with pytest.raises(PowerCut):
        experiment.run(bounded, tmp_path / "cut", say=lambda _: None, on_round=cut)
    again: list[str] = []
    assert experiment.run(bounded, tmp_path / "cut", resume=True, say=again.append) == summary
    assert len(again) == 1
    quiet = experiment.run(override(bounded, {"federation.max_norm": None}), tmp_path / "quiet", say=said.append)
    assert quiet["rejected"] == []
    assert len(said) == 2


def test_tables_have_a_footnote_for_each_run_with_rejected_replies(
    bounded: Experiment, tmp_path: Path, sweeps: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    table1, figure3 = sweeps("table1"), sweeps("figure3")
    options = ["--preset=smoke", "--alphas=0.1", "--settings=real", "--algorithms=fedavg", "--wandb=off"]
    given = table1.arguments([*options, f"--out={tmp_path}"])
    (cell,) = table1.grid(given)
    summary = experiment.run(bounded, tmp_path / "run", say=lambda _: None)
    (tmp_path / "run").rename(tmp_path / cell.name)
    note = f"{cell.name}: 4 replies of 1 client were rejected (client 0: {summary['rejected'][0]['why']})."
    assert of_table1.written([cell], grids.finished([cell], tmp_path), tmp_path, given).count(note) == 1
    figure3.report([cell], figure3.arguments([*options, f"--out={tmp_path}"]), tmp_path, Display())
    for name in ("table1.md", "figure3.md"):
        assert (tmp_path / name).read_text().count(note) == 1
    assert capsys.readouterr().out.count(note) == 1
    assert tables.rejected_notes(pd.DataFrame([{"run": "quiet"}])) == []
