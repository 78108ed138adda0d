"""torchvision's image classifiers by name (``torchvision:resnet18``), for any number of classes."""

from collections.abc import Callable
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.nn import functional as F

_WITHOUT_LINEAR = ("squeezenet1_0", "squeezenet1_1")
_NO_AUXILIARY_LOSS = {"aux_logits": False, "init_weights": True}


def names() -> list[str]:
    """Return the names of the classifiers whose last layer is linear."""
    from torchvision import models

    return [name for name in models.list_models(module=models) if name not in _WITHOUT_LINEAR]


def component(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds torchvision's classifier ``name`` for a data set."""

    def build(
        shape: tuple[int, ...], n_classes: int, head: Literal["file", "new"] = "file",
        size: Annotated[int | None, "[1, 4096]"] = None,
    ) -> Backbone:  # fmt: skip
        """Build the classifier.

        Args:
            head: initial weights of the last layer: file (from model.weights, if there is one) or new (random)
            size: resize images to size x size pixels in the model; null: images as they are
        """
        return Backbone(name, shape, n_classes, head == "new", size)

    return build


class Backbone(nn.Module):
    """A classifier of torchvision as ``last(body(x))``; x: normalised images (B, C, H, W) with 1 or 3 channels.

    A grey image is repeated for the three channels. BatchNorm's statistics are buffers, which the server averages.

    Attributes:
        not_in_file: name prefixes of the tensors that a file of weights does not set.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], n_classes: int, has_new_head: bool = False, size: int | None = None
    ) -> None:
        super().__init__()
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise ValueError(f"it needs images with 1 or 3 channels, and examples are {shape}")
        from torchvision import models

        options = _NO_AUXILIARY_LOSS if name in ("googlenet", "inception_v3") else {}
        self.body = models.get_model(name, weights=None, num_classes=n_classes, **options)
        self.size, self.not_in_file = size, ("last.",) if has_new_head else ()
        self.head_in_body = [which for which, layer in self.body.named_modules() if isinstance(layer, nn.Linear)][-1]
        self.last = self.body.get_submodule(self.head_in_body)
        self.body.set_submodule(self.head_in_body, nn.Identity())

    def name_here(self, name: str) -> str:
        """Return this module's name of the tensor that torchvision calls ``name`` (may begin with "body.")."""
        name = name.removeprefix("body.")
        layer, _, leaf = name.rpartition(".")
        return f"last.{leaf}" if layer == self.head_in_body else f"body.{name}"

    def embed(self, x: Tensor) -> Tensor:
        """Return the embedding (B, d) of images x."""
        if self.size:
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return self.body(x.expand(-1, 3, -1, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, classes) of images x."""
        return self.last(self.embed(x))
