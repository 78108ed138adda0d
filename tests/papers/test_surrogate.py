"""FedDM's figure 1: matching has a closed form, and so have slope and curvature at 0; sizes of table 3."""

import numpy as np
import pytest

from fedcommons.errors import UserError
from message_sizes import uploaded
from papers.feddm.surrogate import Points, Recipe, draw, first, loss, match, minimiser, slope, tangent, weights


def _mean(points: Points, label: float) -> float:
    return float(points.x[points.y == label].mean())


def test_the_real_points_are_those_of_equation_17_and_weights_lie_in_the_interval() -> None:
    real = draw(0, 20_000)
    assert abs(real.x.mean()) < 4 / 20_000**0.5
    turned = ((real.x >= 0) != (real.y == 1)).mean()
    assert turned == pytest.approx(0.1, abs=4 * (0.09 / 20_000) ** 0.5)
    w = weights(0, Recipe(4000, radius=0.5))
    assert np.abs(w).max() == 0.5
    assert (np.abs(w) == 0.5).mean() == pytest.approx(0.617, abs=4 * (0.617 * 0.383 / 4000) ** 0.5)  # P(|w| > 1/2)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_matching_moves_each_class_as_a_whole_by_the_closed_form(momentum: float) -> None:
    """gap_t of a class of m points follows v <- beta v + 2 w_t^2 gap / m, gap <- gap - eta v; the spread stays."""
    real, recipe = draw(0), Recipe(50, 0.3, momentum)
    start = first(real, 0)
    after = match(real, start, 0, recipe)
    for label in (0.0, 1.0):
        members = start.y == label
        gap, v = _mean(start, label) - _mean(real, label), 0.0
        for w in weights(0, recipe):
            v = momentum * v + 2 * w**2 * gap / members.sum()
            gap -= 0.3 * v
        moved = after.x[members] - start.x[members]
        assert np.allclose(moved, moved[0], atol=1e-12)
        assert _mean(after, label) - _mean(real, label) == pytest.approx(gap, abs=1e-10)


def test_slope_tangent_and_minimiser_are_those_of_the_loss() -> None:
    """The tangent at 0 lies below the loss, which is convex; the minimiser may be an end of the interval."""
    real, w, h = draw(1), np.linspace(-4, 4, 9), 1e-6
    assert np.allclose((loss(w + h, real) - loss(w - h, real)) / (2 * h), slope(w, real), atol=1e-8)
    assert tangent(np.zeros(1), real) == pytest.approx(loss(np.zeros(1), real), abs=1e-12)
    assert (loss(w, real) >= tangent(w, real) - 1e-12).all()
    best = minimiser(real, 50.0)
    assert abs(slope(np.array([best]), real)[0]) < 1e-12
    assert minimiser(real, best / 2) == pytest.approx(best / 2)
    with pytest.raises(UserError, match="of 1 points the classes get"):
        first(real, 0, 1)


def test_with_nearly_equal_clients_every_client_uploads_every_class() -> None:
    assert uploaded("CIFAR-10", 10, 1e6, 0) == 10 * 10 * 10 * 3072  # clients, classes, images per class, numbers
    assert uploaded("CIFAR-10", 10, 0.01, 0) < 10 * 10 * 5 * 3072  # at least half of the classes are missing
