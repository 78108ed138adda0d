"""What a process with a GPU is set to, tried without one: the same bits each time, and a record of the GPU."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedcommons.config import presets
from fedcommons.core import torch_settings
from fedcommons.core.worker import default_device, fresh_torch
from fedcommons.federation.variables import OURS, variables
from fedcommons.tracking.run_folder import RunFolder

NAME, VALUE = OURS


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose torch says that it has a GPU; what it sets is set back."""
    monkeypatch.setattr(torch_settings, "has_gpu", lambda: True)
    monkeypatch.setenv(NAME, "")  # to be restored
    monkeypatch.delenv(NAME)
    with torch_settings.usual():
        torch.set_deterministic_debug_mode(0)
        torch.backends.cudnn.benchmark = True
        yield


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_gives_the_same_bits_each_time() -> None:
    assert default_device() == torch.device("cuda")
    assert torch.get_deterministic_debug_mode() == 1  # warns: a module without such a kernel still trains
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    with fresh_torch():  # as in a run of this process
        assert torch.get_deterministic_debug_mode() == 1
        assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("with_gpu")
def test_what_cublas_reads_is_set_where_nobody_has_and_is_no_difference_between_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver without a GPU does not set it, and its actors do."""
    default_device()
    assert torch_settings.CUBLAS == OURS
    assert os.environ[NAME] == VALUE
    assert NAME not in variables()
    monkeypatch.setenv(NAME, ":16:8")
    default_device()
    assert os.environ[NAME] == ":16:8"
    assert variables()[NAME] == ":16:8"


def test_a_cpu_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_settings, "has_gpu", lambda: False)
    monkeypatch.delenv(NAME, raising=False)
    with fresh_torch():
        assert default_device() == torch.device("cpu")
        assert torch.get_deterministic_debug_mode() == 0
    assert NAME not in os.environ


@pytest.mark.parametrize(
    ("printed", "kinds"),
    [
        ("echo 'A100, 40960 MiB, 550.54, 8.0'; echo 'A100, 40960 MiB, 550.54, 8.0'", ["A100, 40960 MiB, 550.54, 8.0"]),
        ("exit 9", []),
    ],
)
def test_a_run_says_what_gpus_its_machine_has(
    printed: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{printed}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    RunFolder(tmp_path / "run", presets.experiment("smoke"), resume=False)
    told = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert told["gpu_kinds"] == kinds
    assert told["cuda"] == torch.version.cuda
