"""Random flip and crop for CIFAR, on whole batches of uint8 images; all draws come from the given generator."""

import torch
from torch import Tensor
from torch.nn import functional as F


def flip_and_crop(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Flip each image with probability 1/2 and crop it at random after zero padding.  x: (B, C, H, W), any type."""
    b, _, h, w = x.shape
    flip = torch.rand(b, generator=generator) < 0.5
    top, left = (torch.randint(2 * padding + 1, (b, 1), generator=generator) for _ in range(2))
    columns = torch.where(flip[:, None], torch.arange(w - 1, -1, -1), torch.arange(w)) + left  # (B, W)
    rows = torch.arange(h) + top  # (B, H)
    padded = F.pad(x, (padding,) * 4)
    index = torch.arange(b)[:, None, None].to(x.device), rows[:, :, None].to(x.device), columns[:, None].to(x.device)
    images = padded.permute(0, 2, 3, 1)[index].permute(0, 3, 1, 2)
    # Not .contiguous(): it leaves one-channel images as they are, with strides that convolutions take for channels-last
    # and double backward passes do not; the kernels of the two round differently.
    return images.clone(memory_format=torch.contiguous_format)
