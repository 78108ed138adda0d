"""Robust aggregation: rules that resist Byzantine clients and replace the mean of the clients' updates.

n: number of replies;  u_i: float64 vector of length d with all of client i's ``Reply.sums``, also scalars and
BatchNorm's statistics, divided by its weight w_i;  f: number of Byzantine clients that Krum assumes.

median            median of each coordinate                         (Yin et al., ICML 2018, arXiv:1803.01498, def. 1)
trimmed_mean:B    mean of each coordinate without its floor(B n) smallest and floor(B n) largest values      (def. 2)
krum:F            the u_i with the smallest sum of squared distances to its n - f - 2 nearest updates
                  (Blanchard et al., NeurIPS 2017, section 4)
multi_krum:F:M    mean of the M updates with the smallest sums; default: M = n - F - 2, for which resilience is proved
                  (El Mhamdi et al., ICML 2018)
geometric_median  argmin_v sum_i w_i ||v - u_i|| by the smoothed Weiszfeld algorithm    (Pillutla et al., IEEE TSP 2022,
                  arXiv:1912.13445, algorithm 2), from the weighted mean, with nu = 10^-6

The geometric median uses the clients' weights w_i; the other rules ignore the weights, as in the papers. The server
stores all updates of a round: n d numbers of the model's type, and again in float64. A round with fewer replies than
the rule needs, because of stragglers, Poisson sampling or rejected replies, ends like a round without replies.

Departs from the papers: Weiszfeld's iteration ends after ``STEPS`` steps, or after a step that is shorter than
``TOLERANCE`` times the median distance to the updates. The paper's criterion, the objective's relative decrease, ends
too early if a few updates are very far away.
"""

import re
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from fedcommons.errors import UserError, quote, unknown

NU, STEPS, TOLERANCE = 1e-6, 1000, 1e-9

COLUMNS = 2**18
"""Number of coordinates that are sorted at once, so that sorting needs little memory."""

FORMS = {
    "mean": "mean",
    "median": "median",
    "trimmed_mean": "trimmed_mean:B, with the trimmed share B in [0, 0.5)",
    "krum": "krum:F, with a number of clients F",
    "multi_krum": "multi_krum:F or multi_krum:F:M, with numbers of clients F and M, and M at least 1",
    "geometric_median": "geometric_median",
}
"""Name of a rule -> form of the field ``federation.aggregation``."""

NUMBERS = {"trimmed_mean": r":(0?\.[0-4]\d*|0)", "krum": r":(\d{1,9})", "multi_krum": r":(\d{1,9})(?::([1-9]\d{0,8}))?"}
"""Name of a rule -> regular expression of the numbers after the name."""


@dataclass(frozen=True)
class Aggregation:
    """A rule of robust aggregation. text: value of the option. share: B. f: F. chosen: M (0: n - F - 2)."""

    text: str
    name: str
    share: float = 0.0
    f: int = 0
    chosen: int = 0

    @property
    def least(self) -> int:
        """Return the smallest number of replies that the rule needs; for a trimmed mean with B > 0, to trim a reply."""
        if self.name == "trimmed_mean":
            return ceil(1 / self.share - 1e-9) if self.share else 1
        return max(2 * self.f + 3, self.f + self.chosen) if "krum" in self.name else 1

    def __call__(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Return the aggregate (d,) of the updates (n, d) of clients with the weights (n,), all float64."""
        n = len(updates)
        if self.name == "geometric_median":
            return geometric_median(updates, weights)
        if "krum" in self.name:
            m = 1 if self.name == "krum" else self.chosen or n - self.f - 2
            nearest = krum_scores(updates, self.f).argsort(stable=True)[:m]
            return updates[nearest.sort().values].mean(0)
        return trimmed_mean(updates, (n - 1) // 2 if self.name == "median" else int(self.share * n + 1e-9))


def aggregation_of(text: str) -> Aggregation | None:
    """Return the rule of the field ``federation.aggregation``; None for mean.

    Raises:
        UserError: there is no such rule, or its numbers are missing or out of range.
    """
    name = text.partition(":")[0]
    if name not in FORMS:
        raise unknown("federation.aggregation", name, FORMS)
    numbers = re.fullmatch(NUMBERS.get(name, ""), text.removeprefix(name))
    if numbers is None:
        raise UserError(f"federation.aggregation has the form {FORMS[name]}, got {quote(text)}.")
    if name == "trimmed_mean":
        return Aggregation(text, name, share=float(numbers[1]))
    f, *chosen = [int(number) for number in numbers.groups("0")] or [0]
    return None if name == "mean" else Aggregation(text, name, f=f, chosen=chosen[0] if chosen else 0)


def trimmed_mean(updates: Tensor, k: int) -> Tensor:
    """Return for each coordinate the mean (d,) of the updates (n, d) without the k smallest and k largest values."""
    parts = updates.split(COLUMNS, dim=1)
    return torch.cat([part.sort(dim=0).values[k : len(updates) - k].mean(0) for part in parts])


def krum_scores(updates: Tensor, f: int) -> Tensor:
    """Return for each update (n, d) the sum of squared distances to its n - f - 2 nearest other updates, (n,)."""
    n = len(updates)
    distances = torch.cdist(updates, updates, compute_mode="donot_use_mm_for_euclid_dist").square()
    distances.fill_diagonal_(-1)  # so that the update itself is first, also among equal updates
    return distances.sort(dim=1).values[:, 1 : n - f - 1].sum(1)


def geometric_median(updates: Tensor, weights: Tensor) -> Tensor:
    """Return the smoothed geometric median (d,) of the updates (n, d) with the weights (n,)."""
    centre = weights @ updates / weights.sum()
    for _ in range(STEPS):
        distances = (updates - centre).norm(dim=1)
        pulls = weights / distances.clamp(min=NU)
        before, centre = centre, pulls @ updates / pulls.sum()
        if float((centre - before).norm()) <= TOLERANCE * float(distances.median()):
            break
    return centre
