"""The package on a GPU that is not there: all lies on the right device, no bit differs from the CPU's, and what a step
costs in launches, waits and copies is a small fixed number.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.moon import MOON
from fedcommons.config import registry
from fedcommons.config.schema import Data
from fedcommons.convergence.estimators import Part, moments
from fedcommons.convergence.smoothness import smoothness, smoothness_of_each
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.client_worker import floating_buffers
from fedcommons.core.evaluation import ModelTask, evaluate
from fedcommons.core.local_training import LocalSGD
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, UserError
from fedcommons.flat_tensors import data, to_device
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.runs import build
from fedcommons.seeding import set_default_generator
from fedcommons.testing import Federation, check_algorithm, digits
from fedcommons.testing.comparing import bits
from fedcommons.testing.on_device import PRETEND, check_on, two_rounds
from fedcommons.testing.pretend_gpu import CPU, GPU, PretendGPU, Seen
from lightning_modules.ddpm import DDPM

PLAIN = LocalSGD(epochs=1, batch_size=4)
DP = replace(PLAIN, dp=DPSGD(noise_multiplier=1.0, clip=1.0))
TWO = partial(digits, (9, 5))
BATCH_NORM = partial(digits, (9, 5), dropout=0.3, batch_norm=True)

OWN_STEPS = ("coboosting", "dense", "fedcvae", "fedddpm", "feddf", "feddm", "fedgen", "fedlap", "moon", "one_shot")
"""Methods that do other work than the clients' local steps."""


def case(
    method: Algorithm, local: LocalSGD = PLAIN, clients: Callable[..., Federation] = TWO
) -> tuple[Algorithm, Federation]:
    return method, clients(method=method).training(local)


def played(method: Algorithm, clients: Federation) -> tuple[dict[str, bytes], list[Seen]]:
    """The bits after two rounds there, and what each local step but a client's first costs."""
    with PretendGPU() as gpu:
        standing = two_rounds(method, clients.on(GPU), gpu)
    assert gpu.steps
    return bits(standing), gpu.steps


# Every algorithm


@pytest.mark.parametrize("name", registry.KINDS["algorithm"].components)
@pytest.mark.long
def test_every_method_runs_on_a_gpu_and_its_steps_do_not_wait(name: str, quick: Callable[[str], Algorithm]) -> None:
    check_on(PRETEND)(*case(quick(name), replace(PLAIN, augment=True), BATCH_NORM))


def test_under_dp_sgd_a_step_copies_the_rows_of_its_batch_and_the_noise_alone() -> None:
    """Both are drawn on the CPU, so that they are the same on every device."""
    there, steps = played(*case(MOON(), DP))
    assert there == bits(two_rounds(*case(MOON(), DP)))
    for step in steps:
        assert step.waits == step.copies
        assert _by_file(step.copies) == {"privacy/dp_sgd.py": 2}


def _by_file(lines: Counter[str]) -> Counter[str]:
    return Counter(line.partition(":")[0] for line in lines.elements())


@pytest.mark.parametrize("name", ["fedavg", "moon", "feddyn", "fedgen", "feddm", "dense"])
@pytest.mark.long
def test_a_methods_step_costs_less_than_four_plain_ones(name: str, quick: Callable[[str], Algorithm]) -> None:
    """Its hooks may make two more forward passes, or differentiate twice; they may not loop over the examples.

    In two stages of training there are two kinds of steps. One of a server may pass through three networks.
    """
    three, two = (
        {
            step.launches.total()
            for step in played(*case(quick(name), replace(PLAIN, batch_size=n), partial(digits, (6,))))[1]
        }
        for n in (3, 2)
    )
    assert three == two
    assert name != "fedavg" or three == {30}  # 13 forward, 16 backward, and one of SGD for all parameters
    assert max(three) <= (6 if name in OWN_STEPS else 4) * 30


