"""For tests of one's own methods: the contract that every algorithm keeps, and tiny federations to play it on."""

from fedcommons.testing.contract import CHECKS, check_algorithm
from fedcommons.testing.federations import Federation, LeastSquares, Regression, digits, least_squares

__all__ = ["CHECKS", "Federation", "LeastSquares", "Regression", "check_algorithm", "digits", "least_squares"]
