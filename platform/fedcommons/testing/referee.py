"""A referee for anybody's method: the contract, and what its author claims of it, each with a verdict in a sentence.

What is claimed is tried where the answer is known:

special case   with these constants it is that other method: the same model after two rounds on digits, up to rounding,
               whether clients weigh alike or by their examples
alike          clients that hold the same data: the server's model goes to the solution of their least squares
exact          clients that differ: it goes to the minimiser of the mean of their losses, with five full-batch steps a
               round, where FedAvg leaves 2 % of the way
models         numbers that a client receives and sends in a round, in sizes of the model
private        the sensitivity test, and an audit by canaries, of its releases under DP-SGD
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedcommons.audits.canaries import audit_method
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.worker import fresh_torch
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.federation.rounds import Standing
from fedcommons.tensors import copy, norm, sub
from fedcommons.testing.comparing import require
from fedcommons.testing.contract import CHECKS, LOCAL
from fedcommons.testing.federations import LeastSquares, digits, least_squares
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared
from fedcommons.testing.spy import Spy, received, sent

ROUNDING = 1e-4
"""Relative distance of two models that are the same up to rounding."""

NEAR = 0.01
"""Share of the way to the solution that may be left after ``ROUNDS``."""

ROUNDS, LR, STEPS = 400, 0.05, LocalSGD(epochs=5, batch_size=100)
"""On least squares: rounds, and full-batch steps of a client in each."""

AUDITED = LocalSGD(1, 1000, dp=DPSGD(noise_multiplier=1.0, clip=1.5))
"""One step of all examples, so that canaries show much."""


@dataclass(frozen=True)
class Claims:
    """What an author says of a method.

    special_case: the method with other constants, and the method that it then is. exact: see above. down, up: sizes of
    the model that a client receives and sends. private: its releases hold.
    """

    special_case: tuple[Algorithm, Algorithm] | None = None
    exact: bool = False
    down: float | None = None
    up: float | None = None
    private: bool = False


NOTHING = Claims()


@dataclass(frozen=True)
class Verdict:
    """passed: None where nothing was claimed, or the check does not apply."""

    check: str
    passed: bool | None
    said: str

    @property
    def word(self) -> str:
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


@fresh_torch()
def referee(algorithm: Algorithm, claims: Claims = NOTHING) -> Iterator[Verdict]:
    """The verdicts, one after another: on the contract's promises, then on the claims."""
    for name, check in CHECKS.items():
        yield _tried(name.replace("_", " "), partial(check, algorithm, LOCAL), "holds")
    yield _tried("clients that are alike", partial(_goes_to_the_solution, algorithm, _alike()), "the solution is found")
    if claims.special_case:
        same = partial(_are_the_same, *claims.special_case)
        yield _tried("special case", same, "the same, up to rounding")
    if claims.exact:
        said = "the minimiser of all clients' losses is found"
        yield _tried("exact", partial(_goes_to_the_solution, algorithm, least_squares()), said)
    yield _models(algorithm, claims)
    if claims.private:
        yield _tried("sensitivity", partial(what_leaves_a_client_moves_as_declared, algorithm, LOCAL), "as declared")
        yield _tried("audit", partial(_audit, algorithm), "no bound is above the ledger's epsilon")


def _tried(check: str, play: Callable[[], object], holds: str) -> Verdict:
    try:
        said = play()
    except AssertionError as error:
        return Verdict(check, False, str(error))
    except UserError as error:
        return Verdict(check, None, f"does not apply: {sentence(error)}")
    except Exception as error:
        return Verdict(check, False, f"it failed: {sentence(error)}")
    return Verdict(check, True, said if isinstance(said, str) else holds)


def _alike() -> LeastSquares:
    one = least_squares(sizes=(8,))
    return LeastSquares([*one.a] * 4, [*one.b] * 4)


def _goes_to_the_solution(algorithm: Algorithm, problem: LeastSquares) -> str:
    """How far the model is from the solution in the end, against how far it was at ones: zeros would hide faults."""
    federation = problem.federation(LR).training(STEPS)
    plan, model = federation.plan(ROUNDS), federation.model
    model.buffer.fill_(1)
    try:
        start = Standing(0, algorithm.start(copy(model), plan.facts, plan.seed))
        end = federation.play(algorithm, plan, start=start)[-1][0].model.buffer.double().numpy()
    except (ClientError, TypeError) as error:
        raise UserError(f"it needs another module than least squares have ({sentence(error)})") from error
    left = np.linalg.norm(end - problem.optimum) / np.linalg.norm(1 - problem.optimum)
    said = f"{100 * left:.2g} % of the way to the solution are left after {ROUNDS} rounds"
    require(left <= NEAR, f"{said}, more than {100 * NEAR:g}")
    return said


def _are_the_same(one: Algorithm, other: Algorithm) -> None:
    for weighting in ("uniform", "samples"):
        federation = digits(method=one).training(LOCAL, weighting)
        plan = federation.plan(2)
        a, b = (federation.play(method, plan)[-1][0].model for method in (one, other))
        off = norm(sub(a, b)) / norm(sub(b, federation.model))
        weigh = "alike" if weighting == "uniform" else "by their examples"
        require(
            off <= ROUNDING, f"where clients weigh {weigh} its model is another one: {100 * off:.2g} % of two rounds"
        )


def _models(algorithm: Algorithm, claims: Claims) -> Verdict:
    """What a client of the last of two rounds receives and sends, against what is claimed."""
    federation, spy = digits(method=algorithm).training(LOCAL), Spy(algorithm)
    try:
        federation.play(spy, federation.plan(2))
    except Exception as error:
        return Verdict("models", False, f"it failed: {sentence(error)}")
    size = federation.model.buffer.nbytes
    if not spy.calls:
        return Verdict("models", None, "no client is played")
    call = spy.calls[-1]
    seen = {"receives": (received(call) / size, claims.down), "sends": (sent(call) / size, claims.up)}
    said = "a client " + " and ".join(f"{what} {value:.3g}" for what, (value, _) in seen.items()) + " models a round"
    claimed = [(value, wanted) for value, wanted in seen.values() if wanted is not None]
    if not claimed:
        return Verdict("models", None, said)
    passed = all(abs(value - wanted) <= 0.01 * max(wanted, 1) for value, wanted in claimed)
    return Verdict("models", passed, f"{said}; claimed: {', '.join(f'{wanted:g}' for _, wanted in claimed)}")


def _audit(algorithm: Algorithm) -> str:
    epsilon, bounds = audit_method(algorithm, AUDITED, seed=0)
    for name, bound in bounds.items():
        said = bound.verdict(epsilon)
        require(said != "above the reported one", f"{name} shows at least {bound.bound:.2f}, the ledger says {epsilon}")
    require(epsilon is not None, "nothing that it sends is covered")
    return (
        f"the ledger says epsilon {epsilon:.2f}, canaries show {max((b.bound for b in bounds.values()), default=0):.2f}"
    )
