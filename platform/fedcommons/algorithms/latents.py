"""Encoding and decoding of images by the classifying autoencoder of FedVAE and FedDPMS.

The functions use the module in evaluation mode, with its present weights; they do not train it. Codes are vectors of
length l.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData
from fedcommons.privacy.dp_sgd import NoisySum, clipped
from fedcommons.privacy.noise import Stream
from fedcommons.privacy.release import Release
from fedcommons.seeding import generator

CHUNK = 500  # number of images that are encoded in one forward pass

AUTOENCODER = {
    "encode": "encode(images) returns mean and log-variance of the codes, each (B, l)",
    "decoder": "decoder(codes) returns images in [0, 1]; it must be a submodule",
}
"""Attributes that the clients' module must have: name -> description for error messages."""

AND_CROSS_ENTROPY = {
    **AUTOENCODER,
    "cross_entropy": "cross_entropy(batch, batch_idx) returns the classifier's loss without the autoencoder's",
}


def decayed(work: Work, decay: float, round: int) -> float | None:
    """Return the learning rate times decay^k, k = (local epochs before ``round``) // 10; None if ``decay`` is 1."""
    return None if decay == 1 else work.rates[0] * decay ** ((round - 1) * work.loop.epochs // 10)


def abundant(counts: Tensor, n: int) -> list[int]:
    """Return up to n non-empty classes with the most examples, by counts (classes,); ties: lower class first."""
    order = counts.argsort(descending=True, stable=True)[:n]
    return [c for c in order.tolist() if counts[c] > 0]


def scarce(counts: Tensor, n: int) -> Tensor:
    """Return each client's n classes with the lowest ``counts`` (N, classes), as (N, n); ties: lower class first."""
    return counts.argsort(dim=1, stable=True)[:, :n].clone()


def assistants(client: int, scarce: Sequence[int], abundant: Mapping[int, Sequence[int]], n: int) -> list[int]:
    """Return up to n other clients that have sent codes of the client's scarce classes, most such classes first.

    abundant: the classes whose codes each client has sent, by client. On ties, the lowest client number comes first.
    Clients that have sent no scarce class are left out.
    """
    overlap = {j: len(set(scarce) & set(abundant[j])) for j in sorted(abundant) if j != client}
    best = sorted(overlap, key=lambda j: overlap[j], reverse=True)  # stable sort: ties go to the lowest client number
    return [j for j in best if overlap[j]][:n]


@contextmanager
def evaluation_mode(work: Work) -> Iterator[None]:
    """Run the block with the module in evaluation mode and without gradients."""
    work.module.eval()
    with torch.no_grad():
        yield


def codes_by_class(work: Work, data: ClientData, n: int) -> dict[int, Tensor]:
    """Return the codes without noise, (m, l), of the m images of each of the client's n most abundant classes."""
    encode = work.module.encode
    with evaluation_mode(work):
        return {
            c: torch.cat([encode(part)[0] for part in data.x[data.y == c].split(CHUNK)])  # pyright: ignore[reportCallIssue]
            for c in abundant(data.y.bincount(), n)
        }


def real_images(data: ClientData, n: int, most: int, seed: int) -> dict[str, Tensor]:
    """Return {"codes": images, "labels": classes}: up to ``most`` random real images of each of n abundant classes."""
    draws, rows = generator(seed, "real images"), []
    for c in abundant(data.y.bincount(), n):
        of_class = (data.y == c).nonzero()[:, 0]
        rows.append(of_class[torch.randperm(len(of_class), generator=draws)[:most].to(of_class.device)])
    return {"codes": data.x[torch.cat(rows)], "labels": data.y[torch.cat(rows)]}


def noisy_mean(codes: Tensor, clip: float, sigma: float, draws: Stream) -> tuple[Tensor, Release]:
    """Return the noisy mean of m clipped codes and its privacy ledger entry (release).

    The mean is (1/m) (sum_j z_j min(1, C/||z_j||) + N(0, sigma^2 C^2 I)) for codes z_j, with C ``clip``. Of two
    neighbouring data sets, one has a zero code in place of the code of one image; m is public and equal in both. So
    their sums differ by at most C.
    """
    total = NoisySum(torch.zeros_like(codes[0]), clip)
    for code in codes:
        total.add(*clipped(code.clone(), clip))
    total.blur(sigma, draws)
    return total.values / len(codes), total.release


def sample_recognised_codes(
    work: Work, centres: Iterable[tuple[int, Tensor]], sigma: float, quota: int, tries: int, draws: torch.Generator
) -> tuple[Tensor, list[int]]:
    """Sample codes around each centre; return those whose decoded image the module assigns to the centre's class.

    Codes are drawn from N(centre, sigma^2 I). centres: (class, mean code). quota: largest number of returned codes per
    centre. tries: largest number of batches of ``quota`` sampled codes per centre. Returns (codes, classes).
    """
    accepted, labels = [], []
    with evaluation_mode(work):
        for c, centre in centres:
            recognisable = centre.new_empty(0, len(centre))
            for _ in range(tries):
                codes = centre + sigma * torch.randn(quota, len(centre), generator=draws).to(centre)
                predicted = work.module(work.module.decoder(codes)).argmax(1)  # pyright: ignore[reportCallIssue]
                recognisable = torch.cat([recognisable, codes[predicted == c]])[:quota]
                if len(recognisable) == quota:
                    break
            accepted.append(recognisable)
            labels += [c] * len(recognisable)
    return torch.cat(accepted), labels


def decoded(work: Work, codes: Tensor, like: Tensor) -> Tensor:
    """Return the images decoded from codes (n, l), with the dtype of ``like``; uint8 pixels are in 0..255."""
    with evaluation_mode(work):
        images = work.module.decoder(codes)  # pyright: ignore[reportCallIssue]
    return (255 * images).round().to(torch.uint8) if like.dtype == torch.uint8 else images.to(like)


def augmented(data: ClientData, images: Tensor, labels: Tensor, seed: int) -> ClientData:
    """Return n examples sampled from the union of the client's n examples and m decoded images, with weight n + m."""
    n, m = len(data), len(labels)
    rows = torch.randperm(n + m, generator=generator(seed, "augmented"))[:n].to(data.y.device)
    weight = data.weight
    if weight is not None:
        weight = torch.cat([weight * (data.size / n), torch.ones_like(labels, dtype=weight.dtype)])[rows]
        weight = weight * (n / weight.sum())
    x, y = torch.cat([data.x, images])[rows], torch.cat([data.y, labels])[rows]
    return replace(data, x=x, y=y, weight=weight, ids=None, total=data.size + m)
