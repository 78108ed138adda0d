"""Sums over clients in fixed blocks: what makes results independent of the number of workers.

A round's participants, sorted, are cut into ``blocks`` consecutive blocks. One worker trains a block and sums it in
client order in float64; the blocks are added in block order. Free partial sums per worker only look as if they agreed.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fedcommons.federation.executor import J
from fedcommons.tensors import Flat, Payload, data, like


def cut(items: Sequence[J], blocks: int) -> list[list[J]]:
    """At most ``blocks`` consecutive non-empty blocks whose sizes differ by at most one."""
    n = min(blocks, len(items))
    cuts = [len(items) * i // n for i in range(n + 1)] if n else [0]
    return [list(items[a:b]) for a, b in pairwise(cuts)]


class BlockSum:
    """Adds payloads of one form in float64, in the order they come."""

    def __init__(self) -> None:
        self.total: dict[str, Flat | Tensor] = {}
        self._wide: dict[str, Tensor] = {}

    def add(self, payload: Payload) -> None:
        """Add a client's sums; all clients must send the same names and shapes."""
        if not self.total:
            self.total = {name: like(x, data(x).to(torch.float64, copy=True)) for name, x in payload.items()}
            return
        if payload.keys() != self.total.keys():
            raise ValueError(f"clients sent sums of different names: {sorted(payload)} and {sorted(self.total)}")
        for name, x in payload.items():
            values = data(x)
            if values.dtype != torch.float64:
                # copy into a float64 buffer, then add: 5 times faster than an addition of mixed types
                if name not in self._wide:
                    self._wide[name] = torch.empty_like(data(self.total[name]))
                values = self._wide[name].copy_(values)
            data(self.total[name]).add_(values)


def add_blocks(totals: Iterable[Mapping[str, Flat | Tensor]]) -> dict[str, Flat | Tensor]:
    """The sum of block totals, in block order; blocks in which nobody was accepted are empty and add nothing."""
    result = BlockSum()
    for total in totals:
        if total:
            result.add(total)
    return result.total
