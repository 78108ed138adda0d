"""Random numbers of images per class and client, from Dirichlet laws.

``group_sizes``: for each class, shares of the clients; many draws at a time, redrawn until one is accepted.
``plain_sizes``: for each class, shares of the clients; whatever is drawn.
``sizes_by_priors``: for each client, shares of the classes; images are dealt one by one.
``sizes_by_all_priors``: for each client, shares of the classes; a class is split in the ratio of its shares.
"""

from math import lgamma

import numpy as np

from fedcommons.errors import UserError

MAX_DRAWS = 1_000_000

HOPELESS = 1e-3
"""If fewer accepted draws than this are expected among ``MAX_DRAWS``, drawing stops, or does not begin."""


def group_sizes(
    class_sizes: np.ndarray, n_clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """How many images of each class each client gets: (classes, clients), rows summing to ``class_sizes``.

    For each class, proportions ~ Dir(alpha) over clients; a client that already holds its fair share gets 0, and the
    others' proportions are renormalised. This is repeated until every client has ``min_size`` images.

    Raises:
        UserError: no draw in a million was accepted, or it is clear that none will be (``HOPELESS``).
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
        # Shares of a Dirichlet law are negatively associated: all clients have enough less often than if each had it
        # independently with the same probability. So this is an upper bound.
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


def plain_sizes(class_sizes: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """How many images of each class each client gets: (classes, clients), rows summing to ``class_sizes``.

    For each class, shares ~ Dir(alpha) over clients; each gets its share rounded down, then the images that are left
    go one by one to the client that is furthest below its share, which nobody is twice.
    """
    shares = _shares(_log_gamma(alpha, (len(class_sizes), n_clients), rng)) * class_sizes[:, None]
    sizes = np.floor(shares).astype(np.int64)
    below = np.argsort(np.argsort(sizes - shares, 1, kind="stable"), 1)  # 0: furthest below its share
    return sizes + (below < (class_sizes - sizes.sum(1))[:, None])


def sizes_by_priors(class_sizes: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """How many images of each class each client gets: (classes, clients), rows summing to ``class_sizes``.

    Each client has a prior ~ Dir(alpha) over classes. Images are dealt without replacement, one at a time: to a random
    client that is not full, of a class drawn from its prior. Acar et al. (2021) draw again if the class is exhausted,
    which may never end. Here the class is drawn once, from the prior renormalised over the classes that are left; the
    law is the same.

    Departs from the authors' code: if N does not divide n, sizes differ by one, and no image is left out.
    """
    log_prior = _log_gamma(alpha, (n_clients, len(class_sizes)), rng)  # up to a constant per client: it cancels
    sizes = np.zeros((len(class_sizes), n_clients), dtype=np.int64)
    unspent = class_sizes.copy()
    left = np.flatnonzero(unspent)
    for client in _turns(np.diff(class_sizes.sum() * np.arange(n_clients + 1) // n_clients), rng):
        # Gumbel-max draws in proportion to the prior in log space: it also works where the prior of all classes that
        # are left would underflow to zero.
        c = left[np.argmax(log_prior[client, left] + rng.gumbel(size=len(left)))]
        sizes[c, client] += 1
        unspent[c] -= 1
        if unspent[c] == 0:
            left = left[left != c]
    return sizes


def sizes_by_all_priors(class_sizes: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """How many images of each class each client gets: (classes, clients), rows summing to ``class_sizes``.

    Client i has a prior p_i ~ Dir(alpha) over classes, and of class c the share p_ic / sum_j p_jc. Each gets its share
    rounded down, then each image that is left goes to a client drawn uniformly from all.

    Departs from FedCVAE's code: logarithms are drawn, as for alpha = 0.001 most priors themselves underflow to 0.
    """
    log_gamma = _log_gamma(alpha, (n_clients, len(class_sizes)), rng)
    log_prior = log_gamma - np.logaddexp.reduce(log_gamma, axis=1, keepdims=True)
    sizes = np.floor(_shares(log_prior.T) * class_sizes[:, None]).astype(np.int64)
    return sizes + rng.multinomial(class_sizes - sizes.sum(1), np.full(n_clients, 1 / n_clients))


def _turns(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The client that gets each image, in order: uniform over the clients that are not full (``sizes``) yet.

    Every client has a Poisson clock of the same rate, which stops when it is full; the next ring is uniform over the
    running clocks.
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
        cuts = np.floor(np.cumsum(_shares(log_gamma), 1) * n + 1e-9).astype(np.int64)
        cuts[:, -1] = n
        sizes[:, c] = np.diff(cuts, axis=1, prepend=0)
        held += sizes[:, c]
    return sizes


def _log_gamma(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Logs of Gamma(alpha) draws; for alpha = 0.01 most of the draws themselves underflow to 0."""
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def _shares(log_weights: np.ndarray) -> np.ndarray:
    """Each row in proportion to e^log_weights, with sum 1."""
    weights = np.exp(log_weights - log_weights.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)
