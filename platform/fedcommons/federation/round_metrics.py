"""The metrics of a round's training, and the error of a round whose replies were all rejected."""

from collections.abc import Mapping

from fedcommons.core.algorithm import Reply
from fedcommons.core.rejections import Largest
from fedcommons.errors import ClientError, DivergenceError
from fedcommons.federation.client_block import NOT_FINITE


def mean_metrics(accepted: Mapping[int, Reply]) -> dict[str, float]:
    """Return "train/METRIC" -> mean of the metric over the clients that report it."""
    names = sorted({name for reply in accepted.values() for name in reply.metrics})
    replies = [reply for _, reply in sorted(accepted.items())]
    values = {name: [float(r.metrics[name]) for r in replies if name in r.metrics] for name in names}
    return {f"train/{name}": sum(v) / len(v) for name, v in values.items()}


def all_rejected(name: str, number: int, rejected: Mapping[int, str], before: Largest | None) -> ClientError:
    """Return the error for a round in which all replies were rejected. The error names the client that is the cause.

    If a reply of the last round was much larger than the others (``stands_out``) and now no reply is finite, the cause
    is the client of the large reply, which may have made the model too large. Else it is the first rejected client.
    """
    if before and before.stands_out and all(reason.endswith(NOT_FINITE) for reason in rejected.values()):
        text = f"round {number}, {name}: no reply was finite; among the replies, {before} (see federation.max_norm)"
        return DivergenceError(text, before.client, before.round)
    client, reason = next(iter(rejected.items()))
    grown = (NOT_FINITE, *(["federation.max_norm"] if number > 1 else []))  # in round 1, the limit is too low
    kind = DivergenceError if any(word in r for r in rejected.values() for word in grown) else ClientError
    return kind(f"round {number}, {name}: every reply was rejected; client {client}: {reason}", client, number)
