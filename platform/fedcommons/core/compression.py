"""Compression of clients' updates (see ``updates.py``): top-k sparsification with error feedback, and QSGD.

Each tensor of an update, divided by the client's weight, is one vector v with d values of b bytes; the vector contains
all layers. SCAFFOLD's two tensors are two vectors, because their scales differ. All other data are sent unchanged:
messages to clients, scalars, BatchNorm's statistics, and tensors that occur in ``Reply.each`` only. A vector is sent
unchanged, too, if its compressed form is not shorter.

``TopK`` sends the k values of largest magnitude, k = max(1, round(share d)). Aji and Heafield, EMNLP 2017,
arXiv:1704.05021; Stich et al., NeurIPS 2018, arXiv:1809.07599. Bytes: k b for the values, and
ceil(min(k ceil(log2 d), d) / 8) for their positions, which are k numbers or, if shorter, one bit per value of v.

Error feedback: client i sends C(v + e_i) and stores e_i <- v + e_i - C(v + e_i).  C: compressor;  e_i: client i's
error, zero at first. Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv:1901.09847, algorithm 2. The
error does not change in a round in which the client's reply does not arrive or is rejected. The error is dropped if
the shapes of the update change, as between the stages of FedDPMS.

``QSGD`` sends the norm of each bucket of 512 values and, per value, the sign and a level l_j in 0, ..., s, where
s = 2^(bits - 1) - 1. The server computes ||v|| sign(v_j) l_j / s, whose mean is v_j.  ||v||: L2 norm of the bucket of
v_j. Alistarh et al., NeurIPS 2017, arXiv:1610.02132, sections 3 and 4. Bytes: b ceil(d / 512) + ceil(d bits / 8).

Departs from the papers: clients compress updates of many local steps, not gradients. QSGD's codes have a fixed length.
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedcommons.core.algorithm import Reply
from fedcommons.core.updates import ERROR, is_update
from fedcommons.flat_tensors import Flat, Layout, Payload, data, like
from fedcommons.seeding import generator

BUCKET = 512
"""Number of consecutive values that QSGD divides by one norm, as in the paper's experiments."""


@dataclass(frozen=True)
class TopK:
    """Send the ``share`` of values, in (0, 1], that have the largest magnitudes."""

    share: float

    def count(self, d: int) -> int:
        """Return k, the number of values that are sent of a vector with ``d`` values."""
        return max(1, round(self.share * d))

    def compress(self, v: Tensor, *key: int | str) -> Tensor:
        """Return a copy of the vector ``v`` in which all values are zero except the k largest magnitudes."""
        largest = v.abs().topk(self.count(len(v))).indices
        return torch.zeros_like(v).index_copy_(0, largest, v[largest])

    def nbytes(self, d: int, itemsize: int) -> int:
        """Return the number of bytes of a compressed vector with ``d`` values of ``itemsize`` bytes each."""
        k = self.count(d)
        return k * itemsize + ceil(min(k * (d - 1).bit_length(), d) / 8)


@dataclass(frozen=True)
class QSGD:
    """Send each value as a sign and one of 2^(``bits`` - 1) levels, drawn such that the mean is the value."""

    bits: int

    def compress(self, v: Tensor, *key: int | str) -> Tensor:
        """Return the quantised vector ``v``; key: key of the random numbers, which are drawn on the CPU."""
        s, rows = 2 ** (self.bits - 1) - 1, pad(v, (0, -len(v) % BUCKET)).view(-1, BUCKET)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).double()
        draws = torch.rand(rows.shape, generator=generator(*key), dtype=torch.float64).to(v.device)
        levels = (rows.abs() / norms.clamp(min=1e-300) * s + draws).floor().clamp(max=s)
        return (norms * rows.sign() * levels / s).to(v.dtype).view(-1)[: len(v)]

    def nbytes(self, d: int, itemsize: int) -> int:
        """Return the number of bytes of a compressed vector with ``d`` values of ``itemsize`` bytes each."""
        return ceil(d / BUCKET) * itemsize + ceil(d * self.bits / 8)


@dataclass(frozen=True)
class Compression:
    """The step that compresses a client's update (``ClientStep``); has_feedback: use error feedback."""

    compressor: TopK | QSGD
    has_feedback: bool

    def __call__(self, reply: Reply, nbytes: int, memory: Payload, seed: int) -> tuple[Reply, int]:
        """Return the reply with compressed updates, and its bytes; see ``ClientStep``.

        Raises:
            ValueError: ``Reply.sums`` has a tensor of integers that is no scalar.
        """
        sums, each = dict(reply.sums), dict(reply.each)
        # A noisy (private) update must contain no error of an update without noise, so the two errors have two names.
        noisy = {name for event in reply.releases if event.covered for name in event.what}
        errors: dict[str, Flat | Tensor] = {}
        for name, x in reply.sums.items():
            values = data(x)
            if values.dim() and not values.is_floating_point():
                raise ValueError(f"communication.compress needs floats, but Reply.sums[{name!r}] is {values.dtype}")
            packed = self.compressor.nbytes(values.numel(), values.itemsize)
            if not is_update(name, values) or packed >= values.nbytes:
                continue
            v, key = values.reshape(-1) / reply.weight, f"{ERROR}{'noisy' if name in noisy else 'bare'} {name}"
            if key in memory and _form(memory[key]) == _form(x):
                v += data(memory[key]).reshape(-1).to(v)
            sent = self.compressor.compress(v, seed, "compression", name)
            if self.has_feedback:
                errors[key] = like(x, (v - sent).view(values.shape))
            sums[name] = like(x, (sent * reply.weight).view(values.shape))
            if name in each:
                each[name] = like(each[name], sent.view(values.shape))
            nbytes += packed - values.nbytes
        if errors:
            entries = {name: x for name, x in memory.items() if reply.memory is None or name.startswith(ERROR)}
            reply = replace(reply, memory={**(reply.memory or {}), **entries, **errors})
        return replace(reply, sums=sums, each=each), nbytes


def _form(x: Flat | Tensor) -> Layout | torch.Size:
    return x.layout if isinstance(x, Flat) else x.shape
