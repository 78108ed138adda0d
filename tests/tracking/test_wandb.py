"""Weights & Biases: the real client, its file in offline mode read back, a stub of the server, and the workspace."""

import io
import json
import platform
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from getpass import getuser
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import wandb
import yaml
from PIL import Image
from report_runs import quiet

import fedcommons
from fedcommons import Experiment, UserError
from fedcommons.config import presets
from fedcommons.config.dotted import choose, override
from fedcommons.federation import hosts
from fedcommons.runs import experiment
from fedcommons.tracking.run_folder import read_rounds as lines
from fedcommons.tracking.wandb_media import KEYS
from fedcommons.tracking.wandb_tracker import IID, flaw_of_login
from fedcommons.tune.sweep import tracked
from fedcommons.tune.sweep_folder import require_shared

if TYPE_CHECKING:
    from conftest import WandbFile
    from wandb_server import Server

Reader = Callable[[Path], "WandbFile"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning"),  # of wandb-workspaces itself
    pytest.mark.long,
]
SMALL = {"federation.rounds": 1, "federation.checkpoint_every": 2, "measure.every": 0, "data.limit": 80}


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    values = {**SMALL, "artifacts": str(tmp_path / "artifacts"), "tracking.wandb": "offline"}
    return presets.experiment("smoke", "digits", values)


def test_wandb_has_every_number_of_every_round_and_the_chosen_components(tmp_path: Path, wandb_file: Reader) -> None:
    values = {"federation.rounds": 4, "measure.every": 2, "tracking.group": "g", "algorithm": "user_parts:Reports",
              "straggler.rule": "fastest", "target": 0.01, "tracking.wandb": "offline"}  # fmt: skip
    folder = tmp_path / "run"
    summary = experiment.run(presets.experiment("smoke", "digits", {**SMALL, **values}), folder)
    file, record = wandb_file(folder), lines(folder)
    numbers = [{k: v for k, v in line.items() if k not in ("late", "partial")} for line in record]
    own_columns = ("_", "media/", "seconds/")
    assert [{k: v for k, v in row.items() if not k.startswith(own_columns)} for row in file.history] == numbers
    assert all(row["seconds/train"] >= 0 for row in file.history)
    assert (file.run.run_group, file.run.job_type) == ("g", "federation")
    assert set(file.run.tags) == {"smoke", "digits", "reports", "real", "dirichlet_classes", "cnn", "fastest"}
    config = {name: value for name, value in file.config.items() if "/" not in name}
    written = yaml.safe_load((folder / "config.yaml").read_text())
    del written["artifacts"], written["data"]["dir"], written["tracking"]
    assert config == {**written, "preset": "smoke"}
    assert (file.summary["target_reached"], file.summary["target"]) == (True, 0.01)
    assert file.summary["rounds_to_target"] == summary["rounds_to_target"] > 0


def test_effective_values_are_those_that_resulted(config: Experiment, tmp_path: Path, wandb_file: Reader) -> None:
    """p is null in the config here and 1/2 in fact; without generators or DP-SGD it is 0, and iid has ``IID``."""

    def effective(file: "WandbFile") -> dict[str, Any]:
        return {name.removeprefix("effective/"): value for name, value in file.config.items() if "/" in name}

    values = {"sharing.setting": "shuffled_synthetic", "generator.rho": 0.5, "partition.name": "iid",
              "generator.epochs": 1, "generator.channels": (8, 8), "generator.sampling_steps": 2,
              "sharing.audit": True}  # fmt: skip
    summary = experiment.run(override(config, values), tmp_path / "made")
    synthetic = wandb_file(tmp_path / "made")
    assert synthetic.config["sharing"]["p"] is None
    assert effective(synthetic) == {"p": summary["p"], "rho": 0.5, "lr": 0.1, "alpha": IID, "noise_multiplier": 0}
    assert synthetic.summary["audit/pixels/closer"] == summary["audit"]["pixels"]["closer"]
    values = {"dp.local": True, "dp.noise_multiplier": 1.5, "client.lr": 0.01, "target": 1.0}
    result = experiment.run(override(config, values), tmp_path / "private")
    private = wandb_file(tmp_path / "private")
    assert effective(private) == {"alpha": 0.1, "noise_multiplier": 1.5, "p": 0, "rho": 0, "lr": 0.01}
    name = "epsilon_of_messages_if_secret"
    assert private.summary[f"privacy/{name}"] == result["privacy"][name]
    assert private.summary["privacy/overall"] == synthetic.summary["privacy/overall"] == "none"
    assert private.summary["target_reached"] is False


USER_FILE = """
from fedcommons.algorithms.fedavg import FedAvg as Method
from fedcommons.data.datasets import digits
from fedcommons.sharing.synthetic import LocalSynthetic as Stage
from lightning_modules.networks import Linear as Net


def images(folder=""):
    return digits()
"""


