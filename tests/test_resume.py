"""Interrupted at any point and resumed = never interrupted, metric file included."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.errors import ClientError, UserError
from fedcommons.runs import experiment
from fedcommons.sweeping.sweep import open_sweep

SHORT = {
    "federation.rounds": 6, "federation.checkpoint_every": 2, "measure.every": 3, "client.epochs": 1, "data.limit": 60,
    "partition.n_clients": 3, "model.channels": (2, 4), "tracking.wandb": "off",
}  # fmt: skip
POOL = {"sharing.setting": "shuffled_synthetic", "sharing.p": 0.5, "generator.epochs": 1, "generator.channels": (8, 8),
        "generator.sampling_steps": 2, "federation.rounds": 1}  # fmt: skip


def short(folder: Path, fields: Mapping[str, object] | None = None) -> Experiment:
    return presets.experiment("smoke", "digits", {**SHORT, "artifacts": str(folder / "artifacts"), **(fields or {})})


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    return short(tmp_path)


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ: the metrics, the summary, the final weights."""
    last = max(folder.glob("checkpoints/*.safetensors"))
    return {p.name: p.read_bytes() for p in (folder / "rounds.jsonl", folder / "summary.json", last)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    experiment.run(short(folder), folder / "run")
    return folder / "run"


@pytest.fixture
def unfinished(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, as if it had been killed before its summary."""
    shutil.copytree(whole, tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    return tmp_path / "cut"


class PowerCut(Exception):
    pass


def require_resumed(config: Experiment, folder: Path, whole: Path, first: int) -> None:
    """The run goes on with this round, and ends as the one that was never interrupted."""
    seen: list[int] = []
    experiment.run(config, folder, resume=True, on_round=lambda number, _: seen.append(number))
    assert seen == [*range(first, 7)]
    assert outputs(folder) == outputs(whole)


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


@pytest.mark.parametrize("cut_at", [0, 1, 2, 3, 5, 6])
@pytest.mark.long
def test_a_run_interrupted_in_any_round_ends_as_if_it_never_was(
    cut_at: int, config: Experiment, tmp_path: Path, whole: Path
) -> None:
    def cut(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == cut_at:
            raise PowerCut

    with pytest.raises(PowerCut):
        experiment.run(config, tmp_path / "cut", on_round=cut)
    require_resumed(config, tmp_path / "cut", whole, cut_at - cut_at % 2 + 1)  # from the last checkpoint


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


@pytest.mark.parametrize("tries", [1, 2])
@pytest.mark.long
def test_a_run_that_a_client_stopped_goes_on_from_the_round_before(
    tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its regular checkpoints were of rounds 0 and 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FAILS)
    config = short(tmp_path, {"algorithm": "mine.py:Mine"})
    experiment.run(config, tmp_path / "whole")
    with monkeypatch.context() as broken:
        broken.setenv("FAILS", "1")
        for number in range(tries):
            with pytest.raises(ClientError, match=r"client 1, round 4.*ZeroDivisionError|round 4, client 1"):
                experiment.run(config, tmp_path / "cut", resume=number > 0)
            assert (tmp_path / "cut" / "error.txt").exists()
    require_resumed(config, tmp_path / "cut", tmp_path / "whole", 4)
    assert not (tmp_path / "cut" / "error.txt").exists()


@pytest.mark.parametrize(("lost", "first"), [(1, 5), (2, 5), (3, 0)])
@pytest.mark.long
def test_a_checkpoint_whose_lines_are_lost_is_not_used(
    lost: int, first: int, config: Experiment, unfinished: Path, whole: Path
) -> None:
    """There are checkpoints of rounds 4 and 6; the record must hold every round up to one, or the run begins again."""
    lines = (unfinished / "rounds.jsonl").read_text().splitlines(keepends=True)
    (unfinished / "rounds.jsonl").write_text("".join(lines[:-lost]))
    require_resumed(config, unfinished, whole, first)


def test_old_checkpoints_that_a_killed_run_left_are_removed(config: Experiment, unfinished: Path, whole: Path) -> None:
    """After its last round nothing is saved any more that would remove them."""
    checkpoints = unfinished / "checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())
    for path in checkpoints.glob("round-000004*"):
        shutil.copy(path, path.with_name(path.name.replace("4", "2")))
    require_resumed(config, unfinished, whole, 7)
    assert sorted(path.name for path in checkpoints.iterdir()) == before


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
def test_a_damaged_artifact_is_reported_and_built_again_to_the_same_bits(tmp_path: Path) -> None:
    shuffled = short(tmp_path, POOL)
    with pytest.raises(LookupError, match="client 0 have not been made"):  # a trial leaves them to its sweep
        experiment.run(shuffled, tmp_path / "trial", may_generate=False)
    assert not (tmp_path / "artifacts").exists()
    experiment.run(shuffled, tmp_path / "whole", say=lambda _: None)
    artifact = max((tmp_path / "artifacts" / "images").glob("*.safetensors"))
    artifact.write_bytes(artifact.read_bytes()[:50])
    said: list[str] = []
    experiment.run(shuffled, tmp_path / "again", say=said.append)
    assert any("truncated or altered" in text and "built again" in text for text in said)
    assert outputs(tmp_path / "again") == outputs(tmp_path / "whole")


@pytest.mark.long
def test_artifacts_need_be_writable_only_where_some_are_missing(
    as_nobody: Callable[[Callable[[], None]], None],
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        shuffled = short(folder, POOL)
        experiment.run(shuffled, folder / "first", say=lambda _: None)
        for path in (folder / "artifacts", *(folder / "artifacts").iterdir()):
            path.chmod(0o555)

        def run_again() -> None:
            experiment.run(shuffled, folder / "second")
            with pytest.raises(UserError, match="artifacts cannot be written"):
                experiment.run(override(shuffled, {"generator.lr": 0.5}), folder / "third")
            assert not (folder / "third").exists()

        as_nobody(run_again)
        assert outputs(folder / "second") == outputs(folder / "first")
        for path in (folder / "artifacts", *(folder / "artifacts").iterdir()):
            path.chmod(0o755)


def test_the_summary_holds_what_tables_need_and_no_times_or_paths(whole: Path) -> None:
    text = (whole / "summary.json").read_text()
    summary = json.loads(text)
    wanted = {"dataset", "algorithm", "setting", "alpha", "n_clients", "participation", "seed", "learning_rate",
              "target", "rounds_to_target", "rounds", "last_accuracy", "best_accuracy", "p", "bytes_down", "bytes_up",
              "bytes_once", "zeta_sq", "zeta_hat_sq", "sigma_sq", "sigma_hat_sq"}  # fmt: skip
    assert wanted <= set(summary)
    assert str(whole.parent) not in text
    assert [r for r, _ in summary["zeta_sq"]] == [0, 3, 6]
    for name in ("config.yaml", "environment.json", "partition.json", "timing.jsonl"):
        assert (whole / name).stat().st_size > 0
    lines = [json.loads(line) for line in (whole / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(7))
    assert {"test/accuracy", "comm/up_bytes", "comm/down_bytes", "train/loss"} <= set(lines[1])
