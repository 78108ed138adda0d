"""Local training of a client: minibatch steps with the client's LightningModule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedcommons.core import functional_step, steps
from fedcommons.core.optimizers import Schedulers, plain_step
from fedcommons.core.steps import AddToGrad, Batch, Loss
from fedcommons.core.training_process import TrainingProcess
from fedcommons.data.clients import ClientData
from fedcommons.data.transforms import flip_and_crop
from fedcommons.deprecated import accepts_old_names
from fedcommons.flat_tensors import Flat
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.dp_sgd import DPSGD, PrivateStep
from fedcommons.privacy.release import UNCOVERED, Release
from fedcommons.privacy.weight_guard import Written
from fedcommons.runtime.torch_settings import tf32
from fedcommons.seeding import generator, keyed_besides_torch, set_default_generator

Batches = Callable[[int], Iterator[Any]]
"""Function of an epoch (from 0) that yields, for each step of the epoch, a batch or a list of batches."""

NO_CONTEXT = nullcontext()

Step = steps.PlainStep | steps.AccumulatedStep | steps.ScaledStep | PrivateStep


@accepts_old_names(of="values")
@dataclass(frozen=True)
class Correction:
    """An ``AddToGrad`` that can run for several clients at once; it calls ``function(params, *values)``.

    values: the arguments that differ between clients; ``function`` gets each as a mapping from names to tensors. The
    engine trains clients that have the same ``function`` together, by ``torch.vmap``. So ``function`` may use only
    ``grad`` and ``detach()`` of a parameter.
    """

    function: Callable[..., None]
    values: tuple[Flat, ...]

    def __call__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.function(params, *self._parts)

    @cached_property
    def _parts(self) -> list[dict[str, Tensor]]:
        return [dict(x) for x in self.values]


BARE_GRADIENT = Release(reason="work.gradient has no noise")
"""Privacy ledger entry (release) of a client's gradient over all examples, which no noise protects."""


class LocalResult(NamedTuple):
    """The result of a client's local training."""

    model: Flat  # the worker's buffer, which the next training overwrites; copy it to store or send it
    metrics: Mapping[str, float | Tensor]  # ``loss`` and logged values, averaged over steps; ``steps``: number of steps
    spent: Release  # privacy ledger entry of the model and of data computed from the model only


