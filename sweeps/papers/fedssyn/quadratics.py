"""The heterogeneous quadratics of Fedssyn, and FedAvg with all step sizes of a grid in one batch.

f(x) = (1/N) sum_i f_i(x),   f_i(x) = 1/(2 n) sum_j ||A_ij x - b_ij||^2,   A_ij = a_ij I

N, n, d     clients, samples per client, dimension of x
a_ij        i for client i = 1 ... N; a swapped sample keeps its a
b_ij        ~ N(mu_i, sigma^2/(i^2 d) I) with mu_i ~ N(0, zeta^2/(i^2 d) I), so that E||A_i^T mu_i||^2 = zeta^2
p           share of every client's samples that is swapped
tau         local steps of a round: one pass over the n samples, one by one, in an order drawn for (round, client)
eta, eps    step size; error ||x - x*||^2 to be reached, x* the minimiser of f

A step is affine in x with a scalar coefficient, x <- (1 - eta a^2) x + eta a b. So a client's round is
x <- P_i x + eta sum_j a_j b_j prod_{l after j} (1 - eta a_l^2), where P_i = prod_j (1 - eta a_j^2) in any order.
Only a small matrix product depends on d: the grid of figure 2, 10^9 steps, takes seconds on one core.
The result equals that of a loop over steps up to rounding; all computation is in float64.

Source: Fedssyn (Li et al., TMLR 2024), section 2.3, figures 2 and A.4; its first version, section 2.3 and figure B.3.
Departs from the paper: variances are divided by i^2 d as in the released code, which gives zeta^2 the paper's meaning;
the text has (i d)^2. The error is that of the server's model as in the released code; the captions have the mean over
clients (``models``). The draws have the released code's distribution, not its values.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator
from fedcommons.sharing.swapped import n_swapped

SHAPE = (10, 100, 25)  # number of clients N, samples per client n, dimension d of x
STEP_SIZES = np.logspace(-6, 2, 40)[:31]  # step sizes of the grid, 1e-6 ... 1.43
SHARES = tuple(k / 40 for k in range(41))  # swapped shares p of figure 2 (b)
ROUNDS, TARGET = 800, 1.160264e-6  # the paper's text prints the target error 1.1e-6

TOGETHER = 256
"""Maximum number of pairs (round, step size) computed at once, so that they fit into a cache; results do not change."""


@dataclass(frozen=True)
class Quadratics:
    """The samples of all clients: coefficients a_ij and vectors b_ij."""

    a: np.ndarray  # coefficients a_ij, shape (clients N, samples n)
    b: np.ndarray  # vectors b_ij, shape (clients N, samples n, dimension d)


@dataclass(frozen=True)
class Constants:
    """The constants of the convergence rates, measured at one weight vector x; norms are Euclidean.

    f_i: loss of client i, the mean of the losses F_ij of its samples j; f: mean of f_i over the N clients.
    """

    zeta_sq: float  # heterogeneity of clients i: (1/N) sum_i ||grad f_i - grad f||^2
    sigma_sq: float  # noise of samples j: (1/N) sum_i E_j ||grad F_ij - grad f_i||^2, F_ij: loss
    l_max: float  # the largest smoothness of a client's loss f_i; the paper's L_p if a share p was swapped
    l_avg: float  # the smoothness of the mean loss f
    mu: float  # strong convexity of f; equal to l_avg, as f is isotropic


def draw(seed: int, zeta_sq: float, sigma_sq: float, shape: tuple[int, int, int] = SHAPE) -> Quadratics:
    """Draw the samples of all clients before any swap; ``shape``: (clients N, samples per client n, dimension d)."""
    n_clients, n, d = shape
    b = np.empty(shape)
    for i in range(n_clients):
        generator = numpy_generator(seed, "quadratics", i)
        mean = np.sqrt(zeta_sq / d) * generator.standard_normal(d)
        b[i] = (mean + np.sqrt(sigma_sq / d) * generator.standard_normal((n, d))) / (i + 1)
    return Quadratics(np.repeat(np.arange(1.0, n_clients + 1)[:, None], n, axis=1), b)


def swap(problem: Quadratics, p: float, seed: int) -> Quadratics:
    """Permute the share p (``n_swapped`` samples) of every client's samples among all clients.

    A larger p moves all samples that a smaller p moves. The minimiser x*, ``l_avg`` and ``mu`` do not change.
    """
    n_clients, n, d = problem.b.shape
    m = n_swapped(p, n)
    leaving = [i * n + numpy_generator(seed, "leaving", i).permutation(n)[:m] for i in range(n_clients)]
    places = np.concatenate(leaving)
    source = np.arange(n_clients * n)
    source[places] = numpy_generator(seed, "dealt", m).permutation(places)
    return Quadratics(
        problem.a.reshape(-1)[source].reshape(n_clients, n), problem.b.reshape(-1, d)[source].reshape(problem.b.shape)
    )


def optimum(problem: Quadratics) -> np.ndarray:
    """Return x* = sum_ij a_ij b_ij / sum_ij a_ij^2, the minimiser of f, of shape (d,)."""
    return (problem.a[..., None] * problem.b).sum((0, 1)) / np.square(problem.a).sum()


def gradients(problem: Quadratics, x: np.ndarray) -> np.ndarray:
    """Return the gradients A_ij^T (A_ij x - b_ij) of all samples at x: (clients N, samples n, dimension d)."""
    a = problem.a[..., None]
    return a * (a * x - problem.b)


def constants(problem: Quadratics, x: np.ndarray, pool: Quadratics | None = None, p: float = 0.0) -> Constants:
    """Return the exact constants at x; with a ``pool``, the constants of the mixtures (1 - p) D_i + p D~.

    D_i: samples of client i; D~: samples of the pool; p: share of the pool. For mixtures, Lemma 1 of Fedssyn holds with
    equality:

    zeta_sq = (1-p)^2 zeta^2,   l_max = (1-p) L_max + p L~_avg,
    sigma_sq = (1-p) sigma^2 + p sigma~_avg^2 + p(1-p)(zeta^2 + delta^2)

    zeta^2, sigma^2, L_max: the constants at p = 0. sigma~_avg^2, L~_avg: ``sigma_sq`` and ``l_avg`` of
    ``constants(pooled(pool), x)``. delta^2: see ``delta_sq``.
    """
    shared = pooled(pool or problem)
    of_clients, common = gradients(problem, x), gradients(shared, x)

    def mix(of_own: np.ndarray, of_pool: np.ndarray) -> np.ndarray:
        return (1 - p) * of_own.mean(1) + p * of_pool.mean(1)

    means = mix(of_clients, common)  # each client's mean gradient, shape (N, d)
    noise = mix(np.square(of_clients - means[:, None]).sum(2), np.square(common - means[:, None]).sum(2))
    smoothness = mix(np.square(problem.a), np.square(shared.a))
    zeta_sq = np.square(means - means.mean(0)).sum(1).mean()
    l_avg = float(smoothness.mean())
    return Constants(float(zeta_sq), float(noise.mean()), float(smoothness.max()), l_avg, mu=l_avg)


def delta_sq(problem: Quadratics, pool: Quadratics, x: np.ndarray) -> float:
    """Return delta^2, the squared distance at x between the mean gradients of the clients' and the pool's samples."""
    return float(np.square(gradients(problem, x).mean((0, 1)) - gradients(pool, x).mean((0, 1))).sum())


def pooled(problem: Quadratics) -> Quadratics:
    """Return a problem with one client that has all samples."""
    return Quadratics(problem.a.reshape(1, -1), problem.b.reshape(1, -1, problem.b.shape[2]))


def order(seed: int, round: int, client: int, n: int) -> np.ndarray:
    """Draw the order of a client's n samples in a round (1, 2, ...); swapped share p and step size do not change it."""
    return numpy_generator(seed, "order", round, client).permutation(n)