def test_a_start_that_was_computed_there_is_the_servers() -> None:
    method, clients = case(FedAvg())
    plan = clients.plan(2)
    start, right = clients.start(method, plan), clients.run(method, plan)[-1][0]
    with PretendGPU():
        there = replace(start, state=to_device(start.state, GPU))
        end = clients.on(GPU).run(method, plan, start=there)[-1][0]
    assert bits(end) == bits(right)


def test_an_array_of_numpy_chooses_rows_of_examples_there(gpu: PretendGPU) -> None:
    assert Examples(on_gpu(3), on_gpu(3))[np.array([2, 0])].y.tolist() == [3, 1]


# What the check finds


@dataclass(frozen=True)
class _Buggy(FedDyn):
    bug: Callable[[Tensor, Tensor], object] = print  # of a parameter and its gradient

    def regularise(
        self, params: Mapping[str, nn.Parameter], x: Mapping[str, Tensor], g_i: Mapping[str, Tensor]
    ) -> None:
        p = next(iter(params.values()))
        assert p.grad is not None
        self.bug(p.detach(), p.grad)
        super().regularise(params, x, g_i)


WAITS = r"a local step waits for the GPU .* in testing/test_on_a_gpu\.py:\d+$"

BUGS: dict[str, tuple[str, Callable[[], Algorithm]]] = {
    "zeros without a device": ("same device", partial(_Buggy, bug=lambda p, g: g.add_(torch.zeros(g.shape)))),
    "item": (WAITS, partial(_Buggy, bug=lambda p, g: g.norm().item())),
    "other bits": ("there are other bits of .*state/model", partial(_Buggy, bug=lambda p, g: g.mul_(next(PLAYS)))),
}
PLAYS = count()


@pytest.mark.parametrize("what", BUGS)
def test_a_bug_in_a_hook_is_detected(what: str) -> None:
    words, make = BUGS[what]
    with pytest.raises((AssertionError, ClientError), match=words):
        check_on(PRETEND)(*case(make()))
    if what == "other bits":  # a real device may round
        with pytest.raises(AssertionError, match=r"other .*state/model"):
            check_on("cpu")(*case(make()))


@pytest.mark.long
def test_check_algorithm_takes_a_device() -> None:
    only = ["two_rounds_keep_names_shapes_and_types"]
    for device, words in (("gpu0", "device must be"), ("meta", "torch finds no meta")):
        with pytest.raises(UserError, match=words):
            check_algorithm(FedAvg(), device=device)
    with pytest.raises(AssertionError, match=r"fails 1 of 2 checks\n- a_gpu_that_is_not_there_\w+: a local step waits"):
        check_algorithm(BUGS["item"][1](), device=PRETEND, only=only)


# What is not an algorithm


@pytest.mark.long
def test_measuring_and_evaluating() -> None:
    """A vector travels to a worker, and its answer back, once a job, however many clients the job has."""
    clients = BATCH_NORM()
    at = ModelTask(clients.model, floating_buffers(clients.module()), chunk=20)

    def measured(device: torch.device) -> list[object]:
        executor = clients.on(device).serial(case(FedAvg())[0])
        whole, part = moments(executor, at, "own", 2, 1), moments(executor, at, "own", 2, 1, Part(16, 0, 0))
        return [
            *(data(x).tolist() for result in (whole, part) for x in (result.mean, result.pooled)),
            *(x.tolist() for result in (whole, part) for x in (result.sq, result.sq_mean, result.v)),
            smoothness_of_each(executor, at, "own", 2, 1),
            smoothness(executor, at, "own", 2, 1),
            evaluate(executor, at, {"test": 100}),
        ]

    with PretendGPU() as gpu:
        there = measured(GPU)
    assert there == measured(CPU)
    files = _by_file(gpu.events.copies)
    jobs, starts, totals_of_moments = files["convergence/smoothness.py"], 2, 4
    assert jobs - starts == files["core/block_sum.py"] - totals_of_moments > 5
    assert files["core/evaluation.py"] == 1  # the model once, not for each chunk


