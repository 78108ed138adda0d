"""What a network's last linear layer is given (the features) and returns (the logits), in passes made by others."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class LastLayer:
    """Watches the last linear layer of ``module``; ``inputs`` and ``outputs``: those of the latest forward pass.

    Raises:
        ValueError: the module has no linear layer.
    """

    inputs: Tensor  # (B, d)
    outputs: Tensor  # (B, classes)

    def __init__(self, module: nn.Module) -> None:
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ValueError("features are the input of the last linear layer, and this module has no linear layer")
        self.layer = linear[-1]

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
