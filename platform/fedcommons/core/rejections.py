"""Records of rejected replies, and of each round's largest reply, which an error names if the model is unusable."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch takes seconds to import, and reports do not need torch
    from fedcommons.flat_tensors import Payload

USABLE = ((2 - 2**-23) * 2.0**127) ** 0.5
"""Largest norm of a usable vector, 1.8e19: the square of this norm is the largest float32 number."""

NAMED = 3
"""Maximum number of clients that a message about rejected replies names."""


@dataclass(frozen=True)
class Rejected:
    """Number of rejected replies of a client (``replies``), and the reason for the first rejection (``why``)."""

    replies: int
    why: str


def count_rejections(before: Mapping[int, Rejected], reasons: Mapping[int, str]) -> dict[int, Rejected]:
    """Return the rejections by client up to the current round.

    before: rejections by client up to the previous round. reasons: client -> reason of the rejection in this round.
    """
    after = dict(before)
    for client, reason in reasons.items():
        earlier = after.get(client, Rejected(0, reason))
        after[client] = Rejected(earlier.replies + 1, earlier.why)
    return after


def records(rejected: Mapping[int, Rejected]) -> list[dict[str, Any]]:
    """Return the rejections as dicts of ``client``, ``replies`` and ``why``, in client order, for JSON files."""
    return [{"client": client, **asdict(rejection)} for client, rejection in sorted(rejected.items())]


def read(records: Sequence[Mapping[str, Any]]) -> dict[int, Rejected]:
    """Return the rejections by client; ``records``: dicts from the function ``records``."""
    return {int(r["client"]): Rejected(int(r["replies"]), str(r["why"])) for r in records}


def rejection_summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a message, such as ``3 replies of 1 client were rejected (client 2: its weight is nan)``."""
    replies, clients = sum(r["replies"] for r in records), len(records)
    named = [f"client {r['client']}: {r['why']}" for r in records[:NAMED]]
    named += [f"and {clients - NAMED} more"] if clients > NAMED else []
    what = "1 reply was" if replies == 1 else f"{replies} replies of {clients} client{'s'[: clients > 1]} were"
    return f"{what} rejected ({'; '.join(named)})"


@dataclass(frozen=True)
class Largest:
    """The largest reply norm of a round, with its client, and the median of all other norms (None: no other reply)."""

    round: int
    client: int
    norm: float
    median: float | None

    def __str__(self) -> str:
        others = "no other reply arrived" if self.median is None else f"the median of the others was {self.median:.3g}"
        return f"in round {self.round} the largest was client {self.client}'s, with norm {self.norm:.3g}; {others}"

    @property
    def stands_out(self) -> bool:
        """Whether the norm is more than 100 times the median of the other clients' norms, or there is no other norm."""
        return self.median is None or self.norm > 100 * self.median


def largest(round: int, norms: Mapping[int, float]) -> Largest | None:
    """Return the client with the largest reply norm; None if ``norms`` (client -> norm of the reply) is empty."""
    if not norms:
        return None
    client = max(sorted(norms), key=lambda i: norms[i])
    others = [value for i, value in norms.items() if i != client]
    return Largest(round, client, norms[client], median(others) if others else None)


def read_largest(values: Sequence[Any] | None) -> Largest | None:
    """Return a ``Largest`` from a list (round, client, norm, median), as stored in a checkpoint; None gives None.

    Raises:
        TypeError, ValueError: an element of the list has a wrong type.
    """
    if values is None:
        return None
    round, client, norm, others = values
    return Largest(int(round), int(client), float(norm), None if others is None else float(others))


def unusable(payload: "Payload") -> str | None:
    """Return the reason why training cannot continue with the tensors of ``payload``, or None.

    All values must be finite. Each vector's squared norm must be finite in float32, whatever the vector's type, because
    losses, gradients and proximal terms contain squared norms.
    """
    from fedcommons.flat_tensors import data, norm

    for name, x in payload.items():
        if not data(x).is_floating_point():
            continue
        size = norm(x)
        if not isfinite(size):
            return f"{name} has values that are not finite"
        if size > USABLE:
            return f"{name} has a norm of {size:.3g}, whose square overflows"
    return None
