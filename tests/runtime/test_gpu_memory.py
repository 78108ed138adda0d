"""A process with a GPU, tried without one: no memory, a lost GPU, its settings, and its share of the memory."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedcommons import Algorithm, ClientError, LocalSGD, UserError
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets, registry
from fedcommons.core.worker import default_device, fresh_torch, require_precision
from fedcommons.runs.assemble import assemble
from fedcommons.runs.build import build
from fedcommons.runtime import gpu_memory, torch_settings
from fedcommons.runtime.gpu_memory import with_room
from fedcommons.runtime.rounding_env import OURS, variables
from fedcommons.testing import digits
from fedcommons.testing.comparing import bits
from fedcommons.testing.on_device import two_rounds
from fedcommons.tune.gpu_share import measured, play, share, with_share

LINEAR = nn.Linear.forward
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@contextmanager
def said_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Inside, torch says that there is an old GPU, and the yielded object can change more of torch; then as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        torch_settings.has_gpu.cache_clear()
        try:
            yield patch
        finally:
            torch_settings.has_gpu.cache_clear()


@pytest.fixture
def fails_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], list[int]]:
    """From now on these calls of linear layers find no memory on the GPU; the numbers of all calls."""

    def begin(numbers: range) -> list[int]:
        calls = list[int]()

        def forward(self: nn.Linear, x: Tensor) -> Tensor:
            calls.append(len(calls))
            if calls[-1] in numbers:
                raise torch.OutOfMemoryError(FULL)
            return LINEAR(self, x)

        monkeypatch.setattr(nn.Linear, "forward", forward)
        return calls

    return begin


@pytest.mark.parametrize(("name", "at"), [("fedgen", 14), ("batched", 3)])
def test_what_is_tried_again_has_the_bits_of_what_never_failed(
    name: str, at: int, quick: Callable[[str], Algorithm], fails_at: Callable[[range], list[int]],
) -> None:  # fmt: skip
    def method() -> Algorithm:
        return quick("fedavg" if name == "batched" else name)

    if name == "batched":
        federation = digits((9, 5, 7), linear=True).training(LocalSGD(2, 4, batched=True))
    else:
        federation = digits((9, 5, 7), dropout=0.3, batch_norm=True, method=method()).training(LocalSGD(1, 4))
    right = bits(two_rounds(method(), federation))
    calls = fails_at(range(at, at + 1))
    assert bits(two_rounds(method(), federation)) == right
    assert len(calls) > at, "it has not failed"
    calls = fails_at(range(4, 1000))
    with pytest.raises(ClientError, match=r"client.* 0.*round 1, .*out of memory"):  # the second try fails too
        two_rounds(method(), federation)
    assert 4 < len(calls) < 12


@pytest.mark.parametrize(
    ("error", "tries"),
    [(torch.OutOfMemoryError(FULL), 2), (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), 2),
     (RuntimeError("CUDA error: device-side assert triggered"), 1), (MemoryError(), 1), (KeyboardInterrupt(), 1)],
)  # fmt: skip
def test_only_a_full_gpu_is_tried_again(error: BaseException, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("freed"))

    def play() -> None:
        seen.append("tried")
        raise error

    with pytest.raises(type(error)):
        with_room(play)
    assert seen == ["tried", "freed", "tried"][: 2 * tries - 1]


def test_a_share_bounds_what_a_process_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: type("", (), {"total_memory": 80 * 2**30}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    for part in (0.25, 0.0001, 1.0):
        gpu_memory.limit_memory(part)
    assert asked == [0.25 - 600 / 80 / 1024, 0.0]  # a process alone on its GPU is not bounded


@pytest.fixture
def loses(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on a call of a linear layer cuts the process off from its GPU; later calls raise."""
    lost = list[int]()

    def call(*_: Any) -> list[Tensor]:
        if lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return [torch.zeros(1)]

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        lost.append(1)
        return LINEAR(self, x)

    def number(self: Tensor) -> float:
        return self.item() if call() else 0.0

    def begin() -> None:
        monkeypatch.setattr(nn.Linear, "forward", forward)
        monkeypatch.setattr(torch.Tensor, "__float__", number)
        for name in ("synchronize", "get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"):
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    return begin


@pytest.mark.parametrize(("batched", "named"), [(False, "client 0, round 1"), (True, "clients 0, 1, 2, round 1")])
def test_clients_that_lose_the_gpu_are_named(batched: bool, named: str, loses: Callable[[], None]) -> None:
    federation = digits((9, 5, 7), linear=True).training(LocalSGD(1, 4, batched=batched))
    plan, executor = federation.plan(2, blocks=1), federation.serial(FedAvg())
    start = federation.start(FedAvg(), plan)
    assert not gpu_memory.is_lost()
    loses()
    with pytest.raises(ClientError, match=f"^{named}, .*device-side assert"):
        federation.run(FedAvg(), plan, executor, start)
    assert gpu_memory.is_lost()
    with said_gpu(), pytest.raises(UserError, match="start a new process"):
        default_device()


# Settings

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
def test_settings_that_make_a_gpu_deterministic_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without a GPU does not set the variable of cuBLAS, and its actors do."""
    assert default_device() == torch.device("cuda")
    assert torch.get_deterministic_debug_mode() == 1  # warns: a module without such a kernel still trains
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    with fresh_torch():  # as in a run of this process
        assert torch.get_deterministic_debug_mode() == 1
        assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
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
        assemble(build(config)).executor()


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
    """Ten clients, or a share of them, in blocks: one process needs the memory of one whole block at once."""
    sizes = set[int]()

    def seen(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        biases = [p.shape for p in weights if p.dim() < 3 and p.shape[-1] == 10]  # (N, 10) or (10,)
        sizes.update(shape[0] for shape in biases if len(shape) == 2)

    values = {
        "federation.gpus_per_actor": "auto", "client.batched": True, "federation.blocks": blocks,
        "federation.participation": share,
    }  # fmt: skip
    handle = register_optimizer_step_post_hook(seen)
    try:
        play(presets.experiment("smoke", values={**values, "partition.n_clients": 10, "data.limit": 100}))
    finally:
        handle.remove()
    assert sizes == expected


def test_without_gpus_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.HERE, str(tmp_path))  # it is set there, and is to be as before
    monkeypatch.chdir(tmp_path)  # likewise
    monkeypatch.setattr("ray.cluster_resources", dict)
    config = presets.experiment("smoke", values={"federation.gpus_per_actor": "auto"})
    assert with_share([config], 4) == [config]
    if not torch.cuda.is_available():
        assert measured(str(tmp_path), config) == (0, 0)


@pytest.mark.parametrize(("error", "need"), [(torch.OutOfMemoryError("full"), 100), (ValueError("a bug"), 0)])
def test_a_measurement_that_fails_limits_other_runs_only_for_lack_of_memory(
    error: Exception, need: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(config: object) -> None:
        raise error

    monkeypatch.setenv(registry.HERE, str(tmp_path))  # it is set there, and is to be as before
    monkeypatch.chdir(tmp_path)  # likewise
    for name, value in {"has_gpu": lambda: True, "default_device": lambda: None, "play": play}.items():
        monkeypatch.setattr(f"fedcommons.tune.gpu_share.{name}", value)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    assert measured(str(tmp_path), presets.experiment("smoke")) == (need, 100)
