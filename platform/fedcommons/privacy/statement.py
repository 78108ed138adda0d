"""The privacy statement of a run: which (epsilon, delta) guarantee the shared data (commons) and all messages have.

An epsilon is a guarantee only if an attacker cannot draw the noise again (option ``dp.noise`` secret). The lines of the
section ``privacy`` in ``summary.json`` are:

``noise``                      seeded or secret; null if the run has no noise
``delta``                      delta of the (epsilon, delta) guarantee; null if the run has no noise
``commons``                    ``nothing`` (no shared data), ``covered`` (an epsilon covers all shared data) or
                               ``uncovered``
``pool_epsilon_max``           largest epsilon over clients of a covered commons, else null;
                               ``pool_epsilon_of_each_client`` has the epsilon of each client
``pool_epsilon_of_each_view``  with ``--sharing merf`` or ``dpcda``: epsilon of a client's data shared before round 1
                               against each party (server, another client, ...)
``overall``, ``epsilon_of_messages``  epsilon of all messages of the run; without a guarantee "none" and null
``epsilon_local_training``     with ``dp.local``: epsilon of each client's local training, null if one of the client's
                               trainings is not covered; ``largest`` is null if any client's value is null
``..._if_secret``              with seeded noise: value of that line if the noise were secret
``mechanisms``                 for ``updates`` and ``commons``: ``sigma``, ``q``, ``steps`` and accountant of each
                               client, clipping norm, delta
``user_level``                 with ``dp.central``: the guarantee for a client's whole data set (``privacy.user_level``)
``uncovered``                  names of what no epsilon covers, with the number of releases
``trusted``                    statements of user-defined components that the engine does not check
``in_words``                   one sentence about the commons and one about the run
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedcommons.privacy import gaussian
from fedcommons.privacy.ledger import Ledger, Released
from fedcommons.privacy.salts import IF_SECRET, SECRET, SEEDED

WORDS = {
    "delta": "model updates (delta)", "control": "control variates (control)", "buffers": "BatchNorm's statistics",
    "unclipped": "whether an update is clipped (unclipped)",
    "weight": "weights other than numbers of examples", "undeclared": "data without any statement of protection",
}  # fmt: skip
"""Name of a released tensor -> description of the tensor, for names that a reader may not understand."""

WHY = {
    "raw examples": "for each example epsilon is infinite", "real images": "for each image epsilon is infinite",
    "synthetic images": "their generators give no guarantee",
    "class counts": "labels of synthetic images follow them; generator.label_noise covers them",
}  # fmt: skip
"""Name of released data -> the reason why the data have no epsilon."""

NOTES = (
    "each client's number of examples, which counts as public: neighbouring data sets differ in a blanked example",
    "the experimenter's record (run folder, screen, W&B and other trackers): losses and all that modules and methods "
    "log, notes, exception texts, class counts, zeta^2, sigma^2 and the other convergence parameters, accuracies of "
    "each client, audits",
    "other runs on the same data: their epsilons add up, also those of other seeds and of runs that only served to "
    "choose a learning rate (--lrs, configurations of a sweep); only this run is counted here",
)
"""Data that the privacy ledger never counts, although they may disclose examples; every statement lists them."""

TRUSTED = {
    "algorithm": "which data its releases are computed from; that no data enter work.local by start weights, learning "
    "rate, loss and hooks; how often it trains; what tensor shapes and client memories disclose; secrecy of its noise",
    "sharing": "the stated protection of the examples that its clients create, and that its noise is secret",
    "generator": "the stated protection of its images (receipt), and that its noise is secret",
    "model": "its hooks, and state that it stores outside of tensors and numbers",
    "straggler": "that the choice of stragglers does not depend on the data",
    "data": "that an example belongs to one person only, and that mean, std, classes and scales are not computed from "
    "clients' examples",
    "schedule": "that the learning rate does not depend on the data",
    "partition": "that the assignment of examples to clients does not depend on the content of the examples, "
    "although a partition that asks for x can read the content",
}
"""Kind of component -> the statements of a user-defined component that the engine trusts without a check."""

ADDED = ", except for parties against which the epsilon of the data shared before round 1 is larger"
"""Text appended to the sentence about the overall guarantee, if the epsilon against a party is larger."""

DRAWN_AGAIN = "anyone who knows --seed can draw the noise again (dp.noise seeded; `--dp.noise secret` prevents it)"


def statement(
    ledger: Ledger,
    clients: int,
    delta: float,
    rejected: int,
    *,
    local: bool,
    secret: bool,
    user_code: Mapping[str, str] | None = None,
    views: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the privacy statement of a run. An epsilon is stated only if all data that it describes have a guarantee.

    clients: number of clients. delta: delta of the (epsilon, delta) guarantee. rejected: number of rejected replies in
    the run. local: whether local training is DP-SGD. secret: whether the noise is secret. user_code: kind of component
    -> name of a user-defined component. views: party -> mu, the sensitivity over the noise's standard deviation, of
    the data that the party sees (``stage.Assigned``).

    Returns:
        The lines that the module's docstring lists, except ``mechanisms``. Without ``secret``, all epsilons are None or
        "none", and the epsilons that would hold with secret noise have names that end in ``_if_secret``.
    """
    of_views = {party: gaussian.epsilon(mu, delta) for party, mu in (views or {}).items()}
    dp = local or bool(ledger.commons.covered or ledger.updates.covered)
    leaks = [_leak(name, times, ledger) for name, times in ledger.uncovered.items()]
    if rejected and dp:
        leaks.append(f"the fact that {rejected} replies were rejected, as it depends on the data")
    shared = "uncovered" if ledger.commons.uncovered else "covered" if ledger.commons.covered else "nothing"
    pool = ledger.commons.largest_epsilon(delta) if shared == "covered" else None
    largest = max((e for i in range(clients) if (e := ledger.epsilon_of_all(i, delta)) is not None), default=0.0)
    overall = largest if dp and not leaks else None
    of_each = None if pool is None else [ledger.commons.epsilon(client, delta) for client in range(clients)]
    spent = [ledger.epsilon_of_rounds(client, delta) for client in range(clients)]
    training = {"largest": ledger.largest_epsilon_of_rounds(delta), "of_each_client": spent} if local else None
    closer = _of_closer_views(of_views, ledger.commons.largest_epsilon(delta))
    commons = _of_commons(ledger.commons, delta, secret)
    earned: dict[str, Any] = {
        "pool_epsilon_max": pool,
        "pool_epsilon_of_each_client": of_each,
        **({"pool_epsilon_of_each_view": of_views} if of_views and pool is not None else {}),
        "overall": "none" if overall is None else overall,
        "epsilon_of_messages": overall,
        "epsilon_local_training": training,
    }
    if dp and not secret:
        nothing = dict.fromkeys(earned) | {"overall": "none"}
        earned = nothing | {f"{name}{IF_SECRET}": value for name, value in earned.items() if name != "overall"}
    return {
        "noise": None if not dp else SECRET if secret else SEEDED,
        "delta": delta if dp else None,
        "commons": shared,
        **earned,
        "uncovered": [*NOTES, *closer, *leaks],
        "trusted": [f"{kind} {name}: {TRUSTED[kind]}" for kind, name in (user_code or {}).items() if kind in TRUSTED],
        "in_words": [commons, _overall(leaks, overall, delta, secret, ADDED * bool(closer))],
    }


