"""The privacy constants of a strategy that draws noise itself: the target epsilon or the noise, and one delta."""

from collections.abc import Mapping
from typing import Any, Protocol

from fedcommons.errors import UserError
from fedcommons.privacy.release import SIGMAS


class Noisy(Protocol):
    """A sharing strategy with the constants of a privacy target."""

    @property
    def target_epsilon(self) -> float | None: ...
    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def delta(self) -> float: ...


def check(stage: Noisy, fields: Mapping[str, Any]) -> None:
    """Refuse inconsistent privacy constants, see ``Stage``."""
    if (stage.target_epsilon is None) == (stage.noise_multiplier is None):
        which = "neither" if stage.target_epsilon is None else "both"
        raise UserError(f"give either sharing.target_epsilon or sharing.noise_multiplier, not {which}.")
    if 0 < (sigma := stage.noise_multiplier or 0) < SIGMAS[0]:
        raise UserError(f"sharing.noise_multiplier must be 0 or at least {SIGMAS[0]:g}, got {sigma:g}.")
    if fields.get("dp.delta", stage.delta) != stage.delta:
        raise UserError(f"sharing.delta must be dp.delta = {fields['dp.delta']:g}, got {stage.delta:g}.")
