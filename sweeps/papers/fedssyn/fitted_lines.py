"""Fewest rounds to an error eps, and the line R_p = A_p/sqrt(eps) + B_p through them, fitted in two ways.

plain       least squares for every share p by itself, as the paper describes
authors     as the paper's released code does it: p = 0 as above, and every following p by least squares under
            A_p <= A_(p-1) and B_p <= B_(p-1) - 1 (beyond p = 0.5: - 0.1), p-1 being the share before

The second depends on how many shares there are: each of them lowers B, and what B loses A must gain.

Source: Fedssyn (Li et al., TMLR 2024), section 2.3, figure 2 (c), and the first version's figure B.3.
Departs from the released code: an error that is never reached is left out; there it counts 1000 rounds.
"""

from collections.abc import Sequence

import numpy as np

TARGETS = np.logspace(-6, -4.3, 80)[1:]  # eps of the fit, the released code's: 1.05e-6 ... 5.01e-5
FITS = ("plain", "authors")

Line = tuple[float, float]  # A, B


def fewest_rounds(errors: np.ndarray, eps: float) -> tuple[int, int] | None:
    """Over the step sizes: (rounds to ``eps``, index of the step size with the lowest error then); None: never.

    errors: (step sizes, 1 + rounds), of one problem.
    """
    reached = np.flatnonzero(errors.min(0) <= eps)
    if not len(reached):
        return None
    return int(reached[0]), int(errors[:, reached[0]].argmin())


def rounds_to(errors: np.ndarray, targets: np.ndarray = TARGETS) -> np.ndarray:
    """Fewest rounds to each target, (targets,); nan: not reached."""
    return np.array([at[0] if (at := fewest_rounds(errors, eps)) else np.nan for eps in targets])


def fit(rounds: np.ndarray, targets: np.ndarray = TARGETS, at_most: Line = (np.inf, np.inf)) -> Line | None:
    """(A, B) of the least-squares line under A <= at_most[0] and B <= at_most[1], exactly.

    None where fewer than three targets are reached.
    """
    reached = np.isfinite(rounds)
    if reached.sum() < 3:
        return None
    columns = np.stack([targets[reached] ** -0.5, np.ones(reached.sum())], axis=1)
    from scipy.optimize import lsq_linear  # scipy takes a second to import

    a, b = lsq_linear(columns, rounds[reached], (-np.inf, at_most), method="bvls").x
    return float(a), float(b)


def fit_all(kind: str, shares: Sequence[float], rounds: Sequence[np.ndarray]) -> list[Line | None]:
    """A line for each share p, in rising order; kind: one of ``FITS``; rounds: ``rounds_to`` of each share."""
    lines: list[Line | None] = []
    a = b = np.inf
    for p, found in zip(shares, rounds, strict=True):
        line = fit(found, at_most=(a, b - (1 if p <= 0.5 else 0.1)))
        lines.append(line)
        if kind == "authors" and line:
            a, b = line
    return lines