def in_short(statement: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the statement's entries that W&B shows in a run's summary: the epsilons, and texts on what they cover."""
    names = ("pool_epsilon_max", f"pool_epsilon_max{IF_SECRET}", f"epsilon_of_messages{IF_SECRET}")
    epsilons = {name: statement[name] for name in names if statement.get(name) is not None}
    notes = {name: "; ".join(statement[name]) for name in ("uncovered", "trusted")}
    for name in ("epsilon_local_training", f"epsilon_local_training{IF_SECRET}"):
        if (spent := statement.get(name)) and spent["largest"] is None:
            epsilons[name] = "none"  # without this entry, W&B shows the last logged epsilon
    return {**epsilons, "overall": statement["overall"], "in_words": " ".join(statement["in_words"]), **notes}


def epsilon_in_words(value: float, delta: float, secret: bool) -> str:
    """Return the value of an epsilon as text, as a guarantee only if the noise is secret."""
    number = f"{value:.4g} at delta = {delta:g}"
    return f"epsilon = {number}" if secret else f"epsilon would be {number} if the noise were secret"


def _of_commons(commons: Released, delta: float, secret: bool) -> str:
    if not commons.covered and not commons.uncovered:
        return "Commons: only updates of the model were shared."
    guarantee = f"{epsilon_in_words(commons.largest_epsilon(delta), delta, secret)}, the largest of all clients'"
    names = _list(commons.names)
    if not commons.uncovered:
        return f"Commons ({names}): {guarantee}{'' if secret else f'; as run: none, because {DRAWN_AGAIN}'}."
    covered = f", for {names} alone {guarantee}, if the other shared data were public;" if commons.covered else ","
    return f"Commons: no guarantee{covered} as there is no protection for {_list(commons.uncovered)}."


def _overall(leaks: Sequence[str], overall: float | None, delta: float, secret: bool, to: str) -> str:
    if overall is None:
        more = f" and {len(leaks) - 1} more" if len(leaks) > 1 else ""
        return f"Overall guarantee: none, because of {leaks[0]}{more}." if leaks else "Overall guarantee: none."
    if not secret:
        return (
            f"Overall guarantee: none as run, because {DRAWN_AGAIN}; "
            f"{epsilon_in_words(overall, delta, secret)}, of all messages{to}."
        )
    return f"Overall guarantee: {epsilon_in_words(overall, delta, secret)}, of all messages in this run{to}."


def _of_closer_views(of_views: Mapping[str, float], stated: float) -> list[str]:
    closer = [f"{party} (epsilon {value:.4g})" for party, value in of_views.items() if value > stated * (1 + 1e-6)]
    return [f"larger epsilons of the data shared before round 1, against {', '.join(closer)}"] * bool(closer)


def _leak(name: str, times: int, ledger: Ledger) -> str:
    if name in ledger.outlived:
        return f"{name}, which outlived a client: later steps and clients read it without noise"
    if name in ledger.leaks:
        return f"{name}: {ledger.leaks[name]}"
    reason = f" ({WHY[name]})" if name in WHY else ""
    often = f"{times} time{'s'[: times > 1]}"
    return f"{WORDS.get(name, name)}{reason}, released {often} without differential privacy"


def _list(names: Sequence[str] | Mapping[str, int]) -> str:
    return ", ".join(WORDS.get(name, name) for name in names)
