"""Local training of a client: minibatch steps with the client's LightningModule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from fedcommons.core.functional_step import Step
from fedcommons.core.optimizers import plain_step
from fedcommons.core.training_process import TrainingProcess
from fedcommons.data.clients import ClientData
from fedcommons.data.transforms import flip_and_crop
from fedcommons.deprecated import accepts_old_names
from fedcommons.flat_tensors import Flat
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import Draws
from fedcommons.privacy.release import UNCOVERED, Release
from fedcommons.privacy.weight_guard import WRITTEN, Written
from fedcommons.runtime.torch_settings import tf32
from fedcommons.seeding import generator, keyed_besides_torch, set_default_generator

Batch = tuple[Tensor, ...]
"""(inputs, labels) or (inputs, labels, weights); a method's loss function also gets ``ClientData.extra_columns``."""

Loss = Callable[[Batch, int], Tensor]
"""Function of (batch, step number) that returns the loss. A loss function of a method calls ``training_step`` itself.

Additional forward passes must run in evaluation mode, in which no random numbers are drawn. So dropout in the training
step has the same random numbers as without additional passes.
"""

AddToGrad = Callable[[Mapping[str, nn.Parameter]], None]
"""Function that changes the gradients of the named parameters between the backward pass and the optimizer's step."""


@accepts_old_names(of="values")
@dataclass(frozen=True)
class Correction:
    """An ``AddToGrad`` that can run for several clients at once; it calls ``function(params, *values)``.

    values: the arguments that differ between clients; the function gets each as a mapping from names to tensors. The
    engine trains clients with equal functions together, by ``torch.vmap``. So the function may use only ``grad`` and
    ``detach()`` of a parameter.
    """

    function: Callable[..., None]
    values: tuple[Flat, ...]

    def __call__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.function(params, *self._parts)

    @cached_property
    def _parts(self) -> list[dict[str, Tensor]]:
        return [dict(x) for x in self.values]


KINDS = {"bf16": torch.bfloat16, "fp16-mixed": torch.float16}
"""Value of ``LocalSGD.precision`` -> number type for ``torch.autocast``."""

SCALE = 1024.0
"""Initial factor of the loss in a local training in fp16; the ``GradScaler`` halves it when a gradient overflows."""

BARE_GRADIENT = Release(reason="work.gradient has no noise")
"""Privacy ledger entry (release) of a client's gradient over all examples, which no noise protects."""


