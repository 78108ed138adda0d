"""DP-SGD steps with vectorised per-example gradients, for GPUs and for networks that are slow one example at a time.

Noise multiplicity (De et al. 2022, arXiv:2204.13650; Dockhorn et al. 2023, arXiv:2210.09929): the loss of an example
may be a mean over several random draws. The gradient of the mean is clipped, so more draws cost time but no epsilon.

Gradients are computed by ``torch.vmap``, so the module processes each example separately, as in a loop. For a diffusion
U-Net the gradients are correct. Opacus' hooks compute wrong gradients behind attention layers, whose output is not
contiguous. On a CPU ``torch.vmap`` is also faster than the hooks.

n: number of examples;  g_j: gradient of the loss on example j;  C: clipping norm;  B: batch size;  q: sampling rate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedcommons.errors import UserError, sentence
from fedcommons.privacy.dp_sgd import DPSGD, NoisySum
from fedcommons.privacy.noise import Draws, Stream
from fedcommons.privacy.release import Release

Loss = Callable[..., Tensor]
"""Function (parameters by name, *tensors of one example) -> loss of the example."""

Rows = Tensor | slice
"""Indices of examples."""

Draw = Callable[[int, Rows], Sequence[Tensor]]
"""Function (n, rows) -> columns of random numbers: it draws a step's numbers for n examples and selects ``rows``."""


def require_examples_apart(module: nn.Module) -> None:
    """Check that the loss of an example depends on no other example of the batch.

    Raises:
        UserError: a layer computes statistics of the batch (BatchNorm, or InstanceNorm with running statistics).
    """
    for name, layer in module.named_modules():
        tracks = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if tracks or isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"{type(layer).__name__} ({name or 'the module itself'}) keeps statistics of whole batches, but DP-SGD "
                "needs a gradient for each single example; use GroupNorm in its place."
            )


def clipped_sum(gradients: Sequence[Tensor], clip: float) -> tuple[Tensor, float]:
    """Return the sum of clipped gradients, sum_j g_j min(1, C/||g_j||), as a vector, and C, the bound on a term's norm.

    gradients: one tensor (n, *shape of the parameter) per parameter; g_j is row j of all tensors. clip: C.
    A g_j that is not finite adds zero, because clipping cannot bound its norm.
    """
    flat = [g.reshape(len(g), -1) for g in gradients]
    norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in flat]).norm(dim=0)
    if not (finite := norms.isfinite()).all():
        flat, norms = [g[finite] for g in flat], norms[finite]
    factors = (clip / norms).clamp(max=1)  # for a zero gradient, clip / norm is infinite, and the factor is 1
    return torch.cat([factors @ g for g in flat]), clip


def clipped_sums(
    named: Mapping[str, Tensor],
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    columns: Sequence[Tensor],
    clip: float,
    at_once: int,
) -> tuple[NoisySum, dict[str, Tensor]]:
    """Return the sum of the examples' clipped gradients, before noise, and the sums of losses and other values by name.

    loss: function (parameters by name, *tensors of one example) -> (loss of the example, other values by name).
    at_once: maximum number of examples per gradient call.
    """
    values = {name: p.detach() for name, p in named.items()}
    total = NoisySum(next(iter(values.values())).new_zeros(sum(p.numel() for p in values.values())), clip)
    sums: dict[str, Tensor] = {"loss": total.values.new_zeros(())}
    of_each = torch.vmap(grad_and_value(loss, has_aux=True), in_dims=(None, *(0,) * len(columns)))
    with sdpa_kernel(SDPBackend.MATH):  # ``torch.vmap`` runs other attention kernels in a slow loop over examples
        for rows in zip(*(column.split(at_once) for column in columns), strict=True):
            if len(rows[0]):  # for an empty batch, ``split`` returns one empty piece
                gradients, (losses, others) = of_each(values, *rows)
                total.add(*clipped_sum([gradients[name] for name in values], clip))
                for name, each in {**others, "loss": losses}.items():
                    sums[name] = sums.get(name, 0.0) + each.detach().sum()
    return total, sums


