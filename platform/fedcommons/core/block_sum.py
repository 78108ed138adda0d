"""Sums over clients in blocks of a fixed order, so that results do not depend on the number of worker processes.

A round's participants, sorted, are divided into ``blocks`` consecutive blocks. One worker trains the clients of a block
and adds their tensors in client order in float64. The sums of the blocks are then added in block order. If instead each
worker added all clients that it trains, the last bits of a sum would depend on the number of workers.
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
    """A finished float64 sum over the clients of a block. No code changes the sum later, so Ray need not copy it."""

    arrays: dict[str, np.ndarray]
    layouts: dict[str, Layout]  # names and shapes, only for entries that are ``Flat``


class BlockSum:
    """A running float64 sum of payloads with equal names and shapes, which are added in the order of the calls."""

    def __init__(self) -> None:
        self.sums: dict[str, Flat | Tensor] = {}

    def add(self, payload: Payload) -> None:
        """Add a client's tensors; all clients must send the same names and shapes."""
        if not self.sums:
            self.sums = {name: like(x, data(x).to(torch.float64, copy=True)) for name, x in payload.items()}
            return
        if payload.keys() != self.sums.keys():
            raise ValueError(f"clients sent sums of different names: {sorted(payload)} and {sorted(self.sums)}")
        for name, x in payload.items():
            data(self.sums[name]).add_(data(x))  # in-place addition converts to float64 without a copy

    @property
    def total(self) -> Total:
        """Sum of all added payloads, in CPU memory."""
        arrays = {name: data(x).cpu().numpy() for name, x in self.sums.items()}
        return Total(arrays, {name: x.layout for name, x in self.sums.items() if isinstance(x, Flat)})


def add_blocks(totals: Sequence[Total]) -> dict[str, Flat | Tensor]:
    """Add the blocks' sums in block order; return name -> sum, or an empty dict if there is no block."""
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
