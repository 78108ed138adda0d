"""Sums over clients in fixed blocks, so that results do not depend on the number of workers.

A round's participants, sorted, are cut into ``blocks`` consecutive blocks. One worker trains a block and sums it in
client order in float64; the blocks are then added in block order. Sums per worker would differ in their last bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedcommons.core.executor import J
from fedcommons.flat_tensors import Flat, Layout, Payload, data, like


def cut(items: Sequence[J], blocks: int) -> list[list[J]]:
    """Split ``items`` into at most ``blocks`` consecutive non-empty blocks whose sizes differ by at most one."""
    n = min(blocks, len(items))
    cuts = [len(items) * i // n for i in range(n + 1)] if n else [0]
    return [list(items[a:b]) for a, b in pairwise(cuts)]


@dataclass(frozen=True)
class Total:
    """A finished float64 sum. No code changes it, so Ray can pass it to another process without a copy."""

    arrays: dict[str, np.ndarray]
    layouts: dict[str, Layout]  # only for entries that are ``Flat``


class BlockSum:
    """A running float64 sum of payloads with equal names and shapes, added in the order of the calls."""

    def __init__(self) -> None:
        self.sums: dict[str, Flat | Tensor] = {}

    def add(self, payload: Payload) -> None:
        """Add a client's sums; all clients must send the same names and shapes."""
        if not self.sums:
            self.sums = {name: like(x, data(x).to(torch.float64, copy=True)) for name, x in payload.items()}
            return
        if payload.keys() != self.sums.keys():
            raise ValueError(f"clients sent sums of different names: {sorted(payload)} and {sorted(self.sums)}")
        for name, x in payload.items():
            data(self.sums[name]).add_(data(x))  # in-place addition widens without a copy

    @property
    def total(self) -> Total:
        """Sum of the added payloads, on the CPU."""
        arrays = {name: data(x).cpu().numpy() for name, x in self.sums.items()}
        return Total(arrays, {name: x.layout for name, x in self.sums.items() if isinstance(x, Flat)})


def add_blocks(totals: Sequence[Total]) -> dict[str, Flat | Tensor]:
    """Return the sum of block totals, added in block order; empty without blocks."""
    sums: dict[str, Flat | Tensor] = {}
    for name, first in totals[0].arrays.items() if totals else ():
        total = torch.empty(first.shape, dtype=torch.float64)
        added = total.numpy()
        np.copyto(added, first)
        for other in totals[1:]:
            np.add(added, other.arrays[name], out=added)
        layout = totals[0].layouts.get(name)
        sums[name] = Flat(layout, total) if layout else total
    return sums
