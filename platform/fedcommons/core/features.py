"""What a network's head is given (the embedding) and returns (the logits), in forward passes made by others."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class Head:
    """Watches the module's head; ``inputs`` and ``outputs``: those of the latest forward pass.

    The module says which layer it is: its attribute ``head`` is the dotted name of a submodule, whose input is the
    embedding and whose output are the logits.

    Raises:
        ValueError: it does not say, or there is no such submodule.
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
        """While this lasts, forward passes are noted."""

        def note(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            self.inputs, self.outputs = inputs[0], outputs

        handle = self.layer.register_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()
