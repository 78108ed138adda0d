"""Ctrl-C and SIGTERM while a Trainer trains end a run like anywhere else, not as Lightning would.

This file is also a program: run as a script it runs another, which tells when a generator takes a step.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.data.examples import Examples
from fedcommons.runs import central

ROOT = Path(__file__).parent.parent
GENERATORS = ("--preset=smoke", "--sharing.setting=shuffled_synthetic", "--generator.epochs=100000")


def main() -> None:
    """Run the script that is named, with a word at the first step of a generator."""
    from lightning_modules.ddpm import DDPM

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    step, told = DDPM.training_step, []

    def telling(self: DDPM, *batch: Any) -> Tensor:
        if not told:
            told.append(print("step", flush=True))
        return step(self, *batch)

    mock.patch.object(DDPM, "training_step", telling).start()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")


class Interrupted(LightningModule):
    """Ctrl-C is pressed in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        signal.raise_signal(signal.SIGINT)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_ctrl_c_in_a_trainer_is_ctrl_c_and_may_be_pressed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        data = Examples(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long))
        with pytest.raises(KeyboardInterrupt):
            central.fit(Interrupted(), data, data, epochs=1, batch_size=2, seed=0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


AGAIN = """
import atexit, signal
from fedcommons.config import cli

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
atexit.register(signal.raise_signal, signal.SIGINT)
cli.main(lambda line: signal.raise_signal(signal.SIGINT))
"""


@pytest.mark.long  # for a process of its own
def test_a_second_ctrl_c_while_a_command_ends_adds_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.startswith("stopped; ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.ray  # for its seconds
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_is_stopped_while_a_generator_trains(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folders = f"--out={tmp_path / 'run'}", f"--artifacts={tmp_path / 'artifacts'}"
    process = subprocess.Popen(
        [sys.executable, __file__, str(ROOT / "sweeps" / "run.py"), *GENERATORS, *folders],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while process.stdout.readline() not in ("step\n", ""):
        pass
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert ("--resume goes on" in said) == (number == signal.SIGINT)


@pytest.mark.ray
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_is_stopped_while_its_generators_train(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """The signal goes to all its processes, Ray's too: as of a terminal, ``timeout``, Slurm and systemd."""
    command = [sys.executable, __file__, str(ROOT / "sweeps" / "table1.py"), "--preset=smoke", "--alphas=0.1"]
    command += ["--settings=shuffled_synthetic", "--generator.epochs=100000"]  # so there is nothing else to run
    options = f"--out={tmp_path / 'out'}", f"--artifacts={tmp_path / 'artifacts'}"
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (family := training(process)) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=50)  # Ray's own patience with its server that has ended is 60
    assert family, said
    assert process.returncode == code, said
    assert ("--resume goes on" in said) == (number == signal.SIGINT)
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [member.name() for member in alive] == []


def training(process: subprocess.Popen) -> list[psutil.Process]:
    """All that a sweep has started, once a trial of its own runs, which makes a generator; until then nothing."""
    family = psutil.Process(process.pid).children(recursive=True)
    names: list[str] = []
    for member in family:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            names.append(member.name())
    return family if any(name.startswith("ray::Implicit") for name in names) else []


if __name__ == "__main__":
    main()
