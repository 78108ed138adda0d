"""Access to a network's head (input: embedding, output: logits), to BatchNorm parameters and to normalised images."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import Tensor, nn

from fedcommons.errors import UserError


def head_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of the module's ``head``; empty if ``head`` names no submodule."""
    head = getattr(module, "head", None)
    return tuple(n for n, _ in module.named_parameters() if isinstance(head, str) and n.startswith(f"{head}."))


def layers_of(names: Iterable[str]) -> str:
    """Return the names of the layers of the parameters ``names``, joined by commas: "a.weight" is in layer "a"."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in names))


def matching_layers(names: Iterable[str], patterns: str, field: str) -> list[str]:
    """Return the names among the parameters ``names`` whose layer matches a pattern, in the order of ``names``.

    patterns: name patterns with the syntax of file names, separated by commas. field: name of the field in messages.

    Raises:
        UserError: a pattern matches no layer.
    """
    layers = {name: name.rpartition(".")[0] for name in names}
    chosen = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in chosen:
        if not any(fnmatchcase(layer, pattern) for layer in layers.values()):
            raise UserError(f"{field}: {pattern!r} matches no layer; the layers are {layers_of(layers)}.")
    return [name for name, layer in layers.items() if any(fnmatchcase(layer, pattern) for pattern in chosen)]


def batch_norm_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters (scale and shift) of all BatchNorm layers in the module."""
    layers = [n for n, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    return tuple(n for n, _ in module.named_parameters() if n.rpartition(".")[0] in layers)


class Head:
    """Recorder of ``inputs`` (embeddings) and ``outputs`` (logits) of a module's head in the latest forward pass.

    The module's attribute ``head`` is the dotted name of the submodule that maps the embedding to the logits.

    Raises:
        ValueError: the module has no attribute ``head``, or no submodule with this name.
    """

    inputs: Tensor  # (B, d): embeddings with d features of B examples
    outputs: Tensor  # (B, classes): logits

    def __init__(self, module: nn.Module) -> None:
        name, kind = getattr(module, "head", None), type(module).__name__
        if not isinstance(name, str):
            raise ValueError(
                f"{kind} must have an attribute head, the dotted name of the layer that maps the embedding to the "
                'logits: in the class, head = "network.last"'
            )
        layers = dict(module.named_modules())
        if not name or name not in layers:
            raise ValueError(f"{kind}.head must be the dotted name of one of its submodules, got {name!r}")
        self.layer = layers[name]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which the head's inputs and outputs are recorded in every forward pass."""

        def note(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            self.inputs, self.outputs = inputs[0], outputs

        handle = self.layer.register_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()


def seen(module: nn.Module, pixels: Tensor) -> Tensor:
    """Scale images with pixels in [0, 1] to [0, 255] and normalise them as the module normalises uint8 images."""
    normalise = getattr(module, "normalise", None)
    return normalise(255 * pixels) if normalise else 255 * pixels
