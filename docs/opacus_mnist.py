"""The network of Opacus' MNIST example (examples/mnist.py of pytorch/opacus); see results/opacus_mnist.md."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Two convolutions, each with ReLU and max-pooling of stride 1, and two linear layers: 26,010 weights."""

    def __init__(self, shape: tuple[int, ...], n_classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))