def noisy_sum(
    named: Mapping[str, Tensor], loss: Loss, columns: Sequence[Tensor], clip: float, physical_batch: int
) -> NoisySum:
    """Return the sum of the examples' clipped gradients, before noise; at most ``physical_batch`` examples per call."""
    return clipped_sums(named, lambda *arguments: (loss(*arguments), {}), columns, clip, physical_batch)[0]


def of_step(
    dp: DPSGD, step: nn.Module, named: Mapping[str, nn.Parameter], batch: Sequence[Tensor], number: int
) -> tuple[NoisySum, dict[str, Tensor]]:
    """Return the noiseless sum of a local step's clipped gradients, and the batch's sums of loss and logged metrics.

    step: the training step as a function of the weights (``functional_step.Step``). number: index of the step.
    One call computes the gradients of ``dp.at_once`` examples. The module gets each example as a batch of one.
    """

    def loss(weights: Mapping[str, Tensor], *row: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of_one = tuple(t.unsqueeze(0) for t in row)
        return functional_call(step, {f"inner.{name}": w for name, w in weights.items()}, (of_one, number))

    return clipped_sums(named, loss, batch, dp.clip, dp.at_once)


def gradients(
    dp: DPSGD, step: nn.Module, named: Mapping[str, nn.Parameter], log: Callable[[dict[str, Tensor], int], None],
    batch: Sequence[Tensor], number: int, expected: int, noise: Stream, _: Sequence[int] = (),
) -> tuple[Tensor, Release]:  # fmt: skip
    """Do the same as ``DPSGD.gradients``, with the vectorised gradients of ``of_step``.

    log: called with the batch's sums of the logged values, and with the number of examples in the batch.
    """
    total, sums = of_step(dp, step, named, batch, number)
    value = sums.pop("loss") / max(len(batch[1]), 1)
    log(sums, len(batch[1]))
    return value, dp.put(total, list(named.values()), expected, noise)


def flaw(step: nn.Module, named: Mapping[str, nn.Parameter], batch: Sequence[Tensor]) -> str | None:
    """Compute vectorised gradients on ``batch`` as a test; return the error message, or None if there is no error."""
    training = step.training
    try:
        of_step(DPSGD(0.0, 1.0, at_once=2), step.train(), named, batch, 0)
    except Exception as error:  # vmap or user code may raise any exception
        return sentence(error)
    finally:
        step.train(training)
    return None


def steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    columns: Sequence[Tensor],
    draw: Draw,
    dp: DPSGD,
    *,
    batch_size: int,
    epochs: int,
    physical_batch: int,
    noise: Draws,
    draws: torch.Generator | None = None,
) -> Iterator[Release]:
    """Train ``module`` by DP-SGD; after every step, yield the privacy ledger's entry (``Release``) of the step.

    An epoch has ceil(n/B) Poisson batches with sampling rate min(1, B/n); n: number of examples, B: ``batch_size``. An
    empty batch gives a step with noise only, because a missing step would disclose that the batch is empty.

    Args:
        columns: the examples, n rows in each column.
        draw: function that draws the random inputs of the examples' losses in a step. With seeded noise, it is called
            for the batch's examples only. With secret noise, it is called for all n examples, so an example's random
            inputs do not depend on which other examples are in the batch.
        draws: torch generator that ``draw`` uses, or None. With secret noise, each step seeds this generator anew.

    Raises:
        UserError: an example's loss depends on other examples of the batch; see ``require_examples_apart``.
    """
    require_examples_apart(module)
    named, n = dict(module.named_parameters()), len(columns[0])
    expected, q = min(batch_size, n), dp.sampling_rate(n, batch_size)
    for step in range(epochs * dp.steps(n, batch_size)):
        chosen = dp.sample(n, batch_size, noise.stream("batch", step)).to(columns[0].device)
        batch = [column[chosen] for column in columns]
        seeds = noise.seeds(1, step)
        if seeds and draws:
            draws.manual_seed(seeds[0])
        random_columns = draw(n, chosen) if seeds else draw(len(chosen), slice(None))
        total = noisy_sum(named, loss, [*batch, *random_columns], dp.clip, physical_batch)
        release = dp.put(total, list(named.values()), expected, noise.stream("noise", step))
        optimizer.step()
        yield replace(release, q=q)
