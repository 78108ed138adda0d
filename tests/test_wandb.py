"""Weights & Biases, the real one in offline mode, its file read back."""

import json
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import choose, override
from fedcommons.errors import ClientError
from fedcommons.federation import scratch
from fedcommons.runs import experiment
from fedcommons.tracking.wandb_tracker import IID

if TYPE_CHECKING:
    from conftest import WandbFile

    Reader = Callable[[Path], WandbFile]

pytestmark = pytest.mark.long
SMALL = {"federation.rounds": 1, "federation.checkpoint_every": 2, "measure.every": 0, "data.limit": 80}


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    values = {**SMALL, "artifacts": str(tmp_path / "artifacts"), "tracking.wandb": "offline"}
    return presets.experiment("smoke", "digits", values)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def sent(found: "WandbFile", folder: Path) -> list[str]:
    """All texts that W&B has of a run, or will have."""
    (of,) = (folder / "wandb").glob("offline-run-*")
    paths = [path for path in (of / "files").rglob("*") if path.is_file() and path.suffix != ".png"]
    return [*map(str, found.records), *(path.read_text() for path in paths)]


def keys(values: dict[str, Any]) -> list[str]:
    """All names in a nested config."""
    return [name for key, value in values.items() for name in [key, *(keys(value) if isinstance(value, dict) else [])]]


