"""Methods that choose a round's clients, or none, themselves: in the engine, in a run, and in a replay."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closed_forms import Digits

from fedcommons import ClientError, Executor, Facts, Replies, State, UserError, load_runs
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.core.algorithm import Merged
from fedcommons.flat_tensors import Flat, Payload, data, flat, scalar, scale
from fedcommons.runs import experiment
from fedcommons.runs.replay import replay
from fedcommons.tracking.run_folder import read_rounds


class ByState(FedAvg):
    """Its state names the clients: 0 and 1, then none, then 1 and 2, then none ...; without clients it halves x."""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "first": torch.tensor(0), "alone": torch.tensor(0)}

    def participants(self, state: State, round: int) -> Sequence[int]:
        first = int(scalar(state, "first"))
        return () if scalar(state, "alone") else (first + 1, first)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> Any:
        first = data(state["first"])
        if not replies:
            return {"model": scale(flat(state, "model"), 0.5), "first": first + 1, "alone": torch.tensor(0)}
        after = super().merge(executor, state, total, replies, round, seed)
        return {**after, "first": first, "alone": torch.tensor(1)}, {"cluster/0": torch.tensor(len(replies)), "b": 0.5}


def test_the_clients_of_a_round_are_those_it_names_and_a_round_may_be_the_servers_alone(digits: Digits) -> None:
    """Trained and merged in client order, whatever order it names them in; the others send nothing."""
    federation, size = digits(), 4 * digits().model.layout.size
    seen: list[list[int]] = []

    class Watched(ByState):
        def merge(self, *arguments: Any, **named: Any) -> Merged:
            seen.append(list(arguments[3]))
            return super().merge(*arguments, **named)

    played = federation.run(Watched(), federation.plan(4, participation=0.2))
    assert seen == [[0, 1], [], [1, 2], []]
    assert [facts["clients"] for _, facts in played] == [2, 0, 2, 0]
    assert [facts["comm/up_bytes"] for _, facts in played] == [2 * size, 0, 2 * size, 0]
    (first, _), (second, facts), *_ = played
    assert torch.equal(second.model.buffer, first.model.buffer / 2)
    assert not {"train/loss", "server/b"} & facts.keys()
    assert (played[2][1]["server/cluster/0"], played[2][1]["server/b"]) == (2, 0.5)
    all_late = replace(federation.plan(2), straggler_rule=lambda joined, facts, round, seed: dict.fromkeys(joined, 0.0))
    silent = federation.run(ByState(), all_late)[-1][0]
    assert torch.equal(silent.model.buffer, federation.model.buffer)


ENDS = r"round 1: .* beside the state must"


@pytest.mark.parametrize(
    ("named", "reported", "message"),
    [
        *(([*those], (), r"must be some of 5 clients, each once, got \[") for those in ([5], [1, 1])),
        ([], (), "^round 1, Naming: the merged model has values that are not finite$"),  # without any reply, too
        *(([], ({name: 1.0},), ENDS) for name in ("a b", "", "/a", 3, "a" * 101)),
        *(([], ({"a": number},), ENDS) for number in (float("nan"), torch.tensor([1, 2]), "1", None)),
        ([], ([1.0],), r"round 1: .*pair \(state, numbers by name\), got \(dict, list\)"),
        ([], ({}, {}), r"round 1: .*pair .*got \(dict, dict, dict\)"),
    ],
)
def test_clients_that_do_not_exist_and_numbers_that_are_not_finite_are_refused(
    named: list[int], reported: tuple[Any, ...], message: str, digits: Digits
) -> None:
    class Naming(FedAvg):
        def participants(self, state: State, round: int) -> Sequence[int]:
            return named

        def merge(self, executor: Executor, state: State, *arguments: Any, **named: Any) -> Any:
            after = {"model": scale(flat(state, "model"), 1 if reported else float("nan"))}
            return (after, *reported) if reported else after

    federation = digits()
    with pytest.raises(ClientError, match=message):
        federation.run(Naming(), federation.plan(1))


BY_STATE = f"{__file__}:ByState"


@pytest.mark.long
def test_a_client_that_the_state_names_is_replayed_and_only_trained_clients_spend_privacy(tmp_path: Path) -> None:
    values = {"algorithm": BY_STATE, "tracking.wandb": "off", "measure.every": 0, "data.limit": 60, "dp.local": True}
    whole = experiment.run(presets.experiment("smoke", "digits", values), tmp_path / "whole", say=lambda _: None)
    assert [line["clients"] for line in read_rounds(tmp_path / "whole")[1:]] == [2, 0, 2]
    assert [line.get("participants") for line in read_rounds(tmp_path / "whole")] == [None, [0, 1], [], [1, 2]]
    assert load_runs(tmp_path / "whole")["server/b"].tolist() == [0.5]
    spent = whole["privacy"]["epsilon_local_training_if_secret"]["of_each_client"]
    assert [s > 0 for s in spent] == [True, True, True, False]
    assert whole["privacy"]["epsilon_of_messages_if_secret"] == max(spent)
    again = replay(tmp_path / "whole", 3, 2, lambda _: None, [BY_STATE])
    assert again.rejected is None
    assert again.up_bytes > 0
    with pytest.raises(UserError, match=r"client 0 .* not sampled; these do: 1, 2"):
        replay(tmp_path / "whole", 3, 0, lambda _: None, [BY_STATE])
