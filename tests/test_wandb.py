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
from fedcommons.runs import experiment
from fedcommons.tracking.wandb_tracker import IID

if TYPE_CHECKING:
    from conftest import WandbFile

    Reader = Callable[[Path], WandbFile]

SMALL = {"federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 2, "data.limit": 100}


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    values = {**SMALL, "artifacts": str(tmp_path / "artifacts"), "tracking.wandb": "offline", "tracking.group": "g"}
    return presets.experiment("smoke", "digits", values)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_home_that_cannot_be_written_puts_no_log_of_wandb_on_stderr(tmp_path: Path) -> None:
    """/proc stands for it: also root cannot write there."""
    script = Path(__file__).parent.parent / "sweeps" / "run.py"
    fields = ["--data.limit=80", "--federation.rounds=1", "--measure.every=0", "--wandb=offline"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "WANDB_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, script, "--preset=smoke", *fields, f"--out={tmp_path / 'run'}"],
        capture_output=True, text=True, timeout=120,
        env=environment | {"HOME": "/proc", "MPLCONFIGDIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert any((tmp_path / "run" / "wandb").iterdir())


@pytest.mark.long
def test_wandb_holds_every_round_of_the_run_folder(config: Experiment, tmp_path: Path, wandb_file: "Reader") -> None:
    experiment.run(config, tmp_path / "run")
    found = wandb_file(tmp_path / "run")
    rows = found.history
    told = [{k: v for k, v in row.items() if not k.startswith(("_", "media/"))} for row in rows]
    assert told == lines(tmp_path / "run")
    assert [row["_step"] for row in rows] == list(range(5))
    sections = {"test/accuracy", "convergence/zeta_sq", "convergence/zeta_hat_sq", "convergence/sigma_sq"}
    assert sections <= set(rows[2])
    assert "comm/up_bytes" in rows[1]
    defined = [r.metric for r in found.records if r.HasField("metric")]
    assert ("*", "round") in [(m.name or m.glob_name, m.step_metric) for m in defined]
    assert found.run.run_group == "g"
    assert found.run.run_id == (tmp_path / "run" / "wandb-id.txt").read_text().strip()


def test_wandb_gets_the_lost_bytes_but_no_lists_of_clients(
    config: Experiment, tmp_path: Path, wandb_file: "Reader"
) -> None:
    experiment.run(override(config, {"straggler.rule": "fastest"}), tmp_path / "run")
    rows, record = wandb_file(tmp_path / "run").history, lines(tmp_path / "run")
    assert record[1]["late"]
    for row, line in zip(rows, record, strict=True):
        assert row.get("comm/lost_bytes") == line.get("comm/lost_bytes")
        assert not {"late", "partial"} & row.keys()


@pytest.mark.long
def test_nobody_learns_from_wandb_where_a_run_was_made(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: "Reader"
) -> None:
    """Neither the host nor the user, a folder or the command; the secrets are in no file of the run at all."""
    secrets = {"WANDB_API_KEY": "0a1b" * 10, "RAY_AUTH_TOKEN": "c3d4" * 16}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    data = str(tmp_path / "data")
    there = override(config, {"federation.rounds": 1, "data.dir": data})
    experiment.run(there, tmp_path / "run", say=print)
    found = wandb_file(tmp_path / "run")
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    sent = [str(record) for record in found.records]
    sent += [path.read_text() for path in (folder / "files").rglob("*") if path.is_file() and path.suffix != ".png"]
    for here in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), str(Path.cwd()), sys.executable):
        assert not [text for text in sent if here in text]
    assert found.run.host == ""
    assert not [text for text in sent if re.search(rf"\b({platform.node()}|{getuser()})\b", text)]
    assert not [record for record in found.records if record.HasField("environment")]
    told = (tmp_path / "run" / "environment.json").read_text()
    assert not re.search(rf"{tmp_path}|{Path.home()}|\b{platform.node()}\b", told)
    with pytest.raises(ClientError):
        experiment.run(override(there, {"client.lr": 1e30}), tmp_path / "failed")
    assert (tmp_path / "failed" / "error.txt").exists()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not [name for name, text in secrets.items() if text.encode() in path.read_bytes()]


def keys(values: dict[str, Any]) -> list[str]:
    """All names in a nested config."""
    return [name for key, value in values.items() for name in [key, *(keys(value) if isinstance(value, dict) else [])]]


def test_the_config_is_nested_and_has_the_chosen_parts_only(
    config: Experiment, tmp_path: Path, wandb_file: "Reader"
) -> None:
    """A section for each part of config.yaml, none for a generator, another algorithm or what concerns this machine."""
    experiment.run(override(config, {"algorithm": "fedprox", "federation.rounds": 1}), tmp_path / "run")
    found, run = wandb_file(tmp_path / "run").config, wandb_file(tmp_path / "run").run
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    del written["artifacts"], written["data"]["dir"], written["tracking"]
    assert found.pop("preset") == "smoke"
    effective = {name: found.pop(name) for name in list(found) if name.startswith("effective/")}
    assert found == written
    assert {"client", "fedprox", "partition", "federation"} <= found.keys()
    assert not {"generator", "feddyn", "moon"} & found.keys()
    assert found["sharing"] == {"setting": "real", "audit": False, "withhold": "none"}
    assert not [name for name in keys(found) if "." in name]
    nothing = {"effective/rho": 0, "effective/noise_multiplier": 0}
    assert effective == {"effective/alpha": 0.1, "effective/p": 0.0, "effective/lr": 0.1, **nothing}
    assert set(run.tags) == {"smoke", "digits", "fedprox", "real", "dirichlet_classes", "cnn"}
    assert run.job_type == "federation"


@pytest.mark.long
def test_effective_values_are_those_that_resulted(config: Experiment, tmp_path: Path, wandb_file: "Reader") -> None:
    """p is null in the config here and 1/2 in fact; without generators or DP-SGD it is 0, and iid has ``IID``."""
    one = {"federation.rounds": 1, "measure.every": 0}
    made = {**one, "sharing.setting": "shuffled_synthetic", "generator.rho": 0.5, "partition.name": "iid"}
    made |= {"generator.epochs": 1, "generator.channels": (8, 8), "generator.sampling_steps": 2}
    summary = experiment.run(override(config, {**made, "sharing.audit": True}), tmp_path / "made")
    found = wandb_file(tmp_path / "made").config
    assert found["sharing"]["p"] is None
    assert summary["p"] == pytest.approx(0.5, abs=0.01)
    effective = {name: value for name, value in found.items() if "/" in name}
    of_all = {"effective/alpha": IID, "effective/noise_multiplier": 0}
    assert effective == {"effective/p": summary["p"], "effective/rho": 0.5, "effective/lr": 0.1, **of_all}
    private = override(
        config, {**one, "dp.local": True, "dp.noise_multiplier": 1.5, "client.lr": 0.01, "data.limit": 80}
    )
    result = experiment.run(private, tmp_path / "private")
    effective = {n: v for n, v in wandb_file(tmp_path / "private").config.items() if "/" in n}
    of_all = {"effective/p": 0, "effective/rho": 0, "effective/lr": 0.01}
    assert effective == {"effective/alpha": 0.1, "effective/noise_multiplier": 1.5, **of_all}
    assert "dp" in wandb_file(tmp_path / "private").run.tags
    private = wandb_file(tmp_path / "private").summary
    name = "epsilon_of_messages_if_secret"
    assert (private["privacy/overall"], private[f"privacy/{name}"]) == ("none", result["privacy"][name])
    assert wandb_file(tmp_path / "made").summary["privacy/overall"] == "none"
    told = wandb_file(tmp_path / "made").summary
    assert "privacy/pool_epsilon_max" not in told
    assert told["audit/pixels/closer"] == summary["audit"]["pixels"]["closer"]
    assert told["audit/withheld"] == 0


@pytest.mark.parametrize(("target", "reached"), [(0.01, True), (1.0, False)])
def test_a_target_that_was_not_reached_is_logged_as_such(
    target: float, reached: bool, config: Experiment, tmp_path: Path, wandb_file: "Reader"
) -> None:
    summary = experiment.run(override(config, {"target": target, "federation.rounds": 1}), tmp_path / "run")
    found = wandb_file(tmp_path / "run").summary
    assert found["target_reached"] is reached
    assert found.get("rounds_to_target") == summary["rounds_to_target"] == (1 if reached else None)
    assert ("rounds_to_target" in found) is reached
    assert found["target"] == target


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
@pytest.mark.long
def test_of_parts_of_ones_own_only_file_names_are_uploaded(
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
    assert [found[s]["name"] for s in ("data", "partition", "generator", "model")] == [
        f"my.py:{name}" for name in ("images", "deal", "Painter", "Net")
    ]
    assert (found["algorithm"], found["sharing"]["setting"]) == ("my.py:Method", "my.py:Stage")
    assert (found["data"]["folder"], found["data"]["folders"]) == ("photos", ["one", "two"])
    assert kept.summary["algorithm"] == "my.py:Method"
    assert set(kept.run.tags) == {"images", "method", "deal", "stage", "painter", "net"}
    assert not [name for name in keys(found) if "." in name]
    (folder,) = Path("out/run/wandb").glob("offline-run-*")
    sent = [str(record) for record in kept.records]
    sent += [path.read_text() for path in (folder / "files").rglob("*") if path.is_file() and path.suffix != ".png"]
    for here in ("secret project", "lab/", "~", "out/", str(tmp_path)):
        assert not [text for text in sent if here in text], here


def modes(folder: Path) -> dict[str, int]:
    """Who may do what with the files of a run, by their names."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_users_umask_decides_who_reads_a_run(umask: int, mode: int, config: Experiment, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        experiment.run(override(config, {"federation.rounds": 1, "tracking.wandb": "off"}), tmp_path / "run")
    finally:
        os.umask(before)
    found = modes(tmp_path / "run")
    assert {Path(name).suffix for name in found} >= {".json", ".jsonl", ".yaml", ".safetensors"}
    assert set(found.values()) == {mode}, found


@pytest.mark.ray  # for its seconds: W&B's service keeps the umask it was started with, so this takes a process
def test_the_umask_holds_for_what_wandb_writes_too(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "sweeps" / "run.py"
    options = "--preset=smoke", "--federation.rounds=1", f"--out={tmp_path / 'run'}", "--tracking.wandb=offline"
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, umask=0o027, timeout=100)
    assert done.returncode == 0, done.stderr
    found = modes(tmp_path / "run")
    assert [name for name in found if name.endswith(".wandb")]
    assert set(found.values()) == {0o640}, found


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


@pytest.mark.ray  # for its seconds
def test_what_wandb_leaves_of_a_killed_run_nobody_else_can_enter_and_the_next_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedcommons.federation import scratch

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


@pytest.mark.long
def test_a_resumed_run_keeps_its_id_and_its_whole_history(
    config: Experiment, tmp_path: Path, wandb_file: "Reader"
) -> None:
    class PowerCut(Exception):
        pass

    def cut(number: int, _: object) -> None:
        if number == 3:
            raise PowerCut

    with pytest.raises(PowerCut):
        experiment.run(config, tmp_path / "run", on_round=cut)
    first = (tmp_path / "run" / "wandb-id.txt").read_text()
    experiment.run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "wandb-id.txt").read_text() == first
    rows = wandb_file(tmp_path / "run").history
    assert [(row["_step"], row["test/accuracy"]) for row in rows] == [
        (line["round"], line["test/accuracy"]) for line in lines(tmp_path / "run")
    ]


def test_online_without_a_login_falls_back_to_offline_and_says_so(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_file: "Reader"
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-such-netrc"))
    said: list[str] = []
    online = override(config, {"tracking.wandb": "online", "federation.rounds": 1})
    experiment.run(online, tmp_path / "run", say=said.append)
    assert any("no login" in text and "offline" in text for text in said)
    assert len(wandb_file(tmp_path / "run").history) == 2


def test_a_wandb_that_fails_does_not_fail_the_run(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(wandb, "init", broken)
    said: list[str] = []
    summary = experiment.run(override(config, {"federation.rounds": 1}), tmp_path / "run", say=said.append)
    assert summary["rounds"] == 1
    assert any("disk full" in text for text in said)


def test_off_writes_nothing(config: Experiment, tmp_path: Path) -> None:
    experiment.run(override(config, {"tracking.wandb": "off", "federation.rounds": 1}), tmp_path / "run")
    assert not (tmp_path / "run" / "wandb").exists()
