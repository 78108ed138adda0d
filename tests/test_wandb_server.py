"""W&B online: the real client and its core, and a stub of the server that records what it gets (``wandb_server``)."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from fedcommons import experiment, run
from fedcommons.tracking.wandb_media import KEYS

if TYPE_CHECKING:
    from conftest import WandbFile
    from wandb_server import Server

SMALL = {"wandb": "online", "federation.rounds": 2, "client.epochs": 1, "measure.every": 1, "data.limit": 80}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_the_server_gets_all_of_a_run_and_nothing_of_this_machine(wandb_online: "Server", tmp_path: Path) -> None:
    fields = {**SMALL, "setting": "shuffled_synthetic", "generator.epochs": 1, "artifacts": str(tmp_path / "made")}
    said: list[str] = []
    run(experiment("smoke", values=fields), tmp_path / "mine", say=said.append)
    assert not [text for text in said if "W&B" in text]
    bucket = wandb_online.bucket
    assert (bucket["project"], bucket["groupName"]) == ("fedcommons", "digits-dirichlet_classes")
    assert (bucket["jobType"], bucket["displayName"]) == ("federation", "mine")
    assert {"smoke", "shuffled_synthetic", "ddpm"} <= {*bucket["tags"]}
    assert (wandb_online.config["preset"], wandb_online.config["federation"]["rounds"]) == ("smoke", 2)
    rows = [{k: v for k, v in row.items() if k not in KEYS} for row in wandb_online.history]
    assert rows == lines(tmp_path / "mine")
    pictures = {key: wandb_online.history[-1][key] for key in KEYS}
    assert not [key for row in wandb_online.history[:-1] for key in row if key in KEYS]
    for key, facts in pictures.items():
        content = wandb_online.uploads[facts["path"]]
        assert Image.open(io.BytesIO(content)).size == (facts["width"], facts["height"]), key
        assert len(content) <= 200_000
    assert wandb_online.bucket["program"] == "fedcommons"  # not the script's path, which W&B's client sends by itself
    for here in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), str(Path.cwd()), sys.executable):
        assert not [body for body in wandb_online.received if here.encode() in body], here
    assert {"zeta_hat_sq_mean", "rounds_used", "privacy/overall", "best_accuracy"} <= {*wandb_online.summary}
    assert "rounds" not in wandb_online.summary
    assert wandb_online.streams[-1]["complete"] is True
    assert wandb_online.streams[-1]["exitcode"] == 0


@pytest.mark.long
def test_a_run_that_the_server_refuses_is_kept_offline(
    wandb_online: "Server", tmp_path: Path, wandb_file: "Callable[[Path], WandbFile]"
) -> None:
    wandb_online.refuses = True
    said: list[str] = []
    run(experiment("smoke", values=SMALL), tmp_path / "mine", say=said.append)
    (text,) = [text for text in said if "W&B" in text]
    assert "kept offline" in text
    rows = wandb_file(tmp_path / "mine").history
    assert [row["test/accuracy"] for row in rows] == [line["test/accuracy"] for line in lines(tmp_path / "mine")]
