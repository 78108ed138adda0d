"""Squared norms of per-sample gradients in one backward pass, without storing the gradients.

a_b: input of a layer for sample b;  g_b: gradient of the loss in the layer's output for sample b;  t, s: positions in
this output (pixels, tokens). The squared norm of the gradient in the weight (normalisation: in weight and bias) is:

linear          ||sum_t g_bt a_bt^T||^2 = sum_ts <a_bt, a_bs> <g_bt, g_bs>;  with a single t  ||a_b||^2 ||g_b||^2
convolution     as linear, with the input's patch at t as a_bt; or the sum over t explicitly, whichever is cheaper
normalisation   ||sum_t g_bt xhat_bt||^2 + ||sum_t g_bt||^2,  xhat: the normalised input
embedding       sum_ts [token_bt = token_bs] <g_bt, g_bs>

The batch runs through the module under ``torch.vmap``. Every operation then runs for all samples at once, but the
module sees one sample, as in a loop over batches of size 1. So a_b and g_b belong to sample b, even if the module
permutes, repeats, folds or mixes rows of its input. The result is exact. If these formulas do not apply, the samples
run one by one, which is exact but slow. The formulas do not apply to other kinds of layers, to parameters that are used
twice or outside their layer, or to a layer whose output is the same for all samples. They also do not apply to a module
that vmap cannot run, such as a module that branches on its input.
Source: Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799; Rochette et al., arXiv:1912.06015.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.core.client_worker import trainable_parameters
from fedcommons.core.logging_shim import Metrics

Batch = Sequence[Tensor]

CHUNK_ELEMENTS = 4_000_000
"""Maximum number of elements in memory at a time if per-sample gradients of a layer are computed explicitly."""


def gradients(module: LightningModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean gradient over the B samples as one vector (P,), and each sample's squared gradient norm (B,).

    P: number of trained parameters. A sample's gradient is the gradient of the loss on a batch with only this sample.
    The module is set to evaluation mode, so that BatchNorm does not mix samples and dropout draws no random numbers.

    Raises:
        ValueError: a layer mixes samples even in evaluation mode.
    """
    module.eval()
    require_apart(module)
    if has_closed_forms(module) and (result := _all_at_once(module, batch)):
        return result
    return _one_by_one(module, batch)


