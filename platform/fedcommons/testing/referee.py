"""Tests of user-defined methods: one verdict for each check of ``contract`` and for each claim of the method's author.

Each claim is tested on a problem with a known answer:

special case   with certain constants the method equals another method: on softmax regression of digits both models are
               equal after four rounds, up to rounding, with full or partial participation and both client weightings
alike          if all clients have the same data, a verdict reports how far the model is from the least-squares solution
exact          if clients have different data: with five full-batch steps per round the model converges to the minimiser
               of the clients' mean loss; for comparison, FedAvg stops at 2 % of the initial distance
rate           on quadratics the error f(x) - f* is never above Corollary I's bound (``rates.on_quadratics``), and an
               exact method converges linearly; if the corollary does not apply to a method, a verdict gives the reason
models         the most bytes that a client receives and sends in a round are the claimed multiples of the model's bytes
private        with DP-SGD all sent values are declared as protected, the sensitivity test confirms the declarations,
               and an audit with canaries finds no epsilon above the declared epsilon

For a client of another framework (``adapters``) only the checks of ``theirs`` run, with full batches, and clients are
weighted by their numbers of examples. For each property that cannot be tested, a verdict gives the reason.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedcommons.audits.canaries import audit_method
from fedcommons.core.algorithm import Algorithm, ChoosesClients
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import fresh_torch
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import ClientError, is_exit, sentence, user_code_context
from fedcommons.flat_tensors import norm, sub
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.testing import rate, theirs
from fedcommons.testing.adapters import Adapted
from fedcommons.testing.comparing import NotJudged, listed, require
from fedcommons.testing.contract import CHECKS, LOCAL
from fedcommons.testing.federations import LeastSquares, digits, least_squares
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared
from fedcommons.testing.spy import Spy, received, sent
from fedcommons.testing.suspects import explanation

ROUNDING = 1e-4
"""Maximum relative distance (Euclidean norm) of two models that count as equal up to rounding."""

NEAR = 0.01
"""Maximum distance of an exact method from the solution after 2 * ROUNDS rounds, as a share of the initial distance."""

ROUNDS = 400
"""Number of rounds on least squares, with the learning rate and the local steps of the module ``rate``."""

AUDITED = LocalSGD(1, 1000, dp=DPSGD(noise_multiplier=1.0, clip=1.5))
"""Local training in the audit: one step on all examples, so that the effect of single examples is large."""


@dataclass(frozen=True)
class Claims:
    """Claims of an author about a method; None or False: the claim is not made.

    special_case: the method with certain constants, and another method that it then equals. exact: the server model
    converges to the minimiser of the clients' mean loss. down, up: bytes that a client receives and sends per round,
    divided by the model's bytes. private: with DP-SGD all sent values are protected. rate: Corollary I's bound holds.
    """

    special_case: tuple[Algorithm, Algorithm] | None = None
    exact: bool = False
    down: float | None = None
    up: float | None = None
    private: bool = False
    rate: bool = False


NOTHING = Claims()


@accepts_old_names(said="text")
@dataclass(frozen=True)
class Verdict:
    """The verdict of a check. passed: None without a claim or a way to judge the claim. text: the verdict in words.

    cause: the error that made the check fail, equal for all checks that fail for the same reason; else empty.
    """

    check: str
    passed: bool | None
    text: str
    cause: str = ""

    @property
    def word(self) -> str:
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


def referee(algorithm: Algorithm, claims: Claims = NOTHING) -> Iterator[Verdict]:
    """Run all tests and yield their verdicts: first on the checks of ``contract``, then on the author's claims.

    Args:
        algorithm: the method to test; for a client of another framework the result of ``adapted``.
        claims: the author's claims, which are tested too; default: no claims.

    If several checks end with the same error, only the first check fails; the verdicts of the other checks refer to it.
    """
    first: dict[str, str] = {}  # error -> the first check that failed because of it
    for verdict in _verdicts(algorithm, claims):
        if verdict.passed is not True and (earlier := first.get(verdict.cause)):
            yield Verdict(verdict.check, None, f"not judged: same error as in the check {earlier!r}")
            continue
        if verdict.passed is False:
            first[verdict.cause] = verdict.check
        yield verdict


def _verdicts(algorithm: Algorithm, claims: Claims) -> Iterator[Verdict]:
    """Yield the verdicts of all checks, with each failure."""
    is_theirs = isinstance(algorithm, Adapted)
    for name, check in (theirs.CHECKS if is_theirs else CHECKS).items():
        yield _tried(name.replace("_", " "), partial(check, algorithm, LOCAL), "holds")
    if claims.special_case:
        loop, weightings = (theirs.FULL, ("samples",)) if is_theirs else (LOCAL, ("uniform", "samples"))
        same = partial(_are_the_same, *claims.special_case, loop, weightings)
        yield _tried("special case", same, "equal, up to rounding")
    if is_theirs and not algorithm.takes_loss:
        yield Verdict("least squares", None, f"not judged: {theirs.NO_LOSS}")
    else:
        yield _tried("clients that are alike", partial(_distance, algorithm, _alike()), "", claimed=False)
        if claims.exact:
            yield _tried("exact", partial(_nears_the_solution, algorithm), "")
        yield from _rates(algorithm, claims)
    has_claim = claims.down is not None or claims.up is not None
    yield _tried("models", partial(_models, algorithm, claims), "", claimed=has_claim)
    if is_theirs:
        yield from (Verdict(what, None, f"not judged: {reason}") for what, reason in theirs.NOT_JUDGED.items())
    elif claims.private:
        yield _tried("sensitivity", partial(what_leaves_a_client_moves_as_declared, algorithm, LOCAL), "as declared")
        yield _tried("covered", partial(_all_is_covered, algorithm), "a release covers all sent values")
        yield _tried("audit", partial(_audit, algorithm), "", must_apply=False)


def _tried(
    check: str, try_it: Callable[[], object], holds: str, *, claimed: bool = True, must_apply: bool = True
) -> Verdict:
    """Run a check and return its verdict.

    try_it: raises an AssertionError if the check fails, and may return a text on the observed values. holds: the
    verdict's text if the check passes and ``try_it`` returns no text. claimed: if False, the verdict only
    reports observed values. must_apply: if True, a check that raises another error counts as failed.
    """
    try:
        with fresh_torch(), user_code_context("method"):
            message = try_it()
    except BaseException as error:  # user code can raise any exception
        if is_exit(error):
            raise
        cause = error.__cause__ if isinstance(error, ClientError) and error.__cause__ else error
        if isinstance(cause, NotJudged):
            return Verdict(check, None, f"not judged: {plain(str(cause))}")
        if isinstance(cause, AssertionError) and str(cause):
            return Verdict(check, False if claimed else None, plain(str(cause)), sentence(cause))
        message = f"the check could not run: {plain(sentence(error))}"
        return Verdict(check, False if claimed and must_apply else None, message, sentence(cause))
    return Verdict(check, True if claimed else None, message if isinstance(message, str) else holds)


def plain(text: str) -> str:
    """Return a text in one line, without control characters, which could change a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _alike() -> LeastSquares:
    single = least_squares(sizes=(8,))
    return LeastSquares([*single.a] * 4, [*single.b] * 4)