@dataclass(frozen=True)
class LocalSGD:
    """Settings of local training: E epochs of minibatches in a random order that depends on round, client and epoch.

    With ``dp``, batches are Poisson samples, and the gradients are clipped and noised as in DP-SGD (see ``dp_sgd``).
    """

    epochs: int
    batch_size: int
    drop_last: bool = False  # drop an incomplete last batch, unless it is the only batch
    equal_work: bool = True  # with shared examples, train fewer epochs, so that the number of steps stays about equal
    augment: bool = False
    dp: DPSGD | None = None
    onednn: bool = True  # use oneDNN, which is slower than torch's kernels on images with few pixels
    schedule: Callable[[int], float] | None = None  # round -> factor of all learning rates; None: factor 1
    clip_norm: float | None = None  # maximum norm of a step's gradient, clipped before ``add_to_grad``
    precision: str = "fp32"  # "fp32", "tf32", "bf16" or "fp16-mixed"; the last two use torch.autocast
    accumulate: int = 1  # batches per step; a step uses the gradient of the mean loss over all examples in the batches
    batched: bool = False  # train all clients of a block simultaneously (see ``vmap_clients``)
    graphs: bool = False  # on a GPU, run steps as CUDA graphs (see ``cuda_graphs``)

    def epochs_for(self, n: int, n_own: float | None, share: float = 1.0) -> int:
        """Return a client's number of epochs, E' = max(1, min(E, floor(E n_own / n))), the rule of Fedssyn's authors.

        E is ``epochs``. E' = E if ``equal_work`` is off. A straggler runs  ceil(share E')  epochs, so all of 1 .. E'
        are equally probable for a uniform share.

        Args:
            n: number of training examples, real and shared.
            n_own: number of the client's real examples; None: E' = E.
            share: fraction, in (0, 1], of the work that a straggler does; 1 for other clients.
        """
        epochs = self.epochs
        if self.equal_work and n_own is not None:
            epochs = max(1, min(epochs, int(epochs * n_own / n + 1e-9)))
        return max(1, ceil(share * epochs - 1e-9))

    def steps_for(self, n: int, n_own: float | None) -> int:
        """Return K, the number of steps per round of a client with n training examples, of which ``n_own`` are real."""
        return self.steps_of(n, self.epochs_for(n, n_own))

    def steps_of(self, n: int, epochs: int) -> int:
        """Return the number of steps in ``epochs`` epochs over n examples; under DP-SGD, one per Poisson batch."""
        if self.dp:
            return epochs * self.dp.steps(n, self.batch_size)
        full, remainder = divmod(n, self.batch_size)
        batches = full + (remainder > 0 and not (self.drop_last and full > 0))
        return epochs * -(-batches // self.accumulate)

    def run(
        self,
        work: TrainingProcess,
        start: Flat,
        data: ClientData,
        seed: int,
        *,
        loss: Loss | None = None,
        add_to_grad: AddToGrad | None = None,
        lr: float | None = None,
    ) -> LocalResult:
        """Train a client from the weights ``start``; the arguments are those of ``Work.local``."""
        if data.extra_columns and (loss is None or any(len(column) != len(data) for column in data.extra_columns)):
            raise ValueError("ClientData.extra_columns need a loss function of the method, and a row per example")
        if work.replacement:
            return work.replacement(work, self, start, data, seed, loss or lr, add_to_grad)
        epochs = self.epochs_for(len(data), data.n_own, work.share)
        if work.graphs and loss is None and lr is None and isinstance(add_to_grad, Correction | None):
            work.releases.append(UNCOVERED)
            return work.graphs.train(start, data, seed, add_to_grad, epochs)
        dp = self._client_dp(work, data) if self.dp else None
        work.load(start)
        work.optimizer.state.clear()  # momentum starts at zero, because it must not pass from client to client
        work.set_rates(lr)
        if not work.module.training:
            work.train_mode()
        step, batches = self._choose(work, data, seed, dp, loss, add_to_grad)
        if work.schedulers and lr is None:
            batches = partial(_scheduled, work.schedulers, batches)
        kernels = NO_CONTEXT if torch.backends.mkldnn.enabled == self.onednn else onednn(self.onednn)
        others = keyed_besides_torch(seed) if work.has_user_code else NO_CONTEXT
        set_default_generator(seed, "dropout")
        with work.logged as logged, kernels, tf32() if self.precision == "tf32" else NO_CONTEXT, others:
            if work.hooks:
                losses = work.hooks.train(self, data, seed, epochs, loss, add_to_grad)
            else:
                losses = _take(work, step, batches, epochs, is_own=loss is not None)
        is_moved = work.has_user_code and work.gather()
        mean = losses[0] if len(losses) == 1 else reduce(torch.add, losses) / len(losses)
        n_steps = len(losses) - (step.skipped if isinstance(step, steps.ScaledStep) else 0)
        metrics = {**logged.means, **logged.values(), "loss": mean, "steps": max(1, n_steps)}
        spent = UNCOVERED
        if isinstance(step, PrivateStep):
            spent = step.release(len(losses), work.times_listed(data), is_moved=is_moved)
        work.releases.append(spent)
        return LocalResult(work.params, metrics, spent)

    def _client_dp(self, work: TrainingProcess, data: ClientData) -> DPSGD:
        """Return the client's settings of DP-SGD. Noise for a target epsilon depends on the number of examples."""
        assert self.dp
        if self.dp.target and work.releases:
            raise ValueError("dp.target_epsilon is for one local training of a client in a round, and this is another")
        if self.dp.target and (times := work.times_listed(data)) > 1:
            raise ValueError(f"dp.target_epsilon is for examples that occur once, and one is listed {times} times")
        return self.dp.of_client(len(data), self.batch_size, self.steps_for(len(data), data.n_own))

    def _choose(
        self, work: TrainingProcess, data: ClientData, seed: int, dp: DPSGD | None, own_loss: Loss | None,
        add_to_grad: AddToGrad | None,
    ) -> tuple[Step, Batches]:  # fmt: skip
        """Return the kind of step for a training, and the function that yields an epoch's batches for the step."""
        loss = steps.autocast(own_loss or work.module.training_step, work.device.type, self.precision)
        parameters, update = list(work.named.values()), plain_step(work.optimizer)
        changes: list[steps.Change] = []
        if self.clip_norm is not None:
            changes.append(partial(nn.utils.clip_grad_norm_, parameters, self.clip_norm))
        if add_to_grad:
            changes.append(partial(add_to_grad, work.named))
        if dp:
            gradients = partial(dp.gradients, parameters, loss)
            if dp.at_once > 1 and own_loss is None:
                gradients = partial(
                    dp_sgd_vmap.gradients, dp, functional_step.Step(work.module), work.named, work.logged.add
                )
            draws, guard = work.noise.call("local training", *data.columns), Written(work.params.buffer, work.optimizer)
            changes += [guard.look, update, guard.keep]
            private = PrivateStep(dp, draws, len(data), self.batch_size, gradients, changes, guard)
            return private, partial(self._samples, private, data, seed)
        if self.precision == "fp16-mixed":
            step = steps.AccumulatedStep(loss, parameters, changes, self.accumulate)
            return steps.ScaledStep(step, work.optimizer, work.device.type), partial(self.steps, data, seed)
        changes.append(update)
        if self.accumulate > 1:
            return steps.AccumulatedStep(loss, parameters, changes, self.accumulate), partial(self.steps, data, seed)
        return steps.PlainStep(loss, parameters, changes), partial(self.batches, data, seed)

    def _samples(self, step: PrivateStep, data: ClientData, seed: int, epoch: int) -> Iterator[Any]:
        augment = partial(_flip_and_crop_each, generator(seed, "order", epoch)) if self.augment else None
        return step.samples((*data.columns, *data.extra_columns), augment, epoch)

    def steps(self, data: ClientData, seed: int, epoch: int) -> Iterator[list[Batch]]:
        """Return an iterator over the steps of an epoch, each a list of at most ``accumulate`` batches.

        Args:
            data: training data of a client.
            seed: seed of the client's training.
            epoch: number of the epoch, from 0.
        """
        batches = self.batches(data, seed, epoch)
        return iter(lambda: list(islice(batches, self.accumulate)), [])

    def batches(self, data: ClientData, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch in a random order, which depends on ``seed`` and ``epoch``.

        Args:
            data: training data of a client. A batch has all columns: inputs, labels, weights if there are any, and
                ``extra_columns``.
            seed: seed of the client's training.
            epoch: number of the epoch, from 0.
        """
        n, b, columns = len(data), self.batch_size, (*data.columns, *data.extra_columns)
        if n <= b and not self.augment:
            yield columns  # one batch contains all examples, so the order does not matter
            return
        draws = generator(seed, "order", epoch)
        order = torch.randperm(n, generator=draws).to(data.y.device)
        shuffled = [t.index_select(0, order) for t in columns]  # the batches are views of these tensors
        if self.augment:
            shuffled[0] = flip_and_crop(shuffled[0], draws)
        for first in range(0, n, b):
            if self.drop_last and 0 < first > n - b:
                return
            yield tuple(t[first : first + b] for t in shuffled)


def _take(work: TrainingProcess, step: Step, batches: Batches, epochs: int, *, is_own: bool) -> list[Tensor]:
    """Take the steps of all epochs and return their losses. is_own: the method replaces ``training_step``."""
    losses: list[Tensor] = []
    clock, (first_epoch, first_step) = work.clock, work.started_at
    for epoch in range(epochs):
        for number, batch in enumerate(batches(epoch), len(losses) if is_own else 0):
            clock.current_epoch, clock.global_step = first_epoch + epoch, first_step + len(losses)
            try:
                value = step(batch, number)
            except steps.NoLoss as error:
                what = "the method's loss" if is_own else "training_step"
                raise ValueError(f"{what} gives None for batch {number}: each needs a number") from error
            except Exception as error:
                while not isinstance(batch, Tensor):  # ends with the inputs of the step's first batch
                    batch = batch[0]
                error.add_note(f"step {len(losses)}, batch {tuple(batch.shape)}")
                raise
            losses.append(value.detach())
    return losses


def _scheduled(schedulers: Schedulers, batches: Batches, epoch: int) -> Iterator[Any]:
    """Yield the batches of an epoch; before the epoch and after each batch, step the schedulers that are due."""
    if epoch:
        schedulers.after("epoch", epoch)
    n = 0
    for batch in batches(epoch):
        yield batch
        n += len(batch) if isinstance(batch, list) else 1
        schedulers.after("step", n)


def _flip_and_crop_each(draws: torch.Generator, images: Tensor, seeds: Sequence[int]) -> Tensor:
    if not seeds:
        return flip_and_crop(images, draws)
    each = zip(images.split(1), seeds, strict=True)
    return torch.cat([flip_and_crop(image, generator(seed, "augment")) for image, seed in each])


@contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """Context in which torch uses oneDNN on the CPU if ``enabled``, else torch's kernels, which round differently."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = enabled  # pyright: ignore[reportAttributeAccessIssue]  (a descriptor that takes it)
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def constant(correction: Flat) -> Correction:
    """Return a ``Correction`` that adds ``correction`` to the gradients of the parameters that ``correction`` names."""
    return Correction(_add, (correction,))


def _add(params: Mapping[str, nn.Parameter], correction: Mapping[str, Tensor]) -> None:
    for name, part in correction.items():
        grad = params[name].grad
        if grad is not None:
            grad.add_(part)


def clip_gradients(params: Iterable[nn.Parameter], most: float) -> None:
    """Scale the gradients so that their joint norm is at most ``most``; a ``Correction`` may call this function."""
    parameters = list(params)
    is_vmapped = not isinstance(parameters[0], nn.Parameter)  # vmap cannot run torch's fused implementation
    nn.utils.clip_grad_norm_(parameters, most, foreach=False if is_vmapped else None)
