"""Effects of raw copies on label shares (theorem 1) and on the coded gradient's second moment (theorem 2).

Makkonen, Niemelä, Hollanti and Kas Hanna, "Approximate gradient coding for privacy-flexible federated learning with
non-IID data", arXiv:2404.03524.   N: number of clients;  K: examples of a class;  M: examples;  c: share of examples
that are not private;  d: copies of each such example, at d other clients;  q: probability that a client straggles;
r = q/(1 - q);  X, Y: a class's shares over clients, before and after copies;  g_j: gradient of example j;
d_j: number of clients that hold example j, owner included;  I_i: 1 if client i answers, else 0;  coded gradient:
ghat = sum_i I_i sum_j g_j/((1 - q) d_j) over all clients i and the examples j that client i holds.

``Pairs`` are for the single-class setting, in which client l owns class l. There E||ghat||^2 over copies and stragglers
is the sum over pairs (a, b) of a coefficient times <g_a, g_b>; the coefficient depends on the kind of the pair. The
paper bounds some of these coefficients; here all coefficients are exact.
"""

from dataclasses import dataclass

import numpy as np


def expected_distance(n_clients: int, d: int, c: float, k: int, distance: float) -> float:
    """Return E||Y - 1/N||^2 of theorem 1, where Y has the shares of a class that each client holds after copies.

    n_clients: N. distance: the squared distance from 1/N before copies. c: share of examples that is not private. d:
    copies of each such example. k: K, examples of the class. The value is exact for the variant ``exact`` of
    ``gradient_coding.copies``. For ``binomial`` it is exact if Y divides by the expected number of examples and copies,
    K (1 + d c), instead of the drawn number.
    """
    others = n_clients - 1
    noise = d * c * (others - d) / ((1 + d * c) ** 2 * others * k)
    return noise + ((others - d * c) / ((1 + d * c) * others)) ** 2 * distance


@dataclass(frozen=True)
class Pairs:
    """A number for each kind of pair (a, b) of examples: same or other class; both private, mixed, or both open.

    An example is open if it is not private. The kind ``itself`` is the pair of an open example with itself. The pair of
    a private example with itself has the kind ``same_private``.
    """

    same_private: float
    same_mixed: float
    same_open: float
    itself: float
    other_private: float
    other_mixed: float
    other_open: float

    def __matmul__(self, others: "Pairs") -> float:
        """Return the scalar product with ``others``: multiply the two numbers of each kind, and add the products."""
        return sum(a * b for a, b in zip(vars(self).values(), vars(others).values(), strict=True))


def coefficients(n_clients: int, d: int, q: float) -> Pairs:
    """Return for each kind of pair (a, b) of examples the coefficient of <g_a, g_b> in the second moment E||ghat||^2.

    g_a: gradient of example a; ghat: coded gradient. d: copies of each example that is not private. q: probability that
    a client straggles.
    """
    r, near = q / (1 - q), d / (n_clients - 1)
    return Pairs(
        same_private=1 + r,
        same_mixed=1 + r / (d + 1),
        same_open=1 + r * (1 + d * near) / (d + 1) ** 2,
        itself=1 + r / (d + 1),
        other_private=1,
        other_mixed=1 + r * near / (d + 1),
        other_open=1 + r * (2 * near + (n_clients - 2) * near**2) / (d + 1) ** 2,
    )


def without_copies(q: float) -> Pairs:
    """Return the same coefficients as ``coefficients``, but for clients that share no copies."""
    r = q / (1 - q)
    return Pairs(1 + r, 1 + r, 1 + r, 1 + r, 1, 1, 1)


def sums(gram: np.ndarray, labels: np.ndarray, private: np.ndarray) -> Pairs:
    """Sum the scalar products <g_a, g_b> of examples' gradients over the pairs of each kind of ``Pairs``.

    gram: (M, M), all <g_a, g_b>; labels: (M,) classes; private: (M,) bool.
    """
    same, n_open = labels[:, None] == labels, (~private[:, None]).astype(int) + ~private
    itself = np.eye(len(labels), dtype=bool) & ~private

    def total(pairs: np.ndarray) -> float:
        return float(gram[pairs].sum())

    return Pairs(
        same_private=total(same & (n_open == 0)),
        same_mixed=total(same & (n_open == 1)),
        same_open=total(same & (n_open == 2) & ~itself),
        itself=total(itself),
        other_private=total(~same & (n_open == 0)),
        other_mixed=total(~same & (n_open == 1)),
        other_open=total(~same & (n_open == 2)),
    )


def second_moment(holds: np.ndarray, gram: np.ndarray, q: float) -> float:
    """Return the second moment E||ghat||^2 of the coded gradient ghat over random stragglers, for any partition.

    The value is ||sum_j g_j||^2 + r sum_i ||f_i||^2, where f_i is the sum of g_j/d_j over the examples j of client i.
    g_j: gradient of example j; d_j: number of clients that hold it; r = q/(1 - q). holds: (M examples, N clients), 1
    where the client holds the example. gram: (M, M), <g_j, g_l>. q: probability that a client straggles.
    """
    shares = holds / holds.sum(1, keepdims=True)
    return float(gram.sum() + q / (1 - q) * np.einsum("ai,ab,bi->", shares, gram, shares, optimize=True))


def assumption(pairs: Pairs) -> bool:
    """Return whether assumption 1 holds, both for mixed and for open pairs of examples.

    By assumption 1, the sum of <g_a, g_b> over pairs of one class is at least 0, and at least the sum over pairs of two
    classes. g_a: gradient of example a. pairs: from ``sums``.
    """
    return pairs.same_mixed >= max(0.0, pairs.other_mixed) and pairs.same_open + pairs.itself >= max(
        0.0, pairs.other_open
    )


def promised(pairs: Pairs, d: int, q: float, negative: bool = False) -> float:
    """Return theorem 2's lower bound on the amount by which copies reduce the coded gradient's second moment.

    The bound holds under ``assumption``. pairs: from ``sums``. d: copies of each example that is not private. q:
    probability that a client straggles. negative: return the larger bound of remark 1, which holds if the sums over
    pairs of two classes are <= 0.
    """
    return q / (1 - q) * (d if negative else d - 1) / (d + 1) * (pairs.same_mixed + pairs.same_open + pairs.itself)