def _trained(device: torch.device) -> dict[str, Tensor]:
    """Three steps of a tiny model, as Lightning's Trainer makes them; its weights rest on the CPU."""
    set_default_generator(0, "weights")
    model = DDPM(shape=(1, 8, 8), n_classes=10, channels=(8, 16), lr=1e-3, timesteps=20, flip=True).to(device)
    examples, optimizer = build.load(Data(limit=48)).train.to(device), model.configure_optimizers()
    model.train()
    model.on_fit_start()
    for number in range(3):
        batch = slice(16 * number, 16 * number + 16)
        loss = model.training_step((examples.x[batch], examples.y[batch]), number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.on_train_batch_end()
    return model.averaged()


def test_a_step_of_the_diffusion_model_neither_waits_nor_copies() -> None:
    """Times, noise and flips are drawn on the GPU; a real one draws other numbers than the CPU."""
    with PretendGPU() as gpu:
        there = _trained(GPU)
    here = _trained(CPU)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in here)
    assert [step.copies + step.waits for step in gpu.steps] == 2 * [Counter()]
    assert len({step.launches.total() for step in gpu.steps}) == 1
    assert gpu.live == 0


# The pretended GPU itself


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with PretendGPU() as entered:
        yield entered


def on_gpu(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device=GPU).view(shape)


def _hook_of_the_backward_pass() -> None:
    x = on_gpu(3).requires_grad_()
    behind = torch.ones(3)
    x.register_hook(lambda g: g * behind)
    x.sum().backward()


REFUSED: dict[str, Callable[[], object]] = {
    "zeros without a device": lambda: on_gpu(3) + torch.zeros(3),
    "a number for an index": lambda: on_gpu(3).index_select(0, torch.tensor(1)),
    "an index on the GPU into the CPU": lambda: torch.ones(3)[torch.tensor([1], device=GPU)],
    "a hook of the backward pass": _hook_of_the_backward_pass,
    "a generator of the CPU for the GPU": lambda: torch.rand(3, device=GPU, generator=torch.Generator()),
    "inside vmap": lambda: torch.vmap(lambda x: x * torch.ones(3))(on_gpu(2, 3)),
}
"""What a GPU refuses, each once."""

COUNTED: dict[str, tuple[Callable[[Tensor], object], tuple[int, int]]] = {
    # it waits and copies nothing but a number
    "item": (lambda x: x[0].item(), (1, 0)),
    "a mask": (lambda x: x[x > 1], (1, 0)),
    # it copies between the devices once
    "cpu": (lambda x: x.cpu(), (1, 1)),
    "copy_ from the GPU": (lambda x: torch.zeros(3).copy_(x), (1, 1)),
    "copy_ to the GPU": (lambda x: x.copy_(torch.zeros(3)), (1, 1)),
    "an index of the CPU": (lambda x: x[torch.tensor([0, 1])], (1, 1)),
    # neither
    "arithmetic": (lambda x: (x * 2 + x.mean()).relu().clamp(max=1), (0, 0)),
    "a number on the CPU": (lambda x: x * torch.tensor(2.0), (0, 0)),
    "to where it is": (lambda x: x.to(GPU).cuda().to("cuda").to(torch.float64), (0, 0)),
}
"""An operation, and how often the program waits and copies."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_lies_on_the_wrong_device_is_refused(what: str, gpu: PretendGPU) -> None:
    with pytest.raises(RuntimeError, match="device"):
        REFUSED[what]()


@pytest.mark.parametrize("what", COUNTED)
def test_waits_and_copies_are_counted_by_line(what: str, gpu: PretendGPU) -> None:
    (do, expected), x = COUNTED[what], on_gpu(3)
    before = gpu.events.since(type(gpu.events)())
    do(x)
    events = gpu.events.since(before)
    assert all(line.startswith("testing/test_on_a_gpu.py:") for line in events.waits | events.copies)
    assert (events.waits.total(), events.copies.total()) == expected
