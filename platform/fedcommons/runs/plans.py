"""The plan of a run's rounds: how clients are sampled, which are stragglers, and the state before round 1."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedcommons.core.aggregation import aggregation_of
from fedcommons.core.algorithm import Algorithm, ChoosesClients, Facts, Personal, State
from fedcommons.core.attacks import Attack
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.compression import QSGD, Compression, TopK
from fedcommons.core.returned import require_state
from fedcommons.core.updates import NO_STEPS, Updates
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError, user_code_context
from fedcommons.federation.central_dp import CentralDP
from fedcommons.federation.client_sampling import accounted, joining
from fedcommons.federation.rounds import Plan
from fedcommons.federation.stragglers import Independent, Rule, arrival
from fedcommons.flat_tensors import Flat
from fedcommons.privacy.accountants import tight_noise_for
from fedcommons.runs.checks import refuse


def begin(algorithm: Algorithm, model: Flat, facts: Facts, seed: int) -> State:
    """Call the method's ``start`` and return its result, the server's state before round 1.

    Raises:
        ClientError: the method's ``start`` failed, or returned no valid state.
    """
    with user_code_context(algorithm, "start"):
        state = algorithm.start(model, facts, seed)
        require_state(state, model.layout, has_model="model" in state or not isinstance(algorithm, Personal))
        return state


def plan_of(
    algorithm: Algorithm, rule: Rule, train: Examples, rows: Sequence[np.ndarray], n_classes: int | None, *, seed: int,
    rounds: int, participation: float, weighting: str, blocks: int, keep_buffers: bool, max_norm: float | None,
    partial_work: str, poisson: bool = False, central: tuple[float, float, float | None] | None = None,
    compressor: tuple[str, float] | None = None, error_feedback: bool = True, aggregation: str = "mean",
    attack: Attack | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of all rounds: how clients are sampled, which are stragglers, and the use of partial work.

    rule: the rule that picks stragglers. train, rows: training examples, and those of each client. partial_work: take,
    drop, or method (as the method defines). poisson, attack: see ``Plan``. central: the constants of ``CentralDP``.
    compressor: see ``updates_of``. aggregation: value of the field.

    Raises:
        UserError: the straggler rule or the aggregation refuses this number of clients.
    """
    slow = None if rule == Independent() else rule
    n, joins = len(rows), joining_of(algorithm, len(rows), participation)
    refuse(slow, "check_clients", n, joins)
    robust = aggregation_of(aggregation)
    if robust and joins is not None and joins < robust.least:
        least = f"needs at least {robust.least} clients in a round, and {joins} take part"
        raise UserError(f"federation.aggregation {robust.text} {least}.")
    accepts_partial = {"take": True, "drop": False, "method": capabilities_of(algorithm).takes_partial}[partial_work]
    replies_partially = accepts_partial and capabilities_of(slow).leaves_partial
    replied = arrival(None if replies_partially else slow, n, n * participation if poisson and joins else joins, seed)
    facts = Facts(n, (), rounds, weighting, replied, n_classes=n_classes)
    updates = updates_of(compressor, error_feedback=error_feedback)
    plan = Plan(
        facts, participation, blocks, seed, slow, keep_buffers, max_norm, accepts_partial, updates=updates,
        poisson=poisson, central=CentralDP(*central) if central else None, aggregation=robust, attack=attack,
    )  # fmt: skip
    return on_clients(plan, Clients(train, rows))


def with_central_target(plan: Plan, target: float, delta: float) -> Plan:
    """Return the plan with the smallest noise of ``dp.central`` that costs at most the epsilon ``target`` at ``delta``.

    Raises:
        UserError: the target epsilon needs too much noise.
    """
    if plan.central is None:
        return plan
    facts = plan.facts
    course = accounted(facts.n_clients, plan.participation, plan.seed, facts.rounds, poisson=plan.poisson)
    try:
        noise = tight_noise_for(target, *course, delta)
    except UserError as error:
        raise UserError(f"dp.{error}".replace("target_epsilon", "central_epsilon")) from None
    return replace(plan, central=replace(plan.central, noise=noise, target=target))


def updates_of(compressor: tuple[str, float] | None, *, error_feedback: bool) -> Updates:
    """Return the engine's steps on updates. compressor: ("topk", share), ("qsgd", bits) or None."""
    if compressor is None:
        return NO_STEPS
    name, number = compressor
    rule = TopK(number) if name == "topk" else QSGD(int(number))
    return Updates((Compression(rule, error_feedback and name == "topk"),))


def on_clients(plan: Plan, clients: Clients, **facts: Any) -> Plan:
    """Return a copy of the plan with the number and the data sizes of ``clients``, and with the further ``facts``."""
    sizes, counts = tuple(clients.rows.totals.tolist()), partial(clients.counts, plan.facts.n_classes)
    return replace(plan, facts=replace(plan.facts, n_clients=len(clients), sizes=sizes, counts=counts, **facts))


def joining_of(algorithm: Algorithm, n: int, participation: float) -> int | None:
    """Return floor(n participation), how many of n clients a round samples; None if the algorithm chooses clients."""
    return None if isinstance(algorithm, ChoosesClients) else joining(n, participation)
