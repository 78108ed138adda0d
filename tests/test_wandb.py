"""Weights & Biases, the real one in offline mode, its file read back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedcommons import experiment, presets
from fedcommons.config import Experiment, override

if TYPE_CHECKING:
    from conftest import WandbFile

    Reader = Callable[[Path], WandbFile]

SMALL = {"federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 2, "data.limit": 100}


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    values = {**SMALL, "artifacts": str(tmp_path / "artifacts"), "tracking.wandb": "offline", "tracking.group": "g"}
    return override(presets.experiment("smoke", "digits"), values)


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
