"""ResNet-18 with instance norm, for small images; FedDM's second network (arXiv:2207.09653, figure 4).

He et al., "Deep residual learning for image recognition", CVPR 2016, arXiv:1512.03385. The layers are torchvision's.
"""

from torch import Tensor, nn


class ResNet18(nn.Module):
    """Eight residual blocks of two convolutions, then a linear layer; instance norm replaces BatchNorm.

    Input: images (B, C, H, W) of at least 16x16 pixels. 11,173,962 parameters for 3x32x32 images of 10 classes.

    As usual for small images, the first convolution is 3x3 with stride 1, without pooling after it. With torchvision's
    first layers, the last blocks would get one pixel, and instance norm of a single pixel is zero.
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise ValueError(f"it needs images of at least 16x16, and examples are {shape}")
        from torchvision.models import resnet18

        def norm(channels: int) -> nn.Module:
            return nn.GroupNorm(channels, channels)  # One group per channel is instance norm.

        self.body = resnet18(norm_layer=norm)
        self.body.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(
            self.body.conv1.weight, mode="fan_out", nonlinearity="relu"
        )  # torchvision's initialisation of a ResNet
        self.body.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        self.body.fc = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        self.last = nn.Linear(512, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
