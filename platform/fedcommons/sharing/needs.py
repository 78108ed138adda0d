"""Deprecated path of ``fedcommons.generators.requests``, from which users' sharing strategies import ``needs``."""

from warnings import warn

from fedcommons.generators.requests import Contribution, GeneratorRecipe
from fedcommons.generators.requests import GenerationRequest as Need
from fedcommons.generators.requests import requests_of_clients as needs

__all__ = ["Contribution", "GeneratorRecipe", "Need", "needs"]

warn("fedcommons.sharing.needs is fedcommons.generators.requests", DeprecationWarning, stacklevel=2)
