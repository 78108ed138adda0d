"""Continue a run with another number of rounds than planned, with the same results as a new run, bit for bit.

A round depends on its own number, by which random draws are keyed. It usually does not depend on the planned number of
rounds R. Four things may depend on R: the learning rate schedule, the noise for a target epsilon, the method
(``Facts.rounds`` in ``start``), and a user-defined straggler rule, which gets the facts in every round. The method and
the straggler rule are called with both values of R, and the change of R is refused if their results differ. Metrics
that are computed only in the last round are computed again (see ``RunFolder``).
"""

from dataclasses import replace
from pathlib import Path

from fedcommons.config import registry
from fedcommons.config.dotted import same_results
from fedcommons.core.client_worker import trainable_parameters
from fedcommons.errors import UserError, user_code_context
from fedcommons.federation.client_sampling import participants
from fedcommons.flat_tensors import Payload, data, flatten
from fedcommons.privacy.salts import SECRET
from fedcommons.runs import run_salts
from fedcommons.runs.build import Prepared, begin, plan_of
from fedcommons.runs.checks import depends_on_rounds
from fedcommons.runs.worker import build_module
from fedcommons.tracking.run_folder import (
    is_run,
    read_config,
    read_rounds,
    require_same_data,
    require_same_rounding,
)


def require_same_rounds(prepared: Prepared, folder: Path) -> None:
    """Refuse another number of rounds for the run in ``folder`` if its finished rounds depend on the planned number.

    Differences in other fields are not checked here; ``RunFolder`` reports them.

    Raises:
        UserError: the finished rounds depend on the planned number of rounds.
    """
    if not is_run(folder) or same_results(planned := read_config(folder), prepared.config) != ["federation.rounds"]:
        return
    if reason := dependence(prepared, planned.federation.rounds, len(read_rounds(folder)) - 1):
        raise UserError(
            f"{folder} holds a run of {planned.federation.rounds} rounds, and {reason} on federation.rounds: with "
            f"{prepared.config.federation.rounds} the rounds so far would have had other results; choose another --out."
        )


def may_continue(prepared: Prepared, folder: Path) -> bool:
    """Check whether the run in ``folder`` can continue as ``prepared``, which may have another number of rounds."""
    planned, done, config = read_config(folder), len(read_rounds(folder)) - 1, prepared.config
    try:
        require_same_data(folder, config.data.name, prepared.dataset.digest)
        require_same_rounding(folder)
        if config.dp.noise == SECRET:
            run_salts.read_salt(folder, prepared.salts)
    except UserError:
        return False
    return done <= config.federation.rounds and not dependence(prepared, planned.federation.rounds, done)


def dependence(prepared: Prepared, rounds: int, done: int) -> str | None:
    """Return why finished rounds depend on the planned number of rounds, such as "algorithm NAME depends"; else None.

    A user-defined straggler rule is called for each finished round with both numbers of rounds. Built-in rules are not
    called, as they do not read ``Facts.rounds``.

    prepared: the experiment with the new number of rounds. rounds: the number of rounds that was planned before. done:
    the number of finished rounds.
    """
    config, algorithm, rule = prepared.config, prepared.algorithm, prepared.straggler_rule
    plan = plan_of(config, algorithm, rule, prepared.client_data.clients, prepared.about)
    plans = plan.facts, replace(plan.facts, rounds=rounds)
    model = flatten(trainable_parameters(build_module(config, prepared.dataset)))
    first, second = (begin(algorithm, model, facts, config.seed) for facts in plans)
    if not same(first, second):
        return f"algorithm {config.algorithm} depends"
    if config.dp.target_epsilon is not None:
        return "the noise of dp.target_epsilon depends"
    if depends_on_rounds(config.client.lr_schedule):
        return f"client.lr_schedule {config.client.lr_schedule} depends"
    if rule is None or not registry.is_user_defined(config.straggler.rule):
        return None
    for number in range(1, done + 1):
        joined = participants(plan.facts.n_clients, plan.participation, plan.seed, number)
        with user_code_context(rule, "__call__", f"round {number}"):
            first, second = (dict(rule(list(joined), facts, number, plan.seed)) for facts in plans)
        if first != second:
            return f"straggler.rule {config.straggler.rule} depends"
    return None


def same(a: Payload, b: Payload) -> bool:
    """Check whether two server states have equal names, shapes, types and bits."""
    return a.keys() == b.keys() and all(
        getattr(a[name], "layout", None) == getattr(b[name], "layout", None)
        and data(a[name]).dtype == data(b[name]).dtype
        and data(a[name]).shape == data(b[name]).shape
        and data(a[name]).equal(data(b[name]))
        for name in a
    )
