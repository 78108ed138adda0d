"""bf16 and fp16-mixed: torch's autocast, the obvious loops, a loss scale that no client leaves to another, refusals."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from fedcommons import experiment
from fedcommons.core.local import SCALE, LocalSGD
from fedcommons.core.work import Work
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import noise_key

if TYPE_CHECKING:
    from fedcommons.testing.federations import Federation

    Digits = Callable[..., Federation]

HALF = {"bf16": torch.bfloat16, "fp16-mixed": torch.float16}
FULL = 1000


def _work(digits: "Digits", precision: str, **more: float) -> "tuple[Federation, Work]":
    federation = digits(**more).training(LocalSGD(4, FULL, precision=precision))
    return federation, federation.work()


@pytest.mark.parametrize("precision", HALF)
def test_equals_the_obvious_loop_bit_for_bit(precision: str, digits: "Digits") -> None:
    federation, work = _work(digits, precision)
    data, module = federation.data.clients[1], federation.module()
    sgd = torch.optim.SGD(module.parameters(), 0.1)
    scale = SCALE if precision == "fp16-mixed" else 1.0
    for _ in range(4):
        sgd.zero_grad()
        with torch.autocast("cpu", HALF[precision]):
            loss = module.training_step(data.columns, 0)
        assert isinstance(loss, Tensor)
        (loss * scale).backward()
        for p in module.parameters():
            assert p.grad is not None
            p.grad /= scale
        sgd.step()
    found = work.local(federation.model, data, 0)
    for name, p in module.named_parameters():
        assert torch.equal(found.model[name], p.detach()), name
    assert found.model.buffer.dtype == torch.float32
    half = found.model.buffer.clone()
    full = _work(digits, "fp32")[1].local(federation.model, data, 0).model.buffer
    assert 0 < float((half - full).norm()) < 0.05 * float((full - federation.model.buffer).norm())


def test_a_step_that_overflows_is_left_out_and_every_client_begins_its_scale_anew(digits: "Digits") -> None:
    federation, work = _work(digits, "fp16-mixed")
    data, calls = federation.data.clients[1], []

    def loss(batch: tuple[Tensor, ...], step: int) -> Tensor:
        calls.append(step)
        value = work.module.training_step(batch, step)
        assert isinstance(value, Tensor)
        return value * (float("inf") if step == 1 else 1.0)

    found = work.local(federation.model, data, 0, loss=loss)
    first = found.model.buffer.clone()
    assert (calls, found.metrics["steps"]) == ([0, 1, 2, 3], 3)
    assert first.isfinite().all()
    work.local(federation.model, federation.data.clients[2], 0)
    assert torch.equal(work.local(federation.model, data, 0, loss=loss).model.buffer, first)


def test_tf32_holds_in_steps_alone_and_is_fp32_on_a_cpu(digits: "Digits") -> None:
    found, during = [], []
    gpus = attrgetter("cuda.matmul", "cudnn.conv", "cudnn.rnn")(torch.backends)
    for precision in ("fp32", "tf32"):
        federation, work = _work(digits, precision)

        def loss(batch: tuple[Tensor, ...], step: int, work: Work = work) -> Tensor:
            during.append({of.fp32_precision for of in gpus})
            value = work.module.training_step(batch, step)
            assert isinstance(value, Tensor)
            return value

        before = [of.fp32_precision for of in gpus]
        found.append(work.local(federation.model, federation.data.clients[1], 0, loss=loss).model.buffer.clone())
        assert [of.fp32_precision for of in gpus] == before
    assert torch.equal(*found)
    assert [each == {"tf32"} for each in during] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("precision", HALF)
def test_workers_of_any_number_have_the_same_bits(precision: str, digits: "Digits") -> None:
    """A client's training does not depend on who was trained before it."""
    federation, work = _work(digits, precision)
    alone = [_work(digits, precision)[1].local(federation.model, d, 3).model.buffer for d in federation.data.clients]
    after = [work.local(federation.model, d, 3).model.buffer.clone() for d in federation.data.clients]
    assert all(torch.equal(a, b) for a, b in zip(alone, after, strict=True))


def test_accumulation_and_the_scale_agree(digits: "Digits") -> None:
    federation = digits(sizes=(5, 40), linear=True)
    found = []
    for loop in (LocalSGD(2, 5, precision="fp16-mixed", accumulate=4), LocalSGD(2, 20, precision="fp16-mixed")):
        found.append(federation.training(loop).work().local(federation.model, federation.data.clients[1], 1).model)
    moved = (found[1].buffer - federation.model.buffer).norm()
    assert (found[0].buffer - found[1].buffer).norm() < 0.01 * moved


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dp.local": True, "client.precision": "fp16-mixed"}, r"client\.precision must be .* with dp\.local"),
        ({"client.precision": "fp8"}, r"unknown client\.precision 'fp8'"),
    ],
)
def test_a_wrong_precision_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(experiment("smoke", values=values))


def test_it_is_another_experiment() -> None:
    keys = {noise_key(experiment("smoke", values={"client.precision": p})) for p in ("fp32", *HALF)}
    assert len(keys) == 3
    assert noise_key(experiment("smoke")) in keys
