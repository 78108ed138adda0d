"""The W&B workspace, panel by panel: each shows what the runs' own files for W&B hold; and what a server gets of it."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from fedcommons import experiment, run
from fedcommons.errors import UserError

if TYPE_CHECKING:
    from conftest import WandbFile
    from wandb_server import Server

    Reader = Callable[[Path], WandbFile]

FIELDS = {
    "wandb": "offline",
    "tracking.project": "mine",
    "federation.rounds": 2,
    "client.epochs": 1,
    "measure.every": 1,
    "data.limit": 80,
}
RUNS = {
    "plain": {}, "swapped": {"setting": "shuffled_real", "p": 0.2, "measure.every": 0},
    "private": {"dp.local": True, "dp.noise_multiplier": 1.5, "client.lr": 0.01},
    "made": {"setting": "shuffled_synthetic", "generator.epochs": 1},
}  # fmt: skip

LINE, BAR, MEDIA = "Run History Line Plot", "Bar Chart", "Media Browser"
AXES = [f"config:effective/{axis}.value" for axis in ("alpha", "p", "rho", "noise_multiplier", "lr")]
PANELS = {
    "What decides": [
        ("Parallel Coordinates Plot", "", [*AXES, "summary:zeta_hat_sq_mean", "summary:rounds_used"]),
        ("Parallel Coordinates Plot", "", [*AXES, "summary:rounds_used"]),  # zeta^2 was not measured in one run
        ("Scatter Plot", "summary:zeta_hat_sq_mean", ["summary:rounds_used"]),
    ],
    "Accuracy": [
        (LINE, "round", ["test/accuracy"]), (LINE, "comm/total_bytes", ["test/accuracy"]),
        (LINE, "round", ["validation/accuracy"]), (LINE, "round", ["train/loss"]),
        (BAR, "", ["rounds_to_target"]), (BAR, "", ["best_accuracy"]), (BAR, "", ["last_accuracy"]),
    ],
    "Client dissimilarity": [
        (LINE, "round", ["convergence/zeta_hat_sq", "convergence/zeta_lemma1_sq"]),
        (LINE, "round", ["convergence/zeta_sq"]), (LINE, "round", ["convergence/delta_sq"]),
    ],
    "Gradient noise": [(LINE, "round", ["convergence/sigma_hat_sq", "convergence/sigma_lemma1_sq"])],
    "Privacy": [
        (LINE, "round", ["privacy/epsilon_local_training_if_secret"]),
        (BAR, "", ["disclosed"]), (BAR, "", ["privacy/epsilon_of_messages_if_secret"]),
    ],
    "Bytes": [(LINE, "round", ["comm/up_bytes"]), (LINE, "round", ["comm/down_bytes"])],
    "Pictures": [(MEDIA, "", ["media/pool"]), (MEDIA, "", ["media/partition"]), (MEDIA, "", ["media/sizes"])],
}  # fmt: skip
"""Of each section its panels: type, what stands below, and what is shown."""

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")  # of wandb-workspaces itself


@pytest.fixture(scope="module")
def dashboard(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    if find_spec("wandb_workspaces") is None:
        pytest.skip("wandb-workspaces is not installed: pip install 'fedcommons[dashboard]'")
    return sweeps("dashboard")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("my runs")
    made = {"target": 0.01, "artifacts": str(out / "artifacts")}
    for name, fields in RUNS.items():
        run(experiment("smoke", values={**FIELDS, **made, **fields}), out / name, say=lambda text: None)
    return out


@pytest.fixture(scope="module")
def view(dashboard: ModuleType, folder: Path) -> dict[str, Any]:
    """The workspace as it was written."""
    assert dashboard.dashboard([str(folder), "--out", str(folder / "out" / "dashboard.json")]) == 0
    return json.loads((folder / "out" / "dashboard.json").read_text())


def panels(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Section and panel, in order."""
    for section in spec["section"]["panelBankConfig"]["sections"]:
        yield from ((section["name"], panel) for panel in section["panels"])


