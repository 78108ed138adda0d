"""Corollary I of Fedssyn: the number of iterations that FedAvg needs, T = R tau in R rounds, up to constant factors.

f, f*    mean of the clients' losses; its minimum
epsilon  accuracy: upper bound of the mean of ||grad f||^2 over iterations (non-convex), or of f - f* (strongly convex)
N, tau   number of clients, which all take part in every round; number of local steps per round
zeta     square root of zeta^2, the dissimilarity of the clients' gradients
s        standard deviation of a step's gradient;  s^2 = sigma^2 / B for batches of B samples
L, mu    constants of smoothness and strong convexity

                    noise               drift                                              descent
strongly convex  s^2 / (mu N epsilon) + sqrt(L / epsilon) (tau zeta + sqrt(tau) s) / mu + (L tau / mu) log(1/epsilon)
non-convex       L s^2 / (N epsilon^2) + L (tau zeta + sqrt(tau) s) / epsilon^(3/2)     + L tau / epsilon

Both lines are upper bounds, with the best step size for this epsilon. ``non_convex`` computes the second line.
``on_quadratics`` computes the strongly convex bound for any step size, without gradient noise, with all constant
factors.
Source: Fedssyn (Li et al., TMLR 2024), corollary I, after Koloskova et al., ICML 2020, arXiv:2003.10422.
"""

from math import sqrt


def non_convex(epsilon: float, n: int, tau: float, zeta_sq: float, step_sq: float, smooth: float) -> float:
    """Return T, the iterations up to the accuracy ``epsilon`` of ||grad f||^2, for a smooth f, convex or not.

    f: mean of the clients' losses, with smoothness L (``smooth``). n: number of clients. tau: local steps per round.
    zeta_sq: zeta^2, dissimilarity of the clients' gradients. step_sq: s^2, variance of a step's gradient.
    """
    drift = tau * sqrt(zeta_sq) + sqrt(tau * step_sq)
    return smooth * step_sq / (n * epsilon**2) + smooth * drift / epsilon**1.5 + smooth * tau / epsilon


def on_quadratics(
    rounds: int, rate: float, tau: int, zeta_sq: float, smooth: float, mu: float, distance: float
) -> float:
    """Return an upper bound of f(x_R) - f* after R rounds of FedAvg with full-batch steps, for quadratic losses f_i.

        sqrt(f(x_R) - f*) <= sqrt(L/8) eta (tau - 1) zeta / phi
                             + sqrt(L/2) (1 - phi eta tau mu)^R (||x_0 - x*|| + eta (tau - 1) zeta sqrt(L/mu) / (2 phi))

    f_i: loss of client i. f: mean of the losses of all N clients. x_0, x_R, x*: model before round 1, after round R,
    and at the minimum f* of f. rate: eta, the step size, in (0, 1/L]. phi = (1 - (1 - eta L)^tau) / (eta tau L), in
    (0, 1]. smooth: L, the largest eigenvalue of the Hessians A_i of the f_i. mu: the smallest eigenvalue of f's
    Hessian. zeta_sq: (1/N) sum_i ||grad f_i(x*)||^2. distance: ||x_0 - x*||. tau: local steps per round.
    So f(x_R) - f* <= epsilon needs eta <= O(sqrt(epsilon / L) / (tau zeta)), which gives T of the strongly convex line.

    Proof: a round is x <- x - Q (x - x') with the fixed point x', Q = (1/N) sum_i P_i A_i and
    P_i = eta sum_(k < tau) (1 - eta A_i)^k. Let D_i = eta tau - P_i. As functions of an eigenvalue of A_i, D_i is at
    most eta^2 tau (tau-1) A_i / 2, and P_i A_i is at least phi eta tau A_i. The gradients at x* add up to 0, so
    x' - x* = Q^-1 (1/N) sum_i D_i grad f_i(x*). By the Cauchy-Schwarz inequality, v = x' - x* has a norm
    sqrt(v^T Q v) of at most c zeta. Here c^2 is the largest D_i^2 / (P_i A_i) over all i and eigenvalues. It is at most
    eta^3 tau (tau-1)^2 L / (4 phi). Also Q >= phi eta tau (1/N) sum_i A_i.
    The bound is nearly reached if only a few clients' losses are curved, with gradients in proportion to the curvature.

    Raises:
        ValueError: eta is not in (0, 1/L].
    """
    if not 0 < rate * smooth <= 1:
        raise ValueError(f"the step size must lie in (0, 1/L], got {rate:g} with L = {smooth:g}")
    phi = (1 - (1 - rate * smooth) ** tau) / (rate * tau * smooth)
    drift = sqrt(smooth * zeta_sq / 8) * rate * (tau - 1) / phi
    descent = sqrt(smooth / 2) * (1 - phi * rate * tau * mu) ** rounds
    return (drift + descent * (distance + drift * sqrt(2 / mu))) ** 2
