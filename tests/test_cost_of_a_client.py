"""What the engine itself does for a client of one small step, counted in calls, as seconds differ from run to run; and
that its plain step of the optimizer is the optimizer's step.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fedcommons
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.local import LocalSGD
from fedcommons.core.plain_step import plain_step
from fedcommons.core.work import Work
from fedcommons.federation import rounds

if TYPE_CHECKING:
    from conftest import Federation

    Digits = Callable[..., Federation]

CALLS = 230
"""Of a client of one step. There are 220; nobody noticed when there were 35 more."""

REGION = "Optimizer.step#SGD.step"
"""What torch's profiler shows of a step."""


def _calls(play: Callable[[], object]) -> int:
    """Calls by our functions and of them, and those of the dataclasses' generated ones."""
    ours, found = str(Path(fedcommons.__file__).parent), 0

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal found
        file = frame.f_code.co_filename
        found += event in ("call", "c_call") and (file.startswith(ours) or file in ("<string>", dataclasses.__file__))

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        play()
    finally:
        sys.setprofile(before)
    return found


def test_a_client_costs_few_calls(digits: "Digits") -> None:
    found = []
    for clients in (10, 30):
        federation = digits(sizes=[5] * clients, linear=True).training(LocalSGD(1, 5))
        algorithm, plan = FedAvg(), federation.plan(3)
        course = rounds.run(algorithm, federation.serial(algorithm), plan, federation.start(algorithm, plan))
        next(course)  # what is done once a run
        found.append(_calls(lambda course=course: next(course)))
    assert (found[1] - found[0]) / 20 < CALLS, found


def _train(work: Work, federation: "Federation") -> Tensor:
    """Three steps of client 1."""
    return work.local(federation.model, federation.data.clients[1], seed=3).model.buffer.clone()


def _one_epoch(digits: "Digits", **more: float) -> "Federation":
    return digits(**more).training(LocalSGD(1, 6))  # client 1 has 16 examples


def test_no_step_enters_the_profilers_region(digits: "Digits") -> None:
    federation = _one_epoch(digits)
    work = federation.work()
    with torch.profiler.profile() as profile:
        _train(work, federation)
    assert not [event.name for event in profile.events() or () if event.name == REGION]


def test_the_plain_step_has_the_same_bits(digits: "Digits", monkeypatch: pytest.MonkeyPatch) -> None:
    federation = _one_epoch(digits, momentum=0.9)
    plain = _train(federation.work(), federation)
    monkeypatch.setattr("fedcommons.core.local.plain_step", lambda optimizer: optimizer.step)
    assert torch.equal(plain, _train(federation.work(), federation))


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_the_optimizer_are_called_at_every_step(of_all: bool, before: bool, digits: "Digits") -> None:
    federation, calls = _one_epoch(digits), []
    work = federation.work()
    register = {
        (False, False): work.optimizer.register_step_post_hook,
        (False, True): work.optimizer.register_step_pre_hook,
        (True, False): register_optimizer_step_post_hook,
        (True, True): register_optimizer_step_pre_hook,
    }[of_all, before]
    _train(work, federation)
    hook = register(lambda *_: calls.append(1))
    try:
        _train(work, federation)
    finally:
        hook.remove()
    _train(work, federation)
    assert len(calls) == 3


def test_steps_that_others_wrap_are_taken_as_they_are() -> None:
    """By a schedule in the optimizer itself, and by a class whose ``step`` says that it is torch's."""
    taken = []
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # torch wraps a class's step when it makes the first one

    class Counted(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, *args: Any, **options: Any) -> Any:
            taken.append("class")
            return super().step(*args, **options)

    plain_step(Counted([torch.zeros(1)], lr=0.1))()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    own: Any = optimizer.step
    optimizer.step = lambda *args: (taken.append("instance"), own(*args))  # pyright: ignore[reportAttributeAccessIssue]
    plain_step(optimizer)()
    assert taken == ["class", "instance"]


def test_an_optimizer_of_ones_own_is_stepped_without_gradients() -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.sub_(parameter.grad)

    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), 0.25)
    plain_step(Own([weight], {}))()
    assert weight.tolist() == [0.75, 0.75]
