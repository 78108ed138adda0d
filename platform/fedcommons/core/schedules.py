"""Learning rate schedules over rounds: functions that return a factor of the clients' learning rates for a round.

r: the round, from 1;  R: the number of rounds;  W: rounds of warm-up. The factor multiplies every learning rate of the
module's optimizer in that round's local trainings. Within a round the learning rate is constant, unless the module has
a scheduler. In the first W rounds every schedule multiplies its factor by  r/(W + 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, isfinite, pi
from numbers import Real
from typing import Annotated, Any

from fedcommons.errors import UserError, quote, user_code_context

Warmup = Annotated[int, "[0, 1e9]"]


def constant(round: int, warmup: Warmup = 0) -> float:
    """Return the constant factor 1.

    Args:
        warmup: W, first rounds in which the rate rises linearly
    """
    return _warm(round, warmup)


def cosine(round: int, rounds: int, warmup: Warmup = 0, least: Annotated[float, "(0, 1]"] = 0.001) -> float:
    """Return l + (1 - l)(1 + cos(pi (r - 1)/R))/2, from 1 towards l (Loshchilov and Hutter, ICLR 2017, no restarts).

    Args:
        warmup: W, first rounds in which the rate rises linearly
        least: l, the factor that it falls to
    """
    return _warm(round, warmup) * (least + (1 - least) * (1 + cos(pi * (round - 1) / rounds)) / 2)


def step(
    round: int, warmup: Warmup = 0, every: Annotated[int, "[1, 1e9]"] = 10, gamma: Annotated[float, "(0, 1]"] = 0.5
) -> float:
    """Return gamma^floor((r - 1)/s).

    Args:
        warmup: W, first rounds in which the rate rises linearly
        every: s, rounds after which the rate falls
        gamma: the factor by which it falls
    """
    return _warm(round, warmup) * gamma ** ((round - 1) // every)


def _warm(round: int, warmup: int) -> float:
    return min(1.0, round / (warmup + 1))


@dataclass(frozen=True)
class Schedule:
    """A schedule with checked values. ``function``: round to factor. ``what``: name of the schedule in messages."""

    function: Callable[[int], Any]
    what: str

    def __call__(self, round: int) -> float:
        """Return the factor of a round.

        Raises:
            UserError: the factor is not a positive finite number.
            ClientError: the function failed.
        """
        with user_code_context(self.what):
            value = self.function(round)
        if not isinstance(value, Real) or not isfinite(value) or value <= 0:
            raise UserError(f"{self.what} must give a factor above 0 for every round, got {quote(value)} for {round}.")
        return float(value)
