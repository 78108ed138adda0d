"""Weights & Biases: the real client, its file in offline mode read back, and online with a stub of the server."""

import io
import platform
import re
import sys
from collections.abc import Callable
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import wandb
import yaml
from PIL import Image

import fedcommons
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import choose, override
from fedcommons.runs import experiment
from fedcommons.tracking.run_folder import read_rounds as lines
from fedcommons.tracking.wandb_media import KEYS
from fedcommons.tracking.wandb_tracker import IID

if TYPE_CHECKING:
    from conftest import WandbFile
    from wandb_server import Server

Reader = Callable[[Path], "WandbFile"]
pytestmark = pytest.mark.long
SMALL = {"federation.rounds": 1, "federation.checkpoint_every": 2, "measure.every": 0, "data.limit": 80}


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    values = {**SMALL, "artifacts": str(tmp_path / "artifacts"), "tracking.wandb": "offline"}
    return presets.experiment("smoke", "digits", values)


def test_wandb_has_every_number_of_every_round_and_the_chosen_components(tmp_path: Path, wandb_file: Reader) -> None:
    values = {"federation.rounds": 4, "measure.every": 2, "tracking.group": "g", "algorithm": "fedprox",
              "straggler.rule": "fastest", "target": 0.01, "tracking.wandb": "offline"}  # fmt: skip
    folder = tmp_path / "run"
    own = experiment.run(presets.experiment("smoke", "digits", {**SMALL, **values}), folder)
    file, record = wandb_file(folder), lines(folder)
    assert record[1]["late"]
    numbers = [{k: v for k, v in line.items() if k not in ("late", "partial")} for line in record]
    assert [{k: v for k, v in row.items() if not k.startswith(("_", "media/"))} for row in file.history] == numbers
    assert (file.run.run_group, file.run.job_type) == ("g", "federation")
    assert set(file.run.tags) == {"smoke", "digits", "fedprox", "real", "dirichlet_classes", "cnn", "fastest"}
    config = {name: value for name, value in file.config.items() if "/" not in name}
    written = yaml.safe_load((folder / "config.yaml").read_text())
    del written["artifacts"], written["data"]["dir"], written["tracking"]
    assert config == {**written, "preset": "smoke"}
    assert (file.summary["target_reached"], file.summary["target"]) == (True, 0.01)
    assert file.summary["rounds_to_target"] == own["rounds_to_target"] > 0


def test_effective_values_are_those_that_resulted(config: Experiment, tmp_path: Path, wandb_file: Reader) -> None:
    """p is null in the config here and 1/2 in fact; without generators or DP-SGD it is 0, and iid has ``IID``."""

    def effective(found: "WandbFile") -> dict[str, Any]:
        return {name.removeprefix("effective/"): value for name, value in found.config.items() if "/" in name}

    values = {"sharing.setting": "shuffled_synthetic", "generator.rho": 0.5, "partition.name": "iid",
              "generator.epochs": 1, "generator.channels": (8, 8), "generator.sampling_steps": 2,
              "sharing.audit": True}  # fmt: skip
    summary = experiment.run(override(config, values), tmp_path / "made")
    made = wandb_file(tmp_path / "made")
    assert made.config["sharing"]["p"] is None
    assert summary["p"] == pytest.approx(0.5, abs=0.01)
    assert effective(made) == {"p": summary["p"], "rho": 0.5, "lr": 0.1, "alpha": IID, "noise_multiplier": 0}
    assert made.summary["audit/pixels/closer"] == summary["audit"]["pixels"]["closer"]
    values = {"dp.local": True, "dp.noise_multiplier": 1.5, "client.lr": 0.01, "target": 1.0}
    result = experiment.run(override(config, values), tmp_path / "private")
    private = wandb_file(tmp_path / "private")
    assert effective(private) == {"alpha": 0.1, "noise_multiplier": 1.5, "p": 0, "rho": 0, "lr": 0.01}
    name = "epsilon_of_messages_if_secret"
    assert private.summary[f"privacy/{name}"] == result["privacy"][name]
    assert private.summary["privacy/overall"] == made.summary["privacy/overall"] == "none"
    assert private.summary["target_reached"] is False
    assert "rounds_to_target" not in private.summary


OWN = """
from fedcommons.algorithms.fedavg import FedAvg as Method
from fedcommons.data.datasets import digits
from fedcommons.sharing.local_synthetic import LocalSynthetic as Stage
from lightning_modules.networks import Linear as Net


def images(folder=""):
    return digits()
"""


