"""Trackers and measures of one's own: what they are told, what their failures do, and that they change nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedcommons import ClientError, Experiment, UserError, experiment, load_rounds, load_runs
from fedcommons.config.flat import deciding, from_dict, override, same_results, to_dict
from fedcommons.runs.experiment import run
from fedcommons.runs.worker import noise_key
from fedcommons.sweeping.sweep import cell

LAB = '''
import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Told:
    """Writes what it is told.

    Args:
        file: that it writes
    """

    folder: Path
    config: dict
    file: str = "told.jsonl"

    def __post_init__(self):
        self.write("made", self.config["federation.rounds"], "w")

    def write(self, what, value, mode="a"):
        with open(self.folder / self.file, mode) as file:
            file.write(json.dumps([what, value]) + "\\\\n")

    def log(self, round, metrics):
        self.write(round, metrics)
        metrics.clear()

    def finish(self, summary):
        self.write("finished", summary and summary["rounds"])
        summary.clear()


@dataclass
class Failing:
    at: str = "log"

    def __post_init__(self):
        self.require("made")

    def require(self, what):
        if self.at == what:
            raise OSError(28, "No space left on device")

    def log(self, round, metrics):
        self.require("log")

    def finish(self, summary):
        self.require("finish")


def project(project: str = "mine"):
    return None


@dataclass(frozen=True)
class Weights:
    power: float = 2.0

    def __call__(self, work, data, round, seed):
        assert not work.module.training
        size = sum((p.abs() ** self.power).sum() for p in work.module.parameters())
        for p in work.module.parameters():
            p.data.zero_()
        return {"size": size, "clients": len(data.own), "seed": seed % 1000, "drawn": torch.rand(()), "round": round}


@dataclass(frozen=True)
class Wrong:
    gives: str = "list"

    def __call__(self, work, data, round, seed):
        return {"list": [1.0], "text": {"a": "b"}}[self.gives] if round else {"a": 1}
'''
FIELDS = {
    "wandb": "off", "federation.rounds": 3, "federation.checkpoint_every": 1, "client.epochs": 1, "measure.every": 0,
    "data.limit": 80,
}  # fmt: skip
TRACKER, MEASURE = "my_lab.py:Told", "my_lab.py:Weights"


@pytest.fixture(autouse=True)
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my_lab.py in it, from which the command is given."""
    (tmp_path / "my_lab.py").write_text(LAB.replace("\\\\", "\\"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def described(**fields: Any) -> Experiment:
    return experiment("smoke", values={**FIELDS, **{name.replace("__", "."): value for name, value in fields.items()}})


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("rounds.jsonl", "summary.json")}


def quiet(text: str) -> None: ...


class Stopped(Exception):
    pass


def stop_after(number: int) -> Any:
    def on_round(round: int, metrics: object) -> None:
        if round == number:
            raise Stopped

    return on_round


def test_a_tracker_is_told_every_round_and_changes_nothing(lab: Path) -> None:
    run(described(), lab / "without", say=quiet)
    summary = run(described(tracking__tracker=TRACKER, tracking__file="all.jsonl"), lab / "with", say=quiet)
    assert summary["rounds"] == 3  # though the tracker emptied what it was told
    assert files(lab / "without") == files(lab / "with")
    made, *rounds, finished = lines(lab / "with" / "all.jsonl")
    assert (made, finished) == (["made", 3], ["finished", 3])
    recorded = lines(lab / "with" / "rounds.jsonl")
    assert rounds == [[one.pop("round"), one] for one in recorded]


@pytest.mark.long
def test_a_resumed_run_tells_a_tracker_all_rounds(lab: Path) -> None:
    wanted = described(tracking__tracker=TRACKER)
    run(wanted, lab / "whole", say=quiet)
    with pytest.raises(Stopped):
        run(wanted, lab / "run", say=quiet, on_round=stop_after(2))
    run(wanted, lab / "run", say=quiet, resume=True)
    assert (lab / "run" / "told.jsonl").read_bytes() == (lab / "whole" / "told.jsonl").read_bytes()


@pytest.mark.long
def test_a_resumed_run_may_have_another_tracker_or_none(lab: Path) -> None:
    wanted = described(tracking__tracker=TRACKER)
    with pytest.raises(Stopped):
        run(wanted, lab / "run", say=quiet, on_round=stop_after(1))
    (lab / "my_lab.py").write_text((lab / "my_lab.py").read_text() + "# changed\n")
    for now in (described(tracking__tracker=TRACKER), override(wanted, {"tracking.tracker": None}), described()):
        assert same_results(wanted, now) == []
    run(override(wanted, {"tracking.tracker": None}), lab / "run", say=quiet, resume=True)
    run(described(), lab / "plain", say=quiet)
    assert files(lab / "run") == files(lab / "plain")


@pytest.mark.parametrize("at", ["made", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_and_dropped(lab: Path, at: str) -> None:
    said: list[str] = []
    run(described(tracking__tracker="my_lab.py:Failing", tracking__at=at), lab / "run", say=said.append)
    told = (
        "tracking.tracker my_lab.py:Failing: OSError: [Errno 28] No space left on device "
        "(my_lab.py, line 46 in require); the run goes on without it."
    )
    assert [text for text in said if "tracker" in text] == [told]
    run(described(), lab / "plain", say=quiet)
    assert files(lab / "run") == files(lab / "plain")


def test_a_measures_numbers_are_in_the_record_and_in_the_frames(lab: Path) -> None:
    plain = run(described(measure__every=2), lab / "plain", say=quiet)
    wanted = described(measure__every=2, measure__measure=MEASURE, measure__power=1)
    measured = run(wanted, lab / "run", say=quiet)
    rounds = lines(lab / "run" / "rounds.jsonl")
    new = [{n.partition("/")[2]: v for n, v in one.items() if n.startswith("measure/")} for one in rounds]
    assert [bool(one) for one in new] == [True, False, True, True]  # before round 1, every second round, the last
    assert [one["round"] for one in new if one] == [0, 2, 3]
    assert new[0]["clients"] == measured["n_clients"]
    assert len({one["seed"] for one in new if one}) == len({one["drawn"] for one in new if one}) == 3
    without = [{n: v for n, v in one.items() if not n.startswith("measure/")} for one in rounds]
    assert without == lines(lab / "plain" / "rounds.jsonl")
    assert {n: v for n, v in measured.items() if n != "config"} == {n: v for n, v in plain.items() if n != "config"}
    assert load_rounds(lab / "run")["measure/size"].dropna().tolist() == [one["size"] for one in new if one]
    assert load_runs(lab / "run")["measure/size"].tolist() == [new[-1]["size"]]


def test_a_resumed_run_measures_as_if_it_had_never_stopped(lab: Path) -> None:
    wanted = described(measure__every=1, measure__measure=MEASURE)
    run(wanted, lab / "whole", say=quiet)
    with pytest.raises(Stopped):
        run(wanted, lab / "run", say=quiet, on_round=stop_after(2))
    run(wanted, lab / "run", say=quiet, resume=True)
    assert files(lab / "run") == files(lab / "whole")


@pytest.mark.parametrize(
    ("gives", "said"),
    [("list", "it must give numbers by name, got list"), ("text", "could not")],
)
def test_a_measure_that_fails_stops_the_run_with_one_sentence(lab: Path, gives: str, said: str) -> None:
    wanted = described(measure__every=1, measure__measure="my_lab.py:Wrong", measure__gives=gives)
    with pytest.raises(ClientError, match=rf"measure.measure my_lab.py:Wrong, round 1: {said}"):
        run(wanted, lab / "run", say=quiet)
    assert len(lines(lab / "run" / "rounds.jsonl")) == 1
    assert "my_lab.py" in (lab / "run" / "error.txt").read_text()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_actors_give_the_numbers_of_one_process(lab: Path) -> None:
    wanted = described(measure__every=1, measure__measure=MEASURE)
    run(wanted, lab / "one", say=quiet)
    run(override(wanted, {"federation.executor": "ray_actors"}), lab / "actors", say=quiet)
    assert files(lab / "one") == files(lab / "actors")


def test_without_them_the_config_has_no_field_of_theirs() -> None:
    plain = described()
    assert not {"tracking.tracker", "measure.measure"} & plain.flat.keys()
    assert "tracker" not in to_dict(plain)["tracking"]
    assert "measure" not in to_dict(plain)["measure"]
    assert not {"tracker", "measure"} & plain.chosen.keys()
    given_none = described(tracking__tracker=None, measure__measure=None)
    assert given_none == plain


def test_a_tracker_names_no_run_and_a_measure_does() -> None:
    plain, tracked = described(measure__every=1), described(measure__every=1, tracking__tracker=TRACKER)
    measured = override(plain, {"measure.measure": MEASURE})
    assert (deciding(tracked), cell(tracked, {}).name, noise_key(tracked)) == (
        deciding(plain), cell(plain, {}).name, noise_key(plain)
    )  # fmt: skip
    assert deciding(measured).keys() - deciding(plain).keys() == {"measure.measure", "source.measure"}
    assert cell(measured, {}).name != cell(plain, {}).name


@pytest.mark.parametrize("name", ["tracker", "measure"])
def test_a_config_with_them_is_read_as_it_was_written(name: str) -> None:
    field, part, constant = {
        "tracker": ("tracking.tracker", TRACKER, ("tracking.file", "x")),
        "measure": ("measure.measure", MEASURE, ("measure.power", 3.0)),
    }[name]
    wanted = experiment("smoke", values={**FIELDS, "measure.every": 1, field: part, constant[0]: constant[1]})
    read = from_dict(to_dict(wanted))
    assert read.flat == wanted.flat
    assert override(wanted, {field: None}).flat.keys() == described().flat.keys()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"tracking.tracker": "excel"},
            "unknown tracking.tracker 'excel'. Known: csv, mlflow, tensorboard, trackio, or an import path of your own",
        ),
        ({"tracking.tracker": "my_lab.py:Tol"}, "did you mean 'Told'"),
        ({"measure.measure": "nothing.py:Sharpness"}, "there is no file"),
        ({"measure.measure": MEASURE}, "measure.every must be at least 1 with measure.measure"),
        ({"tracking.tracker": "my_lab.py:project"}, "constant project needs another name"),
        ({"measure.every": 1, "measure.measure": MEASURE, "measure.powr": 1.0}, "powr"),
    ],
)
def test_what_is_wrong_is_refused_before_any_work(lab: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        run(experiment("smoke", values={**FIELDS, **values}), lab / "run", say=quiet)
    assert said in str(refused.value)
    assert not (lab / "run").exists()


@pytest.mark.parametrize("words", [[], ["--tracking.tracker=null"], ["--tracking.tracker", "~"]])
def test_a_command_line_may_say_that_there_is_none(words: Sequence[str]) -> None:
    from fedcommons.config import cli

    assert cli.experiment(cli.parse(cli.parser("a test", words, {}), words)).tracking.tracker is None
