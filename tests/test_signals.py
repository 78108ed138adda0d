"""Ctrl-C and SIGTERM while a Trainer trains end a command as anywhere else, and not as Lightning would."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from forked import call, forked, warm_up
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.data.examples import Examples
from fedcommons.runs import central


class Interrupted(LightningModule):
    """Ctrl-C is pressed in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        signal.raise_signal(signal.SIGINT)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_ctrl_c_in_a_trainer_is_ctrl_c_and_may_be_pressed_again() -> None:
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


@pytest.mark.long
def test_a_second_ctrl_c_while_a_command_ends_adds_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    (line,) = done.stderr.splitlines()
    assert line.startswith("stopped; ")


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_is_stopped_while_a_generator_trains(
    number: signal.Signals, code: int, sweeps: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """The signal arrives in the third backward pass."""
    warm_up()
    words = ["--preset=smoke", "--sharing.setting=shuffled_synthetic", "--data.limit=60", "--tracking.wandb=off"]
    backward, passes = torch.Tensor.backward, []

    def interrupted(self: Tensor, *given: Any, **named: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            signal.raise_signal(number)
        backward(self, *given, **named)

    def action() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.Tensor.backward = interrupted
        call(sweeps("run").run, *words, "--generator.epochs=1000", "--out=run", "--artifacts=artifacts")

    ended = forked(action, tmp_path)
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert ("--resume goes on" in ended.err) == (number == signal.SIGINT)
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