def effective(found: "WandbFile") -> dict[str, Any]:
    return {name.removeprefix("effective/"): value for name, value in found.config.items() if "/" in name}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, wandb_file: "Reader") -> "tuple[Path, WandbFile]":
    """A run of FedProx with stragglers, and what W&B has of it."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    values = {"federation.rounds": 4, "measure.every": 2, "tracking.group": "g", "algorithm": "fedprox",
              "straggler.rule": "fastest", "target": 0.01, "tracking.wandb": "offline"}  # fmt: skip
    experiment.run(presets.experiment("smoke", "digits", {**SMALL, **values}), folder)
    return folder, wandb_file(folder)


def test_wandb_has_every_number_of_every_round(tracked: "tuple[Path, WandbFile]") -> None:
    """And no list of clients."""
    folder, file = tracked
    rows, record = file.history, lines(folder)
    assert record[1]["late"]
    numbers = [{k: v for k, v in line.items() if k not in ("late", "partial")} for line in record]
    assert [{k: v for k, v in row.items() if not k.startswith(("_", "media/"))} for row in rows] == numbers
    assert [row["_step"] for row in rows] == list(range(5))
    assert {"test/accuracy", "convergence/zeta_sq", "convergence/zeta_hat_sq", "convergence/sigma_sq"} <= set(rows[2])
    assert {"comm/up_bytes", "comm/lost_bytes"} <= set(rows[1])
    defined = [r.metric for r in file.records if r.HasField("metric")]
    assert ("*", "round") in [(m.name or m.glob_name, m.step_metric) for m in defined]
    assert (file.run.run_group, file.run.job_type) == ("g", "federation")
    assert file.run.run_id == (folder / "wandb-id.txt").read_text().strip()


def test_the_config_is_nested_and_has_the_chosen_components_only(tracked: "tuple[Path, WandbFile]") -> None:
    """A section for each part of config.yaml, none for a generator, another algorithm or what concerns this machine."""
    folder, file = tracked
    config = {name: value for name, value in file.config.items() if "/" not in name}
    written = yaml.safe_load((folder / "config.yaml").read_text())
    del written["artifacts"], written["data"]["dir"], written["tracking"]
    assert config.pop("preset") == "smoke"
    assert config == written
    assert {"client", "fedprox", "partition", "federation"} <= config.keys()
    assert not {"generator", "feddyn", "moon"} & config.keys()
    assert not [name for name in keys(config) if "." in name]
    assert effective(file) == {"alpha": 0.1, "p": 0.0, "lr": 0.1, "rho": 0, "noise_multiplier": 0}
    assert set(file.run.tags) == {"smoke", "digits", "fedprox", "real", "dirichlet_classes", "cnn", "fastest"}


def test_effective_values_are_those_that_resulted(
    tracked: "tuple[Path, WandbFile]", config: Experiment, tmp_path: Path, wandb_file: "Reader"
) -> None:
    """p is null in the config here and 1/2 in fact; without generators or DP-SGD it is 0, and iid has ``IID``."""
    values = {"sharing.setting": "shuffled_synthetic", "generator.rho": 0.5, "partition.name": "iid",
              "generator.epochs": 1, "generator.channels": (8, 8), "generator.sampling_steps": 2,
              "sharing.audit": True}  # fmt: skip
    summary = experiment.run(override(config, values), tmp_path / "made")
    made = wandb_file(tmp_path / "made")
    assert made.config["sharing"]["p"] is None
    assert summary["p"] == pytest.approx(0.5, abs=0.01)
    assert effective(made) == {"p": summary["p"], "rho": 0.5, "lr": 0.1, "alpha": IID, "noise_multiplier": 0}
    values = {"dp.local": True, "dp.noise_multiplier": 1.5, "client.lr": 0.01, "target": 1.0}
    result = experiment.run(override(config, values), tmp_path / "private")
    private = wandb_file(tmp_path / "private")
    assert effective(private) == {"alpha": 0.1, "noise_multiplier": 1.5, "p": 0, "rho": 0, "lr": 0.01}
    assert "dp" in private.run.tags
    name = "epsilon_of_messages_if_secret"
    assert private.summary[f"privacy/{name}"] == result["privacy"][name]
    assert private.summary["privacy/overall"] == made.summary["privacy/overall"] == "none"
    assert "privacy/pool_epsilon_max" not in made.summary
    assert made.summary["audit/pixels/closer"] == summary["audit"]["pixels"]["closer"]
    assert made.summary["audit/withheld"] == 0
    folder, reached = tracked
    own = json.loads((folder / "summary.json").read_text())
    assert (reached.summary["target_reached"], reached.summary["target"]) == (True, 0.01)
    assert reached.summary["rounds_to_target"] == own["rounds_to_target"] > 0
    assert private.summary["target_reached"] is False
    assert "rounds_to_target" not in private.summary


def test_wandb_gets_nothing_of_this_machine_and_no_file_has_a_secret(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: "Reader"
) -> None:
    """Neither the host nor the user, a folder or the command."""
    secrets = {"WANDB_API_KEY": "0a1b" * 10, "RAY_AUTH_TOKEN": "c3d4" * 16}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    there = override(config, {"data.dir": str(tmp_path / "data")})
    experiment.run(there, tmp_path / "run", say=print)
    file = wandb_file(tmp_path / "run")
    for here in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), str(Path.cwd()), sys.executable):
        assert not [text for text in sent(file, tmp_path / "run") if here in text]
    assert file.run.host == ""
    names = rf"\b({platform.node()}|{getuser()})\b"
    assert not [text for text in sent(file, tmp_path / "run") if re.search(names, text)]
    assert not [record for record in file.records if record.HasField("environment")]
    facts = (tmp_path / "run" / "environment.json").read_text()
    assert not re.search(rf"{tmp_path}|{Path.home()}|\b{platform.node()}\b", facts)
    with pytest.raises(ClientError):
        experiment.run(override(there, {"client.lr": 1e30}), tmp_path / "failed")
    assert (tmp_path / "failed" / "error.txt").exists()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not [name for name, text in secrets.items() if text.encode() in path.read_bytes()]


OWN = """
from fedcommons.algorithms.fedavg import FedAvg as Method
from fedcommons.data.datasets import digits
from fedcommons.data.partition import iid as deal
from fedcommons.generators.ddpm import DDPM as Painter
from fedcommons.sharing.local_synthetic import LocalSynthetic as Stage
from lightning_modules.networks import Linear as Net


def images(folder="", folders=("",)):
    return digits()
