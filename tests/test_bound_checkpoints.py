"""A checkpoint, a client's memory and the lines of a run belong to it: another run's are passed over."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.files import checksum_of
from fedcommons.runs import experiment

TINY = override(
    presets.experiment("smoke", "digits"),
    {
        "algorithm": "scaffold", "data.limit": 60, "client.epochs": 1, "measure.every": 0, "federation.rounds": 3,
        "federation.checkpoint_every": 1, "tracking.wandb": "off", "model.channels": (2, 4),
        "federation.memory_mb": 0.001,
    },
)  # fmt: skip
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "seed": {"seed": 7}, "rate": {"client.lr": 0.5}, "method": {"algorithm": "fedavg"}, "data": {"data.limit": 50},
    "sigma": {"dp.local": True, "dp.noise_multiplier": 2.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, and others that differ from it in one thing."""
    folder = tmp_path_factory.mktemp("runs")
    for name, values in {"whole": {}, **OTHERS}.items():
        experiment.run(override(TINY, values), folder / name, say=lambda text: None)
    return folder


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ."""
    return {name: (folder / name).read_bytes() for name in ("rounds.jsonl", "summary.json")}


def unfinished(runs: Path, folder: Path) -> Path:
    """A copy of the run, as if it had been killed before its summary."""
    shutil.copytree(runs / "whole", folder)
    (folder / "summary.json").unlink()
    return folder


def resumed(folder: Path, config: Experiment = TINY) -> tuple[list[int], str]:
    """The rounds that are played when it is resumed, and what is said."""
    seen: list[int] = []
    said: list[str] = []
    experiment.run(config, folder, resume=True, say=said.append, on_round=lambda number, _: seen.append(number))
    return seen, "\n".join(said)


@pytest.mark.parametrize("other", OTHERS)
def test_checkpoints_of_another_run_are_passed_over(other: str, runs: Path, tmp_path: Path) -> None:
    folder = unfinished(runs, tmp_path / "run")
    for name in ("checkpoints", "memory"):
        shutil.rmtree(folder / name)
        if (runs / other / name).exists():
            shutil.copytree(runs / other / name, folder / name)
    seen, said = resumed(folder)
    assert seen == [0, 1, 2, 3]
    assert said.count("is of a run with other fields, data, code or secret noise, so it is passed over.") == 2
    assert outputs(folder) == outputs(runs / "whole")


def test_another_runs_memory_of_the_same_name_is_passed_over(runs: Path, tmp_path: Path) -> None:
    folder = unfinished(runs, tmp_path / "run")
    for file in (folder / "memory").iterdir():
        if (runs / "seed" / "memory" / file.name).exists():
            shutil.copy(runs / "seed" / "memory" / file.name, file)
    assert resumed(folder)[0] == [0, 1, 2, 3]
    assert outputs(folder) == outputs(runs / "whole")


def test_another_runs_rounds_are_found_out(runs: Path, tmp_path: Path) -> None:
    folder = unfinished(runs, tmp_path / "run")
    shutil.copy(runs / "seed" / "rounds.jsonl", folder / "rounds.jsonl")
    seen, said = resumed(folder)
    assert seen == [0, 1, 2, 3]
    assert said.count("goes with other rounds than those in rounds.jsonl and clients.jsonl") == 2
    assert outputs(folder) == outputs(runs / "whole")


def test_a_run_of_an_earlier_version_goes_on_and_it_is_said(runs: Path, tmp_path: Path) -> None:
    """Its checkpoints and memories tell of no run."""
    folder = unfinished(runs, tmp_path / "run")
    (folder / "rounds.jsonl").write_text("".join((folder / "rounds.jsonl").read_text().splitlines(True)[:3]))
    for path in [*folder.glob("checkpoints/*.json"), *folder.glob("memory/*.json")]:
        facts = json.loads(path.read_text())
        plain = {k: v for k, v in facts.items() if k not in ("run", "record", "name", "sha256", "facts_sha256")}
        path.write_text(json.dumps({"sha256": facts["sha256"], "facts_sha256": checksum_of(plain), **plain}))
    seen, said = resumed(folder)
    assert seen == [3]
    assert "is of an earlier version, which did not tell of which run; it is taken for this one's." in said
    assert outputs(folder) == outputs(runs / "whole")


def test_a_run_goes_on_from_its_own_checkpoint_in_silence(runs: Path, tmp_path: Path) -> None:
    folder = unfinished(runs, tmp_path / "run")
    (folder / "rounds.jsonl").write_text("".join((folder / "rounds.jsonl").read_text().splitlines(True)[:3]))
    assert resumed(folder) == ([3], "")
    assert outputs(folder) == outputs(runs / "whole")
