"""Pairs of neighbouring data sets: one example per client is blanked out or replaced in the second data set.

blanked: all features of the example are nan. Clipping turns non-finite gradients into zero (``dp_sgd.clipped``). So the
example adds nothing to a clipped sum, while the number of examples stays equal, as ``privacy/ledger.py`` assumes. All
other code that reads the example returns nan, which the test detects. A noisy sum moves by at most its sensitivity.
Only examples with floating-point features can be blanked out.
zeroed: all pixels of the image are 0, so the image adds nothing to a sum of pixels. Only uint8 images can be zeroed.
replaced: another example takes the place of the example; if ``labels`` is True, the label changes too. A replacement is
a removal and an addition, so a noisy sum moves by at most twice its sensitivity.

In the first data set the example has a large norm (images: all pixels 255), so that clipping has an effect. A
floating-point replacement is the negative of this example, and an image is replaced by a black image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.seeding import numpy_generator

LOUD = 20.0
"""Factor on floating-point features of the changed example in the first data set, so that clipping has an effect."""


@dataclass(frozen=True)
class Kind:
    """A kind of change of an example, such as blanked (see the module's docstring).

    words: text for messages. times: maximum change of a noisy sum, in multiples of its sensitivity. labels: whether the
    example's label changes too.
    """

    words: str
    times: float
    labels: bool = False


BLANKED = Kind("with an example blanked out", 1.0)
REPLACED = Kind("with an example replaced", 2.0)
RELABELLED = Kind("with an example and its label replaced", 2.0, labels=True)
ZEROED = Kind("with an image blanked out (all pixels zero)", 1.0)


def apart(clients: Clients, whose: Sequence[int], kind: Kind, seed: int) -> tuple[Clients, Clients]:
    """Return the clients twice: with the first and with the second of two neighbouring data sets.

    The data sets differ in one random example of each client in ``whose``. If labels change, the new label is another
    label of the same client, or the old label if the client has only one label.
    """
    rows, others = [], []
    for client in whose:
        client_rows = clients.rows[client]
        rows.append(int(numpy_generator(seed, "neighbours", client).choice(client_rows)))
        label = int(clients.store.y[rows[-1]])
        client_labels = clients.store.y[torch.tensor(client_rows)].unique().tolist()
        others.append(next((other for other in client_labels if other != label), label))
    store, at = clients.store, torch.tensor(rows)
    first, second, y = store.x.clone(), store.x.clone(), store.y.clone()
    if first.is_floating_point():
        first[at] *= LOUD
        second[at] = torch.nan if kind is BLANKED else -first[at]
    elif first.dtype == torch.uint8:
        first[at], second[at] = 255, 0
    else:
        second[at] = first.max() - first[at]
    if kind.labels:
        y[at] = torch.tensor(others)
    rest = clients.rows, clients.n_own, clients.commons
    return Clients(Examples(first, store.y), *rest), Clients(Examples(second, y), *rest)
