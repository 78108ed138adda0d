"""Draws of class sizes over clients from a capped Dirichlet law, many draws at a time, redrawn until accepted."""

import numpy as np

from fedcommons.errors import UserError

MAX_DRAWS = 1_000_000


def group_sizes(
    class_sizes: np.ndarray, n_clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """How many images of each class each client gets: (classes, clients), rows summing to ``class_sizes``.

    Per class, proportions ~ Dir(alpha) over clients; a client that already holds its fair share gets 0 and the
    rest is renormalised. Redrawn until every client has ``min_size``.

    Raises:
        UserError: no draw in a million was accepted, or none can be.
    """
    total = int(class_sizes.sum())
    if n_clients * min_size > total:
        raise UserError(
            f"the partition cannot be met: {n_clients} clients with at least {min_size} images each "
            f"need more than the {total} images there are; use fewer clients."
        )
    drawn = 0
    while drawn < MAX_DRAWS:
        batch = min(64 if drawn == 0 else 4096, MAX_DRAWS - drawn)  # most recipes are met at once
        sizes = _draw(class_sizes, n_clients, alpha, batch, rng)  # (batch, classes, clients)
        accepted = np.flatnonzero(sizes.sum(1).min(1) >= min_size)
        if len(accepted):
            return sizes[accepted[0]]
        drawn += batch
    raise UserError(
        f"the partition cannot be met: in {MAX_DRAWS:,} draws with alpha = {alpha:g} some of {n_clients} clients "
        f"always had fewer than {min_size} images; use a larger alpha, fewer clients or a smaller n_aux."
    )


def _draw(class_sizes: np.ndarray, n_clients: int, alpha: float, batch: int, rng: np.random.Generator) -> np.ndarray:
    fair = class_sizes.sum() / n_clients
    held = np.zeros((batch, n_clients), dtype=np.int64)
    sizes = np.zeros((batch, len(class_sizes), n_clients), dtype=np.int64)
    for c, n in enumerate(class_sizes):
        if n == 0:
            continue
        # log of a Gamma(alpha) draw: for alpha = 0.01 the draw itself underflows to 0 for most clients
        log_gamma = np.log(rng.standard_gamma(alpha + 1, (batch, n_clients)))
        log_gamma += np.log1p(-rng.random((batch, n_clients))) / alpha
        log_gamma[held >= fair] = -np.inf  # fewer than all: images are left, so the total held is below the total
        weights = np.exp(log_gamma - log_gamma.max(1, keepdims=True))
        cuts = np.floor(np.cumsum(weights / weights.sum(1, keepdims=True), 1) * n + 1e-9).astype(np.int64)
        cuts[:, -1] = n
        sizes[:, c] = np.diff(cuts, axis=1, prepend=0)
        held += sizes[:, c]
    return sizes
