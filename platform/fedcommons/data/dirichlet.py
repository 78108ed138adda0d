"""Draws of how many images of each class each client gets, from the two Dirichlet laws in use.

``group_sizes``: per class over clients, capped, many draws at a time, redrawn until accepted.
``sizes_by_priors``: per client over classes, images dealt one by one.
"""

from math import lgamma

import numpy as np

from fedcommons.errors import UserError

MAX_DRAWS = 1_000_000

HOPELESS = 1e-3
"""So few accepted draws at most are expected of all ``MAX_DRAWS``: none is made, or no more."""


def group_sizes(
    class_sizes: np.ndarray, n_clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """How many images of each class each client gets: (classes, clients), rows summing to ``class_sizes``.

    Per class, proportions ~ Dir(alpha) over clients; a client that already holds its fair share gets 0 and the
    rest is renormalised. Redrawn until every client has ``min_size``.

    Raises:
        UserError: no draw in a million was accepted, or none can be, or hardly so (``HOPELESS``).
    """
    total = int(class_sizes.sum())
    if n_clients * min_size > total:
        raise UserError(
            f"the partition cannot be met: {n_clients} clients with at least {min_size} images each "
            f"need more than the {total} images there are; use fewer clients."
        )
    advice = "use a larger alpha, fewer clients or a smaller n_aux."
    if MAX_DRAWS * _all_get_one(class_sizes, n_clients, alpha) < HOPELESS:
        raise UserError(
            f"the partition cannot be met: with alpha = {alpha:g} most classes go to one client each, and "
            f"{np.count_nonzero(class_sizes)} classes are not enough for {n_clients} clients; {advice}"
        )
    drawn = 0
    while drawn < MAX_DRAWS:
        batch = min(64 if drawn == 0 else 4096, MAX_DRAWS - drawn)  # most recipes are met at once
        sizes = _draw(class_sizes, n_clients, alpha, batch, rng)  # (batch, classes, clients)
        accepted = np.flatnonzero(sizes.sum(1).min(1) >= min_size)
        if len(accepted):
            return sizes[accepted[0]]
        short, drawn = (sizes.sum(1) < min_size).mean(), drawn + batch
        # Who has much leaves little to the others (shares of a Dirichlet law are negatively associated), so that all
        # have enough at once is less likely than if they had it independently of each other.
        if batch > 64 and MAX_DRAWS * (1 - short) ** n_clients < HOPELESS:
            raise UserError(
                f"the partition cannot be met: in {drawn:,} draws with alpha = {alpha:g} {short:.0%} of {n_clients} "
                f"clients had fewer than {min_size} images on average, and never none; {advice}"
            )
    raise UserError(
        f"the partition cannot be met: in {MAX_DRAWS:,} draws with alpha = {alpha:g} some of {n_clients} clients "
        f"always had fewer than {min_size} images; {advice}"
    )


def _all_get_one(class_sizes: np.ndarray, n_clients: int, alpha: float) -> float:
    """A bound on the probability that a draw gives every client an image.

    Each class has a first client, so N - K more must get one. In Polya's urn the i-th image of a class goes to a new
    client with probability at most N alpha/i; the cuts of ``_draw`` favour new ones by at most 1/(1 - 1/e) < 1.6. So
    many events of total probability t have a probability of at most t^m/m! that m or more occur.
    """
    n = class_sizes[class_sizes > 0]
    more = n_clients - len(n)
    if more <= 0:
        return 1.0
    total = 1.6 * n_clients * alpha * (1 + np.log(n)).sum()
    return float(np.exp(min(0.0, more * np.log(total) - lgamma(more + 1))))


def sizes_by_priors(class_sizes: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """How many images of each class each client gets: (classes, clients), rows summing to ``class_sizes``.

    Per client, a prior ~ Dir(alpha) over classes. Images are dealt without replacement, one at a time, to a random
    client that is not full, of a class from that client's prior. Acar et al. (2021) redraw the class while it is an
    exhausted one, which need not end; what they accept is a draw given that it is not exhausted, so it is drawn here
    at once, from the prior renormalised over the classes that are left.

    Departs from the authors' code: totals differ by one where N does not divide n, instead of leaving images out.
    """
    log_prior = _log_gamma(alpha, (n_clients, len(class_sizes)), rng)  # up to a constant per client: it cancels
    sizes = np.zeros((len(class_sizes), n_clients), dtype=np.int64)
    unspent = class_sizes.copy()
    left = np.flatnonzero(unspent)
    for client in _turns(np.diff(class_sizes.sum() * np.arange(n_clients + 1) // n_clients), rng):
        # Gumbel-max: a draw in proportion to the prior that never leaves log space, so a client whose prior on all the
        # classes that are left would underflow to zero still draws in proportion to it and needs no other law
        c = left[np.argmax(log_prior[client, left] + rng.gumbel(size=len(left)))]
        sizes[c, client] += 1
        unspent[c] -= 1
        if unspent[c] == 0:
            left = left[left != c]
    return sizes


def _turns(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whose turn it is, image by image: uniform over the clients that do not hold their ``sizes`` yet.

    Every client has a Poisson clock of the same rate that stops when it is full: all that run are as likely next.
    """
    rings = np.cumsum(rng.standard_exponential((len(sizes), sizes.max())), 1)
    until_full = np.arange(sizes.max()) < sizes[:, None]
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(rings[until_full])]


def _draw(class_sizes: np.ndarray, n_clients: int, alpha: float, batch: int, rng: np.random.Generator) -> np.ndarray:
    fair = class_sizes.sum() / n_clients
    held = np.zeros((batch, n_clients), dtype=np.int64)
    sizes = np.zeros((batch, len(class_sizes), n_clients), dtype=np.int64)
    for c, n in enumerate(class_sizes):
        if n == 0:
            continue
        log_gamma = _log_gamma(alpha, (batch, n_clients), rng)
        log_gamma[held >= fair] = -np.inf  # fewer than all: images are left, so the total held is below the total
        weights = np.exp(log_gamma - log_gamma.max(1, keepdims=True))
        cuts = np.floor(np.cumsum(weights / weights.sum(1, keepdims=True), 1) * n + 1e-9).astype(np.int64)
        cuts[:, -1] = n
        sizes[:, c] = np.diff(cuts, axis=1, prepend=0)
        held += sizes[:, c]
    return sizes


def _log_gamma(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Logs of Gamma(alpha) draws; for alpha = 0.01 most of the draws themselves underflow to 0."""
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha
