"""Tests for user-defined methods: the contract of every algorithm, tiny federations, a pretended GPU,
and the sensitivity test of private methods, generators and sharing strategies."""

from fedcommons.testing.contract import CHECKS, check_algorithm
from fedcommons.testing.federations import Federation, LeastSquares, Regression, digits, least_squares
from fedcommons.testing.pretend_gpu import GPU, PretendGPU
from fedcommons.testing.sensitivity_of_generators import check_generator
from fedcommons.testing.sensitivity_of_stages import check_stage

__all__ = [
    "CHECKS",
    "GPU",
    "Federation",
    "LeastSquares",
    "PretendGPU",
    "Regression",
    "check_algorithm",
    "check_generator",
    "check_stage",
    "digits",
    "least_squares",
]
