"""A referee for anybody's method: the contract, and what its author claims of it, each with a verdict in a sentence.

What is claimed is tried where the answer is known:

special case   with these constants it is that other method: the same softmax regression after four rounds on digits, up
               to rounding, of all clients or some, whether they weigh alike or by their examples
alike          clients that hold the same data: how near the server's model comes to the solution of their least squares
exact          clients that differ: it goes to the minimiser of the mean of their losses, with five full-batch steps a
               round, and goes on nearing it; FedAvg stays at 2 % of the way
rate           on quadratics its error is never above Corollary I's bound at its rate (``rates.on_quadratics``), and
               where it is exact it falls linearly; of what the corollary says nothing, this is told
models         bytes that a client receives and sends in a round at most, in sizes of the model
private        all that it sends under DP-SGD is covered, moves as declared, and an audit by canaries finds no more

A client of another framework (``adapters``) is asked what is its own doing (``theirs``), with full batches and weighed
by its examples, and a verdict names what cannot be judged of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedcommons.audits.canaries import audit_method
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import fresh_torch
from fedcommons.errors import ClientError, ends, sentence, somebodys
from fedcommons.flat_tensors import norm, sub
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.testing import rate, theirs
from fedcommons.testing.adapters import Adapted
from fedcommons.testing.comparing import listed, require
from fedcommons.testing.contract import CHECKS, LOCAL
from fedcommons.testing.federations import LeastSquares, digits, least_squares
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared
from fedcommons.testing.spy import Spy, received, sent

ROUNDING = 1e-4
"""Relative distance of two models that are the same up to rounding."""

NEAR = 0.01
"""Share of the way to the solution that may be left after twice ``ROUNDS``."""

ROUNDS = 400
"""On least squares, at the rate and with the steps of ``rate``."""

AUDITED = LocalSGD(1, 1000, dp=DPSGD(noise_multiplier=1.0, clip=1.5))
"""One step of all examples, so that canaries show much."""


@dataclass(frozen=True)
class Claims:
    """What an author says of a method.

    special_case: the method with other constants, and the method that it then is. exact, private: see above. down, up:
    bytes that a client receives and sends, in sizes of the model. rate: it converges as FedAvg does.
    """

    special_case: tuple[Algorithm, Algorithm] | None = None
    exact: bool = False
    down: float | None = None
    up: float | None = None
    private: bool = False
    rate: bool = False


NOTHING = Claims()


@dataclass(frozen=True)
class Verdict:
    """passed: None where nothing was claimed."""

    check: str
    passed: bool | None
    said: str

    @property
    def word(self) -> str:
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


def referee(algorithm: Algorithm, claims: Claims = NOTHING) -> Iterator[Verdict]:
    """The verdicts, one after another: on the contract's promises, then on the claims."""
    is_theirs = isinstance(algorithm, Adapted)
    for name, check in (theirs.CHECKS if is_theirs else CHECKS).items():
        yield _tried(name.replace("_", " "), partial(check, algorithm, LOCAL), "holds")
    if claims.special_case:
        loop, weightings = (theirs.FULL, ("samples",)) if is_theirs else (LOCAL, ("uniform", "samples"))
        same = partial(_are_the_same, *claims.special_case, loop, weightings)
        yield _tried("special case", same, "the same, up to rounding")
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
        yield from (Verdict(what, None, f"not judged: {why}") for what, why in theirs.NOT_JUDGED.items())
    elif claims.private:
        yield _tried("sensitivity", partial(what_leaves_a_client_moves_as_declared, algorithm, LOCAL), "as declared")
        yield _tried("covered", partial(_all_is_covered, algorithm), "all that it sends is covered by a release")
        yield _tried("audit", partial(_audit, algorithm), "", must_apply=False)


def _tried(
    check: str, try_it: Callable[[], object], holds: str, *, claimed: bool = True, must_apply: bool = True
) -> Verdict:
    """Its verdict. claimed: else what is seen is told, and no failure. must_apply: a check that cannot be played fails.

    ``try_it`` raises an AssertionError where the check fails, and returns what was seen where that is worth a word.
    """
    try:
        with fresh_torch(), somebodys("method"):
            said = try_it()
    except BaseException as error:  # whatever somebody's code raises
        if ends(error):
            raise
        cause = error.__cause__ if isinstance(error, ClientError) and error.__cause__ else error
        if isinstance(cause, AssertionError) and str(cause):
            return Verdict(check, False if claimed else None, plain(str(cause)))
        said = f"it could not be played: {plain(sentence(error))}"
        return Verdict(check, False if claimed and must_apply else None, said)
    return Verdict(check, True if claimed else None, said if isinstance(said, str) else holds)


