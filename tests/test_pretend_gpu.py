"""The GPU that is not there: what it refuses, what it counts, and that it changes no bit."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.testing.pretend_gpu import CPU, GPU, PretendGPU, place


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    """Entered."""
    with PretendGPU() as entered:
        yield entered


def on_gpu(*shape: int) -> Tensor:
    """Some numbers there."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device=GPU).view(shape)


def _with_gradient_elsewhere() -> None:
    p = nn.Parameter(on_gpu(3))
    p.grad = torch.ones(3)


def _with_momentum_elsewhere() -> None:
    p = nn.Parameter(on_gpu(3))
    optimizer = torch.optim.SGD([p], 0.1, momentum=0.9)
    optimizer.state[p]["momentum_buffer"] = torch.ones(3)
    p.grad = on_gpu(3)
    optimizer.step()


def _module_left_behind() -> None:
    nn.Linear(3, 2)(on_gpu(4, 3))


def _constant_left_behind() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by, self.layer = torch.ones(3), nn.Linear(3, 2)  # no buffer, so ``to`` leaves it

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.by)

    Scaled().to(GPU)(on_gpu(4, 3))


def _hook_of_the_backward_pass() -> None:
    x = on_gpu(3).requires_grad_()
    behind = torch.ones(3)
    x.register_hook(lambda g: g * behind)
    x.sum().backward()


def _into_a_number_on_the_cpu() -> None:
    torch.zeros(()).add_(on_gpu())