def test_wandb_gets_no_secret_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: Reader) -> None:
    """Neither the host nor the user, a folder or the command; of a user's components only the files' names."""
    secrets = {"WANDB_API_KEY": "0a1b" * 10, "RAY_AUTH_TOKEN": "c3d4" * 16}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    home, lab = Path.home(), tmp_path / "secret project"
    (lab / "lab").mkdir(parents=True)
    for name in ("my.py", "lab/other.py"):
        (lab / name).write_text(USER_FILE)
    monkeypatch.chdir(lab)
    monkeypatch.setenv("HOME", str(lab))
    values = {
        "algorithm": f"{lab}/my.py:Method", "data.name": "~/my.py:images", "sharing.setting": "lab/other.py:Stage",
        "model.name": "lab/other.py:Net", "data.folder": f"{lab}/photos/",
        "generator.epochs": 1, "generator.sampling_steps": 2, "generator.channels": (8, 8),
        "data.dir": str(tmp_path / "data"),
    }  # fmt: skip
    offline = {"data.limit": 40, "tracking.wandb": "offline", "artifacts": str(lab / "artifacts")}
    there = choose({**SMALL, **offline, **values})
    experiment.run(there, Path("out/run"), say=print)
    file = wandb_file(Path("out/run"))
    names = [file.config[section]["name"] for section in ("data", "model")]
    assert [*names, file.config["sharing"]["setting"]] == ["my.py:images", "other.py:Net", "other.py:Stage"]
    assert file.config["algorithm"] == file.summary["algorithm"] == "my.py:Method"
    assert file.config["data"]["folder"] == "photos"
    assert {"images", "method", "stage", "net"} <= set(file.run.tags)
    (folder,) = Path("out/run/wandb").glob("offline-run-*")
    assert not [path for path in Path("out/run").rglob("*") if path.is_symlink() and not path.exists()]
    paths = [path for path in (folder / "files").rglob("*") if path.is_file() and path.suffix != ".png"]
    texts = [*map(str, file.records), *(path.read_text() for path in paths)]
    places = (tmp_path, home, Path(__file__).parent, sys.executable)
    for here in (*map(str, places), "secret project", "lab/", "~", "out/"):
        assert not [text for text in texts if here in text], here
    assert not [text for text in texts if re.search(rf"\b({platform.node()}|{getuser()})\b", text)]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not [name for name, text in secrets.items() if text.encode() in path.read_bytes()]


def broken(*_: object, **__: object) -> None:
    raise OSError("disk full")