def plain(text: str) -> str:
    """Somebody's words in one line, without characters that a terminal obeys."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _alike() -> LeastSquares:
    one = least_squares(sizes=(8,))
    return LeastSquares([*one.a] * 4, [*one.b] * 4)


def _left(algorithm: Algorithm, problem: LeastSquares, rounds: int) -> Iterator[float]:
    """After each round, the distance from the solution over that of the start."""
    start, *after = rate.courses(algorithm, problem, rounds)
    first = np.linalg.norm(start - problem.optimum)
    yield from (float(np.linalg.norm(found - problem.optimum) / first) for found in after)


def _rates(algorithm: Algorithm, claims: Claims) -> Iterator[Verdict]:
    if why := rate.not_judged(algorithm):
        yield Verdict("rate", None, f"not judged: {why}, and of that Corollary I says nothing")
        return
    yield _tried("rate", partial(rate.within_the_bound, algorithm), "", claimed=claims.rate)
    if claims.exact:
        yield _tried("linear", partial(rate.is_linear, algorithm), "")


def _distance(algorithm: Algorithm, problem: LeastSquares) -> str:
    *_, last = _left(algorithm, problem, ROUNDS)
    return f"{100 * last:.2g} % of the way to the solution are left after {ROUNDS} rounds of least squares"


def _nears_the_solution(algorithm: Algorithm) -> str:
    """A bias shows as a distance that does not shrink any more, however small it is."""
    left = [*_left(algorithm, least_squares(), 2 * ROUNDS)]
    half, last = left[ROUNDS - 1], left[-1]
    said = f"{100 * half:.2g} % of the way to all clients' solution are left after {ROUNDS} rounds, {100 * last:.2g} %"
    require(last <= NEAR and (last <= half / 2 or last <= ROUNDING**2), f"{said} after twice as many")
    return f"{said} after twice as many"


def _are_the_same(one: Algorithm, other: Algorithm, loop: LocalSGD, weightings: Sequence[str]) -> None:
    """Four rounds, of all clients and of some, who weigh alike or by their examples."""
    for weighting in weightings:
        for participation in (1.0, 0.6):
            federation = digits(linear=True, method=one).training(loop, weighting)
            plan = federation.plan(4, participation)
            a, b = (federation.play(method, plan)[-1][0].model for method in (one, other))
            off = norm(sub(a, b)) / norm(sub(b, federation.model))
            weigh = "alike" if weighting == "uniform" else "by their examples"
            who = "all take part" if participation == 1 else "some take part"
            said = f"where clients weigh {weigh} and {who} its model is another: {100 * off:.2g} % of four rounds"
            require(off <= ROUNDING, said)


def _models(algorithm: Algorithm, claims: Claims) -> str:
    """The most that a client of two rounds receives and sends, against what is claimed."""
    federation, spy = digits(method=algorithm).training(LOCAL), Spy(algorithm)
    federation.play(spy, federation.plan(2))
    size = federation.model.buffer.nbytes
    down, up = (max(map(of, spy.calls), default=0) / size for of in (received, sent))
    said = f"a client receives {down:.3g} and sends {up:.3g} models a round"
    for what, value, wanted in (("receives", down, claims.down), ("sends", up, claims.up)):
        if wanted is not None:
            require(abs(value - wanted) <= 0.01 * max(wanted, 1), f"{said}; claimed: it {what} {wanted:g}")
    return said


def _all_is_covered(algorithm: Algorithm) -> None:
    federation = digits(method=algorithm).training(replace(LOCAL, dp=DPSGD(noise_multiplier=1.0, clip=1.0)))
    ledger = federation.play(algorithm, federation.plan(2))[-1][0].ledger
    require(not ledger.uncovered, f"without protection it sends {listed([*ledger.uncovered])}")


def _audit(algorithm: Algorithm) -> str:
    epsilon, bounds = audit_method(algorithm, AUDITED, seed=0)
    for name, bound in bounds.items():
        said = bound.verdict(epsilon)
        require(said != "above the reported one", f"{name} shows at least {bound.bound:.2f}, the ledger says {epsilon}")
    require(epsilon is not None, "nothing that it sends is covered")
    return (
        f"the ledger says epsilon {epsilon:.2f}, canaries show {max((b.bound for b in bounds.values()), default=0):.2f}"
    )
