"""Steps of a round that need each client's update: attacks by Byzantine clients, and robust aggregation.

A block then returns its clients' updates singly instead of their sum. The clients send the same bytes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedcommons.core.aggregation import Aggregation
from fedcommons.core.algorithm import Reply
from fedcommons.core.attacks import Attack
from fedcommons.core.block_sum import BlockSum
from fedcommons.core.updates import is_update
from fedcommons.federation.client_block import BlockResult, Form, checked_norm
from fedcommons.flat_tensors import Flat, Payload, data, like


def vectors(replies: Sequence[Reply], names: Sequence[str]) -> Tensor:
    """Return the sums called ``names`` of n replies, divided by the reply's weight, as vectors (n, d) in float64."""
    each = [torch.cat([data(r.sums[name]).double().reshape(-1) for name in names]) / r.weight for r in replies]
    return torch.stack(each)


def named(vector: Tensor, forms: Payload, names: Sequence[str]) -> dict[str, Flat | Tensor]:
    """Return the vector (d,) as tensors of the shapes and types of the payload's ``names``."""
    parts = vector.split([data(forms[name]).numel() for name in names])
    shaped = zip(names, parts, strict=True)
    return {n: like(x := forms[n], p.reshape(data(x).shape).to(data(x).dtype)) for n, p in shaped}


def falsify(results: Sequence[BlockResult], attack: Attack, round: int, seed: int, max_norm: float | None) -> None:
    """Replace the updates of Byzantine clients, and reject replies that are then not finite or too large."""
    replies = {i: (result, *pair) for result in results for i, pair in result.replies.items()}
    byzantine = sorted(attack.clients & replies.keys())
    for form in dict.fromkeys(replies[i][1] for i in byzantine):
        clients = [i for i in byzantine if replies[i][1] == form]
        sent = [replies[i][2] for i in clients]
        names = [name for name, x in sent[0].sums.items() if is_update(name, data(x))]
        if not names:
            continue
        false = attack.false_updates(vectors(sent, names), clients, len(replies), round, seed)
        for i, reply, update in zip(clients, sent, false, strict=True):
            each = {name: x for name, x in named(update, reply.sums, names).items() if name in reply.each}
            sums = {**reply.sums, **named(update * reply.weight, reply.sums, names)}
            changed, result = replace(reply, sums=sums, each={**reply.each, **each}), replies[i][0]
            if isinstance(size := checked_norm(changed, max_norm), str):
                result.rejected[i] = size
                del result.replies[i]
            else:
                result.replies[i], result.norms[i] = (form, changed), size


def add_up(
    results: Sequence[BlockResult], attack: Attack | None, round: int, seed: int, max_norm: float | None
) -> None:
    """Add each block's replies, after the attack, in client order, as blocks that return only sums do."""
    if attack and attack.is_on_updates:
        falsify(results, attack, round, seed, max_norm)
    for result in results:
        sums = defaultdict[Form, BlockSum](BlockSum)
        for form, reply in result.replies.values():
            sums[form].add(reply.sums)
        result.sums = {form: s.total for form, s in sums.items()}


def aggregate(rule: Aggregation, total: Payload, replies: Mapping[int, Reply]) -> dict[str, Flat | Tensor]:
    """Return the aggregate of the replies times the sum of their weights, in place of the sums ``total``."""
    accepted, names = [reply for _, reply in sorted(replies.items())], [*total]
    weights = torch.tensor([reply.weight for reply in accepted], dtype=torch.float64)
    return named(rule(vectors(accepted, names), weights) * weights.sum(), total, names) if names else {**total}
