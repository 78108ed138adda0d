"""Tests of user-defined methods: checks that every algorithm must pass, tiny federations, a simulated GPU,
and the sensitivity test of differentially private methods, generators and sharing strategies."""

from fedcommons.testing.contract import CHECKS, check_algorithm
from fedcommons.testing.federations import Federation, LeastSquares, Regression, digits, least_squares
from fedcommons.testing.pretend_gpu import GPU, PretendGPU
from fedcommons.testing.sensitivity_of_sharing import check_generator, check_stage

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
