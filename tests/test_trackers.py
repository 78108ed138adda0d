"""The package's trackers: each is read back by its own reader, and has every number of rounds.jsonl, in every round."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedcommons import UserError, experiment
from fedcommons.config.parts import KINDS
from fedcommons.runs.experiment import run

FIELDS = {
    "federation.rounds": 2, "federation.checkpoint_every": 1, "client.epochs": 1, "data.limit": 60, "measure.every": 2,
    "wandb": "off", "straggler.q": 0.3,
}  # fmt: skip
Rows = dict[tuple[int, str], float]


def of_csv(folder: Path) -> Rows:
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        return {(int(row["round"]), row["name"]): float(row["value"]) for row in csv.DictReader(file)}


def of_tensorboard(folder: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {(one.step, name): one.value for name in events.Tags()["scalars"] for one in events.Scalars(name)}


def of_mlflow(folder: Path) -> Rows:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=(folder / "mlflow").absolute().as_uri())
    there = client.get_experiment_by_name("fedcommons")
    assert there
    (found,) = client.search_runs([there.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    of_each = [client.get_metric_history(found.info.run_id, name) for name in found.data.metrics]
    return {(one.step, one.key): one.value for history in of_each for one in history}


def of_trackio(folder: Path) -> Rows:
    """By a process of its own: trackio finds its folder where it is imported."""
    read = "import json; from trackio import SQLiteStorage as s; print(json.dumps(s.get_logs('fedcommons', 'run')))"
    said = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    rows = json.loads(said.stdout.splitlines()[-1])
    names = {name for row in rows for name in row} - {"step", "timestamp"}
    return {(row["step"], name): row[name] for row in rows for name in names if row.get(name) is not None}


READ: Mapping[str, Callable[[Path], Rows]] = {
    "csv": of_csv, "tensorboard": of_tensorboard, "mlflow": of_mlflow, "trackio": of_trackio,
}  # fmt: skip


class Killed(Exception):
    pass


def quiet(text: str) -> None:
    pass


def test_every_tracker_is_read_back() -> None:
    assert READ.keys() == KINDS["tracker"].known.keys()


@pytest.mark.filterwarnings("ignore")  # of the trackers' own packages
@pytest.mark.parametrize("name", READ)
@pytest.mark.long
def test_a_tracker_has_every_number_of_every_round(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that was killed and resumed, which tells the earlier rounds again."""
    if name != "csv" and find_spec(name) is None:
        with pytest.raises(UserError, match=rf"tracker {name} needs a package: pip install 'fedcommons\[{name}\]'"):
            run(experiment("smoke", values={**FIELDS, "tracking.tracker": name}), tmp_path / "run", say=quiet)
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    config, said = experiment("smoke", values={**FIELDS, "tracking.tracker": name}), list[str]()

    def kill(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == 1 and name != "trackio":
            raise Killed

    if name != "trackio":  # there the resumed run is one more
        with pytest.raises(Killed):
            run(config, tmp_path / "run", say=said.append, on_round=kill)
    run(config, tmp_path / "run", say=said.append, resume=True)
    assert not [text for text in said if "goes on without it" in text]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    expected = {
        (line["round"], key): value
        for line in lines
        for key, value in line.items()
        if key != "round" and isinstance(value, int | float)
    }
    assert READ[name](tmp_path / "run") == pytest.approx(expected, rel=1e-6)
    assert os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio")
