"""Lines through the fewest rounds to an error: the plain fit, and the one of the authors' code with its constraints."""

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.optimize import curve_fit

from papers.fedssyn import fitted_lines as lines
from papers.fedssyn import quadratics as q


def test_fewest_rounds_and_the_line_by_hand() -> None:
    errors = np.array([[9, 5, 3, 2, 1], [9, 7, 0.5, 4, 4], [9, np.inf, np.inf, np.inf, np.inf]])
    assert lines.fewest_rounds(errors, 9) == (0, 0)
    assert lines.fewest_rounds(errors, 5) == (1, 0)
    assert lines.fewest_rounds(errors, 3) == (2, 1)  # two step sizes get there: the lower error
    assert lines.fewest_rounds(errors, 0.5) == (2, 1)
    assert lines.fewest_rounds(errors, 0.4) is None
    targets = np.array([1.0, 1 / 4, 1 / 9, 1e-9])
    steep = np.full((1, 20), 2.0)
    for rounds, eps in ((5, 1), (8, 1 / 4), (11, 1 / 9)):
        steep[0, rounds:] = eps
    to = lines.rounds_to(steep, targets)
    assert to[:3].tolist() == [5, 8, 11]
    assert np.isnan(to[3])
    assert lines.fit(to, targets) == pytest.approx((3, 2))  # 3/sqrt(eps) + 2; the last is not reached
    assert lines.fit(to[1:], targets[1:]) is None
    assert lines.fit(np.ones(4), targets) == pytest.approx((0, 1))
    assert [len(lines.TARGETS), *lines.TARGETS[[0, -1]]] == pytest.approx([79, 10**-5.97848, 10**-4.3], rel=1e-5)


X = lines.TARGETS**-0.5


def fitted(kind: str, shares: Sequence[float], rounds: Sequence[np.ndarray]) -> np.ndarray:
    """A and B of every share, (shares, 2)."""
    return np.array([line for line in lines.fit_all(kind, shares, rounds) if line])


@pytest.mark.parametrize("kind", lines.FITS)
def test_both_fits_recover_lines_that_meet_the_constraints(kind: str) -> None:
    shares = (0, 0.25, 0.5, 0.75, 1)
    true = [(0.15, -4.0), (0.1, -5.5), (0.1, -6.5), (0.04, -6.7), (0.0, -6.8)]
    result = fitted(kind, shares, [a * X + b for a, b in true])
    assert np.allclose(result, true, rtol=0, atol=1e-9)


def test_the_constraints_of_the_authors_fit_bind() -> None:
    """A_p may not rise, and B_p falls by 1 at least for every p up to 0.5 and by 0.1 beyond."""
    shares, steep = (0.0, 0.25, 0.5, 0.75, 1.0), (0.15, 0.09, 0.05, 0.02, 0.01)
    rounds = [a * X - 4 for a in steep]
    plain, result = (fitted(kind, shares, rounds) for kind in lines.FITS)
    assert np.allclose(plain[:, 1], -4)
    assert np.allclose(result[:, 1], [-4, -5, -6, -6.1, -6.2])
    best = [X @ (r - b) / (X @ X) for r, b in zip(rounds, result[:, 1], strict=True)]  # least squares, given B
    assert np.allclose(result[:, 0], best, rtol=1e-9)
    assert (result[1:, 0] > plain[1:, 0] + 1e-3).all()  # what B loses A gains
    few = fitted("authors", shares[::2], rounds[::2])
    assert (few[1:, 0] < result[2::2, 0]).all()  # and so more with every share that is looked at
    rising = fitted("authors", (0, 0.1), [0.1 * X, 0.2 * X])
    assert np.allclose(rising, [[0.1, 0], [0.1, -1]], atol=1e-9)
    missing = [rounds[0], np.full(len(X), np.nan), rounds[1]]
    assert lines.fit_all("authors", (0, 0.1, 0.25), missing) == [tuple(result[0]), None, pytest.approx(result[1])]


@pytest.mark.long
def test_both_fits_of_figure_2_c() -> None:
    """The plain one lies on (1-p)^2, the authors' on theory's line; and it is what the released code's solver finds."""
    shares = q.SHARES[:25]  # p up to 0.6
    own = q.draw(0, 10, 0)
    problems = [q.swap(own, p, 0) for p in shares]
    rounds = [lines.rounds_to(e) for e in q.run(problems, q.STEP_SIZES, 400, 0, until=lines.TARGETS[0])]
    plain, authors = (fitted(kind, shares, rounds) for kind in lines.FITS)
    smooth = np.sqrt([q.constants(problem, np.ones(25)).l_max for problem in problems])
    p = np.array(shares)
    theory, square = (1 - p) * smooth / smooth[0], (1 - p) ** 2
    for fit, near, far in ((plain, square, theory), (authors, theory, square)):
        ratio = fit[:, 0] / fit[0, 0]
        assert abs(ratio - near).mean() < 0.05 < 0.1 < abs(ratio - far).mean()
    assert np.allclose(plain[0], authors[0])
    for share, result, before, line in zip(shares[1:], rounds[1:], authors, authors[1:], strict=False):
        most = before - (0, 1 if share <= 0.5 else 0.1)
        theirs, _ = curve_fit(lambda x, a, b: a * x + b, X, result, most, bounds=((-np.inf, -np.inf), most))
        assert np.allclose(line, theirs, rtol=1e-6)
