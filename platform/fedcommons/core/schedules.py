"""Learning rate schedules over rounds: functions of the round that return a factor of the clients' learning rates.

r: number of the round, from 1;  R: total number of rounds;  W: number of warm-up rounds. The factor multiplies every
learning rate of the module's optimizer in the local training of the round. Within a round the learning rate is
constant, unless the module has a scheduler. In the first W rounds, every schedule is multiplied by  r/(W + 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, isfinite, pi
from numbers import Real
from typing import Annotated, Any

from fedcommons.errors import UserError, quote, user_code_context

Warmup = Annotated[int, "[0, 1e9]"]


def constant(round: int, warmup: Warmup = 0) -> float:
    """Return the factor 1 in every round after the warm-up.

    Args:
        warmup: W, number of first rounds in which the learning rate rises linearly
    """
    return _warm(round, warmup)


def cosine(round: int, rounds: int, warmup: Warmup = 0, least: Annotated[float, "(0, 1]"] = 0.001) -> float:
    """Return the factor  l + (1 - l)(1 + cos(pi (r - 1)/R))/2  of round r; over R rounds, it falls from 1 towards l.

    Source: Loshchilov and Hutter, ICLR 2017, without restarts.

    Args:
        warmup: W, number of first rounds in which the learning rate rises linearly
        least: l, the factor towards which the learning rate falls
    """
    return _warm(round, warmup) * (least + (1 - least) * (1 + cos(pi * (round - 1) / rounds)) / 2)


def step(
    round: int, warmup: Warmup = 0, every: Annotated[int, "[1, 1e9]"] = 10, gamma: Annotated[float, "(0, 1]"] = 0.5
) -> float:
    """Return the factor  gamma^floor((r - 1)/s)  of round r: after every s rounds, it is multiplied by gamma.

    Args:
        warmup: W, number of first rounds in which the learning rate rises linearly
        every: s, number of rounds after which the learning rate falls
        gamma: the factor by which the learning rate is multiplied each time
    """
    return _warm(round, warmup) * gamma ** ((round - 1) // every)


def _warm(round: int, warmup: int) -> float:
    return min(1.0, round / (warmup + 1))


@dataclass(frozen=True)
class Schedule:
    """A schedule that checks each factor. function: round -> factor. what: name of the schedule in messages."""

    function: Callable[[int], Any]
    what: str

    def __call__(self, round: int) -> float:
        """Return the factor of the learning rates in a round.

        Raises:
            UserError: the factor is not a positive finite number.
            ClientError: the function failed.
        """
        with user_code_context(self.what):
            value = self.function(round)
        if not isinstance(value, Real) or not isfinite(value) or value <= 0:
            raise UserError(f"{self.what} must return a factor above 0, got {quote(value)} for round {round}.")
        return float(value)
