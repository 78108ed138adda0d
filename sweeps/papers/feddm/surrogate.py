"""Figure 1 of FedDM: a loss of one weight w, its surrogate from 20 points matched to 100 real points, its tangent.

A real point is x ~ N(0, 1). Its label y is 1 where x >= 0, and is flipped with probability 0.1. The model predicts
sigmoid(w x). f(w) is the mean binary cross entropy of the n real points (x, y). f^(w) is that of the n' synthetic
points x~, whose class shares equal those of the real points.

The model has no embedding: z = w x. So the matching loss of class c is L_c = w^2 (mean_c x - mean_c x~)^2, as the mean
of w x is w times the mean of x. Around w = 0 a step of SGD therefore moves all synthetic points of a class together:
their spread is constant, and only their mean moves to the mean of the real points. With equal class means and equal
class shares n'_c/n' = n_c/n, the slopes of f and f^ at w = 0 are equal:
f'(0) = (1/2 - 1) E[x; y = 1] + 1/2 E[x; y = 0], where E[x; y = c] is the mean of x 1{y = c} over all points.
The spread decides the curvature at 0, E[x^2]/4.

Source: Xiong et al., arXiv:2207.09653, figure 1 and appendix A (equations 17 and 18).
Departs from the paper, which does not specify these choices: the weights are w ~ N(0, 1) clipped to the radius, and the
synthetic points start from N(0, 1). Their labels have the shares of the real labels (rounded).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator

N_REAL, N_SYNTHETIC = 100, 20
FLIPPED = 0.1


class Points(NamedTuple):
    """Points x and their labels y (0 or 1), two arrays of shape (n,)."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """Constants of the matching by SGD with momentum; radius: model weights w lie in [-radius, radius]."""

    iterations: int = 1000
    lr: float = 1.0
    momentum: float = 0.5
    radius: float = 5.0


def draw(seed: int, n: int = N_REAL) -> Points:
    """Draw n real points and their labels, by equation 17 of the paper."""
    draws = numpy_generator(seed, "surrogate", "real")
    x = draws.standard_normal(n)
    return Points(x, ((x >= 0) != (draws.random(n) < FLIPPED)).astype(float))


def first(real: Points, seed: int, n: int = N_SYNTHETIC) -> Points:
    """Draw n synthetic points before the matching: x ~ N(0, 1), with the class shares of ``real`` (rounded)."""
    ones = round(n * float(real.y.mean()))
    if not 0 < ones < n:
        raise UserError(f"each class needs a synthetic point, but of {n} points the classes get {n - ones} and {ones}.")
    return Points(
        numpy_generator(seed, "surrogate", "first").standard_normal(n), np.repeat([0.0, 1.0], [n - ones, ones])
    )


def weights(seed: int, recipe: Recipe) -> np.ndarray:
    """Draw the model's weight w in each iteration of the matching: w ~ N(0, 1), clipped to [-radius, radius]."""
    samples = numpy_generator(seed, "surrogate", "weights").standard_normal(recipe.iterations)
    return np.clip(samples, -recipe.radius, recipe.radius)


def match(real: Points, start: Points, seed: int, recipe: Recipe = Recipe()) -> Points:
    """Return the synthetic points ``start`` after matching their class means to those of all real points."""
    x, velocity = start.x.copy(), np.zeros_like(start.x)
    for w in weights(seed, recipe):
        gradient = np.zeros_like(x)
        for label in (0.0, 1.0):
            of_class = start.y == label
            gap = x[of_class].mean() - real.x[real.y == label].mean()
            gradient[of_class] = 2 * w**2 * gap / of_class.sum()
        velocity = recipe.momentum * velocity + gradient
        x -= recipe.lr * velocity
    return Points(x, start.y)


def loss(w: np.ndarray, points: Points) -> np.ndarray:
    """Return the loss f at each weight in ``w``, equation 18: the mean over points of log(1 + e^(w x)) - y w x."""
    z = np.multiply.outer(w, points.x)
    return (np.logaddexp(0, z) - points.y * z).mean(-1)


def slope(w: np.ndarray, points: Points) -> np.ndarray:
    """Return the derivative f' at each weight in ``w``: the mean over points of x (sigmoid(w x) - y)."""
    z = np.multiply.outer(w, points.x)
    return (points.x * (1 / (1 + np.exp(-z)) - points.y)).mean(-1)


def tangent(w: np.ndarray, points: Points) -> np.ndarray:
    """Return the tangent f(0) + w f'(0) at each weight in ``w``: the loss f, predicted from its gradient at 0."""
    return np.log(2) + w * slope(np.zeros(1), points)


def minimiser(points: Points, radius: float) -> float:
    """Return the weight in [-radius, radius] with the smallest loss, by bisection of the slope (the loss is convex)."""
    low, high = -radius, radius
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(np.array([middle]), points)[0] > 0 else (middle, high)
    return (low + high) / 2
