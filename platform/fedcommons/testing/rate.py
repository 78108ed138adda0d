"""The convergence rate of a method on quadratics: Corollary I's bound, and linear convergence of exact methods.

The problem has four clients. One client has almost all the curvature, and gradients at the minimiser are in proportion
to the curvature. There FedAvg's drift is half of ``rates.on_quadratics``, so a learning rate that is 1.5 times as large
exceeds the bound. zeta^2 is the client dissimilarity. There is no noise; all clients take part in every round and take
full-batch steps at the module's learning rate.
"""

from collections.abc import Iterator

import numpy as np

from fedcommons.convergence.rates import on_quadratics
from fedcommons.core.algorithm import Algorithm, ChoosesClients, Personal, needed, needs_pool, trains_locally
from fedcommons.core.local_training import LocalSGD
from fedcommons.federation.rounds import Standing
from fedcommons.federation.rounds import run as play
from fedcommons.flat_tensors import copy
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import LeastSquares

ROUNDS, LR, STEPS = 200, 0.05, LocalSGD(epochs=5, batch_size=100)
"""Rounds, learning rate, and local training: full-batch steps of a client in each round."""

ZETAS = (0.0, 1.0, 10.0)
"""Values of zeta. At 0 all clients have the same minimiser, so only the descent is tested."""

SMOOTH, CURVATURES, AXES = 1.0, np.array([1 / 16, 1 / 16, 1 / 16, 1.0]), np.array([1.0, 0.8, 0.5])
"""L, clients' curvatures relative to L, and axes' curvatures relative to the client; Hessians are rotated diagonals."""

ROUNDING = 1e-12
"""Share of the initial error that may remain because of float64."""


def quadratics(zeta: float) -> LeastSquares:
    """Return the problem f_i(w) = (w - x_i)^T A_i (w - x_i) / 2, with the same minimiser x* of f at every zeta."""
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]  # rows: the axes
    hessians = SMOOTH * CURVATURES[:, None] * AXES  # (N, d)
    gradients = (
        zeta * (CURVATURES - CURVATURES.mean()) / CURVATURES.std()
    )  # gradient of each client at x*, along the first axis
    minimisers = np.array([[2.0, -1.0, 3.0]] * len(hessians))  # the clients' minimisers, along the axes
    minimisers[:, 0] -= gradients / hessians[:, 0]
    roots = np.sqrt(len(AXES) * hessians)
    return LeastSquares([*(roots[..., None] * turned)], [*(roots * minimisers)])


def courses(algorithm: Algorithm, problem: LeastSquares, rounds: int) -> Iterator[np.ndarray]:
    """Yield the server's weights at the start and after each round. They start at 1, because 0 would hide faults."""
    federation = problem.federation(LR).training(STEPS)
    plan, model = federation.plan(rounds), federation.model
    model.buffer.fill_(1)
    start = Standing(0, algorithm.start(copy(model), plan.facts, plan.seed))
    yield model.buffer.double().numpy().copy()
    for now, _ in play(algorithm, federation.serial(algorithm), plan, start):
        yield now.model.buffer.double().numpy()


def errors(algorithm: Algorithm, zeta: float) -> list[float]:
    """Return the errors f(x_r) - f* for r = 0 ... ROUNDS."""
    problem = quadratics(zeta)
    hessian = np.mean([a.T @ a / len(b) for a, b in zip(problem.a, problem.b, strict=True)], axis=0)
    off = np.stack([*courses(algorithm, problem, ROUNDS)]) - problem.optimum
    return (np.einsum("ri,ij,rj->r", off, hessian, off) / 2).tolist()


def bounds(zeta: float) -> list[float]:
    """Return Corollary I's upper bound of each error, for FedAvg at the learning rate ``LR``."""
    problem, mu = quadratics(zeta), SMOOTH * CURVATURES.mean() * AXES.min()
    distance = float(np.linalg.norm(1 - problem.optimum))
    return [on_quadratics(r, LR, STEPS.epochs, zeta**2, SMOOTH, mu, distance) for r in range(ROUNDS + 1)]


def not_judged(algorithm: Algorithm) -> str | None:
    """Return why Corollary I does not cover the method, or None if it does."""
    reasons = {
        "its clients have models of their own": isinstance(algorithm, Personal),
        "it chooses the clients of a round": isinstance(algorithm, ChoosesClients),
        "its clients make no local steps": not trains_locally(algorithm),
        "its server trains on a pool": needs_pool(algorithm),
        "it works by class": getattr(algorithm, "needs_classes", False),
        "it needs more of a module than weights": bool(needed(algorithm)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def within_the_bound(algorithm: Algorithm) -> str:
    """Check the bound in every round, at every zeta, and return a sentence on the largest ratio of error to bound."""
    worst = (0.0, 0, 0.0)
    for zeta in ZETAS:
        gaps = errors(algorithm, zeta)
        shares = np.nan_to_num(np.divide(gaps, np.add(bounds(zeta), ROUNDING * gaps[0])), nan=np.inf)
        worst = max(worst, (float(shares.max()), int(shares.argmax()), zeta))
    share, round, zeta = worst
    message = f"at zeta {zeta:g} after round {round} its error is {share:.2g} times Corollary I's bound at rate {LR:g}"
    require(share <= 1, message)
    return message


def is_linear(algorithm: Algorithm) -> str:
    """Check at every zeta that the second half of the rounds gains at least half the digits of the first half.

    The check also passes if the error is at the level of rounding. At a rate q^r both halves gain equally many digits
    after the fastest modes have vanished. At a rate 1/r the second half gains a factor of 2, with a bias a factor of 1.
    """
    ratios = []
    for zeta in ZETAS:
        gaps = errors(algorithm, zeta)
        first, half, last = gaps[0], gaps[ROUNDS // 2], gaps[-1]
        ratios.append(f"{last / first:.1g} at zeta {zeta:g}")
        nears = last <= ROUNDING * first or (half < first and last / half <= (half / first) ** 0.5)
        digits = (
            f"its error goes to {half / first:.2g} and {last / first:.2g} of the first in {ROUNDS // 2} and {ROUNDS}"
        )
        require(nears, f"at zeta {zeta:g} {digits} rounds, which is not linear")
    return f"linear to the exact minimiser: after {ROUNDS} rounds its error is {', '.join(ratios)} of the first"
