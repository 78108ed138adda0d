"""For tests of your own methods: the contract that every algorithm keeps, tiny federations, a pretended GPU."""

from fedcommons.testing.contract import CHECKS, check_algorithm
from fedcommons.testing.federations import Federation, LeastSquares, Regression, digits, least_squares
from fedcommons.testing.pretend_gpu import GPU, PretendGPU

__all__ = [
    "CHECKS",
    "GPU",
    "Federation",
    "LeastSquares",
    "PretendGPU",
    "Regression",
    "check_algorithm",
    "digits",
    "least_squares",
]
