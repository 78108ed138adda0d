"""Sweeps with a storage: a driver gets what other machines ran, and a machine with nothing goes on."""

import subprocess
import sys
from pathlib import Path

import pytest
from interrupted import outputs, small

from fedcommons.errors import ClientError, UserError
from fedcommons.runs import experiment
from fedcommons.storage import object_store
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep import Trial

ROOT = Path(__file__).parent.parent


def results(out: Path) -> dict[str, bytes]:
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in [*out.glob("*/rounds.jsonl"), *out.glob("*.md")]}


@pytest.mark.parametrize("place", ["folder"], indirect=True)
@pytest.mark.long
def test_a_driver_has_what_other_machines_played(place: str, tmp_path: Path) -> None:
    cell, said = Trial("cell", small(tmp_path, {"storage": place})), list[str]()
    driver = SweepMirror([cell], tmp_path / "a" / "out", said.append)
    driver.begin(resume=False)
    (tmp_path / "a" / "out").mkdir(parents=True)
    driver.claim()
    with pytest.raises(UserError, match="holds a sweep out already; add --resume"):
        SweepMirror([cell], tmp_path / "b" / "out").begin(resume=False)
    worker = tmp_path / "worker" / "out" / "cell"
    experiment.run(cell.config, worker, resume=True, mirrored_as="out/cell")
    driver.bring("cell")
    driver.bring("cell")
    assert outputs(tmp_path / "a" / "out" / "cell") == outputs(worker)
    assert len(said) == 1
    (tmp_path / "a" / "out" / "table.md").write_text("the table")
    driver.end()
    other = SweepMirror([cell], tmp_path / "b" / "out", said.append)
    other.begin(resume=True)
    assert outputs(tmp_path / "b" / "out" / "cell") == outputs(worker)
    (tmp_path / "b" / "out" / "table.md").write_text("another table")
    other.end()
    (tmp_path / "a" / "out" / "table.md").write_text("one more")
    with pytest.raises(ClientError, match="does not take the tables"):
        driver.end()


@pytest.mark.parametrize("place", ["folder"], indirect=True)
@pytest.mark.long
def test_a_resumed_sweep_sends_what_could_not_be_sent(place: str, tmp_path: Path) -> None:
    cell, worker = Trial("cell", small(tmp_path, {"storage": place})), tmp_path / "a" / "out" / "cell"
    experiment.run(small(tmp_path), worker)
    SweepMirror([cell], tmp_path / "a" / "out").begin(resume=True)
    SweepMirror([cell], tmp_path / "b" / "out").begin(resume=True)
    assert outputs(tmp_path / "b" / "out" / "cell") == outputs(worker)


@pytest.mark.ray
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_sweep_is_resumed_on_a_machine_that_has_nothing(place: str, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "sweeps" / "table1.py"), "--preset=smoke", "--algorithms=fedavg",
             "--settings=shuffled_synthetic", "--alphas=0.1", "--federation.rounds=2", "--wandb=off", "--out=out",
             "--artifacts=artifacts", f"--storage={place}"]  # fmt: skip

    def sweep(machine: str, *more: str) -> str:
        (tmp_path / machine).mkdir(exist_ok=True)
        done = subprocess.run([*words, *more], cwd=tmp_path / machine, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "4 generators trained" in sweep("a")
    again = sweep("b", "--resume")
    assert "1 of 1 cells are done already." in again
    assert "Starting Ray" not in again
    assert results(tmp_path / "b" / "out") == results(tmp_path / "a" / "out")
    assert "none had to be trained" in sweep("c", "--resume", "--client.lr=0.07")
    assert object_store.opened(place).look("runs/out/MANIFEST.json")
