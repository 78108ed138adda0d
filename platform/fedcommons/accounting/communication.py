"""Bytes that cross the wire, counted from messages only (methods.md section 11).

Totals over clients: per round down and up, and once for what is exchanged before or between federations. For Fedssyn
with FedAvg and C = 1 the total is 2 N Ms + 2 R N Mc, with Ms the synthetic data of one client as uint8 images and
labels, Mc the model.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes, summed over clients."""

    down: int = 0
    up: int = 0
    once: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.down + other.down, self.up + other.up, self.once + other.once)

    def metrics(self) -> dict[str, int]:
        """A round's bytes under the names they are logged by."""
        return {"comm/down_bytes": self.down, "comm/up_bytes": self.up}


def images_nbytes(n: int, shape: tuple[int, ...]) -> int:
    """Bytes of n uint8 images of this shape with one byte of label each."""
    size = 1
    for side in shape:
        size *= side
    return n * (size + 1)
