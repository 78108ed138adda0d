"""Weighted mean of the clients' models: client i sends w_i (y_i - x), and the server divides the sum by sum_i w_i.

x: server model;  y_i: client i's model after local training;  w_i: client i's weight, ``work.weight(data)``. The engine
adds the clients' tensors in float64 (``core/block_sum.py``).
"""

from fedcommons.core.algorithm import Replies, Reply
from fedcommons.core.local_training import LocalResult
from fedcommons.flat_tensors import Flat, Payload, add, flat, scale, sub


def weighted_reply(x: Flat, trained: LocalResult, weight: float, memory: Payload | None = None) -> Reply:
    """Return a client's reply with the tensor ``delta`` = w_i (y_i - x) to be summed, and the privacy ledger entry.

    x: server model. trained: result of local training, with the client's model y_i. weight: w_i, the client's weight.
    memory: the client's new memory, see ``Reply``.
    """
    y, metrics, spent = trained
    delta = scale(sub(y, x), weight)
    return Reply({"delta": delta}, weight=weight, memory=memory, metrics=metrics, releases=[spent.with_names("delta")])


def weighted_mean(x: Flat, total: Payload, replies: Replies) -> Flat:
    """Return the server's new model:  x + sum_i w_i (y_i - x) / sum_i w_i.

    x: server model. y_i, w_i: model and weight of client i. total: sums over clients; ``delta`` is sum_i w_i (y_i - x).
    """
    return add(x, flat(total, "delta"), 1 / summed_weight(replies))


def summed_weight(replies: Replies) -> float:
    """Return sum_i w_i, the sum of the weights of the clients that replied."""
    return sum(r.weight for r in replies.values())
