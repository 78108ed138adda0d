"""Deprecated import path of ``fedcommons.generators.requests``, with the old names ``needs`` and ``Need``."""

from warnings import warn

from fedcommons.generators.requests import Contribution, GeneratorRecipe
from fedcommons.generators.requests import GenerationRequest as Need
from fedcommons.generators.requests import requests_of_clients as needs

__all__ = ["Contribution", "GeneratorRecipe", "Need", "needs"]

warn("fedcommons.sharing.needs is fedcommons.generators.requests", DeprecationWarning, stacklevel=2)