def shown(panel: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Type, what stands below, and what is shown."""
    kind, config = panel["viewType"], panel["config"]
    if kind == "Parallel Coordinates Plot":
        return kind, "", [column["accessor"] for column in config["columns"]]
    if kind == "Scatter Plot":
        return kind, config["xAxis"], [config["yAxis"]]
    return kind, config.get("xAxis", ""), config["mediaKeys" if kind == MEDIA else "metrics"]


def test_every_section_and_every_panel_is_read_back(view: dict[str, Any]) -> None:
    found: dict[str, list[Any]] = {}
    for section, panel in panels(view["spec"]):
        found.setdefault(section, []).append(shown(panel))
        assert "/" not in panel["config"]["chartTitle"], "a metric's name is no title"
    assert found == PANELS
    assert (view["entity"], view["project"]) == ("ENTITY", "mine")  # the runs' own project


def test_the_library_reads_the_file_back(dashboard: ModuleType, view: dict[str, Any]) -> None:
    """W&B's own classes find the same panels in it, so the server's page can."""
    from wandb_workspaces.workspaces import Workspace, internal

    read = Workspace._from_model(internal.View.model_validate(view))
    assert [section.name for section in read.sections] == [*PANELS]
    kinds = [type(panel).__name__ for section in read.sections for panel in section.panels]
    assert kinds[:2] == ["ParallelCoordinatesPlot", "ParallelCoordinatesPlot"]
    assert (kinds.count("LinePlot"), kinds.count("BarPlot"), kinds.count("MediaBrowser")) == (11, 5, 3)
    assert not [kind for kind in kinds if kind.startswith("Unknown")]


def test_what_a_panel_shows_some_run_has_at_wandb(view: dict[str, Any], folder: Path, wandb_file: "Reader") -> None:
    found = {name: wandb_file(folder / name) for name in RUNS}
    rows = [row for one in found.values() for row in one.history]
    for _, panel in panels(view["spec"]):
        kind, x, names = shown(panel)
        if kind == LINE:
            assert [row for row in rows if {x, *names} <= row.keys()], names
        if kind == MEDIA:  # of which a row holds several facts
            assert [row for row in rows if f"{names[0]}.path" in row], names
        if kind == BAR:
            assert any(isinstance(one.summary.get(names[0]), int | float) for one in found.values()), names


def test_every_run_has_a_line_in_the_parallel_coordinates(
    view: dict[str, Any], folder: Path, wandb_file: "Reader"
) -> None:
    """W&B leaves out a run that lacks a value: where zeta^2 was not measured, the line is in the second picture."""
    plots = [names for kind, _, names in (shown(panel) for _, panel in panels(view["spec"])) if kind[0] == "P"]
    for name, fields in RUNS.items():
        found = wandb_file(folder / name)
        held = {f"config:{key}.value": value for key, value in found.config.items()}
        held |= {f"summary:{key}": value for key, value in found.summary.items()}
        drawn = [all(isinstance(held.get(accessor), int | float) for accessor in names) for names in plots]
        assert drawn == [fields.get("measure.every") != 0, True], name


def test_runs_of_one_group_differ_in_the_seed_only(view: dict[str, Any], folder: Path, wandb_file: "Reader") -> None:
    (runs,) = view["spec"]["section"]["runSets"]
    groups = [key["name"] for key in runs["grouping"]]
    fields = ["preset", "data.name", "partition.name", "algorithm", "sharing.setting"]
    assert groups[:5] == ["preset.value", "data.value.name", "partition.value.name", "algorithm.value",
                          "sharing.value.setting"]  # fmt: skip
    config = wandb_file(folder / "plain").config
    for field, value in zip(fields, ["smoke", "digits", "dirichlet_classes", "fedavg", "real"], strict=True):
        section, _, leaf = field.partition(".")
        assert (config[section][leaf] if leaf else config[section]) == value
    assert [f"config:{name}" for name in groups[5:]] == AXES
    assert all(name.removesuffix(".value") in config for name in groups[5:])


def plain(spec: Any) -> Any:
    """Without the numbers that W&B's package draws for each panel."""
    if isinstance(spec, dict):
        return {name: plain(value) for name, value in spec.items() if name not in ("__id__", "id")}
    return [plain(one) for one in spec] if isinstance(spec, list) else spec


def test_the_command_that_is_printed_makes_the_same_on_the_server(
    dashboard: ModuleType,
    folder: Path,
    view: dict[str, Any],
    wandb_online: "Server",
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(folder), "--project", "mine", "--name", "my runs"]
    assert dashboard.dashboard([str(folder), "--name", "my runs", "--out", str(folder / "out" / "named.json")]) == 0
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert printed == ["python", "sweeps/dashboard.py", *words, "--entity", "YOURS"]
    assert dashboard.dashboard(["me" if word == "YOURS" else word for word in printed[2:]]) == 0
    (made,) = wandb_online.variables("upsertView")
    assert (made["entityName"], made["projectName"], made["displayName"]) == ("me", "mine", "my runs")
    assert made["type"] == "project-view"
    assert plain(json.loads(made["spec"])) == plain(view["spec"])
    assert wandb_online.url in capsys.readouterr().out


def test_without_folders_all_panels_are_made_on_the_server(
    dashboard: ModuleType, wandb_online: "Server", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dashboard.dashboard(["--entity", "me", "--project", "mine"]) == 0
    (made,) = wandb_online.variables("upsertView")
    found = [(section, *shown(panel)) for section, panel in panels(json.loads(made["spec"]))]
    known = {(section, kind, x, *names) for section, kind, x, names in found}
    assert {(section, kind, x, *names) for section, of_it in PANELS.items() for kind, x, names in of_it} <= known
    assert ("Privacy", BAR, "", "privacy/overall") in known
    assert ("Privacy", LINE, "round", "privacy/epsilon_local_training") in known
    assert not [*tmp_path.iterdir()]


def test_on_the_server_it_needs_a_login(
    dashboard: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="--entity needs a login"):
        dashboard.dashboard([str(folder), "--entity", "me"])


def test_a_server_that_refuses_is_told_in_a_sentence(dashboard: ModuleType, wandb_online: "Server") -> None:
    wandb_online.refuses = True
    with pytest.raises(UserError, match=r"^W&B did not take the workspace: .*permission denied") as caught:
        dashboard.dashboard(["--entity", "me"])
    assert len(str(caught.value).splitlines()) == 1


def test_without_the_package_it_says_what_to_install(dashboard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'fedcommons\[dashboard\]'"):
        dashboard.dashboard(["--entity", "me"])


def change(file: Path, **values: Any) -> None:
    """Replace values of a JSON file; None: remove them."""
    found = {**json.loads(file.read_text(encoding="utf-8")), **values}
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not None}), encoding="utf-8")


