"""Sweeps with a storage: a driver gets what other machines ran, and a machine with nothing goes on."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from interrupted import outputs, small
from sweep_runs import sweep_output

from fedcommons.errors import ClientError, UserError
from fedcommons.runs import experiment
from fedcommons.storage import object_store
from fedcommons.storage.snapshots import MANIFEST
from fedcommons.tune.remote_sweep import SweepMirror
from fedcommons.tune.sweep import Trial


def results(out: Path) -> dict[str, bytes]:
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in [*out.glob("*/rounds.jsonl"), *out.glob("*.csv")]}


@pytest.mark.parametrize("place", ["folder"], indirect=True)
@pytest.mark.long
def test_a_driver_has_what_other_machines_played(place: str, tmp_path: Path) -> None:
    cell, messages = Trial("cell", small(tmp_path, {"storage": place})), list[str]()
    driver = SweepMirror([cell], tmp_path / "a" / "out", messages.append)
    driver.begin(resume=False)
    (tmp_path / "a" / "out").mkdir(parents=True)
    driver.claim()
    with pytest.raises(UserError, match="holds a sweep out already; add --resume"):
        SweepMirror([cell], tmp_path / "b" / "out").begin(resume=False)
    worker = tmp_path / "worker" / "out" / "cell"
    experiment.run(cell.config, worker, resume=True, mirrored_as="out/cell")
    driver.fetch("cell")
    driver.fetch("cell")
    assert outputs(tmp_path / "a" / "out" / "cell") == outputs(worker)
    assert len(messages) == 1
    (tmp_path / "a" / "out" / "table.md").write_text("the table")
    driver.end()
    other = SweepMirror([cell], tmp_path / "b" / "out", messages.append)
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
    (Path(place) / "runs" / "out" / "other" / MANIFEST).mkdir(parents=True)  # a damaged run outside of the sweep
    SweepMirror([cell], tmp_path / "a" / "out").begin(resume=True)
    SweepMirror([cell], tmp_path / "b" / "out").begin(resume=True)
    assert outputs(tmp_path / "b" / "out" / "cell") == outputs(worker)


@pytest.mark.parametrize("chosen", [None, "mine"])
def test_a_resumed_sweep_asks_the_storage_once_and_not_once_per_run(
    chosen: str | None, place: str, tmp_path: Path, recorded: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are equal in folder and storage, or in neither, are not requested."""
    cells = [Trial(f"c{i}", small(tmp_path, {"storage": place, "storage_name": chosen})) for i in range(4)]
    a, b, listed = tmp_path / "a" / "out", tmp_path / "b" / "out", list[str]()
    for cell in cells[:3]:
        recorded(a / cell.name, cell.config, None)

    kind = type(object_store.open_store(place))

    def counting(function: Callable[..., Any], keys: list[str]) -> Callable[..., Any]:
        def call(storage: Any, key: str, *arguments: Any) -> Any:
            if function.__name__ == "tags":
                listed.append(key)
                return (function(storage, key, *arguments), keys.clear())[0]  # a folder's listing reads each run's list
            keys.append(key)
            return function(storage, key, *arguments)

        return call

    def asked(out: Path) -> set[str]:
        """Return the runs that requests of a resumed sweep name, without those of the listing."""
        keys = list[str]()
        listed.clear()
        with monkeypatch.context() as patch:
            for name in ("look", "read", "write", "tags"):
                patch.setattr(kind, name, counting(getattr(kind, name), keys))
            SweepMirror(cells, out, lambda _: None).begin(resume=True)
        assert listed == [f"runs/{chosen or 'out'}"]
        return {run for key in keys if (run := key.split("/")[2])[0] == "c"}

    assert asked(a) == {"c0", "c1", "c2"}
    assert asked(b) == {"c0", "c1", "c2"}
    assert results(b) == results(a)
    assert asked(a) == asked(b) == set()
    with (b / "c1" / "summary.json").open("a") as file:  # stands for a run that ended here, and whose upload failed
        file.write("\n")
    assert asked(b) == {"c1"}
    assert asked(a) == {"c1"}
    assert outputs(a / "c1") == outputs(b / "c1")


@pytest.mark.ray
@pytest.mark.usefixtures("one_core")
def test_a_sweep_is_resumed_on_a_machine_that_has_nothing(
    bucket: Callable[[], str], sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    words = ["--preset=smoke", "--algorithms=fedavg", "--settings=shuffled_synthetic", "--alphas=0.1", "--wandb=off",
             "--without-references", "--federation.rounds=2", "--partition.n_clients=2", "--out=out",
             "--artifacts=artifacts", f"--storage={(place := bucket())}"]  # fmt: skip
    table1 = sweeps("table1").table1
    assert "2 generators trained" in sweep_output(table1, tmp_path / "a", *words)
    again = sweep_output(table1, tmp_path / "b", *words, "--resume")
    assert "1 of 1 cells are done already." in again
    assert "Starting Ray" not in again
    assert results(tmp_path / "b" / "out") == results(tmp_path / "a" / "out")
    assert "none had to be trained" in sweep_output(table1, tmp_path / "c", *words, "--resume", "--client.lr=0.07")
    assert object_store.open_store(place).look("runs/out/MANIFEST.json")
