"""What a process with a GPU is set to, tried without one: the same bits each time, and a record of the GPU."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedcommons.config import presets
from fedcommons.core import torch_settings
from fedcommons.core.worker import default_device, fresh_torch, require_precision
from fedcommons.errors import UserError
from fedcommons.federation.variables import OURS, variables
from fedcommons.runs.gpu_need import play
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


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_precision_that_a_gpu_only_imitates_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that has it, as the one that starts a run may have none."""
    capability = [7, 5]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    gpu, why = torch.device("cuda"), "needs a GPU of compute capability 8.0 or newer, and Tesla T4 has 7.5: use fp32"
    with pytest.raises(UserError, match=f"^client.precision {precision} {why}"):
        require_precision("client.precision", precision, gpu)
    require_precision("client.precision", "fp16-mixed", gpu)
    require_precision("client.precision", precision, torch.device("cpu"))
    capability[0] = 8
    require_precision("client.precision", precision, gpu)


def test_who_trains_asks_whether_its_gpu_has_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, str]]()
    note = lambda field, precision, device: asked.append((field, precision))  # noqa: E731
    monkeypatch.setattr("fedcommons.runs.worker.require_precision", note)
    monkeypatch.setattr("fedcommons.generators.ddpm.require_precision", note)
    values = {"sharing": "local_synthetic", "generator.precision": "bf16", "client.precision": "tf32"}
    play(presets.experiment("smoke", values=values))
    assert set(asked) == {("client.precision", "tf32"), ("generator.precision", "bf16")}


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
