"""The weighted mean of clients' models, in two halves: a client sends w_i (y_i - x), the server divides by sum_i w_i.

x: server model;  y_i: client i's model;  w_i: its weight, ``work.weight(data)``. The engine adds up what is sent, in
float64 (``core/block_sum.py``).
"""

from fedcommons.core.algorithm import Replies, Reply
from fedcommons.core.local_training import LocalResult
from fedcommons.flat_tensors import Flat, Payload, add, flat, scale, sub


def weighted_reply(x: Flat, trained: LocalResult, weight: float, memory: Payload | None = None) -> Reply:
    """The client's half: w_i (y_i - x), as the sum ``delta``, with what protects it. memory: see ``Reply``."""
    y, metrics, spent = trained
    delta = scale(sub(y, x), weight)
    return Reply({"delta": delta}, weight=weight, memory=memory, metrics=metrics, releases=[spent.of("delta")])


def weighted_mean(x: Flat, total: Payload, replies: Replies) -> Flat:
    """The server's half: x + sum_i w_i (y_i - x) / sum_i w_i."""
    return add(x, flat(total, "delta"), 1 / summed_weight(replies))


def summed_weight(replies: Replies) -> float:
    """sum_i w_i over the clients that replied."""
    return sum(r.weight for r in replies.values())
