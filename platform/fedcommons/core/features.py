"""Access to a network's head (embedding and logits in forward passes), BatchNorm parameters and normalisation."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def head_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of the module's ``head``; empty if ``head`` names no submodule."""
    head = getattr(module, "head", None)
    return tuple(n for n, _ in module.named_parameters() if isinstance(head, str) and n.startswith(f"{head}."))


def layers_of(names: Iterable[str]) -> str:
    """Return the layers of parameters, separated by commas: the parameter names without the last component."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in names))


def batch_norm_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters (scale and shift) of BatchNorm layers."""
    layers = [n for n, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    return tuple(n for n, _ in module.named_parameters() if n.rpartition(".")[0] in layers)


class Head:
    """Recorder of the ``inputs`` and ``outputs`` of a module's head in the latest forward pass.

    The module's attribute ``head`` is the dotted name of the submodule that maps the embedding to the logits.

    Raises:
        ValueError: the module has no such attribute or submodule.
    """

    inputs: Tensor  # (B, d)
    outputs: Tensor  # (B, classes)

    def __init__(self, module: nn.Module) -> None:
        name, kind = getattr(module, "head", None), type(module).__name__
        if not isinstance(name, str):
            raise ValueError(
                f"{kind} must have an attribute head, the dotted name of the layer that makes logits of the embedding: "
                'in the class, head = "network.last"'
            )
        layers = dict(module.named_modules())
        if not name or name not in layers:
            raise ValueError(f"{kind}.head must be the dotted name of one of its submodules, got {name!r}")
        self.layer = layers[name]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record forward passes in this context."""

        def note(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            self.inputs, self.outputs = inputs[0], outputs

        handle = self.layer.register_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()


def seen(module: nn.Module, pixels: Tensor) -> Tensor:
    """Return images with pixels in [0, 1] scaled and normalised as the network does with uint8 images."""
    normalise = getattr(module, "normalise", None)
    return normalise(255 * pixels) if normalise else 255 * pixels
