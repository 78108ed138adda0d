"""Rejected replies, and the client that is named where a merged model is unusable."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import ModuleType

import pandas as pd
import pytest
import torch
from closed_forms import Digits, Problem

from fedcommons import Algorithm, ClientData, Message, Reply, Work, seed_for
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.ifca import IFCA
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import presets
from fedcommons.core import rejections
from fedcommons.core.rejections import Largest, Rejected
from fedcommons.errors import ClientError, DivergenceError
from fedcommons.federation import checkpoint
from fedcommons.flat_tensors import Flat, Payload, data, flat, norm
from fedcommons.reports import tables
from fedcommons.runs import experiment
from fedcommons.testing.comparing import bits
from fedcommons.testing.spy import Spy
from fedcommons.tune import grid
from papers.fedssyn import table1 as of_table1


@dataclass(frozen=True)
class Spoilt(FedAvg):
    """FedAvg in which client 3 sends 1e30, or ``value``, in every element in the rounds ``when``."""

    value: float = 1e30
    when: tuple[int, ...] = (2,)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        if round not in self.when or seed != seed_for(0, "client", round, 3):
            return reply
        delta = flat(reply.sums, "delta")
        return replace(reply, sums={"delta": Flat(delta.layout, torch.full_like(delta.buffer, self.value))})


@pytest.mark.parametrize(("value", "blocks"), [(1e30, 1), (1e19, 4)])
def test_a_client_that_blows_up_the_model_is_named_in_its_round(value: float, blocks: int, digits: Digits) -> None:
    """Every number is finite; their squares are not."""
    federation, algorithm, spy = digits(), Spoilt(value), Spy(Spoilt(when=()))
    with pytest.raises(DivergenceError, match=r"round 2, Spoilt: the merged model has a norm .* overflows") as caught:
        federation.run(algorithm, federation.plan(3, blocks=blocks))
    assert (caught.value.client, caught.value.round) == (3, 2)
    federation.run(spy, federation.plan(2))
    norms = [norm(flat(call.reply.sums, "delta")) for call in spy.calls if call.round == 2]
    size, others = value * federation.model.layout.size**0.5, median(norms[:3] + norms[4:])
    assert f"norm {size:.3g}; the median of the others was {others:.3g}" in caught.value.sentence


def test_a_client_is_named_whose_update_shows_only_in_the_next_round(digits: Digits, tmp_path: Path) -> None:
    """An update of 1e15 leaves the merged model finite, but no client can train from it; also after a resumption."""
    federation, algorithm = digits(), Spoilt(1e15)
    saved = federation.run(algorithm, federation.plan(2))[-1][0]
    rejected = {12: Rejected(3, "its weight is nan"), 4: Rejected(1, "why")}
    checkpoint.save(tmp_path, replace(saved, rejected=rejected))
    resumed = checkpoint.load_latest(tmp_path)
    assert resumed is not None
    assert (resumed.rejected, resumed.largest) == (rejected, saved.largest)
    for start in (federation.start(algorithm, federation.plan(4)), resumed):
        with pytest.raises(DivergenceError, match=r"round 3, Spoilt: no reply was finite; .* client 3's") as caught:
            federation.run(algorithm, federation.plan(4), start=start)
        assert (caught.value.client, caught.value.round) == (3, 2)


def test_vectors_are_usable_whose_squared_norm_is_a_float32() -> None:
    largest = ((2 - 2**-23) * 2.0**127) ** 0.5
    values = {"n": torch.tensor(2**62), "x": torch.tensor([largest], dtype=torch.float64)}
    assert rejections.unusable(values) is None
    assert rejections.unusable({"x": torch.tensor([1e19, 1e19])}) is None
    assert "1.89e+19" in (rejections.unusable({"x": torch.tensor([1e19, 1.6e19])}) or "")
    assert rejections.unusable({"x": values["x"] * (1 + 1e-15)})
    for value in (math.nan, math.inf):
        assert "not finite" in (rejections.unusable({"x": torch.tensor([1.0, value])}) or "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_norm_overflows_only_where_a_value_does(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert norm(torch.tensor([most / 4, 0, -most / 4], dtype=dtype)) == pytest.approx(most / 4 * 2**0.5, rel=1e-3)
    assert norm(torch.tensor([3, 0, 0, 4], dtype=dtype)) == 5
    assert norm(torch.zeros(0, dtype=dtype)) == 0
    assert math.isinf(norm(torch.tensor([1, -math.inf], dtype=dtype)))


def test_the_largest_reply_stands_out_above_100_times_the_median_of_the_others() -> None:
    largest = rejections.largest(4, {2: 1.0, 0: 5.0, 3: 5.0, 1: 3.0})
    assert largest == Largest(4, 0, 5.0, 3.0)  # of equal ones the first client
    assert [Largest(1, 0, size, 1.0).stands_out for size in (100.0, 100.1)] == [False, True]
    assert rejections.largest(1, {7: 0.1}) == Largest(1, 7, 0.1, None)
    assert Largest(1, 7, 0.1, None).stands_out
    assert rejections.largest(1, {}) is None


@pytest.mark.parametrize("algorithm", [SCAFFOLD(), FedNova(), IFCA()])
def test_the_norm_is_of_all_sums_over_the_weight(algorithm: Algorithm, digits: Digits) -> None:
    """SCAFFOLD's delta and control together; of FedNova not the count of steps, a number."""
    federation = replace(digits(batch_norm=True), weighting="samples")
    spy = Spy(algorithm)
    federation.run(spy, federation.plan(1))
    norms = []
    for call in spy.calls:
        update = [data(x).double() / call.reply.weight for x in call.reply.sums.values() if isinstance(x, Flat)]
        norms.append(float(torch.cat(update).norm()))
    for bound in (size * (1 + 1e-5) for size in sorted(norms)[:-1]):
        ((now, facts),) = federation.run(algorithm, replace(federation.plan(1), max_norm=bound))
        assert set(now.rejected) == {i for i, size in enumerate(norms) if size > bound}
        assert facts["rejected"] == len(now.rejected)
        for i, rejected in now.rejected.items():
            assert rejected.replies == 1
            assert f"norm {norms[i]:.4g}, above federation.max_norm {bound:g}" in rejected.why


