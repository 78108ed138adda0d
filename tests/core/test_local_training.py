"""The local loop: it equals a plain loop bit for bit, and no state passes from client to client."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons import ClientData, Flat, LocalSGD, Work, experiment, flatten, generator, set_default_generator
from fedcommons.core.local_training import onednn as set_onednn
from fedcommons.core.steps import SCALE
from fedcommons.data.transforms import flip_and_crop
from fedcommons.runs.build import noise_key
from fedcommons.testing import Federation, digits


def _train(local: LocalSGD, federation: Federation, rows: ClientData, seed: int = 5, work: Work | None = None) -> Flat:
    trained, _, _ = local.run(work or federation.work(), federation.model, rows, seed)
    return Flat(trained.layout, trained.buffer.clone())  # the worker's own buffer is the next client's


def _rows(n: int, n_own: int | None = None) -> ClientData:
    """Examples whose first pixel is their number."""
    x = torch.zeros(n, 1, 8, 8, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.arange(n)
    return ClientData(x, torch.arange(n) % 10, n_own=n_own)


def _changed(federation: Federation, change: Callable[[Any], object]) -> Federation:
    """Return the federation with a change of its module."""

    def module() -> LightningModule:
        net = federation.module()
        change(net)
        return net

    return replace(federation, module=module)


def _with_optimizer(federation: Federation, make: Callable[[Any], torch.optim.Optimizer]) -> Federation:
    return _changed(federation, lambda net: setattr(net, "configure_optimizers", lambda: make(net.parameters())))


def _batches(local: LocalSGD, federation: Federation, rows: ClientData, seed: int = 5) -> list[list[int]]:
    """The numbers of the examples in each batch of a training."""
    work, seen = federation.work(), list[list[int]]()

    def loss(batch: tuple[Tensor, ...], number: int) -> Any:
        seen.append(batch[0][:, 0, 0, 0].tolist())
        return work.module.training_step(batch, number)

    local.run(work, federation.model, rows, seed, loss=loss)
    return seen


HALF = {"bf16": torch.bfloat16, "fp16-mixed": torch.float16}


@pytest.mark.parametrize(
    ("loop", "frozen"),
    [(LocalSGD(3, 6), ""), (LocalSGD(3, 6, augment=True), ""), (LocalSGD(3, 6), "network.conv1.weight"),
     (LocalSGD(4, 6, precision="bf16"), ""), (LocalSGD(4, 6, precision="fp16-mixed"), "")],
    ids=["plain", "augmented", "frozen", "bf16", "fp16"],
)  # fmt: skip
def test_equals_the_obvious_loop_bit_for_bit(loop: LocalSGD, frozen: str) -> None:
    federation, seed = digits(dropout=0.3, momentum=0.9), 5
    if frozen:
        federation = _changed(federation, lambda net: net.get_parameter(frozen).requires_grad_(False))
    rows, module, losses = federation.data.clients[3], federation.module(), []
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
    set_default_generator(seed, "dropout")
    cast, scale = HALF.get(loop.precision), SCALE if loop.precision == "fp16-mixed" else 1.0
    for epoch in range(loop.epochs):
        draws = generator(seed, "order", epoch)
        order = torch.randperm(20, generator=draws)
        images = flip_and_crop(rows.x[order], draws) if loop.augment else rows.x[order]
        for batch in torch.arange(20).split(6):
            with torch.autocast("cpu", cast) if cast else nullcontext():
                loss = nn.functional.cross_entropy(module(images[batch]), rows.y[order][batch])
            optimizer.zero_grad()
            (loss * scale).backward()
            for p in named.values():
                p.grad = p.grad / scale  # pyright: ignore[reportOptionalOperand]
            optimizer.step()
            losses.append(loss.item())
    trained, metrics, _ = loop.run(federation.work(), federation.model, rows, seed)
    assert torch.equal(trained.buffer, flatten(named).buffer)
    assert trained.buffer.dtype == torch.float32
    assert metrics["steps"] == 4 * loop.epochs
    assert float(metrics["loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    if frozen:
        assert frozen not in trained
    elif not loop.augment:  # half precision rounds a little
        full, _, _ = replace(loop, precision="fp32").run(federation.work(), federation.model, rows, seed)
        assert (float((full.buffer - flatten(named).buffer).norm()) > 0) == (cast is not None)
        assert (full.buffer - flatten(named).buffer).norm() < 0.1 * (full.buffer - federation.model.buffer).norm()


@pytest.mark.parametrize(
    ("epochs", "n", "n_own", "equal_work", "share", "expected"),
    [
        (10, 20, 15, True, 1.0, 7),  # floor(7.5)
        (2, 20, 5, True, 1.0, 1),  # floor(0.5), but at least one
        (10, 20, 30, True, 1.0, 10), (10, 20, 5, False, 1.0, 10), (10, 20, None, True, 1.0, 10),
        (10, 40, 20, True, 0.5, 3),  # ceil(0.5 * 5)
        (10, 40, 20, True, 0.2, 1), (10, 40, 20, True, 0.201, 2),
    ],
)  # fmt: skip
def test_epochs_shrink(epochs: int, n: int, n_own: int | None, equal_work: bool, share: float, expected: int) -> None:
    """ceil(share E') with E' = max(1, floor(n_i E/(n_i + n~))) and n = n_i + n~."""
    local, federation = LocalSGD(epochs, 20, equal_work=equal_work), digits()
    assert local.epochs_for(n, n_own, share) == expected
    work = federation.work()
    work.share = share
    assert local.run(work, federation.model, _rows(n, n_own), 0)[1]["steps"] == expected * -(-n // 20)


@pytest.mark.parametrize(
    ("n", "drop_last", "batches"), [(12, False, [5, 5, 2]), (12, True, [5, 5]), (10, True, [5, 5]), (3, True, [3])]
)
def test_batches_are_a_new_order_in_every_epoch(n: int, drop_last: bool, batches: list[int]) -> None:
    """An incomplete batch stays if it is the only one."""
    epochs = set()
    for seed in (0, 1):
        seen = _batches(LocalSGD(2, 5, drop_last=drop_last), digits(), _rows(n), seed)
        assert list(map(len, seen)) == batches * 2
        for epoch_batches in (seen[: len(batches)], seen[len(batches) :]):
            order = [number for batch in epoch_batches for number in batch]
            assert len(set(order)) == len(order) == sum(batches)
            epochs.add(tuple(order))
    assert len(epochs) == 4 or n == 3


@pytest.mark.parametrize("adam", [False, True])
def test_the_optimizers_state_does_not_pass_from_client_to_client(adam: bool) -> None:
    federation, local = digits(momentum=0.9, dropout=0.3), LocalSGD(2, 5)
    if adam:
        federation = _with_optimizer(federation, lambda p: torch.optim.Adam(p, 0.01))
    a, b = federation.data.clients[0], federation.data.clients[1]
    alone = _train(local, federation, b)
    after_a = federation.work()
    trained = _train(local, federation, a, work=after_a)
    assert torch.equal(_train(local, federation, b, work=after_a).buffer, alone.buffer)
    assert not torch.equal(trained.buffer, alone.buffer)


def test_a_rate_of_one_call_and_rates_that_a_hook_changes_hold_in_that_call_only() -> None:
    """Each group of parameters has its own rate again; ``lr`` is the rate of all groups."""

    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": others}], 0.1)

    federation = _with_optimizer(digits(), two_groups).training(LocalSGD(2, 5, schedule=lambda round: 1 / round))
    work, seen = federation.work(), []
    work.begin(2, federation.data.clients[0])

    def decay(params: object) -> None:
        seen.append([group["lr"] for group in work.optimizer.param_groups])
        for group in work.optimizer.param_groups:
            group["lr"] /= 2

    for lr in (None, 0.8, None):
        work.local(federation.model, federation.data.clients[0], 5, add_to_grad=decay, lr=lr)
    assert [seen[call * 4] for call in range(3)] == [[0.15, 0.05], [0.8, 0.8], [0.15, 0.05]]
    assert seen[1] == [0.075, 0.025]
    work.begin(0)  # a job outside rounds
    assert work.rates == [0.3, 0.1]


@pytest.mark.parametrize(("onednn", "precision"), [(True, "fp32"), (False, "tf32")])
def test_onednn_and_tf32_hold_in_steps_alone(onednn: bool, precision: str) -> None:
    federation, seen = digits(), []
    work, gpus = federation.work(), attrgetter("cuda.matmul", "cudnn.conv", "cudnn.rnn")(torch.backends)

    def now() -> tuple[bool, set[str]]:
        return bool(torch.backends.mkldnn.enabled), {gpu.fp32_precision for gpu in gpus}

    def watched(batch: tuple[Tensor, ...], step: int) -> Any:
        loss: Any = work.module.training_step(batch, step)
        loss.register_hook(lambda grad: seen.append(now()))  # in the backward pass
        seen.append(now())
        return loss

    for outside in (True, False):
        with set_onednn(outside):
            before = now()
            LocalSGD(1, 20, onednn=onednn, precision=precision).run(work, federation.model, _rows(40), 3, loss=watched)
            assert now() == before
    assert [enabled for enabled, _ in seen] == [onednn] * 8
    assert [precisions == {"tf32"} for _, precisions in seen] == [precision == "tf32"] * 8


def test_a_step_that_overflows_is_left_out_and_every_client_begins_its_scale_anew() -> None:
    federation = digits().training(LocalSGD(4, 1000, precision="fp16-mixed"))
    work, data, calls = federation.work(), federation.data.clients[1], list[int]()

    def loss(batch: tuple[Tensor, ...], step: int) -> Any:
        calls.append(step)
        return work.module.training_step(batch, step) * (float("inf") if step == 1 else 1.0)  # pyright: ignore

    result = work.local(federation.model, data, 0, loss=loss)
    first = result.model.buffer.clone()
    assert (calls, result.metrics["steps"]) == ([0, 1, 2, 3], 3)
    assert first.isfinite().all()
    work.local(federation.model, federation.data.clients[2], 0)
    assert torch.equal(work.local(federation.model, data, 0, loss=loss).model.buffer, first)


@pytest.mark.parametrize(("is_own", "first"), [(False, 0), (True, 6)])
def test_a_batch_number_counts_steps_of_the_epoch_and_for_a_methods_loss_all_steps(is_own: bool, first: int) -> None:
    """The second epoch's first batch has the number 0 in the epoch; there are 3 steps of 2 batches before it."""
    federation, numbers = digits().training(LocalSGD(2, 4, accumulate=2)), list[int]()
    work = federation.work()
    train: Any = work.module.training_step

    def loss(batch: tuple[Tensor, ...], number: int) -> Any:
        numbers.append(number)
        return train(batch, number)

    work.module.training_step = loss
    work.local(federation.model, _rows(20), 0, loss=loss if is_own else None)
    assert numbers == [0, 1, 2, 3, 4, *range(first, first + 5)]


def test_precisions_are_different_experiments() -> None:
    assert len({noise_key(experiment("smoke", values={"client.precision": p})) for p in ("fp32", *HALF)}) == 3
