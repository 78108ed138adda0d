"""Squared norms of per-sample gradients in one backward pass, without ever holding the gradients themselves.

For a layer with inputs a_b and gradients g_b of its outputs, b a sample of the batch, t a place in its output:

linear          ||sum_t g_bt a_bt^T||^2 = sum_ts <a_bt, a_bs> <g_bt, g_bs>;  with a single t  ||a_b||^2 ||g_b||^2
convolution     the same with the patches under t as a_bt; or the sum over t itself, whichever is cheaper
normalisation   ||sum_t g_bt xhat_bt||^2 + ||sum_t g_bt||^2, xhat the normalised input
embedding       sum_ts [token_bt = token_bs] <g_bt, g_bs>

All exact. A model with parameters in other layers, or that uses one twice or past its layer, is taken sample by sample:
exact, slow.
Source: Goodfellow, "Efficient Per-Example Gradient Computations", arXiv:1510.01799; Rochette et al., arXiv:1912.06015.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Sequence[Tensor]

CHUNK_ELEMENTS = 4_000_000
"""So many elements of a layer's explicit per-sample gradients are held at a time."""


def gradients(module: LightningModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """The gradient of the mean loss of ``batch`` as one vector (P,), and each sample's squared gradient norm (B,).

    The module is brought to evaluation mode, so that samples do not meet in BatchNorm and nothing is drawn.

    Raises:
        ValueError: samples meet in a layer all the same.
    """
    module.eval()
    require_apart(module)
    if has_closed_forms(module):
        n = len(batch[1])
        with _Recorder(module, n) as recorder:
            loss = _loss(module, batch)
        if recorder.sees_all(loss):
            mean = _gradient(module, loss)
            return mean, recorder.sq_norms * n**2  # the loss is a mean
    return _one_by_one(module, batch)


def require_apart(module: nn.Module) -> None:
    """Refuse a module in which the loss of a sample depends on the others of its batch.

    Raises:
        ValueError: a BatchNorm layer has no running statistics or takes those of what it sees.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"{name} normalises with the statistics of the batch, so that no sample has a gradient of its own; "
                "measure in evaluation mode with running statistics (federation.buffers average) or use GroupNorm"
            )


def has_closed_forms(module: nn.Module) -> bool:
    """Whether every parameter belongs to one layer of a known kind."""
    owners = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    parameters = [p for layer in owners for p in layer.parameters(recurse=False)]
    return all(_form(layer) is not None for layer in owners) and len(parameters) == len({id(p) for p in parameters})


def _loss(module: LightningModule, batch: Batch) -> Tensor:
    loss = module.training_step(tuple(batch), 0)
    assert isinstance(loss, Tensor)
    return loss


def _gradient(module: LightningModule, loss: Tensor) -> Tensor:
    parts = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts])


def _one_by_one(module: LightningModule, batch: Batch) -> tuple[Tensor, Tensor]:
    n = len(batch[1])
    total, sq_norms = None, []
    for j in range(n):
        gradient = _gradient(module, _loss(module, [column[j : j + 1] for column in batch]))
        sq_norms.append(gradient.square().sum())
        total = gradient if total is None else total.add_(gradient)
    assert total is not None
    return total / n, torch.stack(sq_norms)


class _Recorder:
    """Adds up the layers' squared norms while gradients flow back through ``module``."""

    def __init__(self, module: nn.Module, n: int) -> None:
        self.layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
        parameter = next(module.parameters())
        self.sq_norms = torch.zeros(n, dtype=parameter.dtype, device=parameter.device)
        self.calls: Counter[nn.Module] = Counter()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "_Recorder":
        self._handles = [layer.register_forward_hook(self._called) for layer in self.layers]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def sees_all(self, loss: Tensor) -> bool:
        """Whether each layer was called once and no parameter is used past its layer: what it adds up is the whole."""
        uses = _uses(loss)
        once = all(uses[id(p)] == 1 for layer in self.layers for p in layer.parameters(recurse=False))
        return once and all(self.calls[layer] == 1 for layer in self.layers)

    def _called(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.calls[layer] += 1
        output.register_hook(partial(self._add, layer, inputs[0].detach()))

    def _add(self, layer: nn.Module, a: Tensor, g: Tensor) -> None:
        form = _form(layer)
        assert form is not None
        self.sq_norms += form(layer, a, g)


def _uses(loss: Tensor) -> Counter[int]:
    """How often each parameter, by its id, enters the graph of ``loss``."""
    uses: Counter[int] = Counter()
    found = [loss.grad_fn]
    seen = set(found)
    while found:
        node = found.pop()
        for before, _ in node.next_functions if node else ():
            leaf = getattr(before, "variable", None)
            if leaf is not None:
                uses[id(leaf)] += 1
            elif before not in seen:
                seen.add(before)
                found.append(before)
    return uses


def linear(layer: nn.Linear, a: Tensor, g: Tensor) -> Tensor:
    """a (B, ..., in), g (B, ..., out)."""
    if a.dim() == 2:
        sq = g.square().sum(1)
        return a.square().sum(1) * sq + (sq if layer.bias is not None else 0)
    a, g = a.flatten(1, -2), g.flatten(1, -2)
    return _sum_over_places(a.mT, g.mT) + (g.sum(1).square().sum(1) if layer.bias is not None else 0)


def convolution(layer: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    """a (B, C, H, W), g (B, K, h, w)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(a, layer._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
    g, groups = g.flatten(2), layer.groups
    by_group = [t.unflatten(1, (groups, -1)).flatten(0, 1) for t in (patches, g)]
    sq = _sum_over_places(*by_group).view(-1, groups).sum(1)
    return sq + (g.sum(2).square().sum(1) if layer.bias is not None else 0)


def _sum_over_places(a: Tensor, g: Tensor) -> Tensor:
    """||sum_t g_t a_t^T||^2 for a (B, n, T), g (B, m, T): from inner products, or the sum itself, the cheaper."""
    n, m, places = a.shape[1], g.shape[1], a.shape[2]
    if places * (n + m) < n * m:
        return ((a.mT @ a) * (g.mT @ g)).sum((1, 2))
    size = max(1, CHUNK_ELEMENTS // (n * m))
    parts = [(y @ x.mT).square().sum((1, 2)) for x, y in zip(a.split(size), g.split(size), strict=True)]
    return torch.cat(parts)


def group_norm(layer: nn.GroupNorm, a: Tensor, g: Tensor) -> Tensor:
    """a, g (B, C, ...)."""
    return _affine(F.group_norm(a, layer.num_groups, eps=layer.eps), g, layer.bias)


def batch_norm(layer: nn.BatchNorm2d, a: Tensor, g: Tensor) -> Tensor:
    """a, g (B, C, ...), in evaluation mode."""
    return _affine(F.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps), g, layer.bias)


def _affine(normalised: Tensor, g: Tensor, bias: Tensor | None) -> Tensor:
    g = g.flatten(2) if g.dim() > 2 else g.unsqueeze(2)
    sq = (g * normalised.view_as(g)).sum(2).square().sum(1)
    return sq + (g.sum(2).square().sum(1) if bias is not None else 0)


def layer_norm(layer: nn.LayerNorm, a: Tensor, g: Tensor) -> Tensor:
    """a, g (B, ..., *shape)."""
    own = len(layer.normalized_shape)
    scaled = g * F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    scaled, g = (t.flatten(-own).flatten(1, -2) if t.dim() > own + 1 else t.flatten(1)[:, None] for t in (scaled, g))
    return scaled.sum(1).square().sum(1) + (g.sum(1).square().sum(1) if layer.bias is not None else 0)


def embedding(layer: nn.Embedding, tokens: Tensor, g: Tensor) -> Tensor:
    """tokens (B, ...), g (B, ..., dim)."""
    tokens, g = tokens.flatten(1), g.flatten(1, -2)
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
"""(layer, inputs a, output gradients g) -> (B,) squared norms, by the very class of the layer."""


def _form(layer: nn.Module) -> Callable[..., Tensor] | None:
    if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.sparse):
        return None
    return FORMS.get(type(layer))