def _relative_distances(algorithm: Algorithm, problem: LeastSquares, rounds: int) -> Iterator[float]:
    """Yield after each round the server model's distance from the solution, divided by the initial distance."""
    start, *after = rate.courses(algorithm, problem, rounds)
    first = np.linalg.norm(start - problem.optimum)
    yield from (float(np.linalg.norm(weights - problem.optimum) / first) for weights in after)


def _rates(algorithm: Algorithm, claims: Claims) -> Iterator[Verdict]:
    if reason := rate.not_judged(algorithm):
        yield Verdict("rate", None, f"not judged: {reason}, so Corollary I does not apply")
        return
    yield _tried("rate", partial(rate.within_the_bound, algorithm), "", claimed=claims.rate)
    if claims.exact:
        yield _tried("linear", partial(rate.is_linear, algorithm), "")


def _distance(algorithm: Algorithm, problem: LeastSquares) -> str:
    *_, last = _relative_distances(algorithm, problem, ROUNDS)
    return f"{100 * last:.2g} % of the way to the solution remain after {ROUNDS} rounds of least squares"


def _nears_the_solution(algorithm: Algorithm) -> str:
    """Check that the model ends near the solution and keeps approaching it; a biased method stops at some distance."""
    distances = [*_relative_distances(algorithm, least_squares(), 2 * ROUNDS)]
    half, last = distances[ROUNDS - 1], distances[-1]
    message = f"{100 * half:.2g} % of the way to all clients' solution remain after {ROUNDS} rounds, {100 * last:.2g} %"
    require(last <= NEAR and (last <= half / 2 or last <= ROUNDING**2), f"{message} after twice these rounds")
    return f"{message} after twice these rounds"