class LocalResult(NamedTuple):
    """The result of a client's local training."""

    model: (
        Flat  # the worker's buffer, which the next training overwrites; copy it to store it or to send it in ``each``
    )
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
    equal_work: bool = True  # reduces the epochs if examples are shared, to about the number of steps without sharing
    augment: bool = False
    dp: DPSGD | None = None
    onednn: bool = True  # use oneDNN, which is slower than torch's kernels on images with few pixels
    schedule: Callable[[int], float] | None = None  # round -> factor of all learning rates; None: factor 1
    clip_norm: float | None = None  # maximum norm of a step's gradient, clipped before ``add_to_grad``
    precision: str = "fp32"  # "fp32", "tf32", "bf16" or "fp16-mixed"; the last two: autocast, with float32 weights
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
        """Train a client from the weights ``start``; the arguments are those of ``Work.local``.

        ``loss`` gets the number of the step in this training. ``training_step`` gets the batch's index in the epoch.
        """
        if data.extra_columns and (loss is None or any(len(column) != len(data) for column in data.extra_columns)):
            raise ValueError(
                "ClientData.extra_columns need a loss function of the method, and one row per example of the client"
            )
        if work.replacement:
            return work.replacement(work, self, start, data, seed, loss or lr, add_to_grad)
        if work.graphs and loss is None and lr is None and isinstance(add_to_grad, Correction | None):
            work.releases.append(UNCOVERED)
            return work.graphs.train(start, data, seed, add_to_grad, self.epochs_for(len(data), data.n_own, work.share))
        module, optimizer, parameters = work.module, work.optimizer, list(work.named.values())
        step_loss: Loss = loss or module.training_step  # pyright: ignore[reportAssignmentType]
        if self.precision in KINDS:
            step_loss = autocast(step_loss, work.device.type, KINDS[self.precision])
        scaler = GradScaler(work.device.type, init_scale=SCALE) if self.precision == "fp16-mixed" else None
        dp = self._private(work, data) if self.dp else None
        work.load(start)
        optimizer.state.clear()  # momentum starts at zero, because it must not pass from client to client
        work.set_rates(lr)
        schedulers, last = work.schedulers if lr is None else None, 0
        if not module.training:
            work.train_mode()
        losses: list[Tensor] = []
        protections: set[Release] = set()
        n = len(data)
        epochs, clock, (first_epoch, first_step) = (
            self.epochs_for(n, data.n_own, work.share),
            work.clock,
            work.started_at,
        )
        private = work.noise.call("local training", *data.columns) if self.dp else None
        set_default_generator(seed, "dropout")
        is_plain, skipped = self.accumulate == 1 and not scaler, 0
        value: Any = 0.0
        steps: Callable[..., Iterator[Any]] = self.batches if is_plain else self.steps
        if private:
            steps = partial(self._samples, private)
        plain = range(0 if work.hooks else epochs)  # no epoch runs here if ``Hooks.train`` trains the module
        batches = ((epoch, at, b) for epoch in plain for at, b in enumerate(steps(data, seed, epoch)))
        step, written = plain_step(optimizer), Written(work.params.buffer, optimizer) if self.dp else None
        kernels = nullcontext() if torch.backends.mkldnn.enabled == self.onednn else onednn(self.onednn)
        others = keyed_besides_torch(seed) if work.has_user_code else nullcontext()
        with work.logged as logged, kernels, tf32() if self.precision == "tf32" else nullcontext(), others:
            if work.hooks:
                losses += work.hooks.train(self, data, seed, epochs, step_loss, add_to_grad, is_own=loss is not None)
            for epoch, at, batch in batches:
                if schedulers and epoch != last:
                    schedulers.after("epoch", epoch)
                    last = epoch
                clock.current_epoch, clock.global_step = first_epoch + epoch, first_step + len(losses)
                number = len(losses) if loss else at
                if written:
                    written.begin()
                try:
                    if dp and private:
                        batch, seeds = batch
                        expected, noise = min(self.batch_size, n), private.stream("noise", len(losses))
                        if dp.at_once > 1 and loss is None:
                            total, sums = dp_sgd_vmap.of_step(dp, Step(module), work.named, batch, number)
                            value = sums.pop("loss") / max(len(batch[1]), 1)
                            logged.add(sums, len(batch[1]))
                            protections.add(dp.put(total, parameters, expected, noise))
                        else:
                            result = dp.gradients(parameters, step_loss, batch, number, expected, noise, seeds)
                            value = result[0]
                            protections.add(result[1])
                    else:
                        if is_plain:
                            value = step_loss(batch, number)
                        for parameter in parameters:  # faster than zero_grad, which torch wraps in profiling
                            parameter.grad = None
                        if is_plain:
                            value.backward()
                        else:
                            value = self._accumulated(step_loss, batch, number, scaler)
                    if scaler:
                        scaler.unscale_(optimizer)
                    if self.clip_norm is not None:
                        nn.utils.clip_grad_norm_(parameters, self.clip_norm)
                    if add_to_grad:
                        add_to_grad(work.named)
                    if written:
                        written.look()
                    if scaler:
                        skipped += _skipped(scaler, optimizer)
                    else:
                        step()
                    if written:
                        written.keep()
                except Exception as error:
                    if is_plain and value is None:
                        what = "the method's loss" if loss else "training_step"
                        raise ValueError(f"{what} gives None for batch {number}: each needs a number") from error
                    first = batch[0] if is_plain else batch[0][0]
                    error.add_note(f"step {len(losses)}, batch {tuple(first.shape)}")
                    raise
                losses.append(value.detach())
                if schedulers:
                    schedulers.after("step", at * self.accumulate + (1 if is_plain else len(batch)))
        is_moved = work.has_user_code and work.gather()
        mean = losses[0] if len(losses) == 1 else reduce(torch.add, losses) / len(losses)
        metrics = {**logged.means, **logged.values(), "loss": mean, "steps": max(1, len(losses) - skipped)}
        listed = work.times_listed(data) if self.dp else 1
        uncovered = written and (written.unprotected or (WRITTEN if is_moved else None))
        spent = uncovered or self._spent(protections, n, len(losses), listed)
        work.releases.append(spent)
        return LocalResult(work.params, metrics, spent)

    def _private(self, work: TrainingProcess, data: ClientData) -> DPSGD:
        """Return DP-SGD's settings for this client; with a target epsilon, the noise depends on the client.

        Raises:
            ValueError: a target epsilon is set, but the client has already trained in this round, or ``data`` contain
                an example several times. Epsilon would then be larger than the target.
        """
        assert self.dp
        if self.dp.target and work.releases:
            raise ValueError("dp.target_epsilon is for one local training of a client in a round, and this is another")
        if self.dp.target and (times := work.times_listed(data)) > 1:
            raise ValueError(
                f"dp.target_epsilon is for examples that occur once, and an example is listed {times} times"
            )
        return self.dp.of_client(len(data), self.batch_size, self.steps_for(len(data), data.n_own))

    def _spent(self, protections: set[Release], n: int, steps: int, listed: int) -> Release:
        """Return one privacy ledger entry (release) for all steps; without a guarantee if the steps' releases differ.

        protections: the different releases of the steps; empty without DP-SGD, which gives no guarantee. n: number of
        training examples. steps: number of steps. listed: m, the maximum number of copies of an example in the data.
        Symbols of DP-SGD: q, sampling rate; C, clipping norm; sigma, noise multiplier. An example with m copies is in
        a batch with probability q' = 1 - (1 - q)^m, and adds a gradient of norm at most m C. So a step discloses at
        most as much as a sampled Gaussian mechanism with sampling rate q' and noise multiplier sigma / m. The reason:
        the example's contribution is a mixture over the number of copies in the batch, and the divergence is convex.
        """
        if self.dp is None or len(protections) != 1:
            return UNCOVERED
        release, q = protections.pop(), self.dp.sampling_rate(n, self.batch_size)
        if listed > 1:
            release = replace(release, sigma=release.sigma / listed, sensitivity=release.sensitivity * listed)
            q = 1 - (1 - q) ** listed
        return replace(release, q=q, steps=steps)

    def _samples(self, private: Draws, data: ClientData, seed: int, epoch: int) -> Iterator[Any]:
        """Yield the Poisson batches of an epoch, each with a seed per example in the batch (see ``Draws.seeds``)."""
        assert self.dp
        n, steps, draws = len(data), self.dp.steps(len(data), self.batch_size), generator(seed, "order", epoch)
        for number in range(epoch * steps, (epoch + 1) * steps):
            chosen = self.dp.sample(n, self.batch_size, private.stream("batch", number))
            rows, all_seeds = chosen.to(data.y.device), private.seeds(n, number)
            batch = [t[rows] for t in (*data.columns, *data.extra_columns)]
            seeds = [all_seeds[j] for j in chosen.tolist()] if all_seeds else []
            if self.augment and seeds:
                images = zip(batch[0].split(1), seeds, strict=True)
                batch[0] = torch.cat(
                    [flip_and_crop(x, generator(example_seed, "augment")) for x, example_seed in images]
                )
            elif self.augment and len(chosen):
                batch[0] = flip_and_crop(batch[0], draws)
            yield tuple(batch), seeds

    def steps(self, data: ClientData, seed: int, epoch: int) -> Iterator[list[Batch]]:
        """Return an iterator over the steps of ``epoch`` (from 0), each a list of at most ``accumulate`` batches."""
        batches = self.batches(data, seed, epoch)
        return iter(lambda: list(islice(batches, self.accumulate)), [])

    def _accumulated(self, loss: Loss, batches: Sequence[Batch], step: int, scaler: GradScaler | None) -> Tensor:
        """Compute the gradients of the mean loss over all examples of ``batches``, batch by batch; return the loss."""
        n, values = sum(len(batch[1]) for batch in batches), []
        for number, batch in enumerate(batches, step * self.accumulate):
            value = loss(batch, number) * (len(batch[1]) / n)
            (scaler.scale(value) if scaler else value).backward()
            values.append(value.detach())
        return reduce(torch.add, values)

    def batches(self, data: ClientData, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch in a random order, which depends on ``seed`` and ``epoch`` (number, from 0)."""
        n, b, columns = len(data), self.batch_size, (*data.columns, *data.extra_columns)
        if n <= b and not self.augment:
            yield columns  # one batch contains all examples, so the order does not matter
            return
        draws = generator(seed, "order", epoch)
        order = torch.randperm(n, generator=draws).to(data.y.device)
        shuffled = self._augmented([t.index_select(0, order) for t in columns], draws)  # one copy; batches are views
        for first in range(0, n, b):
            if self.drop_last and 0 < first > n - b:
                return
            yield tuple(t[first : first + b] for t in shuffled)

    def _augmented(self, columns: list[Tensor], draws: torch.Generator) -> Batch:
        return (flip_and_crop(columns[0], draws), *columns[1:]) if self.augment else tuple(columns)

    def gradient(self, work: TrainingProcess, at: Flat, data: ClientData) -> Flat:
        """Return the gradient of the mean loss on ``data`` at the weights ``at``, in evaluation mode, not augmented."""
        work.load(at)
        work.module.eval()
        n, b = len(data), self.batch_size
        total = torch.zeros_like(at.buffer)
        for first in range(0, n, b):
            batch = tuple(t[first : first + b] for t in data.columns)
            value = work.module.training_step(batch, 0)
            assert isinstance(value, Tensor)
            parts = torch.autograd.grad(value, list(work.named.values()))
            total.add_(torch.cat([g.reshape(-1) for g in parts]), alpha=len(batch[1]) / n)
        return Flat(at.layout, total)


def autocast(loss: Loss, device: str, kind: torch.dtype) -> Loss:
    """Return the loss function with matrix products in the number type ``kind``; weights and gradients stay float32."""

    def cast(batch: Batch, step: int) -> Tensor:
        with torch.autocast(device, kind):
            value = loss(batch, step)
        return value.float() if value.dtype == kind else value

    return cast


def _skipped(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Take a step with unscaled gradients and return whether the scaler skipped it (non-finite gradient)."""
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < before


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
