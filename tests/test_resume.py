"""Interrupted at any point and resumed = never interrupted, metric file included."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
from interrupted import PowerCut, cut_at, outputs, require_resumed, small

from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.errors import ClientError, UserError
from fedcommons.runs import experiment
from fedcommons.sweeping.sweep import open_sweep

POOL = {"sharing.setting": "shuffled_synthetic", "sharing.p": 0.5, "generator.epochs": 1, "generator.channels": (8, 8),
        "generator.sampling_steps": 2, "federation.rounds": 1}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    return small(tmp_path, {"measure.every": 3})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    experiment.run(small(folder, {"measure.every": 3}), folder / "run")
    return folder / "run"


@pytest.mark.long
def test_where_there_is_nothing_to_resume_it_is_reported_before_any_training(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user may have named the wrong folder."""
    fields = ["--wandb", "off", "--data.limit", "40", "--federation.rounds", "1", "--client.epochs", "1"]
    for is_first in (True, False):
        assert sweeps("run").run(["--preset", "smoke", *fields, "--out", str(tmp_path / "run"), "--resume"]) == 0
        first_line = capsys.readouterr().out.splitlines()[0]
        assert (f"{tmp_path / 'run'} holds no run to resume" in first_line) == is_first
    said: list[str] = []
    with open_sweep(tmp_path / "sweep", True, said.append):
        assert len(said) == 1
        assert f"{tmp_path / 'sweep'} holds no run to resume" in said[0]
    with open_sweep(tmp_path / "new", False, said.append):
        assert len(said) == 1


@pytest.mark.parametrize(("last", "first"), [(1, 1), (2, 3), (5, 5), (6, None)])
@pytest.mark.long
def test_a_run_interrupted_in_any_round_ends_as_if_it_never_was(
    last: int, first: int | None, config: Experiment, tmp_path: Path, whole: Path
) -> None:
    with pytest.raises(PowerCut):
        experiment.run(config, tmp_path / "cut", on_round=cut_at(last))
    require_resumed(config, tmp_path / "cut", whole, first)  # from the last checkpoint


FAILS = """
import os
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.seeds import seed_for


class Mine(FedAvg):
    def client(self, work, message, memory, data, round, seed):
        if os.environ.get("FAILS") and seed == seed_for(0, "client", 4, 1):
            raise ZeroDivisionError
        return super().client(work, message, memory, data, round, seed)
"""


@pytest.mark.long
def test_a_run_that_a_client_stopped_goes_on_from_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its regular checkpoints were of rounds 0 and 2; a resumption that fails again changes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FAILS)
    config, folder = small(tmp_path, {"algorithm": "mine.py:Mine"}), tmp_path / "cut"
    experiment.run(config, tmp_path / "whole")
    monkeypatch.setenv("FAILS", "1")
    for resume in (False, True):
        with pytest.raises(ClientError, match=r"client 1, round 4.*ZeroDivisionError|round 4, client 1"):
            experiment.run(config, folder, resume=resume)
        assert (folder / "error.txt").exists()
    monkeypatch.delenv("FAILS")
    require_resumed(config, folder, tmp_path / "whole", 4)
    assert not (folder / "error.txt").exists()


def test_old_checkpoints_that_a_killed_run_left_are_removed(config: Experiment, whole: Path, tmp_path: Path) -> None:
    """After its last round nothing is saved any more that would remove them."""
    shutil.copytree(whole, tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    for path in (whole / "checkpoints").glob("round-000004*"):
        shutil.copy(path, tmp_path / "cut" / "checkpoints" / path.name.replace("4", "2"))
    require_resumed(config, tmp_path / "cut", whole, None)


def test_measures_that_are_not_finite_are_reported_once(config: Experiment, tmp_path: Path) -> None:
    said: list[str] = []
    noisy = {"dp.local": True, "dp.noise_multiplier": 1e6, "client.lr": 1e4, "federation.rounds": 3}
    experiment.run(override(config, noisy), tmp_path / "run", say=said.append)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    lost = {name for line in lines for name, value in line.items() if value is None}
    reported = [name for text in said if "not finite" in text for name in re.findall(r"\w+/\w+", text)]
    assert lost
    assert sorted(reported) == sorted(lost)


def test_a_finished_run_is_read_and_not_overwritten(config: Experiment, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    said: list[str] = []
    never = {"resume": True, "on_round": lambda *_: pytest.fail("ran again")}
    summary = experiment.run(config, folder, say=said.append, **never)
    assert summary == json.loads((folder / "summary.json").read_text())
    assert len(said) == 1
    assert "finished" in said[0]
    with pytest.raises(UserError, match="holds a run already; add --resume"):
        experiment.run(config, folder)
    with pytest.raises(UserError, match=r"another client\.lr"):
        experiment.run(override(config, {"client.lr": 0.3}), folder, resume=True)
    experiment.run(override(config, {"federation.actors": 3}), folder, **never)  # it decides no bit
    assert outputs(folder) == outputs(whole)


@pytest.mark.long
def test_artifacts_are_built_where_they_are_missing_and_must_be_writable_only_there(
    as_nobody: Callable[[Callable[[], None]], None],
) -> None:
    with TemporaryDirectory() as name:
        folder, said = Path(name), list[str]()
        folder.chmod(0o777)
        store, shuffled = folder / "artifacts", small(folder, POOL)
        with pytest.raises(LookupError, match="client 0 have not been made"):  # a trial leaves them to its sweep
            experiment.run(shuffled, folder / "trial", may_generate=False)
        assert not store.exists()
        experiment.run(shuffled, folder / "first", say=lambda _: None)
        damaged = max((store / "images").glob("*.safetensors"))
        damaged.write_bytes(damaged.read_bytes()[:50])
        experiment.run(shuffled, folder / "second", say=said.append)
        assert any("truncated or altered" in text and "built again" in text for text in said)
        for path in (store, *store.iterdir()):
            path.chmod(0o555)

        def run_again() -> None:
            experiment.run(shuffled, folder / "third", say=pytest.fail)
            with pytest.raises(UserError, match="artifacts cannot be written"):
                experiment.run(override(shuffled, {"generator.lr": 0.5}), folder / "fourth")
            assert not (folder / "fourth").exists()

        as_nobody(run_again)
        assert outputs(folder / "third") == outputs(folder / "second") == outputs(folder / "first")
        for path in (store, *store.iterdir()):
            path.chmod(0o755)
