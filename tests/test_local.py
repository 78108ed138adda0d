"""The one local loop: equal to the obvious one, and nothing of one client reaches another."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcommons import experiment
from fedcommons.core.local import SCALE, LocalSGD
from fedcommons.core.local import onednn as set_onednn
from fedcommons.core.work import Work
from fedcommons.data.augment import flip_and_crop
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import noise_key
from fedcommons.seeds import generator, set_default_generator
from fedcommons.tensors import Flat, flatten
from fedcommons.tensors import copy as copy_of
from fedcommons.testing import Federation, digits, least_squares

CPU = torch.device("cpu")


def _train(local: LocalSGD, federation: Federation, rows: ClientData, seed: int = 5, work: Work | None = None) -> Flat:
    trained, _, _ = local.run(work or federation.work(), federation.model, rows, seed)
    return Flat(trained.layout, trained.buffer.clone())  # the worker's own buffer is the next client's


def _rows(n: int, n_own: int | None = None) -> ClientData:
    """Examples whose first pixel is their number."""
    x = torch.zeros(n, 1, 8, 8, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.arange(n)
    return ClientData(x, torch.arange(n) % 10, n_own=n_own)


def _with_optimizer(federation: Federation, make: Callable[[Any], torch.optim.Optimizer]) -> Federation:
    def module() -> LightningModule:
        one = federation.module()
        one.configure_optimizers = lambda: make(one.parameters())
        return one

    return replace(federation, module=module)


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
    [
        (LocalSGD(3, 6), ""),
        (LocalSGD(3, 6, augment=True), ""),
        (LocalSGD(3, 6), "network.conv1.weight"),
        (LocalSGD(4, 6, precision="bf16"), ""),
        (LocalSGD(4, 6, precision="fp16-mixed"), ""),
    ],
    ids=["plain", "augmented", "frozen", "bf16", "fp16"],
)
def test_equals_the_obvious_loop_bit_for_bit(loop: LocalSGD, frozen: str) -> None:
    federation, seed = _frozen(digits(dropout=0.3, momentum=0.9), frozen), 5
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


def _frozen(federation: Federation, name: str) -> Federation:
    def module() -> LightningModule:
        one = federation.module()
        if name:
            one.get_parameter(name).requires_grad = False
        return one

    return replace(federation, module=module)


@pytest.mark.parametrize(
    ("epochs", "n", "n_own", "equal_work", "share", "expected"),
    [
        (10, 20, 20, True, 1.0, 10),  # nothing shared
        (10, 20, 15, True, 1.0, 7),  # floor(7.5)
        (10, 40, 20, True, 1.0, 5),
        (2, 20, 5, True, 1.0, 1),  # floor(0.5), but at least one
        (10, 20, 0, True, 1.0, 1),
        (10, 20, 30, True, 1.0, 10),
        (10, 20, 5, False, 1.0, 10),
        (10, 20, None, True, 1.0, 10),
        (10, 40, 20, True, 0.5, 3),  # ceil(0.5 * 5)
        (10, 40, 20, True, 0.2, 1),
        (10, 40, 20, True, 0.201, 2),
    ],
)
def test_epochs_shrink_with_shared_data(
    epochs: int, n: int, n_own: int | None, equal_work: bool, share: float, expected: int
) -> None:
    """ceil(share E') with E' = max(1, floor(n_i E/(n_i + n~))) and n = n_i + n~."""
    local, federation = LocalSGD(epochs, 20, equal_work=equal_work), digits()
    assert local.epochs_for(n, n_own, share) == expected
    work = federation.work()
    work.share = share
    assert local.run(work, federation.model, _rows(n, n_own), 0)[1]["steps"] == expected * -(-n // 20)


@pytest.mark.parametrize(
    ("n", "drop_last", "batches"),
    [(10, False, [4, 4, 2]), (10, True, [4, 4]), (8, False, [4, 4]), (8, True, [4, 4]), (3, True, [3]), (4, True, [4])],
)
def test_an_incomplete_last_batch_is_dropped_unless_it_is_the_only_one(
    n: int, drop_last: bool, batches: list[int]
) -> None:
    seen = _batches(LocalSGD(2, 4, drop_last=drop_last), digits(), _rows(n))
    assert list(map(len, seen)) == batches * 2


def test_every_example_is_seen_once_an_epoch_in_an_order_of_its_own() -> None:
    epochs = [
        list(chain.from_iterable(seen[first : first + 3]))
        for seen in (_batches(LocalSGD(2, 5), digits(), _rows(12), seed) for seed in (0, 1))
        for first in (0, 3)
    ]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4  # another for each epoch and each seed


@pytest.mark.parametrize(
    ("optimizer", "precision"), [(None, "fp32"), (None, "bf16"), (None, "fp16-mixed"), (torch.optim.Adam, "fp32")]
)
def test_the_optimizers_state_does_not_pass_from_client_to_client(
    optimizer: type[torch.optim.Adam] | None, precision: str
) -> None:
    federation, local = digits(momentum=0.9, dropout=0.3), LocalSGD(2, 5, precision=precision)
    if optimizer:
        federation = _with_optimizer(federation, lambda p: optimizer(p, 0.01))
    a, b = federation.data.clients[0], federation.data.clients[1]
    alone = _train(local, federation, b)
    after_a = federation.work()
    trained = _train(local, federation, a, work=after_a)
    assert torch.equal(_train(local, federation, b, work=after_a).buffer, alone.buffer)
    assert not torch.equal(trained.buffer, alone.buffer)


def test_dropout_is_keyed_by_the_seed() -> None:
    """With one example there is no order to draw: what differs between seeds is dropout."""
    local, rows = LocalSGD(3, 5), _rows(1)
    wet = digits(dropout=0.5)
    first = _train(local, wet, rows, seed=1)
    torch.rand(7)  # whatever has been drawn before from the generator that dropout uses
    work = wet.work()
    work.module.eval()  # as after an evaluation
    assert torch.equal(_train(local, wet, rows, seed=1, work=work).buffer, first.buffer)
    assert work.module.training
    assert not torch.equal(_train(local, wet, rows, seed=2).buffer, first.buffer)
    dry = digits(dropout=0.0)
    assert torch.equal(_train(local, dry, rows, seed=2).buffer, _train(local, dry, rows, seed=1).buffer)


def test_weights_multiply_the_examples_losses() -> None:
    federation, local = digits(), LocalSGD(2, 4)
    rows = federation.data.clients[0]

    def train(weights: Sequence[float] | None, flip: bool = False, of: Federation = federation) -> Tensor:
        y = torch.cat([(rows.y[:1] + 1) % 10, rows.y[1:]]) if flip else rows.y
        weight = None if weights is None else torch.tensor(weights)
        return _train(local, of, replace(rows, y=y, weight=weight)).buffer

    ones, without_first = [1.0] * 9, [0.0] + [1.0] * 8
    assert torch.allclose(train(ones), train(None), rtol=0, atol=1e-6)
    assert torch.equal(train([2.0] * 9), train(ones, of=digits(lr=0.2)))  # a power of two rounds nothing
    assert not torch.equal(train(ones), train(ones, flip=True))
    assert torch.equal(train(without_first), train(without_first, flip=True))  # the label with weight 0 is not read


def test_the_start_is_left_alone_and_the_result_is_the_workers_buffer() -> None:
    federation = digits()
    work, start = federation.work(), federation.model
    before = start.buffer.clone()
    trained, _, _ = LocalSGD(1, 5).run(work, start, federation.data.clients[0], 0)
    assert torch.equal(start.buffer, before)
    assert trained.buffer.data_ptr() == next(work.module.parameters()).data_ptr()
    assert work.snapshot().buffer.data_ptr() != trained.buffer.data_ptr()
    assert torch.equal(work.snapshot().buffer, trained.buffer)
    with pytest.raises(ValueError, match="names or shapes"):
        work.load(least_squares().federation(0.1).model)


def test_a_rate_of_ones_own_is_for_one_call_only() -> None:
    """Twice the rate is the module with twice the rate; afterwards every call has the module's own again."""
    federation, local = digits(momentum=0.9).training(LocalSGD(2, 5)), LocalSGD(2, 5)
    rows, work = federation.data.clients[1], federation.work()
    own = _train(local, federation, rows)
    double = copy_of(work.local(federation.model, rows, 5, lr=0.2).model)
    assert torch.equal(double.buffer, _train(local, digits(lr=0.2, momentum=0.9), rows).buffer)
    assert work.sgd("a method", momentum=True) == (0.1, 0.9)
    assert torch.equal(work.local(federation.model, rows, 5).model.buffer, own.buffer)
    assert not torch.equal(double.buffer, own.buffer)


def test_a_step_without_a_loss_is_told_and_its_batch_is_not_taken_for_several() -> None:
    federation = digits()
    work, data = Work(federation.module(), torch.device("cpu"), LocalSGD(1, 5)), federation.data.clients[0]
    with pytest.raises(ValueError, match="the method's loss gives None for batch 0"):
        work.local(work.snapshot(), data, 0, loss=lambda batch, step: None)  # pyright: ignore[reportArgumentType]


def test_rates_that_a_hook_changes_are_the_modules_own_again_in_the_next_call() -> None:
    """Of every group of parameters its own; ``lr`` is that of all of them."""

    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": others}], 0.1)

    federation = _with_optimizer(digits(), two_groups)
    rows, work, seen = federation.data.clients[0], federation.work(), []

    def decay(params: object) -> None:
        seen.append([group["lr"] for group in work.optimizer.param_groups])
        for group in work.optimizer.param_groups:
            group["lr"] /= 2

    for lr in (None, 0.8, None):
        work.local(federation.model, rows, 5, add_to_grad=decay, lr=lr)
    assert [seen[call * 4] for call in range(3)] == [[0.3, 0.1], [0.8, 0.8], [0.3, 0.1]]
    assert seen[1] == [0.15, 0.05]


def test_work_has_the_loop_and_the_weighting_of_the_experiment() -> None:
    local, federation = LocalSGD(3, 4), digits()
    rows = federation.data.clients[1]
    plain, weighted = federation.training(local), federation.training(local, "samples")
    trained = plain.work().local(federation.model, rows, 5)
    assert torch.equal(trained.model.buffer, _train(local, federation, rows).buffer)
    assert not trained.spent.covered
    assert (plain.work().weight(rows), weighted.work().weight(rows)) == (1, 16)
    assert (plain.plan(1).facts.total_weight, weighted.plan(1).facts.total_weight) == (5, 64)


class _WithBatchNorm(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_batch_norms_statistics_are_views_over_one_buffer_and_its_counter_starts_anew() -> None:
    work = Work(_WithBatchNorm(), CPU)
    norm = work.module.norm
    assert isinstance(norm, nn.BatchNorm1d)
    norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert isinstance(norm.running_mean, Tensor)
    assert torch.allclose(work.buffers["norm.running_mean"], torch.tensor([0.2, 0.3]))
    assert norm.running_mean.data_ptr() == work.buffers.buffer.data_ptr()
    assert norm.num_batches_tracked == 1
    work.load_buffers(work.initial_buffers)
    assert torch.equal(norm.running_mean, torch.zeros(2))
    assert norm.num_batches_tracked == 0


def test_the_same_module_trains_under_a_plain_trainer(tmp_path: Path) -> None:
    """On the same batches it gets to the same weights."""
    federation, seed = digits(sizes=(40,)), 3
    rows, module = federation.data.clients[0], federation.module()
    orders = [torch.randperm(40, generator=generator(seed, "order", epoch)) for epoch in range(5)]
    batches = [batch.tolist() for order in orders for batch in order.split(8)]
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(rows.x, rows.y), batch_sampler=batches))
    here, _, _ = LocalSGD(5, 8).run(federation.work(), federation.model, rows, seed)
    assert torch.allclose(flatten(dict(module.named_parameters())).buffer, here.buffer, rtol=0, atol=1e-6)
    assert (here.buffer - federation.model.buffer).norm() > 0.1