def test_a_client_above_max_norm_is_as_if_it_had_not_been_there(least_squares: Problem, digits: Digits) -> None:
    problem = least_squares()
    federation, algorithm = problem.federation(0.1), Spoilt(when=(1, 2, 3))
    plan = replace(federation.plan(3, blocks=1), max_norm=100.0)
    now = federation.run(algorithm, plan)[-1][0]
    assert now.rejected.keys() == {3}
    assert now.rejected[3].replies == 3
    three = type(problem)(problem.a[:3], problem.b[:3]).federation(0.1)
    assert bits(now) == bits(three.run(algorithm, three.plan(3, blocks=1))[-1][0])
    with pytest.raises(ClientError, match=r"every reply was rejected; client 0: .*max_norm 0.001") as caught:
        digits().run(FedAvg(), replace(digits().plan(2), max_norm=1e-3))
    assert caught.type is ClientError  # not a DivergenceError


def test_rejections_are_counted_with_their_first_reasons_and_reported() -> None:
    first = rejections.count_rejections({}, {2: "its weight is nan"})
    more = rejections.count_rejections(first, {2: "another"})
    many = rejections.count_rejections(more, {i: "why" for i in (9, 7, 1, 0)})
    message = rejections.rejection_summary(rejections.records(many))
    assert message.startswith("6 replies of 5 clients were")
    assert "(client 0: why; client 1: why; client 2: its weight is nan; and 2 more)" in message
    assert rejections.rejection_summary(rejections.records(first)).startswith("1 reply was")
    assert rejections.read(json.loads(json.dumps(rejections.records(many)))) == many
    assert first == {2: Rejected(1, "its weight is nan")}  # as it was


@pytest.mark.long
def test_a_run_and_a_footnote_report_rejected_replies(tmp_path: Path, sweeps: Callable[[str], ModuleType]) -> None:
    """The first client has updates of norm 0.8 to 0.96."""
    fields = {"federation.rounds": 4, "federation.checkpoint_every": 2, "client.epochs": 2, "measure.every": 0,
              "tracking.wandb": "off", "federation.max_norm": 0.85, "artifacts": str(tmp_path)}  # fmt: skip
    bounded = presets.experiment("smoke", "digits", fields)

    table1, reported = sweeps("table1"), list[str]()
    options = ["--preset=smoke", "--alphas=0.1", "--settings=real", "--algorithms=fedavg", "--wandb=off"]
    arguments = table1.arguments([*options, f"--out={tmp_path}"])
    (cell,) = table1.grid(arguments)
    summary = experiment.run(bounded, tmp_path / cell.name, say=reported.append)
    (record,) = summary["rejected"]
    lines = [json.loads(line) for line in (tmp_path / cell.name / "rounds.jsonl").read_text().splitlines()]
    assert record["client"] == 0
    assert [line.get("rejected_clients") for line in lines] == [None, *[[0]] * 4]
    assert record["replies"] == sum(line.get("rejected", 0) for line in lines) == 4
    note = f"4 replies of 1 client were rejected (client 0: {record['why']})"
    assert len(reported) == 2
    assert record["why"] in reported[0]
    assert reported[0].startswith("round 1: 1 reply")
    assert reported[1].startswith(note)
    table = of_table1.contents([cell], grid.finished([cell], tmp_path), arguments).write("table1", arguments, tmp_path)
    assert table.count(note) == 1
    assert (tmp_path / "table1.md").read_text().count(f"{cell.name}: {note}") == 1
    assert tables.rejected_notes(pd.DataFrame([{"run": "quiet"}])) == []
