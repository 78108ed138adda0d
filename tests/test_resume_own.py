"""A run that was stopped does not go on with other code of somebody's own, or on other data."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.federation.serial import Serial
from fedcommons.runs import build, experiment
from fedcommons.runs.replay import replay
from fedcommons.sweeping import sweep
from fedcommons.sweeping.display import Display

NET = """
from torch import nn

import helper


class Net(nn.Module):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(5, n_classes))

    def forward(self, x):
        return self.body(x) * helper.scale()
"""
DATA = """
import numpy as np


def table():
    held = np.load("table.npz")
    return held["x"], held["y"]
"""
OTHER_DATA = (
    "holds a run on other data: the examples of data.name my_data.py:table are not those that it began with (one that "
    "draws numbers asks for `seed`); bring them back or choose another --out."
)


class Lab:
    """A folder of somebody's parts and data, from which commands are given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net.py").write_text(NET)
        (folder / "helper.py").write_text("def scale():\n    from deeper import SCALE\n    return SCALE\n")
        (folder / "my_data.py").write_text(DATA)
        self.scale(2)
        self.table(0)

    def scale(self, value: int) -> None:
        """Change a helper of the model's helper."""
        (self.folder / "deeper.py").write_text(f"SCALE = {value}\n")

    def table(self, seed: int) -> None:
        """Change one number of the data."""
        x = np.random.default_rng(0).standard_normal((100, 5))
        x[99] += seed
        np.savez(self.folder / "table.npz", x=x, y=np.arange(100) % 3)

    def config(self, **fields: object) -> Experiment:
        short = {"federation.rounds": 3, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off"}
        own = {"model.name": "net.py:Net", "data.name": "my_data.py:table", "partition.n_clients": 2}
        more = {"partition.name": "iid", "artifacts": str(self.folder / "artifacts"), "data.limit": 70}
        return presets.experiment("smoke", "my_data.py:table", {**short, **own, **more, **fields})

    def stopped(self, name: str = "cut") -> Path:
        """A run that was stopped after its first round."""

        def stop(number: int, metrics: Mapping[str, float | None]) -> None:
            if number == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            experiment.run(self.config(), self.folder / name, on_round=stop)
        return self.folder / name


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    build._load.cache_clear()  # as in a process of its own
    return Lab(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outputs(folder: Path) -> list[bytes]:
    last = max(folder.glob("checkpoints/*.safetensors"))
    return [(folder / name).read_bytes() for name in ("rounds.jsonl", "summary.json", "partition.json", last)]


def test_a_run_does_not_go_on_with_a_changed_helper(lab: Lab) -> None:
    experiment.run(lab.config(), lab.folder / "whole")
    cut, before = lab.stopped(), lab.config()
    held = contents(cut)
    lab.scale(3)
    with pytest.raises(UserError, match=r"net\.py or what it imports \(deeper\.py, helper\.py\) is not what it was"):
        experiment.run(before, cut, resume=True)
    with pytest.raises(UserError, match=r"holds a run with another source\.model \(deeper\.py changed\); choose"):
        experiment.run(lab.config(), cut, resume=True)
    assert contents(cut) == held
    lab.scale(2)
    experiment.run(lab.config(), cut, resume=True)
    assert outputs(cut) == outputs(lab.folder / "whole")


def test_an_edit_while_a_run_prepares_changes_nothing_in_it(lab: Lab) -> None:
    """Generators may train for hours between the check and the first round."""

    def logits(edit: bool) -> torch.Tensor:
        lab.scale(2)
        prepared = build.prepare(lab.config(**{"dp.local": True, "client.batch_size": 8}))
        if edit:
            lab.scale(3)
            (lab.folder / "net.py").write_text(NET.replace("self.body(x)", "0 * self.body(x)"))
        executor = build.assemble(prepared).executor()
        assert isinstance(executor, Serial)
        found = executor.worker.work.module(prepared.dataset.test.x)
        assert sweep.with_absolute_paths(prepared.config).source == prepared.config.source  # as a trial is told
        return found

    before = logits(edit=False)
    assert torch.equal(logits(edit=True), before)


def test_a_run_does_not_go_on_on_changed_data(lab: Lab) -> None:
    experiment.run(lab.config(), lab.folder / "whole")
    cut = lab.stopped()
    held = contents(cut)
    lab.table(1)
    build._load.cache_clear()
    with pytest.raises(UserError) as error:
        experiment.run(lab.config(), cut, resume=True)
    assert str(error.value) == f"{cut} {OTHER_DATA}"
    with pytest.raises(UserError) as error:
        replay(cut, 1, 0, named=["my_data.py:table", "net.py:Net"])
    assert str(error.value) == f"{cut} {OTHER_DATA}"
    with pytest.raises(UserError, match=r"holds a run with another client\.lr; choose"):
        experiment.run(lab.config(**{"client.lr": 0.5}), cut, resume=True)
    assert contents(cut) == held
    lab.table(0)
    build._load.cache_clear()
    experiment.run(lab.config(), cut, resume=True)
    assert outputs(cut) == outputs(lab.folder / "whole")
    lab.table(1)
    build._load.cache_clear()
    with pytest.raises(UserError, match="holds a run on other data"):  # what is finished is not of these data either
        experiment.run(lab.config(), cut, resume=True)


@pytest.mark.parametrize("damage", ["of an earlier version", "damaged", "gone", "no object"])
def test_a_run_without_a_digest_of_its_data_goes_on(lab: Lab, damage: str) -> None:
    experiment.run(lab.config(), lab.folder / "whole")
    cut = lab.stopped()
    file = cut / "partition.json"
    facts = {name: value for name, value in json.loads(file.read_text()).items() if name != "data"}
    texts = {"of an earlier version": json.dumps(facts), "damaged": "{", "gone": "", "no object": "[1]"}
    file.write_text(texts[damage])
    if damage == "gone":
        file.unlink()
    experiment.run(lab.config(), cut, resume=True)
    assert outputs(cut) == outputs(lab.folder / "whole")


def test_a_sweep_does_not_go_on_on_changed_data(lab: Lab) -> None:
    """Not even with cells that have not begun: its tables would mix the two."""
    cells = [sweep.cell(lab.config(seed=seed), {"seed": "seed"}) for seed in (0, 1)]
    experiment.run(cells[0].config, lab.folder / "sweep" / cells[0].name)
    with Display() as display:
        assert [cell.name for cell in sweep.todo(cells, lab.folder / "sweep", display).cells] == [cells[1].name]
        lab.table(1)
        build._load.cache_clear()
        with pytest.raises(UserError, match="holds a run on other data"):
            sweep.todo(cells, lab.folder / "sweep", display)


# --- commands, each in a process of its own

COMMAND = [
    "--preset=smoke", "--wandb=off", "--client.epochs=1", "--model=net.py:Net", "--data=my_data.py:table",
    "--partition=iid", "--partition.n_clients=2", "--federation.rounds=1", "--measure.every=0", "--data.limit=70",
]  # fmt: skip


def test_a_command_is_not_resumed_with_other_code_or_data(
    lab: Lab, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    first = command("run", *COMMAND, cwd=lab.folder)
    assert first.returncode == 0, first.stderr
    again = command("run", *COMMAND, "--resume", cwd=lab.folder)
    assert "holds this run, finished" in again.stdout
    lab.scale(3)
    again = command("run", *COMMAND, "--resume", cwd=lab.folder)
    said = "error: runs/run holds a run with another source.model (deeper.py changed); choose another --out.\n"
    assert (again.returncode, again.stderr) == (2, said)
    lab.scale(2)
    lab.table(1)
    again = command("run", *COMMAND, "--resume", cwd=lab.folder)
    assert (again.returncode, again.stderr) == (2, f"error: runs/run {OTHER_DATA}\n")


def test_a_command_with_a_missing_neighbour_does_nothing(
    lab: Lab, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (lab.folder / "net.py").write_text(NET.replace("import helper", "import helpr"))
    done = command("run", *COMMAND, cwd=lab.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "(line 4) imports helpr, and there is no such module; did you mean 'helper'?" in done.stderr
    assert not (lab.folder / "runs").exists()


@pytest.mark.ray
def test_actors_run_the_helpers_that_were_hashed_or_none(lab: Lab, ray_session: None) -> None:
    actors = {"federation.executor": "ray_actors", "federation.actors": 2}
    experiment.run(lab.config(), lab.folder / "serial")
    experiment.run(lab.config(**actors), lab.folder / "actors")
    rounds = [(lab.folder / name / "rounds.jsonl").read_bytes() for name in ("serial", "actors")]
    assert rounds[0] == rounds[1]
    ready = build.assemble(build.prepare(lab.config(**actors)))
    lab.scale(3)
    with pytest.raises(UserError) as error:
        ready.executor()
    assert str(error.value) == (
        "model 'net.py:Net': net.py or what it imports (deeper.py, helper.py) is not what it was when this experiment "
        "was written."
    )