@pytest.mark.parametrize("onednn", [True, False])
def test_training_has_onednn_as_asked_whatever_is_set_outside(onednn: bool) -> None:
    federation, seen = digits(), []
    work = federation.work()

    def watched(batch: tuple[Tensor, ...], step: int) -> Tensor:
        loss = work.module.training_step(batch, step)
        assert isinstance(loss, Tensor)
        seen.append(torch.backends.mkldnn.enabled)
        loss.register_hook(lambda grad: seen.append(torch.backends.mkldnn.enabled))  # in the backward pass
        return loss

    for outside in (True, False):
        with set_onednn(outside):
            LocalSGD(1, 20, onednn=onednn).run(work, federation.model, _rows(40), 3, loss=watched)
            assert torch.backends.mkldnn.enabled == outside
    assert seen == [onednn] * 8


# Precisions


def test_a_step_that_overflows_is_left_out_and_every_client_begins_its_scale_anew() -> None:
    federation = digits().training(LocalSGD(4, 1000, precision="fp16-mixed"))
    work, data, calls = federation.work(), federation.data.clients[1], list[int]()

    def loss(batch: tuple[Tensor, ...], step: int) -> Any:
        calls.append(step)
        return work.module.training_step(batch, step) * (float("inf") if step == 1 else 1.0)  # pyright: ignore

    found = work.local(federation.model, data, 0, loss=loss)
    first = found.model.buffer.clone()
    assert (calls, found.metrics["steps"]) == ([0, 1, 2, 3], 3)
    assert first.isfinite().all()
    work.local(federation.model, federation.data.clients[2], 0)
    assert torch.equal(work.local(federation.model, data, 0, loss=loss).model.buffer, first)


def test_tf32_holds_in_steps_alone_and_is_fp32_on_a_cpu() -> None:
    federation, found, during = digits(), [], []
    gpus = attrgetter("cuda.matmul", "cudnn.conv", "cudnn.rnn")(torch.backends)
    for precision in ("fp32", "tf32"):
        work = federation.work()

        def loss(batch: tuple[Tensor, ...], step: int, module: Any = work.module) -> Tensor:
            during.append({of.fp32_precision for of in gpus})
            return module.training_step(batch, step)

        before = [of.fp32_precision for of in gpus]
        local = LocalSGD(2, 1000, precision=precision)
        found.append(local.run(work, federation.model, federation.data.clients[1], 0, loss=loss).model.buffer.clone())
        assert [of.fp32_precision for of in gpus] == before
    assert torch.equal(*found)
    assert [each == {"tf32"} for each in during] == [False] * 2 + [True] * 2


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
