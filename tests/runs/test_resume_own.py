"""A stopped run does not go on with other code of the user, or on other data.

Each run is a fork of this process, which itself imports nothing of the user.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from forked import Ended, call, forked, warm_up
from interrupted import contents, outputs

from fedcommons.config import presets
from fedcommons.runs import experiment
from fedcommons.runs.replay import replay

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
FIELDS = {
    "federation.rounds": 3, "client.epochs": 1, "measure.every": 0, "tracking.wandb": "off", "model.name": "net.py:Net",
    "data.name": "my_data.py:table", "partition.n_clients": 2, "data.limit": 70, "partition.name": "iid",
}  # fmt: skip
HELPER = "def scale():\n    from deeper import SCALE\n    return SCALE\n"
STOPPED = 77
"""Exit code of a run that ended after its first round, as by kill -9."""


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Lab:
    """A folder of the user's components and data, from which commands are run."""

    folder: Path

    def scale(self, value: int) -> None:
        """Change a helper of the model's helper."""
        (self.folder / "deeper.py").write_text(f"SCALE = {value}\n")

    def table(self, change: int) -> None:
        """Change one number of the data."""
        x = np.random.default_rng(0).standard_normal((100, 5))
        x[99] += change
        np.savez(self.folder / "table.npz", x=x, y=np.arange(100) % 3)

    def alone(self, action: Callable[[], object]) -> Ended:
        return forked(lambda: call(lambda _: (action(), 0)[1]), self.folder)

    def run(
        self, name: str = "cut", stop: bool = False, edit: Callable[[], None] = nothing,
        after_round: Callable[[], None] = nothing,
    ) -> Ended:  # fmt: skip
        """Run or resume; edit: what happens between the config and the run; after_round: what happens in the run."""

        def end(number: int, metrics: Mapping[str, float | None]) -> None:
            if stop and number == 1:
                os._exit(STOPPED)
            after_round()

        def action() -> None:
            config = presets.experiment("smoke", "my_data.py:table", FIELDS)
            edit()
            experiment.run(config, Path(name), resume=Path(name).exists(), on_round=end)

        return self.alone(action)

    def require_refused(self, ended: Ended, *words: str) -> None:
        assert ended.code == 2, ended.err
        assert all(word in ended.sentence for word in words), ended.sentence

    def require_resumed(self) -> None:
        """Check that the stopped run goes on and ends as the one that was never stopped."""
        ended = self.run()
        assert ended.code == 0, ended.err
        assert outputs(self.folder / "cut") == outputs(self.folder / "whole")
        partitions = [(self.folder / name / "partition.json").read_text() for name in ("cut", "whole")]
        assert partitions[0] == partitions[1]


@pytest.fixture(scope="module")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a whole run and a stopped one."""
    warm_up()
    lab = Lab(tmp_path_factory.mktemp("lab"))
    for name, text in {"net.py": NET, "helper.py": HELPER, "my_data.py": DATA}.items():
        (lab.folder / name).write_text(text)
    lab.scale(2)
    lab.table(0)
    assert lab.run("whole").code == 0
    assert lab.run(stop=True).code == STOPPED
    return lab.folder


@pytest.fixture
def lab(lab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    shutil.copytree(lab_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Lab(tmp_path)


@pytest.mark.long
def test_a_run_does_not_go_on_with_a_changed_helper_or_data(lab: Lab) -> None:
    before = contents(lab.folder / "cut")
    lab.require_refused(lab.run(edit=lambda: lab.scale(3)), "net.py", "deeper.py, helper.py", "is not what it was")
    lab.require_refused(lab.run(), "another source.model", "deeper.py changed")
    lab.scale(2)
    lab.table(1)
    words, names = ("holds a run on other data", "my_data.py:table"), ["my_data.py:table", "net.py:Net"]
    lab.require_refused(lab.run(), *words)
    lab.require_refused(lab.alone(lambda: replay(Path("cut"), 1, 0, named=names)), *words)
    assert contents(lab.folder / "cut") | {".lock": before[".lock"]} == before
    lab.table(0)
    lab.require_resumed()
    lab.table(1)
    lab.require_refused(lab.run(), *words)  # a finished run is not of these data either


@pytest.mark.long
def test_a_helper_that_changes_in_the_run_is_reported_at_the_end_and_refused_at_resume(lab: Lab) -> None:
    ended = lab.run("edited", after_round=lambda: lab.scale(3))
    assert ended.code == 0, ended.err
    reported = [line for line in ended.out.splitlines() if "deeper.py, helper.py" in line]
    assert len(reported) == 1, ended.out
    assert outputs(lab.folder / "edited") == outputs(lab.folder / "whole")
    lab.require_refused(lab.run("edited"), "another source.model", "deeper.py changed")


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.long
def test_a_run_without_a_hash_of_its_data_goes_on(lab: Lab, is_damaged: bool) -> None:
    file = lab.folder / "cut" / "partition.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    del facts["data"]
    file.write_text("{" if is_damaged else json.dumps(facts), encoding="utf-8")
    lab.require_resumed()
