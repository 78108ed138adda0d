"""LightningModule hooks in local training: Lightning's calls and bits, nothing kept from client to client, refusals."""

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from fedcommons import ClientData, Flat, Work, flatten, set_default_generator
from fedcommons.core import hooks
from fedcommons.core.evaluation import judged
from fedcommons.core.local_training import LocalSGD, constant

CPU = torch.device("cpu")
DRAWS = torch.Generator().manual_seed(0)
DATA = ClientData(torch.randn(8, 3, generator=DRAWS), torch.randn(8, generator=DRAWS))
OTHER = ClientData(torch.randn(6, 3, generator=DRAWS), torch.randn(6, generator=DRAWS))


class Net(LightningModule):
    """Least squares with dropout; a step also depends on the place of the batch in its epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(nn.functional.dropout(x, 0.2, self.training))[:, 0]

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return (1 + batch_idx) * (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)
        return {"optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)}


def train(module: LightningModule, loop: LocalSGD, *clients: ClientData, correction: Flat | None = None) -> Tensor:
    """Train these clients one after another in one process and return the last one's weights."""
    work, trained = Work(module, CPU, loop), torch.zeros(0)
    for data in clients:
        work.begin(1, data)
        add = None if correction is None else constant(correction)
        trained = work.local(work.initial, data, 7, add_to_grad=add).model.buffer.clone()
    return trained


