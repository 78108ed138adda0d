"""Weights & Biases, the real one in offline mode, its file read back."""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedcommons import experiment, presets
from fedcommons.config import Experiment, override

SMALL = {"federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 2, "data.limit": 100}


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    content, at, pending = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        checksum, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if kind == 0:
            return
        payload = content[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + payload) == checksum
        at, pending = at + 7 + length, pending + payload
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]  (made at import)
            record.ParseFromString(pending)
            pending = b""
            yield record


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged rows of the newest run in a run folder."""
    path = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns)
    return [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    values = {**SMALL, "artifacts": str(tmp_path / "artifacts"), "tracking.wandb": "offline", "tracking.group": "g"}
    return override(presets.experiment("smoke", "digits"), values)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_wandb_holds_every_round_of_the_run_folder(config: Experiment, tmp_path: Path) -> None:
    experiment.run(config, tmp_path / "run")
    rows = history(tmp_path / "run")
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows] == lines(tmp_path / "run")
    assert [row["_step"] for row in rows] == list(range(5))
    sections = {"test/accuracy", "convergence/zeta_sq", "convergence/zeta_hat_sq", "convergence/sigma_sq"}
    assert sections <= set(rows[2])
    assert "comm/up_bytes" in rows[1]
    (path,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    every = list(records(path))
    metrics = [(r.metric.name or r.metric.glob_name, r.metric.step_metric) for r in every if r.HasField("metric")]
    assert ("*", "round") in metrics
    (run,) = [r.run for r in every if r.HasField("run")]
    assert run.run_group == "g"
    assert run.run_id == (tmp_path / "run" / "wandb-id.txt").read_text().strip()


def test_a_resumed_run_keeps_its_id_and_its_whole_history(config: Experiment, tmp_path: Path) -> None:
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
    rows = history(tmp_path / "run")
    assert [(row["_step"], row["test/accuracy"]) for row in rows] == [
        (line["round"], line["test/accuracy"]) for line in lines(tmp_path / "run")
    ]


def test_online_without_a_login_falls_back_to_offline_and_says_so(
    config: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-such-netrc"))
    said: list[str] = []
    online = override(config, {"tracking.wandb": "online", "federation.rounds": 1})
    experiment.run(online, tmp_path / "run", say=said.append)
    assert any("no login" in text and "offline" in text for text in said)
    assert len(history(tmp_path / "run")) == 2


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
