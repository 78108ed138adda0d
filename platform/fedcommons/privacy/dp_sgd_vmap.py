"""DP-SGD steps with vectorised per-example gradients, for GPUs and for networks that are slow one example at a time.

Noise multiplicity (De et al. 2022, arXiv:2204.13650; Dockhorn et al. 2023, arXiv:2210.09929): the loss of an example
may be a mean over several random draws, before its gradient is clipped. So it costs computing time and no epsilon.

Gradients come from ``torch.vmap``: each call of the module gets one example, as in a loop. On a diffusion U-Net this
is correct where Opacus' hooks are wrong (behind attention, whose output is not contiguous), and on a CPU it is faster.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedcommons.errors import UserError, sentence
from fedcommons.privacy.dp_sgd import DPSGD, NoisySum
from fedcommons.privacy.noise import Draws
from fedcommons.privacy.release import Release

Loss = Callable[..., Tensor]
"""(parameters by name, one example's row of each column) -> example's loss; see ``torch.func.functional_call``."""

Rows = Tensor | slice
"""Indices of examples."""

Draw = Callable[[int, Rows], Sequence[Tensor]]
"""(number of examples n, rows) -> columns of one step's random draws: draw for n examples, return only the rows."""


def require_examples_apart(module: nn.Module) -> None:
    """Check that no layer of the module lets an example change the loss of another example in the batch.

    Raises:
        UserError: a layer keeps statistics of batches, so no gradient of a single example exists.
    """
    for name, layer in module.named_modules():
        tracks = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if tracks or isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"{type(layer).__name__} ({name or 'the module itself'}) keeps statistics of whole batches, so that no "
                "example has a gradient of its own, as DP-SGD needs; use GroupNorm in its place."
            )


def clipped_sum(gradients: Sequence[Tensor], clip: float) -> tuple[Tensor, float]:
    """Return sum_j g_j min(1, C/||g_j||) as one vector, and the bound C on the norm of each term.

    g_j consists of row j of each tensor in ``gradients``, of shape (n, *shape of a parameter). A g_j that is not finite
    adds zero, because clipping cannot bound it.
    """
    flat = [g.reshape(len(g), -1) for g in gradients]
    norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in flat]).norm(dim=0)
    if not (finite := norms.isfinite()).all():
        flat, norms = [g[finite] for g in flat], norms[finite]
    factors = (clip / norms).clamp(max=1)  # infinite for a zero gradient
    return torch.cat([factors @ g for g in flat]), clip


def noisy_sum(
    named: Mapping[str, Tensor], loss: Loss, columns: Sequence[Tensor], clip: float, physical_batch: int
) -> NoisySum:
    """Return the sum of the examples' clipped gradients, before noise; ``physical_batch``: most examples per call."""
    values = {name: p.detach() for name, p in named.items()}
    total = NoisySum(next(iter(values.values())).new_zeros(sum(p.numel() for p in values.values())), clip)
    of_each = torch.vmap(grad(loss), in_dims=(None, *(0,) * len(columns)))
    with sdpa_kernel(SDPBackend.MATH):  # vmap would run other kernels example by example
        for rows in zip(*(column.split(physical_batch) for column in columns), strict=True):
            if len(rows[0]):  # an empty batch is split into one empty piece
                total.add(*clipped_sum(list(of_each(values, *rows).values()), clip))
    return total


def of_step(
    dp: DPSGD, step: nn.Module, named: Mapping[str, nn.Parameter], batch: Sequence[Tensor], number: int
) -> tuple[NoisySum, dict[str, Tensor]]:
    """Return the clipped sum of a local step, before noise, and sums over examples of the loss and logged metrics.

    step: the training step as a function of its weights (``functional_step.Step``).
    One call computes ``dp.at_once`` gradients; the module sees each example alone, as a batch of one.
    """
    values = {name: p.detach() for name, p in named.items()}
    total = NoisySum(next(iter(values.values())).new_zeros(sum(p.numel() for p in values.values())), dp.clip)
    sums: dict[str, Tensor] = {"loss": total.values.new_zeros(())}

    def loss(weights: Mapping[str, Tensor], *row: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of_one = tuple(t.unsqueeze(0) for t in row)
        return functional_call(step, {f"inner.{name}": w for name, w in weights.items()}, (of_one, number))

    of_each = torch.vmap(grad_and_value(loss, has_aux=True), in_dims=(None, *(0,) * len(batch)))
    with sdpa_kernel(SDPBackend.MATH):
        for rows in zip(*(column.split(dp.at_once) for column in batch), strict=True):
            if len(rows[0]):
                gradients, (losses, logged) = of_each(values, *rows)
                total.add(*clipped_sum([gradients[name] for name in values], dp.clip))
                for name, each in {**logged, "loss": losses}.items():
                    sums[name] = sums.get(name, 0.0) + each.detach().sum()
    return total, sums


def flaw(step: nn.Module, named: Mapping[str, nn.Parameter], batch: Sequence[Tensor]) -> str | None:
    """Return why vectorised gradients fail for this step, tried on ``batch``, two at once; None if they work."""
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
    """Train ``module`` by DP-SGD; after every step, yield the release that describes the step's protection.

    columns: the examples, n rows each. Batches are Poisson samples with rate q = B/n, ceil(n/B) per epoch. An empty
    batch makes a step of noise only. Its cost is that of any step, and omitting the step would disclose data.
    draw: with secret noise, every step draws for all n examples. So no draw discloses which examples are in a batch,
    and each term of a sum depends on its example only, as amplification by sampling requires. With seeded noise, a
    step draws only for its batch.
    draws: the generator that ``draw`` reads, or None; with secret noise every step seeds it from the salt.

    Raises:
        UserError: examples of a batch change each other's loss; see ``require_examples_apart``.
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
        total.blur(dp.noise_multiplier, noise.stream("noise", step))
        mean = total.values.div_(expected)
        for p, part in zip(named.values(), mean.split([p.numel() for p in named.values()]), strict=True):
            p.grad = part.view_as(p)
        optimizer.step()
        yield replace(total.release, q=q)
