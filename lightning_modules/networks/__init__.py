"""Networks for classification. Each computes ``last(embed(x))``, where ``last`` is the last linear layer."""

from lightning_modules.networks.cnn import CNN
from lightning_modules.networks.conv5 import Conv5
from lightning_modules.networks.convnet import ConvNet
from lightning_modules.networks.encoder import Encoder
from lightning_modules.networks.linear import Linear
from lightning_modules.networks.mlp import MLP
from lightning_modules.networks.projected import Projected
from lightning_modules.networks.resnet import ResNet18
from lightning_modules.networks.vgg import VGG11

__all__ = ["CNN", "MLP", "VGG11", "Conv5", "ConvNet", "Encoder", "Linear", "Projected", "ResNet18"]
