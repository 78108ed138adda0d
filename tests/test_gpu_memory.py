"""A GPU without memory, and one that is lost, as injected faults: one more try with the same bits, then a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from said_gpu import said_gpu
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core import gpu_memory
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.gpu_memory import with_room
from fedcommons.core.local import LocalSGD
from fedcommons.core.worker import default_device
from fedcommons.errors import ClientError, UserError
from fedcommons.testing import digits
from fedcommons.testing.comparing import bits
from fedcommons.testing.on_device import two_rounds

LINEAR = nn.Linear.forward
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


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
    for share in (0.25, 0.0001, 1.0):
        gpu_memory.bound(share)
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
        federation.play(FedAvg(), plan, executor, start)
    assert gpu_memory.is_lost()
    with said_gpu(), pytest.raises(UserError, match="start a new process"):
        default_device()
