"""Targets on any metric, and runs that end when theirs is reached or without progress."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from report_runs import quiet

from fedcommons import Experiment, UserError
from fedcommons.config import presets, target
from fedcommons.config.dotted import deciding, from_dict, override, to_dict
from fedcommons.reports import metrics
from fedcommons.runs.early_stopping import Stop
from fedcommons.runs.experiment import run

FIELDS = {
    "federation.rounds": 6, "federation.checkpoint_every": 4, "measure.every": 0, "client.epochs": 1,
    "data.limit": 300, "tracking.wandb": "off",
}  # fmt: skip


def config(**values: Any) -> Experiment:
    return presets.experiment("smoke", "digits", {**FIELDS, **{n.replace("__", "."): v for n, v in values.items()}})


def test_a_target_is_a_metric_and_a_bound() -> None:
    for text, metric, way, bound in (
        (" accuracy>=0.7 ", "test/accuracy", "max", 0.7), ("validation/f1 >= .5", "validation/f1", "max", 0.5),
        ("elbo >= -120", "test/elbo", "max", -120.0), (1.0, "test/accuracy", "max", 1.0),
        ("accuracy <= 0", "test/accuracy", "min", 0.0), ("loss <= 1e100", "test/loss", "min", 1e100),
    ):  # fmt: skip
        goal, again = target.read(text), target.plain(text)
        assert (goal.metric, goal.way, goal.bound) == (metric, way, bound)
        assert target.plain(again) == again
        assert target.read(again) == goal
        assert goal.is_met({metric: bound})
        beyond = bound + (1e-9 + abs(bound) * 1e-9) * (1 if way == "min" else -1)
        assert not any(goal.is_met(each) for each in ({metric: beyond}, {metric: None}, {}))


def test_what_is_no_target_is_refused() -> None:
    for text, why in (
        (0.0, r"\(0, 1\], got 0"), (80, r"\(0, 1\], got 80"), ("loss < 0.3", "a bound such as"),
        ("loss <= 1.1e100", "a bound such as"), ("accuracy >= 1.01", r"an accuracy lies in \[0, 1\]"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=why):
            config(target=text)


def test_test_accuracy_has_one_name_however_it_is_written() -> None:
    number, text, other = config(target=0.7), config(target="accuracy >= 0.70"), config(target="loss <= 0.7")
    assert text == number
    assert deciding(text) == deciding(number)
    assert deciding(other)["target"] == "test/loss <= 0.7"
    assert from_dict(to_dict(other)) == other
    assert override(other, {"seed": 3}).target == "test/loss <= 0.7"


PATIENCE = {"federation__stop": "patience"}


def test_what_cannot_be_measured_or_is_not_logged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for values, why in (
        ({"target": "validation/accuracy >= 0.5", "data__validation": 0.0}, "--data.validation above 0"),
        ({"target": "convergence/zeta_sq <= 1"}, "--measure.every above 0"),
        ({**PATIENCE, "data__validation": 0.0}, "--data.validation above 0"),
        ({"federation__stop_patience": 3}, "stop_patience changes nothing without --federation.stop patience"),
        ({"federation__stop": "target", "federation__stop_metric": "loss"}, "stop_metric changes nothing"),
        ({**PATIENCE, "federation__stop_metric": "test/loss"}, "a metric on validation data"),
        ({"algorithm": "ditto", "dp__local": True, "dp__target_epsilon": 4.0}, "clients of Ditto train twice"),
        # what only a round shows: the next command with another target finds the folder free
        ({"target": "acuracy >= 0.5"}, "round 0 has no 'test/acuracy'.* It has .*test/los"),
        ({**PATIENCE, "federation__stop_metric": "f1 max"}, "stop_metric: round 0 has no"),
        ({"target": "train/lss <= 1"}, "round 1 has no .*train/loss"),
    ):
        with pytest.raises(UserError, match=why):
            run(config(**values), tmp_path / "run", say=quiet)
        assert not (tmp_path / "run").exists()


def test_patience_ends_a_run_that_many_rounds_after_its_best() -> None:
    for values, ends in (
        ([9, 5, 4, 3, 2, 1, 0], None),
        ([0, 5, 4, 4, 3, 3, 3], 6),  # equal is no better; round 0 does not count
        ([9, 5, 6, 7, 1, 1, 1], 3),
        ([9, None, None, 1, 1, 1, 1], 2),  # what is not finite is no progress
    ):
        stop = Stop("patience", 0.8, 9, 2, "validation/loss", "min")
        every = [{"round": number, "validation/loss": value} for number, value in enumerate(values)]
        shorter = [every[:1], *([*stop.needed(every[:k]), every[k]] for k in range(1, 7))]
        assert next((k for k in range(1, 7) if stop.reason_to_stop(shorter[k])), None) == ends
        longest = Stop("patience", 0.8, ends or 9, 2, "validation/loss", "min")
        assert not longest.reason_to_stop(every[: (ends or 6) + 1])
    c = config()  # the defaults never stop
    assert Stop(c.federation.stop, 0.8, 30, 10, "", "max").reason_to_stop([{"round": 1, "test/accuracy": 1.0}]) is None


@pytest.mark.long
def test_a_run_ends_with_its_target_and_so_does_one_that_goes_on(tmp_path: Path) -> None:
    """The whole run says when that is; the same bits come of a run killed on the way, resumed or extended."""
    whole = run(config(federation__rounds=6), tmp_path / "whole", say=quiet)
    every = [json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()]
    assert (whole["rounds"], "stopped" in whole) == (6, False)
    with pytest.raises(UserError, match="holds a run with another target"):
        run(config(target="f1 >= 0.5"), tmp_path / "whole", resume=True, say=quiet)
    goal = f"loss <= {every[3]['test/loss']!r}"
    stops, seen = config(target=goal, federation__stop="target"), list[int]()
    expected = target.first(goal, every)
    assert expected is not None
    assert expected <= 3
    stopped = run(stops, tmp_path / "run", say=quiet)
    assert stopped["rounds"] == stopped["rounds_to_target"] == expected
    assert f"round {expected}: target" in stopped["stopped"]
    assert stopped["bytes_down"] + stopped["bytes_up"] == every[expected]["comm/total_bytes"]
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert lines == [json.dumps(line) for line in every[: expected + 1]]

    def again(plan: Experiment) -> dict[str, Any]:
        return run(plan, tmp_path / "run", resume=True, say=quiet, on_round=lambda number, _: seen.append(number))

    again(stops)
    (tmp_path / "run" / "summary.json").unlink()  # killed before it was written
    assert again(stops) == stopped
    longer = override(stops, {"federation.rounds": 9})
    assert again(longer) == run(longer, tmp_path / "longer", say=quiet)
    assert seen == []


@pytest.mark.parametrize(
    "values",
    [{"target": "convergence/zeta_sq >= 1e9", "measure__every": 2, "measure__samples": 16},
     {**PATIENCE, "federation__stop_patience": 2, "client__lr": 1e-30, "federation__rounds": 9}],
    ids=["target", "patience"],
)  # fmt: skip
@pytest.mark.long
def test_rounds_that_are_not_evaluated_neither_refuse_nor_end_a_run(values: Mapping[str, Any], tmp_path: Path) -> None:
    """Of rounds 1, 2, 4 and 5 nothing is known."""
    summary = run(config(**{"evaluate__every": 3, "data__limit": 80, **values}), tmp_path / "run", say=quiet)
    assert summary["rounds"] == 6
    assert summary.get("stopped", "round 3").startswith("after") == ("federation__stop" in values)


def test_a_target_of_training_waits_for_a_round_with_a_reply_and_a_metric_has_the_targets_direction() -> None:
    target.require_logged("target", "train/loss", 1, {"comm/up_bytes"})
    assert [metrics.mode("test/f1", f"f1 {sign} 0.5") for sign in (">=", "<=")] == ["max", "min"]
    with pytest.raises(UserError, match="needs --mode max or --mode min"):
        metrics.mode("test/f1", 0.8)


@pytest.mark.parametrize(
    ("values", "is_private"),
    [({"target": "train/loss <= 9"}, True), ({"target": "loss <= 9"}, False),
     ({"target": "train/loss <= 9", "federation__stop": "never"}, False)],
    ids=["of training", "of the test set", "never"],
)  # fmt: skip
@pytest.mark.long
def test_no_epsilon_covers_a_length_of_the_data(values: Mapping[str, Any], is_private: bool, tmp_path: Path) -> None:
    fixed = {"dp__local": True, "federation__rounds": 2, "data__limit": 60, "federation__stop": "target"}
    privacy = run(config(**{**fixed, **values}), tmp_path / "run", say=quiet)["privacy"]
    assert (privacy["epsilon_of_messages_if_secret"] is None) == is_private
    assert (privacy["epsilon_local_training_if_secret"]["largest"] is None) == is_private
    assert any("number of rounds" in name for name in privacy["uncovered"]) == is_private