def _are_the_same(algorithm: Algorithm, other: Algorithm, loop: LocalSGD, weightings: Sequence[str]) -> None:
    """Check that two methods have equal models after four rounds, at each weighting and two participation rates.

    A method that chooses the clients itself is compared with participation of all clients only.
    """
    for weighting in weightings:
        for participation in (1.0,) if isinstance(algorithm, ChoosesClients) else (1.0, 0.6):
            federation = digits(linear=True, method=algorithm).training(loop, weighting)
            plan = federation.plan(4, participation)
            a, b = (federation.shared_by(method).run(method, plan)[-1][0].model for method in (algorithm, other))
            off = norm(sub(a, b)) / (norm(sub(b, federation.model)) or 1.0)
            weigh = "equal weights" if weighting == "uniform" else "weights by examples"
            who = "all take part" if participation == 1 else "some take part"
            message = f"if clients have {weigh} and {who}, the models differ by {100 * off:.3g} % of four rounds"
            cause = "" if off <= ROUNDING else explanation(a, other, federation, participation, ROUNDING)
            require(not cause, f"{message}; {cause}")


def _models(algorithm: Algorithm, claims: Claims) -> str:
    """Compare the maximum bytes that a client receives and sends in two rounds with the author's claims."""
    federation, spy = digits(method=algorithm).training(LOCAL), Spy(algorithm)
    federation.run(spy, federation.plan(2))
    size = federation.model.buffer.nbytes
    down, up = (max(map(count_bytes, spy.calls), default=0) / size for count_bytes in (received, sent))
    message = f"a client receives {down:.3g} and sends {up:.3g} models per round"
    for what, value, wanted in (("receives", down, claims.down), ("sends", up, claims.up)):
        if wanted is not None:
            require(abs(value - wanted) <= 0.01 * max(wanted, 1), f"{message}; claimed: it {what} {wanted:g}")
    return message


def _all_is_covered(algorithm: Algorithm) -> None:
    federation = digits(method=algorithm).training(replace(LOCAL, dp=DPSGD(noise_multiplier=1.0, clip=1.0)))
    ledger = federation.run(algorithm, federation.plan(2))[-1][0].ledger
    require(not ledger.uncovered, f"it sends {listed([*ledger.uncovered])} without protection")


def _audit(algorithm: Algorithm) -> str:
    epsilon, bounds = audit_method(algorithm, AUDITED, seed=0)
    for name, bound in bounds.items():
        is_above = bound.verdict(epsilon) == "above the reported one"
        require(not is_above, f"{name} shows at least {bound.bound:.2f}, the ledger says {epsilon}")
    require(epsilon is not None, "no release covers any sent value")
    most = max((bound.bound for bound in bounds.values()), default=0)
    return f"the ledger says epsilon {epsilon:.2f}, canaries show {most:.2f}"
