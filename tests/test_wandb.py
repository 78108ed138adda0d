"""Weights & Biases, the real one in offline mode, its file read back."""

import json
import os
import platform
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.errors import ClientError
from fedcommons.runs import experiment

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


def test_wandb_holds_every_round_of_the_run_folder(config: Experiment, tmp_path: Path, wandb_file: "Reader") -> None:
    experiment.run(config, tmp_path / "run")
    found = wandb_file(tmp_path / "run")
    rows = found.history
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows] == lines(tmp_path / "run")
    assert [row["_step"] for row in rows] == list(range(5))
    sections = {"test/accuracy", "convergence/zeta_sq", "convergence/zeta_hat_sq", "convergence/sigma_sq"}
    assert sections <= set(rows[2])
    assert "comm/up_bytes" in rows[1]
    defined = [r.metric for r in found.records if r.HasField("metric")]
    assert ("*", "round") in [(m.name or m.glob_name, m.step_metric) for m in defined]
    assert found.run.run_group == "g"
    assert found.run.run_id == (tmp_path / "run" / "wandb-id.txt").read_text().strip()


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
    sent += [path.read_text() for path in (folder / "files").rglob("*") if path.is_file()]
    for here in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), str(Path.cwd()), sys.executable):
        assert not [text for text in sent if here in text]
    assert found.run.host == ""
    assert not [text for text in sent if re.search(rf"\b({platform.node()}|{getuser()})\b", text)]
    assert not [record for record in found.records if record.HasField("environment")]
    assert {"client.lr", "federation.rounds", "data.name"} <= {item.key for item in found.run.config.update}
    told = (tmp_path / "run" / "environment.json").read_text()
    assert not re.search(rf"{tmp_path}|{Path.home()}|\b{platform.node()}\b", told)
    with pytest.raises(ClientError):
        experiment.run(override(there, {"client.lr": 1e30}), tmp_path / "failed")
    assert (tmp_path / "failed" / "error.txt").exists()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or not [name for name, text in secrets.items() if text.encode() in path.read_bytes()]


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
    assert {Path(name).suffix for name in found} >= {".json", ".jsonl", ".yaml", ".png", ".safetensors"}
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
