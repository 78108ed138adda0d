"""What shows clients' data to all trainings of a run without noise, so that no epsilon of its rounds is stated."""

from collections.abc import Mapping, Sequence

from fedcommons.core.release import Release
from fedcommons.data.examples import N_CLASSES, STANDARDISATION

STATE: Mapping[str, str] = {
    STANDARDISATION: "state mean and std in the data set, or set --data.standardise false",
    N_CLASSES: "state n_classes in the data set",
}
"""What a user does about a value that is computed from all clients' examples."""


def leaks_of(computed: Sequence[str]) -> dict[str, str]:
    """Return the leaks of a run by name, and why each leaves all rounds uncovered.

    Args:
        computed: see ``Dataset``.
    """
    why = "computed from all clients' examples, without noise"
    return {what: f"{why} ({STATE.get(what, 'state it in the data set')})" for what in computed}


def computed_by_all(computed: Sequence[str], n_clients: int) -> list[Release]:
    """Return the releases by which all clients give away their part of what is computed before round 1."""
    return [Release(what=(what,), commons=True) for what in computed] * n_clients
