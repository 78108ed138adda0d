"""What shows clients' data to all trainings of a run without noise, so that no epsilon of its rounds is stated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedcommons.core.digests import is_users
from fedcommons.data.clients import Clients
from fedcommons.data.examples import N_CLASSES, STANDARDISATION
from fedcommons.data.federated import Dealt
from fedcommons.privacy.release import Release
from fedcommons.runs.early_stopping import Stop
from fedcommons.sharing.stage import Contributions, Stage

STATE: Mapping[str, str] = {
    STANDARDISATION: "state mean and std in the data set, or set --data.standardise false",
    N_CLASSES: "state n_classes in the data set",
}
"""What a user does about a value that is computed from all clients' examples."""


def leaks_of(
    computed: Sequence[str], stop: Stop, stage: Stage | None, dealt: Dealt, contributed: Contributions
) -> dict[str, str]:
    """Return the leaks of a run by name, and why each leaves all rounds uncovered.

    Args:
        computed: see ``Dataset``.
        stop: the rule by which the run ends.
        stage: the run's sharing stage under DP-SGD, else None.
        dealt: what the stage starts from.
        contributed: what its ``make`` returned.
    """
    why = "computed from all clients' examples, without noise"
    leaks = {what: f"{why} ({STATE.get(what, 'state it in the data set')})" for what in computed}
    if metric := stop.private:
        leaks["number of rounds"] = f"it follows {metric}, and so clients' examples (stop by test/ or validation/)"
    if stage and is_users(type(stage)) and _follows_examples(stage, dealt, contributed):
        name = type(stage).__name__
        leaks["rows and weights"] = f"sharing stage {name} decides them by what examples show (blank ones give others)"
    return leaks


def computed_by_all(computed: Sequence[str], n_clients: int) -> list[Release]:
    """Return the releases by which all clients give away their part of what is computed before round 1."""
    return [Release(what=(what,), commons=True) for what in computed] * n_clients


def _follows_examples(stage: Stage, dealt: Dealt, contributed: Contributions) -> bool:
    """Return whether who trains on which rows, and with which weights, follows what real examples show.

    The stage is asked again with real examples that are blank; labels and made rows are as they are. True where it
    fails then, as nothing can be told.
    """
    real, store = dealt.own.store, contributed.store
    blank = torch.zeros_like(real.x)
    hidden = replace(dealt, own=Clients(replace(real, x=blank), dealt.own.rows))
    seen = replace(contributed, store=replace(store, x=torch.cat([blank, store.x[len(real) :]])))
    results = []
    for one, contributes in ((dealt, contributed), (hidden, seen)):
        try:
            assigned = stage.assign(one, stage.release(one, contributes)[0])
        except Exception:  # whatever a user's stage raises
            return True
        both = (assigned.kept, assigned.weights or ())
        results.append([[np.asarray(part).tolist() for part in each] for each in both])
    return results[0] != results[1]