"""


@pytest.mark.parametrize("home", ["", "~/", "lab/"])
def test_of_users_components_only_file_names_are_uploaded(
    home: str, config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: "Reader"
) -> None:
    """Named by an absolute path, from the home folder or by a relative path; a constant may be a path too."""
    lab = tmp_path / "secret project"
    (lab / "lab").mkdir(parents=True)
    for name in ("my.py", "lab/my.py"):
        (lab / name).write_text(OWN)
    monkeypatch.chdir(lab)
    monkeypatch.setenv("HOME", str(lab))
    file = f"{home or f'{lab}/'}my.py"
    values: dict[str, Any] = {
        "algorithm": f"{file}:Method", "data.name": f"{file}:images", "partition.name": f"{file}:deal",
        "sharing.setting": f"{file}:Stage", "generator.name": f"{file}:Painter", "model.name": f"{file}:Net",
        "data.folder": f"{lab}/photos/", "data.folders": (f"{lab}/one", "two"),
        "generator.channels": (16, 32), "generator.epochs": 1, "generator.sampling_steps": 2, "federation.rounds": 1,
        "measure.every": 0, "data.limit": 40, "partition.n_clients": 2, "client.lr": 0.1, "target": 0.2,
        "tracking.wandb": "offline", "artifacts": str(lab / "artifacts"),
    }  # fmt: skip
    experiment.run(choose(values), Path("out/run"))
    kept = wandb_file(Path("out/run"))
    found = kept.config
    names = [found[section]["name"] for section in ("data", "partition", "generator", "model")]
    assert names == [f"my.py:{name}" for name in ("images", "deal", "Painter", "Net")]
    assert found["algorithm"] == kept.summary["algorithm"] == "my.py:Method"
    assert found["sharing"]["setting"] == "my.py:Stage"
    assert (found["data"]["folder"], found["data"]["folders"]) == ("photos", ["one", "two"])
    assert set(kept.run.tags) == {"images", "method", "deal", "stage", "painter", "net"}
    assert not [name for name in keys(found) if "." in name]
    for here in ("secret project", "lab/", "~", "out/", str(tmp_path)):
        assert not [text for text in sent(kept, Path("out/run")) if here in text], here


def test_the_umask_holds_for_all_files_and_a_home_without_write_access_is_no_error(tmp_path: Path) -> None:
    """/proc stands for it: also root cannot write there. W&B's service keeps the umask that it was started with."""
    script = Path(__file__).parent.parent / "sweeps" / "run.py"
    fields = ["--data.limit=80", "--federation.rounds=1", "--measure.every=0", "--wandb=offline"]
    environment = {k: value for k, value in os.environ.items() if k not in ("XDG_CACHE_HOME", "WANDB_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, script, "--preset=smoke", *fields, f"--out={tmp_path / 'run'}"], capture_output=True,
        text=True, timeout=120, umask=0o027, env=environment | {"HOME": "/proc", "MPLCONFIGDIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    paths = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.is_symlink()]
    assert {".wandb", ".json", ".jsonl", ".yaml", ".safetensors"} <= {path.suffix for path in paths}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o640}


KILLED = """
import os, sys
from pathlib import Path
from fedcommons.config import presets
from fedcommons.tracking.wandb_tracker import WandbTracker, logged_in
logged_in()
Path("run").mkdir()
tracker = WandbTracker(Path("run"), presets.experiment("smoke", "digits", {"tracking.wandb": "offline"}), 0.0, sys.exit)
tracker.log(0, {"test/accuracy": 0.5})
os.kill(os.getpid(), 9)
"""


def test_no_other_user_can_enter_what_wandb_leaves_of_a_killed_run_and_the_next_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # a short name, as for W&B's socket
        done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env={**os.environ, "TMPDIR": temporary})
        assert done.returncode == -signal.SIGKILL
        (left,) = Path(temporary).iterdir()
        assert stat.S_IMODE(left.stat().st_mode) == 0o700
        assert len([*left.glob("*wandb*")]) >= 2
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        deadline = time.monotonic() + 30
        while left.exists() and time.monotonic() < deadline:  # W&B's service ends a moment after its run
            with scratch.folder():
                time.sleep(0.1)
        assert [*Path(temporary).iterdir()] == []


def test_a_resumed_run_keeps_its_id_and_its_whole_history(
    config: Experiment, tmp_path: Path, wandb_file: "Reader"
) -> None:
    class PowerCut(Exception):
        pass

    def cut(number: int, _: object) -> None:
        if number == 3:
            raise PowerCut

    four = override(config, {"federation.rounds": 4})
    with pytest.raises(PowerCut):
        experiment.run(four, tmp_path / "run", on_round=cut)
    first = (tmp_path / "run" / "wandb-id.txt").read_text()
    experiment.run(four, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "wandb-id.txt").read_text() == first
    rows = [(row["_step"], row["test/accuracy"]) for row in wandb_file(tmp_path / "run").history]
    assert rows == [(line["round"], line["test/accuracy"]) for line in lines(tmp_path / "run")]


def test_online_without_a_login_falls_back_to_offline_and_off_writes_nothing(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: "Reader"
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-such-netrc"))
    said: list[str] = []
    experiment.run(override(config, {"tracking.wandb": "online"}), tmp_path / "run", say=said.append)
    assert any("no login" in text and "offline" in text for text in said)
    assert len(wandb_file(tmp_path / "run").history) == 2
    experiment.run(override(config, {"tracking.wandb": "off"}), tmp_path / "off")
    assert not (tmp_path / "off" / "wandb").exists()


def test_a_wandb_that_fails_does_not_fail_the_run(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(wandb, "init", broken)
    said: list[str] = []
    assert experiment.run(config, tmp_path / "run", say=said.append)["rounds"] == 1
    assert any("disk full" in text for text in said)
