"""Trackers and measures, the package's and users': what they get, what their failures do, that they change nothing."""

import csv
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from interrupted import PowerCut, cut_at
from report_runs import quiet

from fedcommons import ClientError, Experiment, UserError, experiment, load_rounds, load_runs
from fedcommons.config.dotted import deciding
from fedcommons.runs import callbacks
from fedcommons.runs.build import noise_key
from fedcommons.runs.experiment import run
from fedcommons.storage.atomic_files import sha256
from fedcommons.tracking.tracker import for_trackers
from fedcommons.tune.sweep import cell

FIELDS = {
    "wandb": "off", "federation.rounds": 3, "federation.checkpoint_every": 1, "client.epochs": 1, "measure.every": 0,
    "data.limit": 80,
}  # fmt: skip
Rows = dict[tuple[int, str], float]


def resumed(config: Experiment, folder: Path, after: int) -> list[str]:
    """Kill a run after a round and resume it; return its messages."""

    messages: list[str] = []
    with pytest.raises(PowerCut):
        run(config, folder, say=messages.append, on_round=cut_at(after))
    run(config, folder, say=messages.append, resume=True)
    return messages


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_csv(folder: Path) -> Rows:
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        return {(int(row["round"]), row["name"]): float(row["value"]) for row in csv.DictReader(file)}


def of_tensorboard(folder: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {(event.step, name): event.value for name in events.Tags()["scalars"] for event in events.Scalars(name)}


def of_mlflow(folder: Path) -> Rows:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=(folder / "mlflow").absolute().as_uri())
    there = client.get_experiment_by_name("fedcommons")
    assert there
    (record,) = client.search_runs([there.experiment_id])
    assert (record.info.run_name, record.info.status) == ("run", "FINISHED")
    of_each = [client.get_metric_history(record.info.run_id, name) for name in record.data.metrics]
    return {(value.step, value.key): value.value for history in of_each for value in history}


READ: Mapping[str, Callable[[Path], Rows]] = {"csv": of_csv, "tensorboard": of_tensorboard, "mlflow": of_mlflow}