def run(
    problems: Sequence[Quadratics],
    steps: np.ndarray,
    rounds: int,
    seed: int,
    models: str = "server",
    until: float = -np.inf,
) -> list[np.ndarray]:
    """Run FedAvg from x = 1 and return per problem the errors (step sizes, 1 + rounds), from the start to the end.

    models: "server" returns the error ||x - x*||^2 of the server's model x, as in the released code. "clients" returns
    the mean error of the clients' models x_i before averaging, (1/N) sum_i ||x_i - x*||^2, as in the captions. x*:
    ``optimum``. An error is inf if a step size diverges. until: a problem ends after the first round in which the
    error of any step size is at most ``until``.
    """
    n_clients, n, _ = problems[0].b.shape
    together = max(1, TOGETHER // len(steps))

    @cache
    def orders(first: int) -> np.ndarray:
        """Return the sample orders of the rounds after ``first``: (rounds, clients, samples), last step first."""
        numbers = range(first + 1, min(first + together, rounds) + 1)
        return np.array([[order(seed, r, i, n) for i in range(n_clients)] for r in numbers])[..., ::-1]

    every = []
    with np.errstate(over="ignore", invalid="ignore"):  # large step sizes diverge and overflow
        for problem in problems:
            errors_so_far = []
            for errors in _play(problem, steps, (orders(k) for k in range(0, rounds, together)), models == "server"):
                errors_so_far.append(np.where(np.isfinite(errors), errors, np.inf))
                if errors_so_far[-1].min() <= until:
                    break
            every.append(np.stack(errors_so_far, axis=1))
    return every


def _play(problem: Quadratics, steps: np.ndarray, blocks: Iterable[np.ndarray], server: bool) -> Iterator[np.ndarray]:
    """Yield the errors (step sizes,) of FedAvg on one problem, at the start and after each round.

    blocks: sample orders of successive rounds, (rounds, clients, samples), the sample of the last step first. server:
    yield the error of the server's model (True), or the mean of the clients' errors before averaging (False).
    """
    n_clients, n, d = problem.b.shape
    target, clients = optimum(problem), np.arange(n_clients)
    factors, ab = 1 - np.square(problem.a)[..., None] * steps, problem.a[..., None] * problem.b
    x = np.ones((len(steps), d))
    yield _error(x[None], target)
    for some in blocks:
        ordered = factors[clients, np.moveaxis(some, -1, 0)]  # shape (samples n, rounds, clients N, step sizes)
        products = np.ones((n + 1, *ordered.shape[1:]))  # entry k: product of the factors of the last k steps
        np.multiply.accumulate(ordered, axis=0, out=products[1:])
        # One small product per client: BLAS runs it in one thread, so the bits do not depend on the number of threads.
        shifts = steps[:, None] * (np.moveaxis(products[:n], 0, -1) @ ab[clients[:, None], some])
        for shift, shrink in zip(shifts, products[n], strict=True):
            models = shrink[..., None] * x + shift  # shape (clients N, step sizes, dimension d)
            x = models.mean(0)
            yield _error(x[None] if server else models, target)


def _error(models: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the mean over ``models`` (models, step sizes, d) of the squared distance to ``target``, (step sizes,)."""
    return np.square(models - target).sum(2).mean(0)


def check(problem: Quadratics, eps: float) -> None:
    """Check before any work that float64 resolves the target error eps."""
    least = float(np.square(np.finfo(float).eps * optimum(problem)).sum())
    if not least < eps < np.inf:
        raise UserError(f"target must lie in ({least:.3g}, inf), as float64 resolves ||x - x*||^2, got {eps:g}.")