def test_wandb_gets_nothing_of_this_machine_and_no_file_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: Reader
) -> None:
    """Neither the host nor the user, a folder or the command; of a user's components only the files' names."""
    secrets = {"WANDB_API_KEY": "0a1b" * 10, "RAY_AUTH_TOKEN": "c3d4" * 16}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    home, lab = Path.home(), tmp_path / "secret project"
    (lab / "lab").mkdir(parents=True)
    for name in ("my.py", "lab/other.py"):
        (lab / name).write_text(OWN)
    monkeypatch.chdir(lab)
    monkeypatch.setenv("HOME", str(lab))
    values = {
        "algorithm": f"{lab}/my.py:Method", "data.name": "~/my.py:images", "sharing.setting": "lab/other.py:Stage",
        "model.name": "lab/other.py:Net", "data.folder": f"{lab}/photos/",
        "generator.epochs": 1, "generator.sampling_steps": 2, "generator.channels": (8, 8),
        "data.dir": str(tmp_path / "data"),
    }  # fmt: skip
    there = choose(
        {**SMALL, "data.limit": 40, "tracking.wandb": "offline", "artifacts": str(lab / "artifacts"), **values}
    )
    experiment.run(there, Path("out/run"), say=print)
    file = wandb_file(Path("out/run"))
    names = [file.config[section]["name"] for section in ("data", "model")]
    assert [*names, file.config["sharing"]["setting"]] == ["my.py:images", "other.py:Net", "other.py:Stage"]
    assert file.config["algorithm"] == file.summary["algorithm"] == "my.py:Method"
    assert file.config["data"]["folder"] == "photos"
    assert {"images", "method", "stage", "net"} <= set(file.run.tags)
    (of,) = Path("out/run/wandb").glob("offline-run-*")
    paths = [path for path in (of / "files").rglob("*") if path.is_file() and path.suffix != ".png"]
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
    said: list[str] = []
    experiment.run(override(config, {"tracking.wandb": "online"}), tmp_path / "run", say=said.append)
    assert any("no login" in text and "offline" in text for text in said)
    assert len(wandb_file(tmp_path / "run").history) == 2
    experiment.run(override(config, {"tracking.wandb": "off"}), tmp_path / "off")
    assert not (tmp_path / "off" / "wandb").exists()
    monkeypatch.setattr(wandb, "init", broken)
    assert experiment.run(config, tmp_path / "broken", say=said.append)["rounds"] == 1
    assert any("disk full" in text for text in said)


def test_the_server_gets_all_of_a_run_and_nothing_of_this_machine(wandb_online: "Server", tmp_path: Path) -> None:
    """A run that the server refuses stays offline."""
    online = {"wandb": "online", "federation.rounds": 2, "client.epochs": 1, "measure.every": 1, "data.limit": 80}
    fields = {**online, "setting": "shuffled_synthetic", "generator.epochs": 1, "artifacts": str(tmp_path / "made")}
    said: list[str] = []
    fedcommons.run(fedcommons.experiment("smoke", values=fields), tmp_path / "mine", say=said.append)
    assert not [text for text in said if "W&B" in text]
    assert (wandb_online.bucket["project"], wandb_online.bucket["displayName"]) == ("fedcommons", "mine")
    assert (wandb_online.config["preset"], wandb_online.config["federation"]["rounds"]) == ("smoke", 2)
    rows = [{k: v for k, v in row.items() if k not in KEYS} for row in wandb_online.history]
    assert rows == lines(tmp_path / "mine")
    pictures = {key: wandb_online.history[-1][key] for key in KEYS}
    for key, facts in pictures.items():
        content = wandb_online.uploads[facts["path"]]
        assert Image.open(io.BytesIO(content)).size == (facts["width"], facts["height"]), key
    for here in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), str(Path.cwd()), sys.executable):
        assert not [body for body in wandb_online.received if here.encode() in body], here
    assert {"zeta_hat_sq_mean", "rounds_used", "privacy/overall", "best_accuracy"} <= {*wandb_online.summary}
    assert wandb_online.streams[-1]["complete"] is True
    wandb_online.refuses = True
    fedcommons.run(fedcommons.experiment("smoke", values=online), tmp_path / "refused", say=said.append)
    assert [text for text in said if "kept offline" in text]
