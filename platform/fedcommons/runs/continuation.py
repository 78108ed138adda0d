"""A run that goes on with more rounds than were planned, or fewer: the same bits as one planned so from the start.

A round knows its number and not how many there will be; draws are keyed by it. What may know R, the number of rounds,
is the method (``Facts.rounds`` in ``start``), a straggler rule of somebody's own, which gets the facts in every round,
the learning rate's schedule, and the noise that a target epsilon takes. The first two are asked under both plans, and a
run that would have begun otherwise is refused. What is observed in the last round alone is observed anew: see
``RunFolder``.
"""

from dataclasses import replace
from pathlib import Path

from fedcommons.config import registry
from fedcommons.config.dotted import same_results
from fedcommons.core.client_worker import trained
from fedcommons.errors import UserError, somebodys
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
    """Refuse another number of rounds for the run in ``folder`` where its rounds so far depend on it.

    Raises:
        UserError: they do. What else differs is told by the ``RunFolder``.
    """
    if not is_run(folder) or same_results(held := read_config(folder), prepared.config) != ["federation.rounds"]:
        return
    if why := dependence(prepared, held.federation.rounds, len(read_rounds(folder)) - 1):
        raise UserError(
            f"{folder} holds a run of {held.federation.rounds} rounds, and {why} on federation.rounds: with "
            f"{prepared.config.federation.rounds} the rounds so far would have been others; choose another --out."
        )


def may_continue(prepared: Prepared, folder: Path) -> bool:
    """Whether the run in ``folder`` can go on as this one, which differs from it in the number of rounds at most."""
    held, done, config = read_config(folder), len(read_rounds(folder)) - 1, prepared.config
    try:
        require_same_data(folder, config.data.name, prepared.dataset.digest)
        require_same_rounding(folder)
        if config.dp.noise == SECRET:
            run_salts.kept(folder, prepared.salts)
    except UserError:
        return False
    return done <= config.federation.rounds and not dependence(prepared, held.federation.rounds, done)


def dependence(prepared: Prepared, rounds: int, done: int) -> str | None:
    """What makes the first ``done`` rounds others than in a plan of this many rounds, as "... depends"; None: nothing.

    A rule of the package's own reads no ``Facts.rounds``, so only somebody's own is asked, in each of these rounds.
    """
    config, algorithm, rule = prepared.config, prepared.algorithm, prepared.late
    plan = plan_of(config, algorithm, rule, prepared.dealt.own, prepared.about)
    plans = plan.facts, replace(plan.facts, rounds=rounds)
    model = flatten(trained(build_module(config, prepared.dataset)))
    one, two = (begin(algorithm, model, facts, config.seed) for facts in plans)
    if not same(one, two):
        return f"algorithm {config.algorithm} depends"
    if config.dp.target_epsilon is not None:
        return "the noise of dp.target_epsilon depends"
    if depends_on_rounds(config.client.lr_schedule):
        return f"client.lr_schedule {config.client.lr_schedule} depends"
    if rule is None or not registry.is_own(config.straggler.rule):
        return None
    for number in range(1, done + 1):
        joined = participants(plan.facts.n_clients, plan.participation, plan.seed, number)
        with somebodys(rule, "__call__", f"round {number}"):
            one, two = (dict(rule(list(joined), facts, number, plan.seed)) for facts in plans)
        if one != two:
            return f"straggler.rule {config.straggler.rule} depends"
    return None


def same(a: Payload, b: Payload) -> bool:
    """Whether two states have the same names, layouts and bits."""
    return a.keys() == b.keys() and all(
        getattr(a[name], "layout", None) == getattr(b[name], "layout", None)
        and data(a[name]).dtype == data(b[name]).dtype
        and data(a[name]).shape == data(b[name]).shape
        and data(a[name]).equal(data(b[name]))
        for name in a
    )
