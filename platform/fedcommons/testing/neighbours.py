"""Neighbouring data sets, which differ in one example of each client: the example is blanked out or replaced.

blanked: the example is nan. Clipping treats non-finite gradients as zero (``dp_sgd.clipped``), so the example keeps
its place and adds nothing, as in ``privacy/ledger.py``. All other code that reads the example gives nan, which the test
detects. A release moves by at most its sensitivity. Floating examples only.
zeroed: the image is black, which has the effect of nan if pixels are summed. uint8 images only.
replaced: another example takes the place, with another label if ``labels`` is True. A replacement is a removal and an
addition, so a release moves by at most twice its sensitivity.

On the first side the example has a large norm, so that clipping has an effect. The replacement is its negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.seeding import numpy_generator

LOUD = 20.0
"""Factor by which the example is scaled, for floating examples."""


@dataclass(frozen=True)
class Kind:
    """A kind of neighbours. said: in words; times: maximum move of a release, in sensitivities; see the module."""

    words: str
    times: float
    labels: bool = False


BLANKED = Kind("with an example blanked out", 1.0)
REPLACED = Kind("with an example replaced", 2.0)
RELABELLED = Kind("with an example and its label replaced", 2.0, labels=True)
ZEROED = Kind("with an image blanked out (all pixels zero)", 1.0)


def neighbouring(
    examples: Examples, rows: Sequence[int], others: Sequence[int], kind: Kind
) -> tuple[Examples, Examples]:
    """Return the examples of both sides, which differ in ``rows``. others: new labels of these rows, if replaced."""
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
    """Return the clients of both sides; one example per client of ``whose`` differs. New labels occur at the client."""
    rows, others = [], []
    for client in whose:
        client_rows = clients.rows[client]
        rows.append(int(numpy_generator(seed, "neighbours", client).choice(client_rows)))
        label, client_labels = (
            int(clients.store.y[rows[-1]]),
            clients.store.y[torch.tensor(client_rows)].unique().tolist(),
        )
        others.append(next((other for other in client_labels if other != label), label))
    return tuple(
        Clients(store, clients.rows, clients.n_own, clients.commons)
        for store in neighbouring(clients.store, rows, others, kind)
    )  # pyright: ignore[reportReturnType]
