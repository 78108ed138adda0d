"""Killed at any point and resumed = never interrupted, metric file included."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import parts, presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.core.algorithm import Algorithm, Message, Reply
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError, UserError
from fedcommons.federation import checkpoint
from fedcommons.runs import experiment
from fedcommons.seeds import seed_for
from fedcommons.sweeping.sweep import open_sweep
from fedcommons.tensors import Payload

SHORT = {
    "federation.rounds": 6,
    "federation.checkpoint_every": 2,
    "measure.every": 3,
    "client.epochs": 2,
    "tracking.wandb": "off",
}
QUICK = {"generator.epochs": 1, "generator.channels": (8, 8), "generator.sampling_steps": 2}
POOL = {"sharing.setting": "shuffled_synthetic", **QUICK}


def as_fedavg(patch: pytest.MonkeyPatch, method: Callable[[], Algorithm]) -> None:
    """From now on this method has FedAvg's name."""
    make = parts.make
    patch.setattr(parts, "make", lambda kind, name, c: method() if kind == "algorithm" else make(kind, name, c))


def short(folder: Path) -> Experiment:
    return presets.experiment("smoke", "digits", {**SHORT, "artifacts": str(folder / "artifacts")})


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    return short(tmp_path)


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ: the metrics, the summary, the final weights."""
    last = max(folder.glob("checkpoints/*.safetensors"))
    return {p.name: p.read_bytes() for p in (folder / "rounds.jsonl", folder / "summary.json", last)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the run leaves that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    experiment.run(short(folder), folder / "run")
    return outputs(folder / "run")


class PowerCut(Exception):
    pass


def test_where_there_is_nothing_to_resume_it_is_said_before_any_training(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody may have named the wrong folder."""
    fields = ["--wandb", "off", "--data.limit", "80", "--federation.rounds", "1", "--client.epochs", "1"]
    given = ["--preset", "smoke", *fields, "--out", str(tmp_path / "run"), "--resume"]
    for expected in (True, False):
        assert sweeps("run").run(given) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (f"{tmp_path / 'run'} holds no run to resume: it starts from the beginning." in lines[:1]) == expected
    said: list[str] = []
    with open_sweep(tmp_path / "sweep", True, said.append):
        assert said == [f"{tmp_path / 'sweep'} holds no run to resume: the sweep starts from its beginning."]
    with open_sweep(tmp_path / "new", False, said.append):
        assert len(said) == 1