@pytest.mark.filterwarnings("ignore")  # of the trackers' own packages
@pytest.mark.parametrize("name", sorted(READ))
@pytest.mark.long
def test_a_tracker_has_every_number_of_every_round(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the numbers of the server; participants above the maximum number have a file, which a hash verifies."""
    monkeypatch.setattr(callbacks, "MOST_LISTED", 1)
    fields = {
        "measure.every": 2, "straggler.q": 0.3, "federation.participation": 0.5, "algorithm": "user_parts:Reports",
    }  # fmt: skip
    config = experiment(
        "smoke", values={**FIELDS, **fields, "tracking.tracker": name if name == "csv" else f"csv, {name}"}
    )
    if name != "csv" and find_spec(name) is None:
        with pytest.raises(UserError, match=rf"pip install 'fedcommons\[{name}\]'"):
            run(config, tmp_path / "run", say=quiet)
        pytest.skip(f"{name} is not installed")
    messages = resumed(config, tmp_path / "run", 1)
    assert not [text for text in messages if "goes on without" in text]
    untrained, *trained = lines(tmp_path / "run" / "rounds.jsonl")
    assert [line["server/share/weighted"] for line in trained] == [0.25] * 3
    for line in trained:
        file = tmp_path / "run" / "participants" / f"round-00000{line['round']}.json"
        assert line["participants_hash"] == sha256(file.read_bytes())
        assert len(json.loads(file.read_text(encoding="utf-8"))) == line["clients"] == 2
    assert load_rounds(tmp_path / "run")["participants_hash"].to_list()[1:] == [r["participants_hash"] for r in trained]
    assert load_runs(tmp_path / "run")["server/share/weighted"].to_list() == [0.25]
    expected = {
        (line["round"], key): value
        for line in (untrained, *trained)
        for key, value in line.items()
        if key != "round" and isinstance(value, int | float)
    }
    timed = {
        (line["round"], f"seconds/{key}"): line[key]
        for line in lines(tmp_path / "run" / "timing.jsonl")
        for key in ("train", "observe")
    }
    first, rest = (READ[each](tmp_path / "run") for each in (name, "csv"))
    assert first == pytest.approx(expected | timed, rel=1e-6, abs=1e-4)  # timing.jsonl rounds seconds
    assert rest.keys() == first.keys()
    line = {"round": 1, "late": [1], "participants": [0], "rejected_clients": [0], "participants_hash": "a"}
    assert for_trackers(line, {"round": 1, "train": 2.0}) == {"late": [1], "seconds/train": 2.0}


LAB = """
import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Mine:
    folder: Path
    config: dict
    fails: str = ""

    def __post_init__(self):
        self.write("made", self.config["federation.rounds"], "w")

    def write(self, what, value, mode="a"):
        if what == self.fails:
            raise OSError(28, "No space left on device")
        with open(self.folder / "mine.jsonl", mode) as file:
            print(json.dumps([what, value]), file=file)

    def log(self, round, metrics):
        self.write("log", {"round": round, **metrics})
        metrics.clear()

    def finish(self, summary):
        self.write("finish", summary and summary["rounds"])
        summary.clear()


@dataclass(frozen=True)
class Weights:
    power: float = 2.0

    def __call__(self, work, data, round, seed):
        assert not work.module.training
        size = sum((p.abs() ** self.power).sum() for p in work.module.parameters())
        for p in work.module.parameters():
            p.data.zero_()
        return {"size": size, "seed": seed % 1000, "drawn": torch.rand(()), "round": round}


class Wrong:
    def __call__(self, work, data, round, seed):
        return [1.0] if round else {"a": 1}
"""
TRACKER, MEASURE = "my_lab.py:Mine", "my_lab.py:Weights"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with my_lab.py in it."""
    (tmp_path / "my_lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def described(**fields: Any) -> Experiment:
    return experiment("smoke", values={**FIELDS, **{name.replace("__", "."): value for name, value in fields.items()}})


def untimed(path: Path) -> list[Any]:
    """Return what the tracker got, without the seconds, which each log call of a round has."""
    for what, value in (calls := lines(path)):
        if what == "log":
            assert min(value.pop("seconds/train"), value.pop("seconds/observe")) >= 0
    return calls


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("rounds.jsonl", "summary.json")}


@pytest.mark.long
def test_a_tracker_gets_every_round_and_changes_nothing(lab: Path) -> None:
    """Also of a resumed run; a tracker that fails is dropped."""
    wanted = described(tracking__tracker=TRACKER)
    run(described(), lab / "without", say=quiet)
    assert run(wanted, lab / "with", say=quiet)["rounds"] == 3  # though the tracker emptied its arguments
    recorded = [["log", line] for line in lines(lab / "with" / "rounds.jsonl")]
    assert untimed(lab / "with" / "mine.jsonl") == [["made", 3], *recorded, ["finish", 3]]
    resumed(wanted, lab / "same", 2)
    assert untimed(lab / "same" / "mine.jsonl") == untimed(lab / "with" / "mine.jsonl")
    for at in ("made", "log", "finish"):
        messages: list[str] = []
        run(described(tracking__tracker=TRACKER, tracking__fails=at), lab / at, say=messages.append)
        (text,) = [text for text in messages if "tracker" in text]
        assert "No space left" in text
    for name in ("with", "same", "made", "log", "finish"):
        assert files(lab / name) == files(lab / "without"), name


@pytest.mark.long
def test_a_measures_numbers_are_in_the_record_and_in_the_frames_and_what_is_wrong_is_refused(lab: Path) -> None:
    run(described(measure__every=2), lab / "plain", say=quiet)
    wanted = described(measure__every=2, measure__measure=MEASURE, measure__power=1)
    run(wanted, lab / "run", say=quiet)
    rounds = lines(lab / "run" / "rounds.jsonl")
    new = [{n.partition("/")[2]: v for n, v in line.items() if n.startswith("measure/")} for line in rounds]
    assert [line.get("round") for line in new] == [0, None, 2, 3]  # before round 1, every second round, the last
    assert len({line["seed"] for line in new if line}) == len({line["drawn"] for line in new if line}) == 3
    without = [{n: v for n, v in line.items() if not n.startswith("measure/")} for line in rounds]
    assert without == lines(lab / "plain" / "rounds.jsonl")
    assert load_runs(lab / "run")["measure/size"].tolist() == [new[-1]["size"]]
    resumed(wanted, lab / "killed", 2)
    assert files(lab / "killed") == files(lab / "run")
    with pytest.raises(ClientError, match=r"my_lab\.py:Wrong, round 1: .*numbers"):
        run(described(measure__every=1, measure__measure="my_lab.py:Wrong"), lab / "wrong", say=quiet)
    for trackers, words in (("excel", "csv, mlflow"), ("csv,excel", "csv, mlflow"), ("csv,csv", "once")):
        with pytest.raises(UserError, match=words):
            run(described(tracking__tracker=trackers), lab / "none", say=quiet)


@pytest.mark.usefixtures("lab")
def test_a_tracker_is_no_part_of_a_runs_identity_and_a_measure_is() -> None:
    plain, tracked = described(measure__every=1), described(measure__every=1, tracking__tracker=TRACKER)
    assert (plain.chosen.get("tracker"), tracked.chosen["tracker"]) == (None, TRACKER)
    for identity in (deciding, lambda config: cell(config, {}).name, noise_key):
        assert identity(tracked) == identity(plain)
    measured = deciding(described(measure__every=1, measure__measure=MEASURE, measure__power=3.0))
    assert measured.keys() - deciding(plain).keys() == {"measure.measure", "source.measure", "measure.power"}
