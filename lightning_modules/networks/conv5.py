"""The classifier of FedCVAE (Heinbaugh et al., ICLR 2023), as in its released code (ceh-2000/fed_cvae)."""

from torch import Tensor, nn
from torch.nn import functional as F

SIDE = 32
"""Height and width of the images in the released code."""


class Conv5(nn.Module):
    """Twice [convolution 5x5 without padding, max-pool 2], a hidden layer, ReLU, a linear layer.

    There is no ReLU after the convolutions. Input: images (B, C, H, W). The network has 876,938 parameters for 1x32x32
    images of 10 classes. Smaller images are padded with zeros to 32x32.

    Departs from the released code, which scales smaller images to 32x32.
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        if len(shape) != 3:
            raise ValueError(f"it needs images, and examples are {shape}")
        channels, *sides = shape
        height, width = (max(side, SIDE) for side in sides)
        top, left = (height - sides[0]) // 2, (width - sides[1]) // 2
        self.margin = left, width - sides[1] - left, top, height - sides[0] - top
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 5), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.Flatten()
        )
        after = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
        self.hidden = nn.Linear(64 * after[0] * after[1], 512)
        self.last = nn.Linear(512, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return F.relu(self.hidden(self.features(F.pad(x, self.margin))))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
