"""Two checks of a method on quadratic losses: the error f(x) - f* is below a bound, and it converges linearly.

The bound is FedAvg's upper bound on the error (Corollary I, ``rates.on_quadratics``). Linear convergence means that the
error falls by a constant factor per round. There are four clients, and one client has most of the curvature. All
clients take part in every round and make full-batch steps without noise at the learning rate ``LR``. FedAvg's last
error is about half of the bound. FedAvg at 1.5 times ``LR`` exceeds the bound for ``LR``, as the error grows with the
square of the learning rate. zeta^2 is the client dissimilarity (1/N) sum_i ||grad f_i(x*)||^2 of N clients with losses
f_i, at the minimiser x* of the mean loss.
"""

from collections.abc import Iterator

import numpy as np

from fedcommons.convergence.rates import on_quadratics
from fedcommons.core.algorithm import Algorithm, ChoosesClients, Personal
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import copy
from fedcommons.testing.comparing import require
from fedcommons.testing.federations import LeastSquares

ROUNDS, LR, STEPS = 200, 0.05, LocalSGD(epochs=5, batch_size=100)
"""Number of rounds, learning rate, and settings of local training: five full-batch steps per client and round."""

ZETAS = (0.0, 1.0, 10.0)
"""Tested values of zeta. At zeta = 0 all clients have the same minimiser, so clients do not drift apart."""

SMOOTH, CURVATURES, AXES = 1.0, np.array([1 / 16, 1 / 16, 1 / 16, 1.0]), np.array([1.0, 0.8, 0.5])
"""Curvatures of the clients' losses; the Hessian of client i has the eigenvalues SMOOTH * CURVATURES[i] * AXES.

SMOOTH is the smoothness constant L, the largest eigenvalue. All Hessians have the same eigenvectors.
"""

ROUNDING = 1e-12
"""Share of the initial error that float64 rounding may leave."""


def quadratics(zeta: float) -> LeastSquares:
    """Return clients' losses f_i(w) = (w - x_i)^T A_i (w - x_i) / 2 with client dissimilarity ``zeta``^2.

    A_i: Hessian of client i. x_i: minimiser of client i. The clients' mean loss has the same minimiser at every zeta.
    """
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]  # rows: common eigenvectors of the Hessians
    hessians = SMOOTH * CURVATURES[:, None] * AXES  # eigenvalues, shape (clients, axes)
    # gradient of each client at the minimiser x*, along the first axis
    gradients = zeta * (CURVATURES - CURVATURES.mean()) / CURVATURES.std()
    minimisers = np.array([[2.0, -1.0, 3.0]] * len(hessians))  # clients' minimisers in the basis of the axes
    minimisers[:, 0] -= gradients / hessians[:, 0]
    roots = np.sqrt(len(AXES) * hessians)
    return LeastSquares([*(roots[..., None] * turned)], [*(roots * minimisers)])


def courses(algorithm: Algorithm, problem: LeastSquares, rounds: int) -> Iterator[np.ndarray]:
    """Yield the server's weights before round 1 and after each round.

    All weights start at 1, because a wrong factor on the weights would have no effect at 0.
    """
    federation = problem.federation(LR).training(STEPS)
    plan, model = federation.plan(rounds), federation.model
    model.buffer.fill_(1)
    start = Standing(0, algorithm.start(copy(model), plan.facts, plan.seed))
    yield model.buffer.double().numpy().copy()
    for now, _ in federation.run(algorithm, plan, start=start):
        yield now.model.buffer.double().numpy()


def errors(algorithm: Algorithm, zeta: float) -> list[float]:
    """Return f(x_r) - f* for r = 0 ... ROUNDS; f: clients' mean loss; f*: minimum of f; x_r: weights after round r."""
    problem = quadratics(zeta)
    hessian = np.mean([a.T @ a / len(b) for a, b in zip(problem.a, problem.b, strict=True)], axis=0)
    off = np.stack([*courses(algorithm, problem, ROUNDS)]) - problem.optimum
    return (np.einsum("ri,ij,rj->r", off, hessian, off) / 2).tolist()


def bounds(zeta: float) -> list[float]:
    """Return Corollary I's upper bounds of FedAvg's ``errors`` after 0 ... ROUNDS rounds at learning rate ``LR``."""
    problem, mu = quadratics(zeta), SMOOTH * CURVATURES.mean() * AXES.min()
    distance = float(np.linalg.norm(1 - problem.optimum))
    return [on_quadratics(r, LR, STEPS.epochs, zeta**2, SMOOTH, mu, distance) for r in range(ROUNDS + 1)]


def not_judged(algorithm: Algorithm) -> str | None:
    """Return why Corollary I does not apply to the method, or None if it applies."""
    capabilities = capabilities_of(algorithm)
    reasons = {
        "its clients have personal models": isinstance(algorithm, Personal),
        "it chooses the clients of a round": isinstance(algorithm, ChoosesClients),
        "its clients make no local steps": not capabilities.trains_locally,
        "its server trains on a pool of images": capabilities.needs_pool,
        "its server trains on public examples": capabilities.needs_public,
        "it works per class": capabilities.needs_classes,
        "it needs more of a module than weights": bool(capabilities.needs),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def within_the_bound(algorithm: Algorithm) -> str:
    """Check that errors are below Corollary I's bound in all rounds at each zeta; return a text on the worst round."""
    worst = (0.0, 0, 0.0)
    for zeta in ZETAS:
        gaps = errors(algorithm, zeta)
        shares = np.nan_to_num(np.divide(gaps, np.add(bounds(zeta), ROUNDING * gaps[0])), nan=np.inf)
        worst = max(worst, (float(shares.max()), int(shares.argmax()), zeta))
    share, round, zeta = worst
    message = f"at zeta {zeta:g} after round {round} the error is {share:.2g} times Corollary I's bound at rate {LR:g}"
    require(share <= 1, message)
    return message


def is_linear(algorithm: Algorithm) -> str:
    """Check linear convergence at every zeta: compare the decline of the error in both halves of the rounds.

    The decline is the number of decimal digits by which the error falls. In the second half of the rounds it must be
    at least half of the decline in the first half, or the error must end at the level of rounding. If the error in
    round r is proportional to q^r with a constant q < 1, both declines are equal, except for fast-converging directions
    at the start. If the error is proportional to 1/r, the second half only halves the error. The error of a
    biased method stops falling.
    """
    ratios = []
    for zeta in ZETAS:
        gaps = errors(algorithm, zeta)
        first, half, last = gaps[0], gaps[ROUNDS // 2], gaps[-1]
        ratios.append(f"{last / first:.1g} at zeta {zeta:g}")
        nears = last <= ROUNDING * first or (half < first and last / half <= (half / first) ** 0.5)
        digits = f"the error after {ROUNDS // 2} and {ROUNDS} rounds is {half / first:.2g} and {last / first:.2g}"
        require(nears, f"at zeta {zeta:g} {digits} of the initial error, which is not linear")
    return f"linear to the exact minimiser: after {ROUNDS} rounds its error is {', '.join(ratios)} of the initial error"