def require_apart(module: nn.Module) -> None:
    """Check that the loss of a sample does not depend on the other samples in the batch.

    Raises:
        ValueError: a BatchNorm layer has no running statistics or uses the statistics of the batch.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"{name} normalises with the statistics of the batch, so that gradients depend on the other samples; "
                "measure in evaluation mode with running statistics (federation.buffers average) or use GroupNorm"
            )


def has_closed_forms(module: nn.Module) -> bool:
    """Return whether every layer with trained parameters is in ``FORMS``, and no parameter belongs to two layers."""
    owners = _owners(module)
    parameters = [p for layer in owners for p in layer.parameters(recurse=False)]
    return all(_form(layer) is not None for layer in owners) and len(parameters) == len({id(p) for p in parameters})


def _owners(module: nn.Module) -> list[nn.Module]:
    """Return the layers that have trained parameters themselves; parameters of sublayers do not count."""
    return [layer for layer in module.modules() if any(p.requires_grad for p in layer.parameters(recurse=False))]


def loss_of(module: LightningModule, batch: Batch) -> Tensor:
    """Return the loss of ``training_step`` on a batch."""
    loss = module.training_step(tuple(batch), 0)
    assert isinstance(loss, Tensor)
    return loss


def _gradient(module: LightningModule, loss: Tensor) -> Tensor:
    parts = torch.autograd.grad(
        loss, list(trainable_parameters(module).values()), allow_unused=True, materialize_grads=True
    )
    return torch.cat([part.reshape(-1) for part in parts])


def _one_by_one(module: LightningModule, batch: Batch) -> tuple[Tensor, Tensor]:
    n = len(batch[1])
    total, sq_norms = None, []
    for j in range(n):
        gradient = _gradient(module, loss_of(module, [column[j : j + 1] for column in batch]))
        sq_norms.append(gradient.square().sum())
        total = gradient if total is None else total.add_(gradient)
    assert total is not None
    return total / n, torch.stack(sq_norms)


def _all_at_once(module: LightningModule, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return the result of ``gradients``, computed by the formulas in ``FORMS``; None if the formulas do not apply."""
    layers, parameters, seen = _owners(module), list(trainable_parameters(module).values()), []

    def alone(*rows: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the loss of one sample, and the inputs and outputs of all layers in the order of the layers' calls."""
        inputs, outputs = [], []

        def see(layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> Tensor:
            (a,) = (*args, *named.values())  # every class of layer in FORMS has one input
            seen.append(layer)
            inputs.append(a.detach())
            outputs.append(output)
            return output.clone()  # a copy, because the module may change the output in place

        handles = [layer.register_forward_hook(see, prepend=True, with_kwargs=True) for layer in layers]
        try:
            return loss_of(module, [row[None] for row in rows]), inputs, outputs
        finally:
            for handle in handles:
                handle.remove()

    metrics = Metrics(module)
    try:
        losses, inputs, outputs = torch.vmap(alone)(*batch)
    except (RuntimeError, ValueError):  # vmap cannot run the module; _one_by_one raises errors of the module again
        return None
    finally:
        metrics.put_back()  # the metrics' states may be tensors of vmap, which are invalid outside of vmap
    loss = losses.sum()
    uses = _uses(loss)
    if Counter(seen) != Counter(layers) or any(uses[id(p)] != 1 for p in parameters):
        return None  # the formulas fail if a layer is called twice or never, or a parameter is used elsewhere
    result = torch.autograd.grad(loss, [*parameters, *outputs], allow_unused=True)
    of_parameters, of_outputs = result[: len(parameters)], result[len(parameters) :]
    sq_norms = torch.zeros_like(losses)
    for layer, a, g in zip(seen, inputs, of_outputs, strict=True):
        form = _form(layer)
        if form is None or g is None:  # no formula for this layer, or g is None because its output is constant
            return None
        sq_norms += form(layer, a, g)
    return torch.cat([g.reshape(-1) for g in of_parameters if g is not None]).div_(len(losses)), sq_norms


def _uses(loss: Tensor) -> Counter[int]:
    """Return the number of uses of each parameter in the autograd graph of ``loss``, by the parameter's id."""
    uses: Counter[int] = Counter()
    pending = [loss.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        for before, _ in node.next_functions if node else ():
            leaf = getattr(before, "variable", None)
            if leaf is not None:
                uses[id(leaf)] += 1
            elif before not in seen:
                seen.add(before)
                pending.append(before)
    return uses


# In the functions below, a is a layer's input, and g is the gradient in the layer's output, for a batch of B samples.
# The shapes of a and g are (B, r, ...), because under vmap a layer gets r rows per sample (nearly always r = 1).


def linear(layer: nn.Linear, a: Tensor, g: Tensor) -> Tensor:
    """Return squared gradient norms (B,) of a linear layer: inputs a (B, ..., in), output gradients g (B, ..., out)."""
    a, g = _places(a), _places(g)
    of_bias = g.sum(1).square().sum(1) if layer.bias is not None else 0
    if a.shape[1] == 1:
        return a.square().sum((1, 2)) * g.square().sum((1, 2)) + of_bias
    return _sum_over_places(a.mT, g.mT) + of_bias


def _places(t: Tensor) -> Tensor:
    """Return a tensor (B, ..., n) in the shape (B, T, n), with all middle dimensions joined to T positions."""
    return t.reshape(len(t), -1, t.shape[-1])


def convolution(layer: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    """Return the squared gradient norms (B,) of a convolution for inputs a and output gradients g.

    a: (B, r, C, H, W), r images with C channels per sample. g: (B, r, K, h, w), K output channels. The dimension r is
    absent if the layer gets each sample as one image without a batch dimension.
    """
    if a.dim() == 4:
        a, g = a[:, None], g[:, None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(a.flatten(0, 1), layer._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
    patches = patches.unflatten(0, a.shape[:2]).transpose(1, 2).flatten(2)
    g, groups = g.flatten(3).transpose(1, 2).flatten(2), layer.groups
    by_group = [t.unflatten(1, (groups, -1)).flatten(0, 1) for t in (patches, g)]
    sq = _sum_over_places(*by_group).view(-1, groups).sum(1)
    return sq + (g.sum(2).square().sum(1) if layer.bias is not None else 0)


def _sum_over_places(a: Tensor, g: Tensor) -> Tensor:
    """Return ||sum_t g_t a_t^T||^2 (B,) for vectors a_t and g_t at T positions t, by the cheaper of two formulas.

    a: (B, n, T), inputs with n features. g: (B, m, T), gradients in outputs with m features. B: number of samples.
    """
    n, m, places = a.shape[1], g.shape[1], a.shape[2]
    if places * (n + m) < n * m:
        return ((a.mT @ a) * (g.mT @ g)).sum((1, 2))
    size = max(1, CHUNK_ELEMENTS // (n * m))
    parts = [(y @ x.mT).square().sum((1, 2)) for x, y in zip(a.split(size), g.split(size), strict=True)]
    return torch.cat(parts)


def group_norm(layer: nn.GroupNorm, a: Tensor, g: Tensor) -> Tensor:
    """Return squared gradient norms (B,) of a group normalisation for inputs a and output gradients g.

    a, g: (B, r, C, ...): B samples, r images per sample (usually 1), C channels.
    """
    return _affine(F.group_norm(a.flatten(0, 1), layer.num_groups, eps=layer.eps), g, layer.bias)


def batch_norm(layer: nn.BatchNorm2d, a: Tensor, g: Tensor) -> Tensor:
    """Return squared gradient norms (B,) of BatchNorm in evaluation mode; a and g: see ``group_norm``."""
    normalised = F.batch_norm(a.flatten(0, 1), layer.running_mean, layer.running_var, eps=layer.eps)
    return _affine(normalised, g, layer.bias)


def _affine(normalised: Tensor, g: Tensor, bias: Tensor | None) -> Tensor:
    g = g.reshape(*g.shape[:3], -1)
    sq = (g * normalised.reshape(g.shape)).sum((1, 3)).square().sum(1)
    return sq + (g.sum((1, 3)).square().sum(1) if bias is not None else 0)


def layer_norm(layer: nn.LayerNorm, a: Tensor, g: Tensor) -> Tensor:
    """Return squared gradient norms (B,) of a layer normalisation: inputs a, output gradients g (B, ..., *shape)."""
    scaled = g * F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    scaled, g = (_places(t.flatten(-len(layer.normalized_shape))) for t in (scaled, g))
    return scaled.sum(1).square().sum(1) + (g.sum(1).square().sum(1) if layer.bias is not None else 0)


def embedding(layer: nn.Embedding, tokens: Tensor, g: Tensor) -> Tensor:
    """Return the squared gradient norms (B,) of an embedding: tokens (B, ...), output gradients g (B, ..., dim)."""
    tokens, g = tokens.reshape(len(tokens), -1), _places(g)
    if layer.padding_idx is not None:
        g = g * (tokens != layer.padding_idx)[..., None]
    same = tokens[:, :, None] == tokens[:, None, :]
    return ((g @ g.mT) * same).sum((1, 2))


FORMS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: linear,
    nn.Conv2d: convolution,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.Embedding: embedding,
}
"""Exact class of a layer -> function of (layer, inputs a, output gradients g) that returns the squared norms (B,)."""


def _form(layer: nn.Module) -> Callable[..., Tensor] | None:
    if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.sparse):
        return None
    if {name for name, _ in layer.named_parameters(recurse=False)} not in ({"weight"}, {"weight", "bias"}):
        return None  # the weight is computed from other parameters, as in weight normalisation or pruning
    if not all(p.requires_grad for p in layer.parameters(recurse=False)):
        return None  # the formulas are for layers without frozen parameters
    return FORMS.get(type(layer))
