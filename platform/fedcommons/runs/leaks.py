"""Leaks: values computed from clients' data without noise that affect all rounds, so that no epsilon is valid."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedcommons.core.digests import is_users
from fedcommons.data.clients import Clients
from fedcommons.data.examples import N_CLASSES, STANDARDISATION
from fedcommons.data.federated import ClientDatasets
from fedcommons.privacy.release import Release
from fedcommons.runs.early_stopping import Stop
from fedcommons.sharing.stage import Contributions, Stage

STATE: Mapping[str, str] = {
    STANDARDISATION: "state mean and std in the data set, or set --data.standardise false",
    N_CLASSES: "state n_classes in the data set",
}
"""Name of a value that is computed from all clients' examples -> advice to the user how to avoid it."""


def leaks_of(
    computed: Sequence[str], stop: Stop, stage: Stage | None, client_data: ClientDatasets, contributed: Contributions
) -> dict[str, str]:
    """Return the leaks of a run by name, each with the reason why no epsilon covers the run's rounds.

    Args:
        computed: names of the values that were computed from all clients' examples (``Dataset.computed``).
        stop: the run's stopping rule.
        stage: the run's sharing strategy if clients train by DP-SGD or the server adds noise, else None.
        client_data: the clients' real data sets, the strategy's input.
        contributed: the result of the strategy's ``make``.
    """
    reason = "computed from all clients' examples, without noise"
    leaks = {what: f"{reason} ({STATE.get(what, 'state it in the data set')})" for what in computed}
    if metric := stop.private:
        leaks["number of rounds"] = f"it follows {metric}, and so clients' examples (stop by test/ or validation/)"
    if stage and is_users(type(stage)) and _follows_examples(stage, client_data, contributed):
        name = type(stage).__name__
        leaks["rows and weights"] = f"sharing stage {name} decides them by what examples show (blank ones give others)"
    return leaks


def computed_by_all(computed: Sequence[str], n_clients: int) -> list[Release]:
    """Return ledger entries for values computed from all clients' examples, one entry per client and value."""
    return [Release(what=(what,), commons=True) for what in computed] * n_clients


def _follows_examples(stage: Stage, client_data: ClientDatasets, contributed: Contributions) -> bool:
    """Check whether the sharing strategy's assignment of rows and weights depends on the content of real examples.

    The strategy is called a second time with blank real examples, and the same labels and synthetic rows. If a call
    fails, the result is True, as independence cannot be shown.
    """
    real, store = client_data.clients.store, contributed.store
    blank = torch.zeros_like(real.x)
    hidden = replace(client_data, clients=Clients(replace(real, x=blank), client_data.clients.rows))
    seen = replace(contributed, store=replace(store, x=torch.cat([blank, store.x[len(real) :]])))
    results = []
    for variant, contributes in ((client_data, contributed), (hidden, seen)):
        try:
            assigned = stage.assign(variant, stage.release(variant, contributes)[0])
        except Exception:  # a user-defined strategy may raise any error
            return True
        results_of_stage = (assigned.own_rows, assigned.weights or ())
        results.append([[np.asarray(part).tolist() for part in each] for each in results_of_stage])
    return results[0] != results[1]