def test_without_a_login_it_is_offline_off_writes_nothing_and_a_failure_does_not_fail_the_run(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: Reader
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-such-netrc"))
    messages: list[str] = []
    experiment.run(override(config, {"tracking.wandb": "online"}), tmp_path / "run", say=messages.append)
    assert any("no login" in text and "offline" in text for text in messages)
    assert len(wandb_file(tmp_path / "run").history) == 2
    experiment.run(override(config, {"tracking.wandb": "off"}), tmp_path / "off")
    assert not (tmp_path / "off" / "wandb").exists()
    monkeypatch.setattr(wandb, "init", broken)
    assert experiment.run(config, tmp_path / "broken", say=messages.append)["rounds"] == 1
    assert any("disk full" in text for text in messages)


class Interrupted:
    def __init__(self) -> None:
        raise KeyboardInterrupt

    def log(self, round: int, metrics: object) -> None: ...

    def finish(self, summary: object) -> None: ...


def test_an_interruption_while_the_trackers_begin_ends_the_wandb_run(config: Experiment, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        experiment.run(override(config, {"tracking.tracker": f"{__file__}:Interrupted"}), tmp_path / "run", say=quiet)
    assert wandb.run is None


def test_the_server_gets_all_of_a_run_and_nothing_of_this_machine(
    wandb_online: "Server", tmp_path: Path, wandb_file: Reader, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run that the server refuses stays offline, and a sweep says so before any run."""
    online = {"wandb": "online", "federation.rounds": 2, "client.epochs": 1, "measure.every": 1, "data.limit": 80}
    fields = {**online, "setting": "shuffled_synthetic", "generator.epochs": 1, "artifacts": str(tmp_path / "made")}
    messages: list[str] = []
    fedcommons.run(fedcommons.experiment("smoke", values=fields), tmp_path / "mine", say=messages.append)
    assert not [text for text in messages if "W&B" in text]
    assert (wandb_online.bucket["project"], wandb_online.bucket["displayName"]) == ("fedcommons", "mine")
    assert (wandb_online.config["preset"], wandb_online.config["federation"]["rounds"]) == ("smoke", 2)
    seen = [[(k, v) for k, v in row.items() if not k.startswith("seconds/")] for row in wandb_online.history]
    rows = [{k: v for k, v in row if k not in KEYS} for row in seen]
    assert rows == lines(tmp_path / "mine")
    pictures = {key: wandb_online.history[-1][key] for key in KEYS}
    for key, facts in pictures.items():
        content = wandb_online.uploads[facts["path"]]
        assert Image.open(io.BytesIO(content)).size == (facts["width"], facts["height"]), key
    for here in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), str(Path.cwd()), sys.executable):
        assert not [body for body in wandb_online.received if here.encode() in body], here
    assert {"zeta_hat_sq_mean", "rounds_used", "privacy/overall", "best_accuracy"} <= {*wandb_online.summary}
    assert wandb_online.streams[-1]["complete"] is True
    of_sweep = {"tracking.wandb": "online", "tracking.group": None}
    assert tracked(of_sweep, tmp_path)["tracking.wandb"] == "online"
    logins = list[hosts.Login]()
    monkeypatch.setattr(hosts, "require_alike", lambda *arguments: logins.append(arguments[-1]))
    require_shared({}, [None], [], tmp_path, makes_artifacts=False, online=True)
    monkeypatch.delenv("WANDB_BASE_URL")  # as on another host
    assert logins[0]() == ("", False)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
    assert flaw_of_login(nowhere) == (f"{nowhere} does not answer", False)
    wandb_online.refuses = True
    assert logins[0]()[1]
    assert tracked(of_sweep, tmp_path)["tracking.wandb"] == "offline"
    assert "permission denied" in capsys.readouterr().out
    fedcommons.run(fedcommons.experiment("smoke", values=online), tmp_path / "refused", say=messages.append)
    assert [text for text in messages if "kept offline" in text]
    assert [row["round"] for row in wandb_file(tmp_path / "refused").history] == [0, 1, 2]


LINE, BAR, MEDIA = "Run History Line Plot", "Bar Chart", "Media Browser"


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
        fedcommons.run(fedcommons.experiment("smoke", values={**same, **fields}), out / name, say=quiet)
    return out


@pytest.fixture(scope="module")
def view(dashboard: ModuleType, folder: Path) -> dict[str, Any]:
    """The workspace as it was written."""
    assert dashboard.dashboard([str(folder), "--out", str(folder / "out" / "dashboard.json")]) == 0
    return json.loads((folder / "out" / "dashboard.json").read_text())


def panels(spec: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Type, x axis and names of the metrics of each panel, in order."""
    for section in spec["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:
            kind, config = panel["viewType"], panel["config"]
            if kind == "Parallel Coordinates Plot":
                yield kind, "", [column["accessor"] for column in config["columns"]]
            elif kind == "Scatter Plot":
                yield kind, config["xAxis"], [config["yAxis"]]
            else:
                names = config["mediaKeys" if kind == MEDIA else "metrics"]
                yield kind, config.get("xAxis", ""), names


def test_every_panel_shows_what_some_run_has_at_wandb(view: dict[str, Any], folder: Path, wandb_file: Reader) -> None:
    """W&B leaves out a run that lacks a value: without zeta^2 its line is in the second picture."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [len(section["panels"]) for section in sections] == [3, 7, 3, 1, 3, 2, 3]
    assert (view["entity"], view["project"]) == ("ENTITY", "mine")  # the runs' own project
    files = {name: wandb_file(folder / name) for name in ("plain", "swapped", "private", "made")}
    rows = [row for file in files.values() for row in file.history]
    for kind, x, names in panels(view["spec"]):
        if kind == LINE:
            assert [row for row in rows if {x, *names} <= row.keys()], names
        if kind == MEDIA:  # a row has several facts of it
            assert [row for row in rows if f"{names[0]}.path" in row], names
        if kind == BAR:
            assert any(isinstance(file.summary.get(names[0]), int | float) for file in files.values()), names
    plots = [names for kind, _, names in panels(view["spec"]) if kind == "Parallel Coordinates Plot"]
    for name, file in files.items():
        values = {f"config:{key}.value": value for key, value in file.config.items()}
        values |= {f"summary:{key}": value for key, value in file.summary.items()}
        plotted = [all(isinstance(values.get(accessor), int | float) for accessor in names) for names in plots]
        assert plotted == [name != "swapped", True], name


def test_the_printed_command_makes_the_same_on_the_server(
    dashboard: ModuleType, folder: Path, view: dict[str, Any], wandb_online: "Server",
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [str(folder), "--project", "mine", "--name", "my runs"]
    assert dashboard.dashboard([str(folder), "--name", "my runs", "--out", str(folder / "out" / "named.json")]) == 0
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert printed == ["python", "sweeps/dashboard.py", *words, "--entity", "YOURS"]
    assert dashboard.dashboard(["me" if word == "YOURS" else word for word in printed[2:]]) == 0
    (upload,) = wandb_online.variables("upsertView")
    assert (upload["entityName"], upload["projectName"], upload["displayName"]) == ("me", "mine", "my runs")
    assert [*panels(json.loads(upload["spec"]))] == [*panels(view["spec"])]
    wandb_online.refuses = True
    with pytest.raises(UserError, match="permission denied"):
        dashboard.dashboard(["--entity", "me"])
