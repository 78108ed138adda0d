"""Pairs of options that cannot be used together, each with the reason. All pairs that ``REFUSED`` omits are allowed."""

from collections.abc import Callable, Mapping
from typing import Any

from fedcommons.errors import UserError

Flat = Mapping[str, Any]
"""Dotted name -> value of an experiment's fields."""

OPTIONS: Mapping[str, Callable[[Flat], bool]] = {
    "dp.local": lambda flat: flat["dp.local"],
    "client.batched": lambda flat: flat["client.batched"],
    "federation.max_norm": lambda flat: flat["federation.max_norm"] is not None,
    "federation.aggregation": lambda flat: flat["federation.aggregation"] != "mean",
    "attack.name": lambda flat: flat["attack.name"] != "none",
    "straggler.rule": lambda flat: flat["straggler.rule"] != "independent" or bool(flat.get("straggler.q")),
}
"""Name of an option -> whether an experiment uses the option."""

REFUSED: Mapping[tuple[str, str], str] = {}
"""Two names in ``OPTIONS`` -> the reason why an experiment must not use both options."""


def require_allowed(flat: Flat) -> None:
    """Check that an experiment uses no refused pair of options.

    Raises:
        UserError: the experiment uses both options of a refused pair.
    """
    for (one, other), reason in REFUSED.items():
        if OPTIONS[one](flat) and OPTIONS[other](flat):
            raise UserError(f"{one} cannot be used with {other}: {reason}.")