def recording(names: tuple[str, ...]) -> type[Net]:
    """Return a class that notes each call of these methods: arguments, clock and learning rate."""

    def plain(value: Any) -> Any:
        return value if isinstance(value, int | float | str) else None

    def noted(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            rate = [group["lr"] for group in self.sgd.param_groups] if hasattr(self, "sgd") else None
            called = name, [plain(x) for x in args], {k: plain(v) for k, v in options.items()}
            self.calls.append((*called, self.current_epoch, self.global_step, rate))
            return getattr(Net, name)(self, *args, **options)

        return method

    def configure_optimizers(self: Any) -> Any:
        configured = Net.configure_optimizers(self)
        self.sgd = configured["optimizer"]
        return configured

    methods = {name: noted(name) for name in names}
    return type("Recording", (Net,), {"calls": [], **methods, "configure_optimizers": configure_optimizers})


NO_TRANSFER = [name for name in hooks.CALLED if name not in hooks.TRANSFER]
ALL = ("prepare_data", "setup", "configure_model", "training_step", *NO_TRANSFER)


class _Epochs:
    def __init__(self, loop: LocalSGD, module: LightningModule) -> None:
        self.loop, self.module = loop, module

    def __iter__(self) -> Iterator[Any]:
        return self.loop.batches(DATA, 7, self.module.current_epoch)

    def __len__(self) -> int:
        return 4


@pytest.mark.filterwarnings("ignore")  # of a Trainer for so few examples
@pytest.mark.parametrize(
    ("names", "accumulate", "clip"),
    [(ALL, 2, 0.5), (hooks.TRANSFER, 1, 0.5)],
    ids=["all, accumulated and clipped", "transfer"],
)
def test_calls_and_bits_are_those_of_the_trainer(
    names: tuple[str, ...], accumulate: int, clip: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    loop = LocalSGD(2, 2, accumulate=accumulate, clip_norm=clip)
    ours, theirs = recording(names)(), recording(names)()
    trained = train(ours, loop, DATA)
    caplog.set_level(logging.ERROR, "pytorch_lightning")
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate, gradient_clip_val=clip,
    )  # fmt: skip

    class Seeded(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            set_default_generator(7, "dropout")

    trainer.callbacks.append(Seeded())  # pyright: ignore[reportAttributeAccessIssue]
    trainer.fit(theirs, _Epochs(loop, theirs))
    assert vars(type(theirs))["calls"] == vars(type(ours))["calls"] != []
    assert torch.equal(trained, flatten(dict(theirs.named_parameters())).buffer)


@pytest.mark.parametrize("name", NO_TRANSFER)
def test_a_hook_that_changes_nothing_changes_no_bit(name: str) -> None:
    loop = LocalSGD(3, 3, clip_norm=0.3)
    for correction in (None, flatten({"net.weight": torch.full((1, 3), 0.7)})):
        if correction is None or name not in hooks.CLIPPING:  # a module's own clipping comes after the correction
            plain = train(Net(), loop, DATA, OTHER, correction=correction)
            assert torch.equal(train(recording((name,))(), loop, DATA, OTHER, correction=correction), plain)


class Keeps(Net):
    """Its hooks leave state of every kind on module, optimizer and parameters; all of it moves the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen, self.table = 0, [0.0], {"scale": torch.ones(())}
        self.register_buffer("far", torch.zeros(3), persistent=False)
        self.extra: Any = None
        self.net.bias.age = 0  # pyright: ignore[reportAttributeAccessIssue]

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        self.halving, configured["optimizer"].steps = configured["lr_scheduler"], 0
        return configured

    def on_train_start(self) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())
        self.net.weight.register_hook(lambda grad: grad * 1.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.seen.append(float(batch[0].sum()))
        self.table["scale"] += 0.1
        self.far += 0.1
        self.net.bias.age += 1  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizers().steps += 1  # pyright: ignore

    def on_train_epoch_end(self) -> None:
        self.net.bias.requires_grad_(False)
        self.optimizers().param_groups[0]["momentum"] = 0.9  # pyright: ignore
        self.extra = nn.Linear(2, 2)  # a submodule that was not there

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.called = getattr(self, "called", 0) + 1
        factor = (self.called + self.steps + sum(self.seen)) * self.table["scale"] + self.far.sum()  # pyright: ignore
        factor = factor + self.net.bias.age + self.optimizers(False).steps + self.halving.last_epoch  # pyright: ignore
        return factor * super().training_step(batch, batch_idx) / 100 + (0 if self.extra is None else 1e-3)


def test_nothing_that_a_hook_keeps_reaches_the_next_client() -> None:
    """Nor what its ``training_step`` keeps outside of local training."""
    loop = LocalSGD(2, 3)
    alone = train(Keeps(), loop, OTHER)
    assert torch.equal(train(Keeps(), loop, DATA, OTHER, OTHER), alone)
    assert not torch.equal(alone, train(Net(), loop, OTHER))
    work = Work(Keeps(), CPU, loop)
    work.gradient(work.initial, DATA)
    work.begin(1, OTHER)
    for parameter in work.module.parameters():
        parameter.grad = torch.ones_like(parameter)  # as a validation_step that differentiates
    assert torch.equal(work.local(work.initial, OTHER, 7).model.buffer, alone)


def test_draws_of_numpy_and_python_are_keyed_and_moved_weights_are_kept() -> None:
    class Odd(Net):
        def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(self.parameters()) * 0.9, self.parameters())
            return (1 + np.random.rand() + random.random()) * super().training_step(batch, batch_idx)  # noqa: NPY002

    before = random.getstate()
    first = train(Odd(), LocalSGD(2, 4), DATA, OTHER)
    assert random.getstate() == before
    random.seed(3)
    assert torch.equal(train(Odd(), LocalSGD(2, 4), OTHER), first)
    assert not torch.equal(first, flatten(dict(Odd().named_parameters())).buffer)


def test_hooks_see_the_corrected_gradient_and_an_optimizer_gets_its_closure() -> None:
    class Clips(Net):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.clamp_(-0.01, 0.01)

    class Twice(torch.optim.SGD):
        """Steps with the gradient at the weights to which a step has led, as SAM does."""

        def step(self, closure: Any = None) -> Any:
            assert closure is not None
            closure()
            super().step()
            return super().step(closure)

    class Sharp(Net):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None: ...

        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), 0.1)

    trained = train(Clips(), LocalSGD(1, 8), DATA, correction=flatten({"net.weight": torch.full((1, 3), 1e3)}))
    assert (trained[:3] - flatten(dict(Net().named_parameters())).buffer[:3]).abs().max() <= 0.1 * 0.01 + 1e-6
    plain = Net().eval()
    plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), 0.1)
    assert torch.equal(train(Sharp().eval(), LocalSGD(1, 8), DATA), train(plain, LocalSGD(2, 8), DATA))


def test_a_transferred_batch_precedes_evaluation_too_and_minus_one_skips_an_epoch() -> None:
    class Judged(Net):
        def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
            return {"loss": (self(batch[0]) - batch[1]).square().mean()}

    class Scales(Judged):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 2, *batch[1:]

    class ByItself(Judged):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    loop = LocalSGD(1, 8)
    works = [Work(module().eval(), CPU, loop) for module in (Scales, ByItself)]
    there, here = (judged(work, DATA.x, DATA.y, 0, 0) for work in works)
    assert there == here
    assert torch.equal(*(work.gradient(work.initial, DATA).buffer for work in works))
    assert torch.equal(train(Scales(), loop, DATA), train(ByItself(), loop, DATA))
    skips = type("Skips", (Net,), {"on_train_batch_start": lambda self, batch, at: -1 if at == 1 else None})
    work = Work(skips(), CPU, LocalSGD(3, 2))
    work.begin(1, DATA)
    assert work.local(work.initial, DATA, 7).metrics["steps"] == 3  # -1 skips the rest of an epoch


@pytest.mark.parametrize(
    ("hook", "word"),
    [({"on_train_batch_start": lambda self, batch, at: -1}, "no step"),
     ({"optimizer_step": lambda self, epoch, at, optimizer, closure: None}, "closure"),
     ({"on_train_start": lambda self: self.net.requires_grad_(True)}, "unfreezes net.bias"),
     ({"on_train_start": lambda self: setattr(self.trainer, "should_stop", True)}, "should_stop"),
     ({"training_step": lambda self, batch, at: None}, "training_step gives None for batch 0")],
)  # fmt: skip
def test_a_hook_that_cannot_be_served_is_named(hook: dict[str, Any], word: str) -> None:
    module = type("Wrong", (Net,), hook)()
    if "unfreezes" in word:
        module.net.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=word):
        train(module, LocalSGD(1, 2), DATA)


def test_every_hook_of_lightning_is_called_or_refused_or_of_no_fit() -> None:
    beginnings = ("on_", "configure_", "optimizer_", "lr_scheduler_")
    of_lightning = {name for name in dir(LightningModule) if name.startswith(beginnings)}
    of_lightning |= {"setup", "teardown", "prepare_data", "backward", "clip_gradients", "transfer_batch_to_device"}
    once = {"configure_optimizers", "configure_callbacks", "configure_model", "prepare_data", "setup"}
    of_no_fit = {n for n in of_lightning if n.startswith(("on_test_", "on_predict_"))} | {"on_gpu"}
    assert of_lightning - once - of_no_fit == {*hooks.CALLED, *hooks.REFUSED} & of_lightning