def test_runs_of_other_versions_and_damaged_ones_are_told_in_a_sentence_each(
    dashboard: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    for name in (*RUNS, "half", "off", "old"):
        shutil.copytree(folder / (name if name in RUNS else "plain"), runs / name)
    change(runs / "old" / "environment.json", packages={"fedcommons": "0.1.0"})
    change(runs / "old" / "summary.json", privacy=None)  # as of a run before there was a statement
    change(runs / "private" / "summary.json", config=None)
    change(runs / "swapped" / "summary.json", last_accuracy="high")
    (runs / "half" / "rounds.jsonl").write_text('{"round": 0, "te')
    (runs / "off" / "wandb-id.txt").unlink()
    assert dashboard.dashboard([str(runs), "--out", str(tmp_path / "made.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        f"left out: {runs}/half has no round yet.",
        f"left out: {runs}/private is of an earlier version: its summary.json does not have the config.",
        f"left out: {runs}/swapped/summary.json is damaged: last_accuracy is 'high'.",
    ]
    assert said[3] == f"1 of 4 runs were played without W&B, which does not have them, as {runs}/off."
    assert said[4].startswith(f"{runs}/old: of fedcommons 0.1.0, not ")
    assert len(said) == 7
    kinds = [
        kind for kind, _, _ in (shown(p) for _, p in panels(json.loads((tmp_path / "made.json").read_text())["spec"]))
    ]
    assert kinds.count(MEDIA) == 3
    with pytest.raises(UserError, match=r"no run in .* can be read"):
        dashboard.dashboard([str(runs / "half")])


def test_a_file_that_cannot_be_written_is_told_in_a_sentence(dashboard: ModuleType, folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(UserError, match=r"--out: .*/file/dashboard\.json cannot be written \("):
        dashboard.dashboard([str(folder), "--out", str(folder / "file" / "dashboard.json")])


@pytest.mark.parametrize("project", ["a\nb", "\x1b[2J", "a/b"])
def test_a_project_that_a_stranger_named_moves_no_terminal(
    project: str, dashboard: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "plain", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    assert "project: mine" in config.read_text()
    config.write_text(config.read_text().replace("project: mine", f"project: {json.dumps(project)}"))
    assert dashboard.dashboard([str(tmp_path / "run"), "--out", str(tmp_path / "made.json")]) == 0
    assert "--project fedcommons --entity" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--project "):
        dashboard.dashboard([str(tmp_path / "run"), "--project", project])