REFUSED: dict[str, Callable[[], object]] = {
    "zeros without a device": lambda: on_gpu(3) + torch.zeros(3),
    "an empty tensor elsewhere": lambda: on_gpu(0) + torch.zeros(0),
    "drawn without a device": lambda: on_gpu(3) * (torch.rand(3) < 0.5),
    "in place": lambda: on_gpu(3).add_(torch.ones(3)),
    "in place on the CPU": lambda: torch.ones(3).add_(on_gpu(3)),
    "into a number on the CPU": _into_a_number_on_the_cpu,
    "out=": lambda: torch.add(on_gpu(), 1, out=torch.ones(())),
    "a number for an index": lambda: on_gpu(3).index_select(0, torch.tensor(1)),
    "cat": lambda: torch.cat([on_gpu(3), torch.ones(3)]),
    "stack of numbers": lambda: torch.stack([on_gpu(), torch.ones(())]),
    "matrix product": lambda: on_gpu(3, 3) @ torch.ones(3),
    "index_select on the GPU": lambda: on_gpu(3).index_select(0, torch.tensor([1])),
    "index_select on the CPU": lambda: torch.ones(3).index_select(0, torch.tensor([1], device=GPU)),
    "an index on the GPU into the CPU": lambda: torch.ones(3)[torch.tensor([1], device=GPU)],
    "values of index_put": lambda: on_gpu(3).index_put_((torch.tensor([1], device=GPU),), torch.ones(1)),
    "labels left behind": lambda: F.cross_entropy(on_gpu(2, 3), torch.tensor([0, 1])),
    "weights of classes": lambda: F.cross_entropy(on_gpu(1, 3), torch.tensor([0], device=GPU), weight=torch.ones(3)),
    "a module left behind": _module_left_behind,
    "a constant of a module": _constant_left_behind,
    "an embedding": lambda: F.embedding(torch.tensor([0]), on_gpu(2, 2)),
    "a gradient": _with_gradient_elsewhere,
    "an optimizer's state": _with_momentum_elsewhere,
    "a hook of the backward pass": _hook_of_the_backward_pass,
    "a generator of the CPU for the GPU": lambda: torch.rand(3, device=GPU, generator=torch.Generator()),
    "a generator of the CPU in place": lambda: on_gpu(3).normal_(generator=torch.Generator()),
    "a generator of the GPU for the CPU": lambda: torch.randperm(3, generator=torch.Generator("cuda")),
    "inside vmap": lambda: torch.vmap(lambda x: x * torch.ones(3))(on_gpu(2, 3)),
}
"""What a GPU refuses, each once."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_lies_on_the_wrong_device_is_refused(what: str, gpu: PretendGPU) -> None:
    with pytest.raises(RuntimeError, match="device"):
        REFUSED[what]()


@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: x.__array__()])
def test_numpy_cannot_see_the_gpu(read: Callable[[Tensor], object], gpu: PretendGPU) -> None:
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        read(on_gpu(3))


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x[1]),
    "bool": lambda x: bool(x[0] > 0),
    "in": lambda x: 2.0 in x,
    "max of Python": lambda x: max(x[0], x[1]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "a mask": lambda x: x[x > 1],
    "a mask that is assigned to": lambda x: x.index_put_((x > 1,), x[:2] + 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "clipping that looks": lambda x: nn.utils.get_total_norm([x], error_if_nonfinite=True),
}
"""What makes the program wait, and copies nothing but a number."""

COPYING: dict[str, Callable[[Tensor], object]] = {
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to another type there": lambda x: x.to(CPU, torch.float64),
    "tolist": lambda x: x.tolist(),
    "numpy by force": lambda x: x.numpy(force=True),
    "copy_ from the GPU": lambda x: torch.zeros(3).copy_(x),
    "copy_ to the GPU": lambda x: x.copy_(torch.zeros(3)),
    "assigned to": lambda x: x.__setitem__(slice(2), torch.zeros(2)),
    "cuda": lambda x: torch.zeros(3).cuda(),
    "to like another": lambda x: torch.zeros(3).to(x),
    "tensor of Python's numbers": lambda x: torch.tensor(0.5, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "as_tensor": lambda x: torch.as_tensor(x, device="cpu"),
    "an index of the CPU": lambda x: x[torch.tensor([0, 1])],
    "a list as an index": lambda x: x[[0, 1]],
}
"""What copies between the devices once."""

FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + x.mean()).relu().clamp(max=1),
    "a number on the CPU": lambda x: x * torch.tensor(2.0),
    "filled with a number": lambda x: x.masked_fill(x > 1, 0.0).fill_(1),
    "a number under a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "an index there": lambda x: x[torch.arange(2, device=x.device)],
    "a slice": lambda x: x[1:],
    "shapes": lambda x: (len(x), x.shape, x.dim(), x.numel(), x.nbytes),
    "made there": lambda x: torch.zeros(3, device=x.device) + torch.zeros_like(x) + x.new_zeros(3),
    "to where it is": lambda x: x.to(GPU).cuda().to("cuda").to(torch.float64),
    "drawn there": lambda x: x + torch.rand(3, device=GPU, generator=torch.Generator(GPU)),
    "clipping": lambda x: nn.utils.clip_grads_with_norm_([_with_gradient(x)], 1.0, x.norm()),
}
"""What neither waits nor copies."""


def _with_gradient(x: Tensor) -> nn.Parameter:
    p = nn.Parameter(x)
    p.grad = x.clone()
    return p


def counted(do: Callable[[Tensor], object], gpu: PretendGPU) -> tuple[int, int]:
    """(waits, copies), all of which stand in this file."""
    x = on_gpu(3)
    before = gpu.seen.since(type(gpu.seen)())
    do(x)
    found = gpu.seen.since(before)
    assert all(line.startswith("tests/test_pretend_gpu.py:") for line in found.waits | found.copies)
    return found.waits.total(), found.copies.total()


@pytest.mark.parametrize("what", WAITING)
def test_waits_are_counted(what: str, gpu: PretendGPU) -> None:
    waits, copies = counted(WAITING[what], gpu)
    assert waits >= 1
    assert copies == 0


@pytest.mark.parametrize("what", COPYING)
def test_copies_are_counted_and_wait(what: str, gpu: PretendGPU) -> None:
    assert counted(COPYING[what], gpu) == (1, 1)


@pytest.mark.parametrize("what", FREE)
def test_nothing_else_is(what: str, gpu: PretendGPU) -> None:
    assert counted(FREE[what], gpu) == (0, 0)


def test_a_line_is_the_programs_not_the_librarys(gpu: PretendGPU) -> None:
    def here() -> int:
        return here.__code__.co_firstlineno

    F.relu(nn.LayerNorm(3, device=GPU)(on_gpu(2, 3))).sum().item()
    assert gpu.seen.waits == {f"tests/test_pretend_gpu.py:{here() + 3}": 1}


def test_launches_are_operations_that_are_not_views(gpu: PretendGPU) -> None:
    x = on_gpu(2, 3)  # one
    y = x.T[1:].reshape(4).view(2, 2)  # one: rows of a transposed matrix are not beside each other
    y.add_(1)  # one
    assert gpu.seen.launches.total() == 3
    torch.zeros(3).add_(1)  # on the CPU
    torch.empty_like(y)
    assert gpu.seen.launches.total() == 3


def test_memory_is_counted_while_it_lives(gpu: PretendGPU) -> None:
    x = on_gpu(100)
    view = x[50:]
    y = x + 1
    assert (gpu.live, gpu.peak) == (800, 800)
    del x, y
    assert (gpu.live, gpu.peak) == (400, 800)
    del view
    assert (gpu.live, gpu.peak) == (0, 800)


def test_results_say_where_they_lie(gpu: PretendGPU) -> None:
    x = on_gpu(3)
    assert x.device == x[1:].device == (x + 1).device == torch.zeros(1, device="cuda").device == GPU
    assert x.is_cuda
    assert not x.is_cpu
    assert torch.zeros(3).device == torch.randn(2, generator=torch.Generator()).device == x.cpu().device == CPU
    copied = deepcopy(nn.Linear(3, 2).to(GPU))
    assert deepcopy(x).device == x.new_tensor([1.0]).device == x.sum().detach().requires_grad_().device == GPU
    assert {p.device for p in copied.parameters()} == {GPU}
    with torch.device("cuda"):
        assert torch.ones(2).device == GPU


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


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_no_bit_changes(optimizer: type[torch.optim.Optimizer]) -> None:
    def trained(device: torch.device) -> list[Tensor]:
        torch.default_generator.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 5)
        )
        net.to(device)
        steps = optimizer(net.parameters(), lr=0.1)  # pyright: ignore[reportCallIssue]
        x, y = torch.randn(7, 1, 8, 8).to(device), (torch.arange(7) % 5).to(device)
        for _ in range(3):
            steps.zero_grad()
            F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            steps.step()
        assert all(place(t) == device for t in net.state_dict().values())
        return [t.cpu() for t in net.state_dict().values()]

    with PretendGPU() as gpu:
        there = trained(GPU)
    assert all(step.waits.total() == step.copies.total() == 0 for step in gpu.steps)
    assert all(torch.equal(a, b) for a, b in zip(there, trained(CPU), strict=True))


def test_afterwards_torch_is_as_before() -> None:
    before = torch.Generator, torch._C._group_tensors_by_device_and_dtype
    with pytest.raises(ZeroDivisionError), PretendGPU():
        raise ZeroDivisionError
    assert (torch.Generator, torch._C._group_tensors_by_device_and_dtype) == before
    assert torch.zeros(2).device == CPU
