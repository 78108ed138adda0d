"""Numbers over seeds as text: mean and standard deviation, mean and 95 % interval, and rounds to a target."""

import re
from collections.abc import Sequence
from functools import cache
from math import sqrt
from statistics import fmean, stdev


@cache
def quantile(n: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with n - 1 degrees of freedom. n: number of values."""
    from scipy.stats import t

    return float(t.ppf(0.975, n - 1))


def student(values: Sequence[float], most: float | None = None) -> tuple[float, float] | None:
    """Return (low, high), the 95 % Student t interval of the values' mean, or None for fewer than two values.

    most: the largest possible value; with it, the interval ends there, and at 0 if no value is negative.
    """
    if len(values) < 2:
        return None
    half = quantile(len(values)) * stdev(values) / sqrt(len(values))
    low, high = fmean(values) - half, fmean(values) + half
    if most is None:
        return low, high
    return low if min(values) < 0 else max(low, 0.0), min(high, most)


def ends(values: Sequence[float], sign: str = "") -> str:
    """Format the interval of ``student`` as ``[low, high]``; ``-`` for one value. sign: ``+`` prints plus signs."""
    limits = student(values)
    return f"[{limits[0]:{sign}.1f}, {limits[1]:{sign}.1f}]" if limits else "-"


def number(value: float, digits: int | None) -> str:
    """Format a number as page.js formats it. digits: number of decimals; None: three significant digits."""
    if digits is not None:
        return f"{value:.{digits}f}"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):.15g}"
    return re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].replace('+', '')}{match[2]}", f"{value:.2e}")


def mean_interval(values: Sequence[float], digits: int | None, most: float) -> str:
    """Format mean and 95 % interval as ``83.9 (80.7 to 87.1)``, or only the mean if both ends are equal to it."""
    mean = number(fmean(values), digits)
    low, high = (number(end, digits) for end in student(values, most) or (0.0, 0.0))
    return mean if low == high else f"{mean} ({low} to {high})"


def mean_std(values: Sequence[float], digits: int | None) -> str:
    """Format ``mean ± sample standard deviation``, or one value. digits: decimals; None: four significant digits."""
    form = ".4g" if digits is None else f".{digits}f"
    mean = format(fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(stdev(values), form if digits is not None else '.2g')}"


def format_rounds(counts: Sequence[float], missed: int) -> str:
    """Format a mean number of rounds to the target as ``16.5``, or as ``>17 (missed by 1 of 2)`` if a seed missed it.

    counts: the rounds of each seed; a seed that missed the target counts with all its rounds. missed: number of seeds
    that missed the target. A single seed that missed it is printed as ``>30``.
    """
    mean = f"{fmean(counts):.1f}".removesuffix(".0")
    if not missed:
        return mean
    return f">{mean}" if len(counts) == 1 else f">{mean} (missed by {missed} of {len(counts)})"
