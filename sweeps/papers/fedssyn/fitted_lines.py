"""Fewest rounds R_p that FedAvg needs for an error eps, and the fitted line R_p = A_p/sqrt(eps) + B_p.

p is the share of every client's samples that is swapped.

There are two kinds of fit (``FITS``):
plain       least squares for every share p separately, as the paper describes
authors     as in the paper's released code: p = 0 as in plain, and every following p by least squares under
            A_p <= A_(p-1) and B_p <= B_(p-1) - 1 (for p > 0.5: B_(p-1) - 0.1); p-1: the next smaller share

The fit ``authors`` depends on the number of shares: each further share lowers B_p, and A_p increases to compensate.

Source: Fedssyn (Li et al., TMLR 2024), section 2.3, figure 2 (c), and the first version's figure B.3.
Departs from the released code: the fit omits an error that is never reached; in the code it counts 1000 rounds.
"""

from collections.abc import Sequence

import numpy as np

TARGETS = np.logspace(-6, -4.3, 80)[1:]  # errors of the fit, as in the released code: 1.05e-6 ... 5.01e-5
FITS = ("plain", "authors")

Line = tuple[float, float]  # (A, B) of a line rounds = A/sqrt(error) + B


def fewest_rounds(errors: np.ndarray, eps: float) -> tuple[int, int] | None:
    """Return the fewest rounds to the error ``eps``, and the index of the best step size after that many rounds.

    errors: (step sizes, 1 + rounds), of one problem. None: no step size reaches the error.
    """
    reached = np.flatnonzero(errors.min(0) <= eps)
    if not len(reached):
        return None
    return int(reached[0]), int(errors[:, reached[0]].argmin())


def rounds_to(errors: np.ndarray, targets: np.ndarray = TARGETS) -> np.ndarray:
    """Return the fewest rounds to each error in ``targets``, (targets,); nan: no step size reaches the error."""
    return np.array([at[0] if (at := fewest_rounds(errors, eps)) else np.nan for eps in targets])


def fit(rounds: np.ndarray, targets: np.ndarray = TARGETS, at_most: Line = (np.inf, np.inf)) -> Line | None:
    """Return (A, B) of the least-squares line rounds = A/sqrt(target) + B under A <= at_most[0] and B <= at_most[1].

    rounds: fewest rounds to each error in ``targets``; nan: not reached. Fewer than three reached errors: None.
    """
    reached = np.isfinite(rounds)
    if reached.sum() < 3:
        return None
    columns = np.stack([targets[reached] ** -0.5, np.ones(reached.sum())], axis=1)
    from scipy.optimize import lsq_linear  # scipy takes a second to import

    a, b = lsq_linear(columns, rounds[reached], (-np.inf, at_most), method="bvls").x
    return float(a), float(b)


def fit_all(kind: str, shares: Sequence[float], rounds: Sequence[np.ndarray]) -> list[Line | None]:
    """Return the fitted line (A, B) of each share p, or None if ``fit`` returns None.

    kind: one of ``FITS``; shares: in rising order; rounds: the result of ``rounds_to`` for each share.
    """
    lines: list[Line | None] = []
    a = b = np.inf
    for p, rounds_of_share in zip(shares, rounds, strict=True):
        line = fit(rounds_of_share, at_most=(a, b - (1 if p <= 0.5 else 0.1)))
        lines.append(line)
        if kind == "authors" and line:
            a, b = line
    return lines


def r_squared(rounds: np.ndarray, line: Line, targets: np.ndarray = TARGETS) -> float | None:
    """Return R^2 of a line: 1 - (mean squared residual)/(variance of the rounds); None: the rounds are constant."""
    reached = np.isfinite(rounds)
    residuals = (rounds - line[0] * targets**-0.5 - line[1])[reached]
    variance = rounds[reached].var()
    return 1 - float((residuals**2).mean() / variance) if variance else None
