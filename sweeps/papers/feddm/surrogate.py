"""FedDM's figure 1: a surrogate of a loss of one weight, learned by matching 20 points to 100, and the tangent.

x ~ N(0, 1), y = 1 where x >= 0, turned over with probability 0.1;  prediction sigmoid(w x);  f(w): mean binary cross
entropy of the n real points, f^(w): of the n' synthetic ones, of which each class has as many as among the real.

The model has no embedding: z = w x, and L_c = w^2 (mean_c x - mean_c x~)^2, as the mean of w x is w times that of x.
So around w = 0 a step of SGD on the points moves those of a class together: they keep their spread, and only their mean
goes to the real one's. With equal class means, and class shares n'_c/n' = n_c/n, the slopes at 0 are the same:
f'(0) = (1/2 - 1) E[x; y = 1] + 1/2 E[x; y = 0] for both. The curvature at 0, E[x^2]/4, is what the spread decides.

Source: Xiong et al., arXiv:2207.09653, figure 1 and appendix A (equations 17 and 18).
Departs from the paper, which does not say: the weights are w ~ N(0, 1) clipped to the radius, the points start from
N(0, 1), and the labels of the synthetic points have the real ones' shares (rounded).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator

N_REAL, N_SYNTHETIC = 100, 20
FLIPPED = 0.1


class Points(NamedTuple):
    """x (n,) and labels y (n,) of 0 and 1."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """Constants of the matching: SGD with momentum on the points, at weights of the ball around 0."""

    iterations: int = 1000
    lr: float = 1.0
    momentum: float = 0.5
    radius: float = 5.0


def draw(seed: int, n: int = N_REAL) -> Points:
    """The real points, equation 17."""
    draws = numpy_generator(seed, "surrogate", "real")
    x = draws.standard_normal(n)
    return Points(x, ((x >= 0) != (draws.random(n) < FLIPPED)).astype(float))


def first(real: Points, seed: int, n: int = N_SYNTHETIC) -> Points:
    """Synthetic points before matching: x ~ N(0, 1), and as large a share of ones as among the real, to 1/n'.

    Raises:
        UserError: one class would have no point.
    """
    ones = round(n * float(real.y.mean()))
    if not 0 < ones < n:
        raise UserError(f"each class needs a synthetic point, and of {n} the classes get {n - ones} and {ones}.")
    return Points(
        numpy_generator(seed, "surrogate", "first").standard_normal(n), np.repeat([0.0, 1.0], [n - ones, ones])
    )


def weights(seed: int, recipe: Recipe) -> np.ndarray:
    """The weight of each iteration:  w ~ N(0, 1), clipped to the radius."""
    drawn = numpy_generator(seed, "surrogate", "weights").standard_normal(recipe.iterations)
    return np.clip(drawn, -recipe.radius, recipe.radius)


def match(real: Points, start: Points, seed: int, recipe: Recipe = Recipe()) -> Points:
    """The synthetic points after matching; all real points are in every batch."""
    x, velocity = start.x.copy(), np.zeros_like(start.x)
    for w in weights(seed, recipe):
        gradient = np.zeros_like(x)
        for label in (0.0, 1.0):
            mine = start.y == label
            gap = x[mine].mean() - real.x[real.y == label].mean()
            gradient[mine] = 2 * w**2 * gap / mine.sum()
        velocity = recipe.momentum * velocity + gradient
        x -= recipe.lr * velocity
    return Points(x, start.y)


def loss(w: np.ndarray, points: Points) -> np.ndarray:
    """f at each of the weights, equation 18:  mean of log(1 + e^(w x)) - y w x."""
    z = np.multiply.outer(w, points.x)
    return (np.logaddexp(0, z) - points.y * z).mean(-1)


def slope(w: np.ndarray, points: Points) -> np.ndarray:
    """f' at each of the weights:  mean of x (sigmoid(w x) - y)."""
    z = np.multiply.outer(w, points.x)
    return (points.x * (1 / (1 + np.exp(-z)) - points.y)).mean(-1)


def tangent(w: np.ndarray, points: Points) -> np.ndarray:
    """f(0) + w f'(0): all that a gradient says."""
    return np.log(2) + w * slope(np.zeros(1), points)


def minimiser(points: Points, radius: float) -> float:
    """The weight in [-radius, radius] of the smallest loss; f is convex, so it is found by halving."""
    low, high = -radius, radius
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(np.array([middle]), points)[0] > 0 else (middle, high)
    return (low + high) / 2
