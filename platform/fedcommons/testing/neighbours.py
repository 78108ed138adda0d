"""Neighbouring data: the same but for one example of each client, which is blanked out or replaced.

blanked: the example is nan. Clipping takes what is not finite for zero (``dp_sgd.clipped``), so the example keeps its
place and adds nothing, as in ``privacy/ledger.py``; and whatever else reads it shows. A release moves by at most
its sensitivity. Floating examples only.
zeroed: the image is black, which is as good as nan where pixels are summed up. uint8 images only.
replaced: another example stands there, with another label where ``labels`` says so. It is blanked out and filled
again, so a release moves by at most twice its sensitivity.

On the first side the example is loud (of large norm, so that clipping matters), and the one in its place is its
opposite.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.seeding import numpy_generator

LOUD = 20.0
"""How much larger the example is than others, where examples are floating."""


@dataclass(frozen=True)
class Kind:
    """How neighbours differ, in words; times: the sensitivities by which a release may move; see the module."""

    said: str
    times: float
    labels: bool = False


BLANKED = Kind("with an example blanked out", 1.0)
REPLACED = Kind("with an example replaced", 2.0)
RELABELLED = Kind("with an example and its label replaced", 2.0, labels=True)
ZEROED = Kind("with an image blanked out (all pixels zero)", 1.0)


def neighbouring(
    examples: Examples, rows: Sequence[int], others: Sequence[int], kind: Kind
) -> tuple[Examples, Examples]:
    """Both sides' examples, which differ in ``rows``; others: the new labels there, if labels are replaced."""
    at = torch.tensor(rows)
    first, second, y = examples.x.clone(), examples.x.clone(), examples.y.clone()
    if first.is_floating_point():
        first[at] *= LOUD
        second[at] = torch.nan if kind is BLANKED else -first[at]
    elif first.dtype == torch.uint8:
        first[at], second[at] = 255, 0
    else:
        second[at] = first.max() - first[at]
    if kind.labels:
        y[at] = torch.tensor(others)
    return Examples(first, examples.y), Examples(second, y)


def apart(clients: Clients, whose: Sequence[int], kind: Kind, seed: int) -> tuple[Clients, Clients]:
    """Both sides' clients; an example of each of ``whose`` differs. A new label is one that the client has."""
    rows, others = [], []
    for client in whose:
        mine = clients.rows[client]
        rows.append(int(numpy_generator(seed, "neighbours", client).choice(mine)))
        label, held = int(clients.store.y[rows[-1]]), clients.store.y[torch.tensor(mine)].unique().tolist()
        others.append(next((other for other in held if other != label), label))
    return tuple(
        Clients(store, clients.rows, clients.n_own, clients.commons)
        for store in neighbouring(clients.store, rows, others, kind)
    )  # pyright: ignore[reportReturnType]
