"""What a run's ledger says, for the summary: two lines, what covers the commons and the overall guarantee."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedcommons.accounting.privacy import Ledger, Released

WORDS = {
    "delta": "model updates (delta)", "control": "control variates (control)", "buffers": "BatchNorm's statistics",
    "weight": "weights that are no numbers of examples", "undeclared": "data of which nothing is stated",
}  # fmt: skip
"""Names of messages whose meaning cannot be seen from them."""

WHY = {
    "raw examples": "for each of them epsilon is infinite", "real images": "for each of them epsilon is infinite",
    "synthetic images": "their generators give no guarantee",
    "class counts": "labels of synthetic images follow them; generator.label_noise covers them",
}  # fmt: skip
"""Why some of what is released has no epsilon."""

NOTES = (
    "each client's number of examples, which counts as public: neighbouring data sets differ in a blanked example",
    "what the run folder holds: training loss, class counts, convergence parameters, audits, and the seed, from which "
    "the noise can be drawn again; keep the folder secret, and choose a seed that is hard to guess",
    "other runs on the same data: their epsilons add up, also those of runs that only served to choose a learning "
    "rate (--lrs, cells of a sweep); only this run is counted here",
)
"""What no ledger covers."""


def statement(ledger: Ledger, clients: int, delta: float, rejected: int, *, local: bool) -> dict[str, Any]:
    """What is protected and what is not. A number is there only where everything that it speaks of is covered.

    ``clients``: N. ``local``: local training is DP-SGD. ``rejected``: number of rejected replies in the run.

    commons: nothing, covered or uncovered. pool_epsilon_max: of a covered commons, the largest of all clients' (their
    data are disjoint), else None. overall: the epsilon of all messages, or ``none``. in_words: a sentence for each.
    """
    dp = local or bool(ledger.commons.covered or ledger.updates.covered)
    leaks = [_leak(name, times) for name, times in ledger.uncovered.items()]
    if rejected and dp:
        leaks.append(f"the fact that {rejected} replies were rejected, as it depends on the data")
    shared = "covered" if ledger.commons.covered else "nothing"
    shared = "uncovered" if ledger.commons.uncovered else shared
    pool = ledger.commons.largest(delta) if shared == "covered" else None
    largest = max((e for i in range(clients) if (e := ledger.of_all(i, delta)) is not None), default=0.0)
    overall = largest if dp and not leaks else None
    spent = [ledger.updates.of(client, delta) for client in range(clients)]
    return {
        "delta": delta if dp else None,
        "commons": shared,
        "pool_epsilon_max": pool,
        "pool_epsilon_of_each_client": None if pool is None else [ledger.commons.of(i, delta) for i in range(clients)],
        "overall": "none" if overall is None else overall,
        "epsilon_of_messages": overall,
        "epsilon_local_training": {"largest": max(spent), "of_each_client": spent} if local else None,
        "uncovered": [*NOTES, *leaks],
        "in_words": [_of_commons(ledger.commons, delta), _overall(leaks, overall, delta)],
    }


def in_short(said: Mapping[str, Any]) -> dict[str, float | str]:
    """The two lines as values, for W&B: ``overall``, and ``pool_epsilon_max`` where it can be stated."""
    pool = said["pool_epsilon_max"]
    return {**({} if pool is None else {"pool_epsilon_max": pool}), "overall": said["overall"]}


def _of_commons(commons: Released, delta: float) -> str:
    if not commons.covered and not commons.uncovered:
        return "Commons: nothing was shared but updates of the model."
    kept = f"epsilon = {commons.largest(delta):.4g} at delta = {delta:g}, the largest of all clients'"
    names = _list(commons.names)
    if not commons.uncovered:
        return f"Commons ({names}): {kept}."
    covered = f", for {names} alone {kept};" if commons.covered else ","
    return f"Commons: no guarantee{covered} as nothing covers {_list(commons.uncovered)}."


def _overall(leaks: Sequence[str], overall: float | None, delta: float) -> str:
    if overall is None:
        more = f" and {len(leaks) - 1} more" if len(leaks) > 1 else ""
        return f"Overall guarantee: none, because of {leaks[0]}{more}." if leaks else "Overall guarantee: none."
    return f"Overall guarantee: epsilon = {overall:.4g} at delta = {delta:g}, of all that left a client in this run."


def _leak(name: str, times: int) -> str:
    why = f" ({WHY[name]})" if name in WHY else ""
    often = f"{times} time{'s'[: times > 1]}"
    return f"{WORDS.get(name, name)}{why}, released {often} with nothing that an epsilon can be computed from"


def _list(names: Sequence[str] | Mapping[str, int]) -> str:
    return ", ".join(WORDS.get(name, name) for name in names)
