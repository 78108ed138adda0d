"""What a process with a GPU is set to, tried without one: the same bits each time, its share, and a record of it."""

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from said_gpu import said_gpu
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedcommons.config import presets
from fedcommons.core import torch_settings
from fedcommons.core.worker import default_device, fresh_torch, require_precision
from fedcommons.errors import UserError
from fedcommons.federation.variables import OURS, variables
from fedcommons.runs.build import assemble, prepare
from fedcommons.runs.gpu_need import play, share
from fedcommons.tracking.run_folder import RunFolder

GB = 2**30
NAME, VALUE = OURS


@pytest.fixture
def with_gpu() -> Iterator[None]:
    """A process with a GPU; what it sets is set back."""
    with said_gpu() as patch, torch_settings.usual():
        patch.setenv(NAME, "")  # to be restored
        patch.delenv(NAME)
        torch.set_deterministic_debug_mode(0)
        torch.backends.cudnn.benchmark = True
        yield


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_gives_the_same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without a GPU does not set the variable of cuBLAS, and its actors do."""
    assert default_device() == torch.device("cuda")
    assert torch.get_deterministic_debug_mode() == 1  # warns: a module without such a kernel still trains
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    with fresh_torch():  # as in a run of this process
        assert torch.get_deterministic_debug_mode() == 1
        assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert torch_settings.CUBLAS == OURS
    assert os.environ[NAME] == VALUE
    assert NAME not in variables()
    monkeypatch.setenv(NAME, ":16:8")  # a user's own value stays
    default_device()
    assert os.environ[NAME] == variables()[NAME] == ":16:8"


def test_a_precision_that_a_gpu_only_imitates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for precision, capability, is_refused in (
        ("tf32", (7, 5), True), ("bf16", (7, 5), True), ("fp16-mixed", (7, 5), False), ("bf16", (8, 0), False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
        require_precision("client.precision", precision, torch.device("cpu"))
        refused = pytest.raises(UserError, match=f"^client.precision {precision} .*Tesla T4")
        with refused if is_refused else nullcontext():
            require_precision("client.precision", precision, torch.device("cuda"))


@pytest.mark.usefixtures("with_gpu")
def test_every_process_that_trains_asks_whether_its_gpu_has_the_precision() -> None:
    """As the process that starts a run may have none."""
    config = presets.experiment("smoke", values={"client.precision": "tf32", "data.limit": 60})
    with pytest.raises(UserError, match=r"^client\.precision tf32"), fresh_torch():
        assemble(prepare(config)).executor()


def test_a_run_records_the_gpus_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = "A100, 40960 MiB, 550.54, 8.0"
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    for line, kinds in ((f"echo '{one}'; echo '{one}'", [one]), ("exit 9", [])):
        tool.write_text(f"#!/bin/sh\n{line}\n")
        tool.chmod(0o755)
        RunFolder(tmp_path / f"{len(kinds)}", presets.experiment("smoke"), resume=False)
        facts = json.loads((tmp_path / f"{len(kinds)}" / "environment.json").read_text())
        assert (facts["gpu_kinds"], facts["cuda"]) == (kinds, torch.version.cuda)


# The share of a GPU that a process needs


@pytest.mark.parametrize(
    ("need", "total", "processes", "gpus", "expected"),
    [
        (10 * GB, 80 * GB, 4, 1, 0.25),  # as many as there are
        (10 * GB, 80 * GB, 16, 1, 0.125), (30 * GB, 80 * GB, 4, 1, 0.5),  # as many as have room
        (10 * GB, 80 * GB, 4, 2, 0.5), (10 * GB, 80 * GB, 5, 2, 0.3333), (10 * GB, 80 * GB, 2, 4, 1.0),  # on all GPUs
        (90 * GB, 80 * GB, 8, 1, 1.0), (1, 80 * GB, 10**6, 1, 0.0001),
        (0, 0, 4, 1, 0.25),  # not known
    ],
)  # fmt: skip
def test_shares(need: int, total: int, processes: int, gpus: int, expected: float) -> None:
    assert share(need, total, processes, gpus) == expected


@pytest.mark.parametrize(
    ("blocks", "share", "expected"), [(4, 1.0, {3}), (1, 1.0, {10}), (10, 1.0, set()), (1, 0.38, {3})]
)
def test_of_batched_clients_a_whole_block_is_played(blocks: int, share: float, expected: set[int]) -> None:
    """Ten clients, or a share of them, cut: what a block's take at once is what a process needs."""
    sizes = set[int]()

    def seen(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        biases = [p.shape for p in weights if p.dim() < 3 and p.shape[-1] == 10]  # (N, 10) or (10,)
        sizes.update(shape[0] for shape in biases if len(shape) == 2)

    values = {
        "federation.gpus_per_actor": "auto",
        "client.batched": True,
        "federation.blocks": blocks,
        "federation.participation": share,
    }
    handle = register_optimizer_step_post_hook(seen)
    try:
        play(presets.experiment("smoke", values={**values, "partition.n_clients": 10, "data.limit": 100}))
    finally:
        handle.remove()
    assert sizes == expected
