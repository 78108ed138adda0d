"""Feature shift between clients, and the random flip and crop of training images.

Feature shift: the inputs x differ between clients, while the partition of the labels does not change.

The data of client i are shifted by  s i/N,  where s is the size of the shift and the N clients are counted from 1:

noise     Gaussian noise of variance s i/N on every value, with pixels scaled to [0, 1]   (NIID-Bench, Li et al. 2022,
          arXiv:2102.02079, section 4.2)
rotation  images are rotated by s i/N degrees, with black corners
colour    channel c of an image is multiplied by 1 + u_c s i/N, with u_c uniform on [-1, 1] and drawn once per client

Shifted examples replace the real examples after the partition. The privacy ledger and audits treat the shifted examples
as the client's raw data. (A sharing strategy cannot shift features, because it must not change the clients' data.)
A client's test rows are shifted in the same way as its training rows. The validation set and the common test set are
not shifted.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.seeding import generator

SIZES = {"noise": 0.1, "rotation": 90.0, "colour": 0.5}
"""Default size s of a shift: variance of the noise, angle in degrees, and largest relative change of a channel."""


def shift_features(clients: Clients, kind: str, size: float | None, seed: int, part: str) -> Examples:
    """Return a copy of the clients' store in which each client's examples are shifted.

    clients: no two clients may hold the same row of the store. kind: noise, rotation or colour. size: size s of the
    shift; None: the default in ``SIZES``. seed: the run's seed. part: name of the set of examples, such as training;
    different sets get different noise.

    Raises:
        UserError: the examples are tokens, or the shift is for images and the examples are not images.
    """
    store, n = clients.store, len(clients)
    is_image = store.x.dim() == 4
    if not (store.x.is_floating_point() or store.x.dtype == torch.uint8) or (kind != "noise" and not is_image):
        what = "images or floating examples" if kind == "noise" else "images (C, H, W)"
        raise UserError(f"partition.shift {kind} is for {what}, not {store.x.dtype} {tuple(store.x.shape[1:])}.")
    if kind == "rotation" and store.y.dim() > 1:
        raise UserError("partition.shift rotation would not rotate labels per position: use noise or colour.")
    x = store.x.clone()
    for client in range(n):
        rows = clients.rows.ids(client)
        # A client's training and test examples get different noise, but the same change of colours.
        draws = generator(seed, "shift", client, *([part] if kind == "noise" else []))
        x[rows] = _shift(x[rows], kind, (size or SIZES[kind]) * (client + 1) / n, draws)
    return replace(store, x=x)


def _shift(x: Tensor, kind: str, by: float, draws: torch.Generator) -> Tensor:
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    if kind == "rotation":
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2.functional import rotate

        return rotate(x, by, InterpolationMode.BILINEAR)
    if kind == "noise":
        y = x.float() + scale * by**0.5 * torch.randn(x.shape, generator=draws)
    else:
        factors = 1 + by * (2 * torch.rand(x.shape[1], generator=draws) - 1)
        y = x.float() * factors.view(-1, 1, 1)
    return y.round().clamp(0, 255).to(x.dtype) if x.dtype == torch.uint8 else y.to(x.dtype)


def flip_and_crop(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Flip each image of x (B, C, H, W) with probability 1/2, pad it by ``padding`` zeros and crop it at random."""
    b, _, h, w = x.shape
    flip = torch.rand(b, generator=generator) < 0.5
    top, left = (torch.randint(2 * padding + 1, (b, 1), generator=generator) for _ in range(2))
    columns = torch.where(flip[:, None], torch.arange(w - 1, -1, -1), torch.arange(w)) + left  # (B, W) source columns
    rows = torch.arange(h) + top  # (B, H) source rows
    padded = F.pad(x, (padding,) * 4)
    index = torch.arange(b)[:, None, None].to(x.device), rows[:, :, None].to(x.device), columns[:, None].to(x.device)
    images = padded.permute(0, 2, 3, 1)[index].permute(0, 3, 1, 2)
    # For one-channel images, .contiguous() would keep the strides of the channels-last memory layout.
    # With channels-last strides, torch's convolutions round differently than with contiguous strides.
    return images.clone(memory_format=torch.contiguous_format)
