"""The W&B workspace, panel by panel: each shows what the runs' own files for W&B hold; and what a server gets of it."""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from report_runs import change, quiet

from fedcommons import experiment, run
from fedcommons.errors import UserError

if TYPE_CHECKING:
    from conftest import WandbFile
    from wandb_server import Server

Reader = Callable[[Path], "WandbFile"]


LINE, BAR, MEDIA = "Run History Line Plot", "Bar Chart", "Media Browser"
PANELS = {
    "What decides": 3, "Accuracy": 7, "Client dissimilarity": 3, "Gradient noise": 1, "Privacy": 3, "Bytes": 2,
    "Pictures": 3,
}  # fmt: skip
"""The number of panels of each section."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning"),  # of wandb-workspaces itself
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def dashboard(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    if find_spec("wandb_workspaces") is None:
        pytest.skip("wandb-workspaces is not installed: pip install 'fedcommons[dashboard]'")
    return sweeps("dashboard")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("my runs")
    same = {"wandb": "offline", "tracking.project": "mine", "federation.rounds": 2, "client.epochs": 1,
            "measure.every": 1, "data.limit": 80, "target": 0.01, "artifacts": str(out / "artifacts")}  # fmt: skip
    for name, fields in {
        "plain": {}, "swapped": {"setting": "shuffled_real", "p": 0.2, "measure.every": 0},
        "private": {"dp.local": True, "dp.noise_multiplier": 1.5, "client.lr": 0.01},
        "made": {"setting": "shuffled_synthetic", "generator.epochs": 1},
    }.items():  # fmt: skip
        run(experiment("smoke", values={**same, **fields}), out / name, say=quiet)
    return out


@pytest.fixture(scope="module")
def view(dashboard: ModuleType, folder: Path) -> dict[str, Any]:
    """The workspace as it was written."""
    assert dashboard.dashboard([str(folder), "--out", str(folder / "out" / "dashboard.json")]) == 0
    return json.loads((folder / "out" / "dashboard.json").read_text())


def panels(spec: dict[str, Any]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Section, type, x axis and names of the metrics of each panel, in order."""
    for section in spec["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:
            kind, config = panel["viewType"], panel["config"]
            if kind == "Parallel Coordinates Plot":
                yield section["name"], kind, "", [column["accessor"] for column in config["columns"]]
            elif kind == "Scatter Plot":
                yield section["name"], kind, config["xAxis"], [config["yAxis"]]
            else:
                names = config["mediaKeys" if kind == MEDIA else "metrics"]
                yield section["name"], kind, config.get("xAxis", ""), names


def test_every_panel_shows_what_some_run_has_at_wandb(view: dict[str, Any], folder: Path, wandb_file: Reader) -> None:
    """W&B leaves out a run that lacks a value: without zeta^2 its line is in the second picture."""
    assert Counter(section for section, *_ in panels(view["spec"])) == PANELS
    assert (view["entity"], view["project"]) == ("ENTITY", "mine")  # the runs' own project
    files = {name: wandb_file(folder / name) for name in ("plain", "swapped", "private", "made")}
    rows = [row for one in files.values() for row in one.history]
    for _, kind, x, names in panels(view["spec"]):
        if kind == LINE:
            assert [row for row in rows if {x, *names} <= row.keys()], names
        if kind == MEDIA:  # a row has several facts of it
            assert [row for row in rows if f"{names[0]}.path" in row], names
        if kind == BAR:
            assert any(isinstance(one.summary.get(names[0]), int | float) for one in files.values()), names
    plots = [names for _, kind, _, names in panels(view["spec"]) if kind == "Parallel Coordinates Plot"]
    for name, one in files.items():
        held = {f"config:{key}.value": value for key, value in one.config.items()}
        held |= {f"summary:{key}": value for key, value in one.summary.items()}
        drawn = [all(isinstance(held.get(accessor), int | float) for accessor in names) for names in plots]
        assert drawn == [name != "swapped", True], name
    (runs,) = view["spec"]["section"]["runSets"]
    groups = [key["name"] for key in runs["grouping"]]  # runs of one group differ in the seed only
    assert groups[5:] == [f"effective/{axis}.value" for axis in ("alpha", "p", "rho", "noise_multiplier", "lr")]


def test_the_printed_command_makes_the_same_on_the_server(
    dashboard: ModuleType, folder: Path, view: dict[str, Any], wandb_online: "Server",
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [str(folder), "--project", "mine", "--name", "my runs"]
    assert dashboard.dashboard([str(folder), "--name", "my runs", "--out", str(folder / "out" / "named.json")]) == 0
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert printed == ["python", "sweeps/dashboard.py", *words, "--entity", "YOURS"]
    assert dashboard.dashboard(["me" if word == "YOURS" else word for word in printed[2:]]) == 0
    (made,) = wandb_online.variables("upsertView")
    assert (made["entityName"], made["projectName"], made["displayName"]) == ("me", "mine", "my runs")
    assert [*panels(json.loads(made["spec"]))] == [*panels(view["spec"])]
    assert dashboard.dashboard(["--entity", "me", "--project", "mine"]) == 0  # of no run: all panels
    every = panels(json.loads(wandb_online.variables("upsertView")[-1]["spec"]))
    assert ("Privacy", BAR, "", ["privacy/overall"]) in every
    wandb_online.refuses = True
    with pytest.raises(UserError, match="permission denied"):
        dashboard.dashboard(["--entity", "me"])


def test_unfinished_runs_are_named_and_texts_of_others_move_no_terminal(
    dashboard: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, made = tmp_path / "runs", str(tmp_path / "made.json")
    for name in ("half", "off", "old"):
        shutil.copytree(folder / "plain", runs / name)
    (runs / "half" / "rounds.jsonl").write_text('{"round": 0, "te')
    (runs / "off" / "wandb-id.txt").unlink()
    change(runs / "old" / "environment.json", packages={"fedcommons": "0.1.0"})
    assert dashboard.dashboard([str(runs), "--out", made]) == 0
    said = capsys.readouterr().out
    assert [part for part in (f"{runs}/half", "1 of 2 runs", "0.1.0") if part not in said] == []
    config = runs / "old" / "config.yaml"
    config.write_text(config.read_text().replace("project: mine", 'project: "\\x1b[2J"'))
    assert dashboard.dashboard([str(runs / "old"), "--out", made]) == 0
    assert "--project fedcommons --entity" in capsys.readouterr().out
    with pytest.raises(UserError, match="no run in"):
        dashboard.dashboard([str(runs / "half")])
