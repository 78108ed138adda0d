"""The GPU that is not there: what it refuses, what it counts, and that it changes no bit."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fedcommons.testing.pretend_gpu import CPU, GPU, PretendGPU


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with PretendGPU() as entered:
        yield entered


def on_gpu(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device=GPU).view(shape)


def _with_gradient_elsewhere() -> None:
    p = nn.Parameter(on_gpu(3))
    p.grad = torch.ones(3)


def _hook_of_the_backward_pass() -> None:
    x = on_gpu(3).requires_grad_()
    behind = torch.ones(3)
    x.register_hook(lambda g: g * behind)
    x.sum().backward()


REFUSED: dict[str, Callable[[], object]] = {
    "zeros without a device": lambda: on_gpu(3) + torch.zeros(3),
    "in place on the CPU": lambda: torch.ones(3).add_(on_gpu(3)),
    "out=": lambda: torch.add(on_gpu(), 1, out=torch.ones(())),
    "a number for an index": lambda: on_gpu(3).index_select(0, torch.tensor(1)),
    "an index on the GPU into the CPU": lambda: torch.ones(3)[torch.tensor([1], device=GPU)],
    "a gradient": _with_gradient_elsewhere,
    "a hook of the backward pass": _hook_of_the_backward_pass,
    "a generator of the CPU for the GPU": lambda: torch.rand(3, device=GPU, generator=torch.Generator()),
    "a generator of the GPU for the CPU": lambda: torch.randperm(3, generator=torch.Generator("cuda")),
    "inside vmap": lambda: torch.vmap(lambda x: x * torch.ones(3))(on_gpu(2, 3)),
}
"""What a GPU refuses, each once."""

COUNTED: dict[str, tuple[Callable[[Tensor], object], tuple[int, int]]] = {
    # it waits and copies nothing but a number
    "item": (lambda x: x[0].item(), (1, 0)),
    "a mask": (lambda x: x[x > 1], (1, 0)),
    # it copies between the devices once
    "cpu": (lambda x: x.cpu(), (1, 1)),
    "numpy by force": (lambda x: x.numpy(force=True), (1, 1)),
    "copy_ from the GPU": (lambda x: torch.zeros(3).copy_(x), (1, 1)),
    "copy_ to the GPU": (lambda x: x.copy_(torch.zeros(3)), (1, 1)),
    "tensor of Python's numbers": (lambda x: torch.tensor(0.5, device=x.device), (1, 1)),
    "an index of the CPU": (lambda x: x[torch.tensor([0, 1])], (1, 1)),
    # neither
    "arithmetic": (lambda x: (x * 2 + x.mean()).relu().clamp(max=1), (0, 0)),
    "a number on the CPU": (lambda x: x * torch.tensor(2.0), (0, 0)),
    "a number under a mask": (lambda x: x.__setitem__(x > 1, 0.0), (0, 0)),
    "to where it is": (lambda x: x.to(GPU).cuda().to("cuda").to(torch.float64), (0, 0)),
    "drawn there": (lambda x: x + torch.rand(3, device=GPU, generator=torch.Generator(GPU)), (0, 0)),
}
"""An operation, and how often the program waits and copies."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_lies_on_the_wrong_device_is_refused(what: str, gpu: PretendGPU) -> None:
    with pytest.raises(RuntimeError, match="device"):
        REFUSED[what]()


@pytest.mark.parametrize("what", COUNTED)
def test_waits_and_copies_are_counted_by_line(what: str, gpu: PretendGPU) -> None:
    (do, expected), x = COUNTED[what], on_gpu(3)
    before = gpu.seen.since(type(gpu.seen)())
    do(x)
    found = gpu.seen.since(before)
    assert all(line.startswith("tests/test_pretend_gpu.py:") for line in found.waits | found.copies)
    assert (found.waits.total(), found.copies.total()) == expected


def test_results_lie_on_the_gpu_and_afterwards_torch_is_as_before() -> None:
    before = torch.Generator, torch.zeros(2).device
    with PretendGPU():
        x = on_gpu(3)
        assert x.device == x[1:].device == (x + 1).device == deepcopy(x).device == x.new_tensor([1.0]).device == GPU
        assert torch.randn(2, generator=torch.Generator()).device == x.cpu().device == CPU
        assert {p.device for p in deepcopy(nn.Linear(3, 2).to(GPU)).parameters()} == {GPU}
        with torch.device("cuda"):
            assert torch.ones(2).device == GPU
        with pytest.raises(TypeError):
            x.numpy()
    assert (torch.Generator, torch.zeros(2).device) == before


def test_steps_are_what_lies_between_an_optimizers_steps(gpu: PretendGPU) -> None:
    p = nn.Parameter(on_gpu(3))
    optimizer = torch.optim.SGD([p], 0.1)
    for _ in range(2):
        gpu.begin()
        p.sum().item()  # before the first step: of no step
        for step in range(3):
            (p * p).sum().backward()
            if step == 2:
                p.sum().item()
            optimizer.step()
    assert [step.waits.total() for step in gpu.steps] == [0, 1, 0, 1]
    assert len({step.launches.total() for step in gpu.steps[::2]}) == 1
