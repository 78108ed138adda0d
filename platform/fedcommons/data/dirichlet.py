"""Random numbers of images per class and client, from Dirichlet distributions.

``group_sizes``: per class, draw the shares of the clients; repeat until every client has enough images.
``plain_sizes``: per class, draw the shares of the clients once.
``sizes_by_priors``: per client, draw the shares of the classes, then assign images one by one to clients of equal size.
``sizes_by_all_priors``: per client, draw the shares of the classes, then split each class in the ratio of the clients'
shares of the class.

Arguments of all functions: ``class_sizes`` (classes,) numbers of images per class, ``alpha`` the concentration of the
Dirichlet distribution, ``rng`` a seeded generator.
"""

from math import lgamma

import numpy as np

from fedcommons.errors import UserError

MAX_DRAWS = 1_000_000
"""Maximum number of draws in ``group_sizes`` before it raises an error."""

HOPELESS = 1e-3
"""Minimum expected number of accepted draws among ``MAX_DRAWS``. With fewer, ``group_sizes`` raises an error early."""


def group_sizes(
    class_sizes: np.ndarray, n_clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw the number of images per class and client: (classes, clients), with row sums ``class_sizes``.

    For each class, proportions ~ Dir(alpha) over clients. A client that already holds its fair share (the images of all
    classes divided by the number of clients) gets 0, and the proportions of the other clients are renormalised. The
    draw of all classes is repeated until every client has ``min_size`` images.

    Raises:
        UserError: no draw in a million was accepted, or no accepted draw can be expected (``HOPELESS``).
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
    n_draws = 0
    while n_draws < MAX_DRAWS:
        # With most arguments one of the first draws is accepted, so the first batch is small.
        batch = min(64 if n_draws == 0 else 4096, MAX_DRAWS - n_draws)
        sizes = _draw(class_sizes, n_clients, alpha, batch, rng)  # (batch, classes, clients)
        accepted = np.flatnonzero(sizes.sum(1).min(1) >= min_size)
        if len(accepted):
            return sizes[accepted[0]]
        short, n_draws = (sizes.sum(1) < min_size).mean(), n_draws + batch
        # short: share of this batch's clients that have fewer than min_size images.
        # If the clients were independent, a draw would be accepted with probability (1 - short)^N, with N = n_clients.
        # The clients' shares of a class have the sum 1, so the true probability is at most (1 - short)^N.
        if batch > 64 and MAX_DRAWS * (1 - short) ** n_clients < HOPELESS:
            break
    raise UserError(
        f"the partition cannot be met: in {n_draws:,} draws with alpha = {alpha:g} some of {n_clients} clients always "
        f"had fewer than {min_size} images; {advice}"
    )


def _all_get_one(class_sizes: np.ndarray, n_clients: int, alpha: float) -> float:
    """Return an upper bound on the probability that a draw gives every client an image.

    N: number of clients; K: number of classes that have images. The K first images, one per class, reach at most K
    clients. So at least m = N - K of the other images must each go to a client without an image of the same class. By
    Polya's urn, the (i + 1)-th image of a class does so with probability at most N alpha/i. The rounding in ``_draw``
    raises this probability by a factor below 1.6. Let t be the sum of these raised probabilities over all images but
    the K first. The upper bound is t^m/m!.
    """
    n = class_sizes[class_sizes > 0]
    more = n_clients - len(n)
    if more <= 0:
        return 1.0
    total = 1.6 * n_clients * alpha * (1 + np.log(n)).sum()
    return float(np.exp(min(0.0, more * np.log(total) - lgamma(more + 1))))


def plain_sizes(class_sizes: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the number of images per class and client: (classes, clients), with row sums ``class_sizes``.

    For each class, shares ~ Dir(alpha) over clients. Each client gets its share of the class's images, rounded down.
    The class's remaining images go to the clients that lost most by the rounding, at most one image per client.
    """
    shares = _shares(_log_gamma(alpha, (len(class_sizes), n_clients), rng)) * class_sizes[:, None]
    sizes = np.floor(shares).astype(np.int64)
    below = np.argsort(np.argsort(sizes - shares, 1, kind="stable"), 1)  # clients' ranks by loss; 0: the largest
    return sizes + (below < (class_sizes - sizes.sum(1))[:, None])


def sizes_by_priors(class_sizes: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the number of images per class and client: (classes, clients), with row sums ``class_sizes``.

    Each client has a prior ~ Dir(alpha) over classes. Images are assigned one at a time, without replacement. Each step
    picks a random client that is not full, and a class from the client's prior. Acar et al. (2021) draw again if the
    class is exhausted, which may never end. Here the class is drawn once, from the prior renormalised over the classes
    with remaining images. The distribution is the same.

    Departs from the authors' code: all images are assigned, so clients' totals may differ by one image.
    """
    # The logarithm of each client's prior without its normalising constant, which would not change the draws below.
    log_prior = _log_gamma(alpha, (n_clients, len(class_sizes)), rng)
    sizes = np.zeros((len(class_sizes), n_clients), dtype=np.int64)
    unspent = class_sizes.copy()
    remaining = np.flatnonzero(unspent)
    for client in _turns(np.diff(class_sizes.sum() * np.arange(n_clients + 1) // n_clients), rng):
        # The Gumbel-max trick draws a class with probability proportional to the client's prior.
        # The Gumbel-max trick needs only logarithms. The priors of all remaining classes may underflow to zero.
        c = remaining[np.argmax(log_prior[client, remaining] + rng.gumbel(size=len(remaining)))]
        sizes[c, client] += 1
        unspent[c] -= 1
        if unspent[c] == 0:
            remaining = remaining[remaining != c]
    return sizes


def sizes_by_all_priors(class_sizes: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the number of images per class and client: (classes, clients), with row sums ``class_sizes``.

    Client i has a prior p_i ~ Dir(alpha) over classes. Its share of the images of class c is p_ic / sum_j p_jc, with
    the sum over all clients j. Each client gets its share of the images, rounded down. Each remaining image of a class
    goes to a client drawn uniformly from all clients.

    Departs from FedCVAE's code: logarithms of priors are drawn, because most priors underflow to 0 for alpha = 0.001.
    """
    log_gamma = _log_gamma(alpha, (n_clients, len(class_sizes)), rng)
    log_prior = log_gamma - np.logaddexp.reduce(log_gamma, axis=1, keepdims=True)
    sizes = np.floor(_shares(log_prior.T) * class_sizes[:, None]).astype(np.int64)
    return sizes + rng.multinomial(class_sizes - sizes.sum(1), np.full(n_clients, 1 / n_clients))


def _turns(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random sequence of clients, (sum of ``sizes``,), in which client i occurs ``sizes[i]`` times.

    Each entry is drawn uniformly from the clients i that occur fewer than ``sizes[i]`` times before the entry.
    Method: each client i has a Poisson clock of rate 1 that stops after ``sizes[i]`` rings; rings are sorted by time.
    """
    rings = np.cumsum(rng.standard_exponential((len(sizes), sizes.max())), 1)
    until_full = np.arange(sizes.max()) < sizes[:, None]
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(rings[until_full])]


def _draw(class_sizes: np.ndarray, n_clients: int, alpha: float, batch: int, rng: np.random.Generator) -> np.ndarray:
    fair = class_sizes.sum() / n_clients
    assigned = np.zeros((batch, n_clients), dtype=np.int64)
    sizes = np.zeros((batch, len(class_sizes), n_clients), dtype=np.int64)
    for c, n in enumerate(class_sizes):
        if n == 0:
            continue
        log_gamma = _log_gamma(alpha, (batch, n_clients), rng)
        log_gamma[assigned >= fair] = -np.inf  # no more images for a client at its fair share
        cuts = np.floor(np.cumsum(_shares(log_gamma), 1) * n + 1e-9).astype(np.int64)
        cuts[:, -1] = n
        sizes[:, c] = np.diff(cuts, axis=1, prepend=0)
        assigned += sizes[:, c]
    return sizes


def _log_gamma(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Draw logarithms of Gamma(alpha) variables, as most of the variables underflow to 0 for alpha = 0.01."""
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def _shares(log_weights: np.ndarray) -> np.ndarray:
    """Return the softmax of each row of ``log_weights``: values in proportion to e^log_weights with row sum 1."""
    weights = np.exp(log_weights - log_weights.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)
