"""Privacy ledger entries (releases) of a client's reply and of its local trainings in a round."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fedcommons.core.algorithm import BUFFERS, Reply
from fedcommons.data.clients import ClientData
from fedcommons.privacy.release import Release, uncovered

NOT_DRAWN = "no noise was drawn for it"
"""The privacy ledger's reason why a reply has no guarantee: the reply declares noise, but the client drew none."""


def released(reply: Reply, client: int, rows: ClientData, *, has_drawn: bool) -> tuple[list[Release], bool]:
    """Return the privacy ledger's entries (releases) of a reply, and whether its trainings may have a guarantee.

    A release with a privacy guarantee is called covered. The entries are the reply's covered releases, and one
    uncovered release for all other tensors, or two if some tensors belong to a commons (data that clients share). A
    weight other than 1 or n_i (the client's number of examples) is listed as uncovered. BatchNorm's statistics are
    never covered. If the client has drawn no noise from ``work.noise``, no release is covered.

    The client's trainings may have a guarantee if three conditions hold:

    - the reply has a covered release, or no tensors
    - the reply's releases name each of its tensors
    - if a release states a guarantee, the client has drawn noise
    """
    sent, is_whole = {*reply.sums, *reply.each}, True
    bare = {*sent, "weight"} if reply.weight != 1 and reply.weight != rows.size else set(sent)
    events: list[Release] = []
    others: list[Release] = []
    for event in reply.releases:
        if event.covered and not has_drawn:
            event, is_whole = replace(event, mechanism=None, reason=NOT_DRAWN), False
        if event.covered:
            bare.difference_update(name for name in event.what if name != BUFFERS)
            events.append(replace(event, client=client))
        else:
            bare.difference_update(event.what)
            others.append(event)
    is_whole = is_whole and not bare & sent and bool(events or not sent)
    names, seen = {False: bare, True: set[str]()}, {False: 0, True: 0}  # the keys are the values of ``Release.commons``
    for event in others:
        names[event.commons].update(event.named)
        seen[event.commons] = max(event.n_disclosed, seen[event.commons])
    for commons in names:
        if names[commons]:
            what = tuple(sorted(names[commons]))
            alike = uncovered(what, commons)
            events.append(replace(alike, client=client, n_disclosed=seen[commons]) if seen[commons] else alike)
    return events, is_whole


def unnamed(trained: Sequence[Release], named: Sequence[Release], client: int) -> list[Release]:
    """Return a privacy ledger entry for every local training or gradient that the reply's releases omit.

    trained: entries of all trainings that the client ran. named: the releases of the reply. An omitted training counts,
    because a later training may start from its result. If no release of the reply has a privacy guarantee, the list is
    empty, because no epsilon is computed for the reply.
    """
    if not any(event.covered for event in named):
        return []
    unnamed = Counter(map(_protection, trained)) - Counter(map(_protection, named))
    return [replace(event, client=client, what=("local training",)) for event in unnamed.elements()]


def _protection(event: Release) -> Release:
    return replace(event, client=-1, what=(), n_disclosed=0, commons=False)
