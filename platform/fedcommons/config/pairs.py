"""Pairs of options that cannot be used together, each with the reason. All pairs that ``REFUSED`` omits are allowed."""

from collections.abc import Callable, Mapping
from typing import Any

from fedcommons.errors import UserError

Flat = Mapping[str, Any]
"""Dotted name -> value of an experiment's fields."""

ATTACKS_ON_UPDATES = ("sign_flip", "gaussian", "alie")
"""Attacks that change clients' updates. An attack on data changes them, too, if attack.scale is not 1."""

OPTIONS: Mapping[str, Callable[[Flat], bool]] = {
    "communication.compress": lambda flat: flat["communication.compress"] != "none",
    "dp.local": lambda flat: flat["dp.local"],
    "dp.central": lambda flat: flat["dp.central"],
    "dp.central_quantile": lambda flat: flat["dp.central_quantile"] is not None,
    "federation.sampling": lambda flat: flat["federation.sampling"] != "fixed",
    "federation.weighting": lambda flat: flat["federation.weighting"] != "uniform",
    "federation.max_norm": lambda flat: flat["federation.max_norm"] is not None,
    "federation.aggregation": lambda flat: flat["federation.aggregation"] != "mean",
    "attack.name": lambda flat: flat["attack.name"] in ATTACKS_ON_UPDATES or flat["attack.scale"] != 1,
    "client.batched": lambda flat: flat["client.batched"],
    "straggler.rule": lambda flat: flat["straggler.rule"] != "independent" or bool(flat.get("straggler.q")),
}
"""Name of an option -> whether an experiment uses the option."""

REFUSED: Mapping[tuple[str, str], str] = {
    ("dp.central", "federation.weighting"): "the noise assumes updates of equal weight",
    ("dp.central", "federation.max_norm"): "updates are clipped, so no norm is too large",
    ("dp.central", "federation.aggregation"): "the noise is added to a sum of updates",
    ("dp.central", "attack.name"): "attacks change updates after the clipping",
    (
        "dp.central_quantile",
        "dp.local",
    ): "clients report whether their update was clipped, and no local noise protects this report",
    ("client.batched", "dp.local"): "DP-SGD trains one client at a time",
    ("federation.sampling", "straggler.rule"): "Poisson sampling assumes that clients reply independently",
}
"""Two names in ``OPTIONS`` -> the reason why an experiment must not use both options."""


NEEDS: Mapping[str, tuple[str, ...]] = {
    "communication.compress": ("averages", "adds_updates"),
    **dict.fromkeys(("dp.central", "federation.aggregation", "attack.name"), ("averages",)),
}
"""Name in ``OPTIONS`` -> capabilities; the option needs a method with at least one of the capabilities."""


def require_allowed(flat: Flat) -> None:
    """Check that an experiment uses no refused pair of options.

    Raises:
        UserError: the experiment uses both options of a refused pair.
    """
    for (option, other), reason in REFUSED.items():
        if OPTIONS[option](flat) and OPTIONS[other](flat):
            raise UserError(f"{option} cannot be used with {other}: {reason}.")
