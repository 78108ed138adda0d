"""Continue a run with another number of rounds than planned, with the same results as a new run, bit for bit.

A round depends on its own number, by which random draws are keyed. It usually does not depend on the planned number of
rounds R. Four things may depend on R: the learning rate schedule, the noise for a target epsilon, the method
(``Facts.rounds`` in ``start``), and a user-defined straggler rule, which gets the facts in every round. The method and
the straggler rule are called with both values of R, and the change of R is refused if their results differ. Metrics
that are computed only in the last round are computed again (see ``RunFolder``).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedcommons.config import live_objects, registry
from fedcommons.core.client_worker import trainable_parameters
from fedcommons.errors import UserError, user_code_context
from fedcommons.federation.client_sampling import participants
from fedcommons.flat_tensors import Payload, data, flatten
from fedcommons.runs import run_salts
from fedcommons.runs.checks import depends_on_rounds
from fedcommons.runs.plans import begin
from fedcommons.runs.spec import RunSpec
from fedcommons.tracking.run_folder import (
    is_run,
    other_rounds,
    planned_rounds,
    read_rounds,
    require_same_data,
    require_same_rounding,
)


def never(digests: Mapping[str, str], names: Mapping[str, str], folder: Path) -> list[str]:
    """Return why the run can never be resumed: messages on code without hash; see ``live_objects.unhashed``.

    Raises:
        UserError: there is such code, and ``folder`` holds a run.
    """
    messages = live_objects.unhashed(digests, names)
    if messages and is_run(folder):
        raise UserError(f"{folder} holds a run already, and {messages[0]}")
    return messages


def require_same_rounds(spec: RunSpec, folder: Path) -> None:
    """Refuse a changed number of rounds if finished rounds of the run in ``folder`` depend on the planned number."""
    if not is_run(folder) or (planned := other_rounds(folder, spec.record)) is None:
        return
    if reason := dependence(spec, planned, len(read_rounds(folder)) - 1):
        raise UserError(
            f"{folder} holds a run of {planned} rounds, and {reason} on federation.rounds: with "
            f"{spec.plan.facts.rounds} the rounds so far would have had other results; choose another --out."
        )


def may_continue(spec: RunSpec, folder: Path) -> bool:
    """Check whether the run in ``folder`` can continue as ``spec``, which may have another number of rounds."""
    planned, done = planned_rounds(folder), len(read_rounds(folder)) - 1
    try:
        require_same_data(folder, spec.names["data"], spec.dataset.digest)
        require_same_rounding(folder)
        if spec.is_secret:
            run_salts.read_salt(folder, spec.salts)
    except UserError:
        return False
    return done <= spec.plan.facts.rounds and not dependence(spec, planned, done)


def dependence(spec: RunSpec, rounds: int, done: int) -> str | None:
    """Return why finished rounds depend on the planned number of rounds, such as "algorithm NAME depends"; else None.

    A user-defined straggler rule is called for each finished round with both numbers of rounds. Built-in rules are not
    called, as they do not read ``Facts.rounds``. rounds: the number that was planned before. done: finished rounds.
    """
    plan, rule, names = spec.plan, spec.plan.straggler_rule, spec.names
    plans = plan.facts, replace(plan.facts, rounds=rounds)
    model = flatten(trainable_parameters(spec.module(spec.dataset)))
    first, second = (begin(spec.algorithm, model, facts, spec.seed) for facts in plans)
    if not same(first, second):
        return f"algorithm {names['algorithm']} depends"
    if spec.local.dp and spec.local.dp.target:
        return "the noise of dp.target_epsilon depends"
    if plan.central and plan.central.target:
        return "the noise of dp.central_epsilon depends"
    if depends_on_rounds(names["schedule"]):
        return f"client.lr_schedule {names['schedule']} depends"
    if rule is None or not registry.is_user_defined(names["straggler"]):
        return None
    for number in range(1, done + 1):
        joined = participants(plan.facts.n_clients, plan.participation, plan.seed, number)
        with user_code_context(rule, "__call__", f"round {number}"):
            first, second = (dict(rule(list(joined), facts, number, plan.seed)) for facts in plans)
        if first != second:
            return f"straggler.rule {names['straggler']} depends"
    return None


def same(a: Payload, b: Payload) -> bool:
    """Check whether two server states have equal names, shapes, types and bits."""
    return a.keys() == b.keys() and all(
        getattr(a[name], "layout", None) == getattr(b[name], "layout", None)
        and data(a[name]).dtype == data(b[name]).dtype
        and data(a[name]).equal(data(b[name]))
        for name in a
    )
