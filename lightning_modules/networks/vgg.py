"""VGG-11 without normalisation: section 4 of Fedssyn (arXiv:2306.13263), with the layers of its released code.

Simonyan and Zisserman, ICLR 2015, arXiv:1409.1556; github.com/lyn1874/fedssyn.
"""

from math import sqrt

from torch import Tensor, nn

_PLAN = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")


class VGG11(nn.Module):
    """Eight convolutions and three linear layers; 9,750,922 parameters for 3x32x32 images of 10 classes."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        if len(shape) != 3 or shape[1] % 32 or shape[2] % 32:
            raise ValueError(f"it needs images of 32x32 or 64x64, and examples are {shape}")
        channels, height, width = shape
        layers: list[nn.Module] = []
        for step in _PLAN:
            if isinstance(step, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, step, 3, padding=1), nn.ReLU()]
                channels = step
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(512 * (height // 32) * (width // 32), 512),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(),
        )
        self.last = nn.Linear(512, n_classes)
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0, sqrt(2 / (9 * module.out_channels)))

    def embed(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
