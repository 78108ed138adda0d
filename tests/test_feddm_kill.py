"""FedDM killed by kill -9 while a client matches or the server trains, and continued: it ends as if it never was.

This file is also the program that is killed.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fedcommons.algorithms import matching, surrogate
from fedcommons.algorithms.feddm import FedDM
from fedcommons.config import presets
from fedcommons.runs import experiment
from fedcommons.seeds import seed_for

pytestmark = pytest.mark.ray  # it needs none, but too long for the default run

FIELDS = {
    "algorithm": "feddm", "data.limit": 100, "measure.every": 0, "federation.rounds": 6, "feddm.iterations": 3,
    "federation.checkpoint_every": 2, "feddm.server_batch": 8, "tracking.wandb": "off",
}  # fmt: skip
MOMENTS = {
    "client": (seed_for(0, "client", 4, 2), matching, "around"),  # a step on client 2's pixels
    "merge": (seed_for(0, "merge", 4), surrogate, "project"),  # a step of the server
}
"""Which call of FedDM's function of this name, in round 4, and what it does in each of its steps."""


def main(folder: Path, moment: str) -> None:
    """Run, and die within the third step of the moment."""
    fatal, place, step = MOMENTS[moment]
    whole, inner, left = getattr(FedDM, moment), getattr(place, step), 0

    def armed(self: FedDM, *given: Any) -> Any:
        nonlocal left
        left = 3 if given[-1] == fatal else 0
        return whole(self, *given)

    def dies(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*given)

    mock.patch.object(FedDM, moment, armed).start()
    mock.patch.object(place, step, dies).start()
    run(folder)


def run(folder: Path) -> dict[str, bytes]:
    """Begin the experiment or go on with it; what must not differ."""
    torch.set_num_threads(1)
    experiment.run(presets.experiment("smoke", "digits", FIELDS), folder, resume=folder.exists(), say=lambda _: None)
    paths = [folder / "rounds.jsonl", folder / "summary.json", *folder.glob("checkpoints/*.safetensors*")]
    return {path.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return run(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_within_a_step_ends_as_if_it_never_was(
    moment: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    folder = tmp_path / "run"
    done = subprocess.run([sys.executable, __file__, str(folder), moment], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]
    assert not (folder / "summary.json").exists()
    assert run(folder) == whole
    assert any(name.endswith("6.safetensors") for name in whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
