"""The rate of a method on quadratics: within Corollary I's bound, and to the exact minimiser where drift is corrected.

Four clients, one of which has almost all the curvature, and gradients at the minimiser in proportion to it: there
FedAvg's drift comes to half of ``rates.on_quadratics``, so that a rate half as large again exceeds it. zeta^2 is what
the clients differ by. Without noise, all clients in every round, full-batch steps at the rate that the module has.
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
"""Rounds, the rate, and full-batch steps of a client in each."""

ZETAS = (0.0, 1.0, 10.0)
"""zeta; at 0 all clients have one minimiser, and nothing but descent is left to see."""

SMOOTH, CURVATURES, AXES = 1.0, np.array([1 / 16, 1 / 16, 1 / 16, 1.0]), np.array([1.0, 0.8, 0.5])
"""L, of clients relative to L, and of axes relative to a client's: the Hessian of client i is diagonal, turned."""

ROUNDING = 1e-12
"""Share of the first error that float64 may leave."""


def quadratics(zeta: float) -> LeastSquares:
    """The problem: f_i(w) = (w - x_i)^T A_i (w - x_i) / 2, with the same minimiser x* of f at every zeta."""
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]  # rows: the axes
    hessians = SMOOTH * CURVATURES[:, None] * AXES  # (N, d)
    gradients = zeta * (CURVATURES - CURVATURES.mean()) / CURVATURES.std()  # of each client at x*, along the first axis
    own = np.array([[2.0, -1.0, 3.0]] * len(hessians))  # their minimisers, along the axes
    own[:, 0] -= gradients / hessians[:, 0]
    roots = np.sqrt(len(AXES) * hessians)
    return LeastSquares([*(roots[..., None] * turned)], [*(roots * own)])


def courses(algorithm: Algorithm, problem: LeastSquares, rounds: int) -> Iterator[np.ndarray]:
    """The server's weights at the start, ones, as zeros would hide faults, and after each round."""
    federation = problem.federation(LR).training(STEPS)
    plan, model = federation.plan(rounds), federation.model
    model.buffer.fill_(1)
    start = Standing(0, algorithm.start(copy(model), plan.facts, plan.seed))
    yield model.buffer.double().numpy().copy()
    for now, _ in play(algorithm, federation.serial(algorithm), plan, start):
        yield now.model.buffer.double().numpy()


def errors(algorithm: Algorithm, zeta: float) -> list[float]:
    """f(x_r) - f* for r = 0 ... ROUNDS."""
    problem = quadratics(zeta)
    hessian = np.mean([a.T @ a / len(b) for a, b in zip(problem.a, problem.b, strict=True)], axis=0)
    off = np.stack([*courses(algorithm, problem, ROUNDS)]) - problem.optimum
    return (np.einsum("ri,ij,rj->r", off, hessian, off) / 2).tolist()


def bounds(zeta: float) -> list[float]:
    """What they may be at most, of FedAvg at this rate."""
    problem, mu = quadratics(zeta), SMOOTH * CURVATURES.mean() * AXES.min()
    distance = float(np.linalg.norm(1 - problem.optimum))
    return [on_quadratics(r, LR, STEPS.epochs, zeta**2, SMOOTH, mu, distance) for r in range(ROUNDS + 1)]


def not_judged(algorithm: Algorithm) -> str | None:
    """Why Corollary I says nothing of it; None where it does."""
    reasons = {
        "its clients have models of their own": isinstance(algorithm, Personal),
        "it chooses the clients of a round": isinstance(algorithm, ChoosesClients),
        "its clients make no local steps": not trains_locally(algorithm),
        "its server trains on a pool": needs_pool(algorithm),
        "it works by class": getattr(algorithm, "needs_classes", False),
        "it needs more of a module than weights": bool(needed(algorithm)),
    }
    return next((why for why, holds in reasons.items() if holds), None)


def within_the_bound(algorithm: Algorithm) -> str:
    """In every round, at every zeta."""
    worst = (0.0, 0, 0.0)
    for zeta in ZETAS:
        found = errors(algorithm, zeta)
        shares = np.nan_to_num(np.divide(found, np.add(bounds(zeta), ROUNDING * found[0])), nan=np.inf)
        worst = max(worst, (float(shares.max()), int(shares.argmax()), zeta))
    share, round, zeta = worst
    said = f"at zeta {zeta:g} after round {round} its error is {share:.2g} times Corollary I's bound at rate {LR:g}"
    require(share <= 1, said)
    return said


def is_linear(algorithm: Algorithm) -> str:
    """At every zeta the second half of the rounds gains half as many digits as the first, or there are none left.

    At a rate q^r both gain as many once the fastest modes are gone; at 1/r the second gains a factor of 2; at a bias 1.
    """
    said = []
    for zeta in ZETAS:
        found = errors(algorithm, zeta)
        first, half, last = found[0], found[ROUNDS // 2], found[-1]
        said.append(f"{last / first:.1g} at zeta {zeta:g}")
        nears = last <= ROUNDING * first or (half < first and last / half <= (half / first) ** 0.5)
        digits = (
            f"its error goes to {half / first:.2g} and {last / first:.2g} of the first in {ROUNDS // 2} and {ROUNDS}"
        )
        require(nears, f"at zeta {zeta:g} {digits} rounds, which is not linear")
    return f"linear to the exact minimiser: after {ROUNDS} rounds its error is {', '.join(said)} of the first"
