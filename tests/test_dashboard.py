"""The W&B workspace, panel by panel: each shows what the runs' own files for W&B hold."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from fedcommons import experiment, run
from fedcommons.errors import UserError

if TYPE_CHECKING:
    from conftest import WandbFile

    Reader = Callable[[Path], WandbFile]

FIELDS = {"wandb": "offline", "federation.rounds": 2, "client.epochs": 1, "measure.every": 1, "data.limit": 80}
RUNS = {
    "plain": {}, "swapped": {"setting": "shuffled_real", "p": 0.2},
    "private": {"dp.local": True, "dp.noise_multiplier": 1.5, "client.lr": 0.01},
}  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")  # of wandb-workspaces itself


@pytest.fixture(scope="module")
def dashboard(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    if find_spec("wandb_workspaces") is None:
        pytest.skip("wandb-workspaces is not installed: pip install 'fedcommons[dashboard]'")
    return sweeps("dashboard")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    for name, fields in RUNS.items():
        run(experiment("smoke", values={**FIELDS, **fields}), out / name, say=lambda text: None)
    return out


@pytest.fixture(scope="module")
def view(dashboard: ModuleType, folder: Path) -> dict[str, Any]:
    """The workspace as it was written."""
    assert dashboard.dashboard([str(folder), "--project", "mine", "--out", str(folder / "out" / "dashboard.json")]) == 0
    return json.loads((folder / "out" / "dashboard.json").read_text())


def panels(view: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The settings of all panels of a kind."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel["config"] for section in sections for panel in section["panels"] if panel["viewType"] == kind]


def test_sections_are_those_of_the_runs(view: dict[str, Any]) -> None:
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    named = ["What decides", "Accuracy", "Client dissimilarity", "Gradient noise", "Privacy", "Bytes"]
    assert [section["name"] for section in sections] == named
    assert (view["entity"], view["project"]) == ("ENTITY", "mine")


def test_every_line_and_its_axis_are_logged_in_rounds_by_some_run(
    view: dict[str, Any], folder: Path, wandb_file: "Reader"
) -> None:
    rows = [row for name in RUNS for row in wandb_file(folder / name).history]
    lines = panels(view, "Run History Line Plot")
    for line in lines:
        assert [row for row in rows if {line["xAxis"], *line["metrics"]} <= row.keys()], line
    drawn = {(line["xAxis"], *line["metrics"]) for line in lines}
    assert {("round", "test/accuracy"), ("comm/total_bytes", "test/accuracy")} <= drawn
    assert ("round", "convergence/zeta_hat_sq", "convergence/zeta_lemma1_sq") in drawn
    assert ("round", "privacy/epsilon_local_training_if_secret") in drawn
    assert ("round", "privacy/epsilon_local_training") not in drawn  # of no run here


def test_every_bar_is_in_the_summary_of_some_run(view: dict[str, Any], folder: Path, wandb_file: "Reader") -> None:
    summaries = [wandb_file(folder / name).summary for name in RUNS]
    bars = [name for bar in panels(view, "Bar Chart") for name in bar["metrics"]]
    assert {"best_accuracy", "disclosed"} <= {*bars}
    for name in bars:
        assert any(name in summary for summary in summaries), name


def test_every_run_has_every_axis_of_the_parallel_coordinates(
    view: dict[str, Any], folder: Path, wandb_file: "Reader"
) -> None:
    """W&B leaves out a run that lacks one."""
    (plot,) = panels(view, "Parallel Coordinates Plot")
    accessors = [column["accessor"] for column in plot["columns"]]
    assert len(accessors) == 7
    for name in RUNS:
        found = wandb_file(folder / name)
        held = {f"config:{key}.value": value for key, value in found.config.items()}
        held |= {f"summary:{key}": value for key, value in found.summary.items()}
        assert all(isinstance(held[accessor], int | float) for accessor in accessors), name


def test_runs_of_one_group_differ_in_the_seed_only(view: dict[str, Any], folder: Path, wandb_file: "Reader") -> None:
    (runs,) = view["spec"]["section"]["runSets"]
    groups = [key["name"].removesuffix(".value") for key in runs["grouping"]]
    assert groups[:2] == ["algorithm", "sharing.value.setting"]
    config = wandb_file(folder / "plain").config
    assert all(key in config for key in groups if key.startswith("effective/"))
    assert config["sharing"]["setting"] == "real"


def test_on_the_server_it_needs_a_login(
    dashboard: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="--entity needs a login"):
        dashboard.dashboard([str(folder), "--entity", "me"])