@pytest.mark.parametrize("cut_at", [0, 1, 2, 3, 5, 6])
def test_a_run_broken_off_in_any_round_ends_as_if_it_never_was(
    cut_at: int, config: Experiment, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    def cut(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == cut_at:
            raise PowerCut

    with pytest.raises(PowerCut):
        experiment.run(config, tmp_path / "cut", on_round=cut)
    seen = []
    experiment.run(config, tmp_path / "cut", resume=True, on_round=lambda number, _: seen.append(number))
    assert outputs(tmp_path / "cut") == whole
    assert seen == list(range(cut_at - cut_at % 2 + 1, 7))  # from the last checkpoint, not from the start


class _Failing(FedAvg):
    """FedAvg whose client 1 fails in round 4, for as long as nobody mends it."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        if seed == seed_for(0, "client", 4, 1):
            raise ZeroDivisionError
        return super().client(work, message, memory, data, round, seed)


@pytest.mark.parametrize("tries", [1, 2])
def test_a_run_that_a_client_stopped_goes_on_from_the_round_before(
    tries: int, config: Experiment, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its regular checkpoints were of rounds 0 and 2."""
    with monkeypatch.context() as broken:
        as_fedavg(broken, _Failing)
        for number in range(tries):
            with pytest.raises(ClientError, match="client 1, round 4, _Failing: ZeroDivisionError"):
                experiment.run(config, tmp_path / "cut", resume=number > 0)
            assert (tmp_path / "cut" / "error.txt").exists()
    seen = []
    experiment.run(config, tmp_path / "cut", resume=True, on_round=lambda number, _: seen.append(number))
    assert seen == [4, 5, 6]
    assert outputs(tmp_path / "cut") == whole
    assert not (tmp_path / "cut" / "error.txt").exists()


@pytest.mark.long
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    config: Experiment, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    experiment.run(config, tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    newest = max((tmp_path / "cut" / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-100])
    with open(tmp_path / "cut" / "rounds.jsonl", "a", encoding="utf-8") as file:
        file.write('{"round": 7, "test/acc')  # a line that was being written
    standing = checkpoint.load_latest(tmp_path / "cut" / "checkpoints")
    assert standing is not None
    assert standing.round == 4
    experiment.run(config, tmp_path / "cut", resume=True)
    assert outputs(tmp_path / "cut") == whole


@pytest.mark.parametrize(("lost", "first"), [(1, 5), (2, 5), (3, 0)])
@pytest.mark.long
def test_a_checkpoint_whose_lines_are_lost_is_not_gone_on_from(
    lost: int, first: int, config: Experiment, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """There are checkpoints of rounds 4 and 6; the record must hold every round up to one, or the run begins again."""
    experiment.run(config, tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    lines = (tmp_path / "cut" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut" / "rounds.jsonl").write_text("".join(lines[:-lost]))
    seen = []
    experiment.run(config, tmp_path / "cut", resume=True, on_round=lambda number, _: seen.append(number))
    assert seen == list(range(first, 7))
    assert outputs(tmp_path / "cut") == whole


def test_what_a_run_had_left_to_remove_when_it_was_killed_is_removed(
    config: Experiment, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """After its last round nothing is saved any more that would remove it."""
    experiment.run(config, tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    checkpoints = tmp_path / "cut" / "checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())
    for path in checkpoints.glob("round-000004*"):
        shutil.copy(path, path.with_name(path.name.replace("4", "2")))
    experiment.run(config, tmp_path / "cut", resume=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == before
    assert outputs(tmp_path / "cut") == whole


def test_measures_that_are_not_finite_are_said_once(config: Experiment, tmp_path: Path) -> None:
    said: list[str] = []
    noisy = {"dp.local": True, "dp.noise_multiplier": 1e6, "client.lr": 1e4, "client.epochs": 1, "federation.rounds": 3}
    experiment.run(override(config, noisy), tmp_path / "run", say=said.append)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    lost = {name for line in lines for name, value in line.items() if value is None}
    found = [name for text in said if "not finite" in text for name in text.partition("record: ")[2][:-11].split(", ")]
    assert lost
    assert sorted(found) == sorted(lost)


def test_a_finished_run_is_read_not_run_again(config: Experiment, tmp_path: Path) -> None:
    first = experiment.run(config, tmp_path / "run")
    said: list[str] = []
    again = experiment.run(
        config, tmp_path / "run", resume=True, say=said.append, on_round=lambda *_: pytest.fail("ran again")
    )
    assert again == first
    assert said == [f"{tmp_path / 'run'} holds this run, finished: nothing is left to do."]


def test_a_folder_with_a_run_is_not_overwritten(config: Experiment, tmp_path: Path) -> None:
    experiment.run(config, tmp_path / "run")
    with pytest.raises(UserError, match="holds a run already; add --resume"):
        experiment.run(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"another client\.lr"):
        experiment.run(override(config, {"client.lr": 0.3}), tmp_path / "run", resume=True)
    # what decides no bit may change: the number of actors, the tracker
    experiment.run(override(config, {"federation.actors": 3}), tmp_path / "run", resume=True)


@pytest.mark.long
def test_a_damaged_artifact_is_said_and_rebuilt_to_the_same_bits(config: Experiment, tmp_path: Path) -> None:
    shuffled = override(config, {**POOL, "federation.rounds": 1})
    experiment.run(shuffled, tmp_path / "whole", say=lambda _: None)
    artifact = max((tmp_path / "artifacts" / "images").glob("*.safetensors"))
    artifact.write_bytes(artifact.read_bytes()[:50])
    said: list[str] = []
    experiment.run(shuffled, tmp_path / "again", say=said.append)
    assert any("truncated or altered" in text and "built again" in text for text in said)
    assert outputs(tmp_path / "again") == outputs(tmp_path / "whole")


def test_a_trial_that_lacks_its_generators_fails_and_trains_none(config: Experiment, tmp_path: Path) -> None:
    """A sweep trains them before its trials; a trial that did would do the work of others again, unseen."""
    shuffled = override(config, {"sharing.setting": "shuffled_synthetic"})
    with pytest.raises(LookupError, match="client 0 have not been made"):
        experiment.run(shuffled, tmp_path / "run", may_generate=False)
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.long
def test_artifacts_need_be_writable_only_where_some_are_missing(
    config: Experiment, as_nobody: Callable[[Callable[[], None]], None]
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        values = {**POOL, "federation.rounds": 1, "artifacts": f"{folder}/artifacts"}
        shuffled = override(config, values)
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


@pytest.mark.ray  # it needs none, but half a minute
def test_kill_9_of_a_real_process(config: Experiment, tmp_path: Path) -> None:
    """The same through the script, in another process, killed without warning after its third round."""
    script = Path(__file__).parent.parent / "sweeps" / "run.py"
    options = [f"--{n}={v}" for n, v in {**SHORT, "federation.rounds": 40, "federation.checkpoint_every": 3}.items()]
    command = [sys.executable, str(script), "--preset=smoke", f"--artifacts={tmp_path / 'artifacts'}", *options]
    cut = tmp_path / "cut"
    process = subprocess.Popen([*command, f"--out={cut}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline, third = time.monotonic() + 120, cut / "checkpoints" / "round-000003.safetensors.json"
    while not third.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (cut / "summary.json").exists(), "it ended before it could be killed"
    done = subprocess.run([*command, f"--out={cut}", "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    resumed = {"federation.rounds": 40, "federation.checkpoint_every": 3}
    experiment.run(override(config, resumed), tmp_path / "whole")
    assert outputs(cut) == outputs(tmp_path / "whole")
    assert "round 40/40  accuracy " in done.stdout
    assert "round  1/40 " not in done.stdout


def test_the_summary_holds_what_tables_need_and_no_times_or_paths(config: Experiment, tmp_path: Path) -> None:
    summary = experiment.run(config, tmp_path / "run")
    wanted = {"dataset", "algorithm", "setting", "alpha", "n_clients", "participation", "seed", "learning_rate",
              "target", "rounds_to_target", "rounds", "last_accuracy", "best_accuracy", "p", "bytes_down", "bytes_up",
              "bytes_once", "zeta_sq", "zeta_hat_sq", "sigma_sq", "sigma_hat_sq"}  # fmt: skip
    assert wanted <= set(summary)
    text = (tmp_path / "run" / "summary.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text) == summary
    assert [r for r, _ in summary["zeta_sq"]] == [0, 3, 6]
    for name in ("config.yaml", "environment.json", "partition.json", "timing.jsonl"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(7))
    assert {"test/accuracy", "comm/up_bytes", "comm/down_bytes", "train/loss"} <= set(lines[1])
