"""The check of a noisy sharing strategy's privacy constants: target epsilon or noise multiplier, and delta."""

from collections.abc import Mapping
from typing import Any, Protocol

from fedcommons.errors import UserError
from fedcommons.privacy.release import SIGMAS


class Noisy(Protocol):
    """A sharing strategy that adds noise; exactly one of ``target_epsilon`` and ``noise_multiplier`` is set."""

    @property
    def target_epsilon(self) -> float | None: ...
    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def delta(self) -> float: ...


def check(stage: Noisy, fields: Mapping[str, Any]) -> None:
    """Check that a strategy's privacy constants are consistent; ``fields``: the experiment's fields (see ``Stage``).

    Raises:
        UserError: not exactly one of target epsilon and noise multiplier is set, or a constant has no valid value.
    """
    if (stage.target_epsilon is None) == (stage.noise_multiplier is None):
        which = "neither" if stage.target_epsilon is None else "both"
        raise UserError(f"set either sharing.target_epsilon or sharing.noise_multiplier, not {which}.")
    if 0 < (sigma := stage.noise_multiplier or 0) < SIGMAS[0]:
        raise UserError(f"sharing.noise_multiplier must be 0 or at least {SIGMAS[0]:g}, got {sigma:g}.")
    if fields.get("dp.delta", stage.delta) != stage.delta:
        raise UserError(f"sharing.delta must be dp.delta = {fields['dp.delta']:g}, got {stage.delta:g}.")
