"""An audit of differentially private local training with canaries: does the training have the stated guarantee?

Example j of m is a canary. Its gradient is a multiple of the j-th unit vector, or zero if a coin excludes the canary.
The training uses the same local loop as a client. The training states its privacy mechanism in a ``Release``, an entry
of the privacy ledger. The audit compares these quantities with the statement:

epsilon       a lower bound: the audit guesses from the noisy gradients which canaries are included (``lower_bound``);
              also an estimate from the canaries' scores (``white_box_estimate``), which detects smaller violations
noise         the standard deviation of the noisy sums over the excluded canaries
sensitivity   the change of a sum by one example: two trainings with the same noise key, with and without the example
batches       the numbers of examples in batches, compared with n independent draws with probability q
steps         the number of steps

m: number of canaries;  n: number of examples;  q: sampling rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.audits.lower_bound import LowerBound, apart, by_scores, coins, verdict
from fedcommons.audits.white_box_estimate import Estimate, estimate
from fedcommons.core.algorithm import Algorithm, Facts
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import Batch, LocalSGD
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import data as numbers
from fedcommons.privacy import accountants
from fedcommons.privacy.noise import Draws, Source, of_audit
from fedcommons.privacy.release import Release
from fedcommons.seeding import numpy_generator, seed_for

STEEP = 10.0
"""Norm of a canary's gradient divided by the clipping norm C; above 1, so that the audit detects missing clipping."""

LOUD = 1000.0
"""Factor on the gradient of the example whose sensitivity is measured; its gradient dominates the sum of the batch."""

CONFIDENCE = 0.95
"""Confidence of an audit: the probability that all its lower bounds on epsilon are correct."""

ALARM = 1e-4
"""Probability of a false alarm: the batches are correct Poisson samples, but the check of their lengths fails."""


class Canaries(LightningModule):
    """A module with m weights in which example (j, factor) has the gradient steepness * factor * (j-th unit vector)."""

    def __init__(self, m: int, steepness: float) -> None:
        super().__init__()
        self.w, self.steepness = nn.Parameter(torch.zeros(m)), steepness

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        j, factor = batch
        return (self.steepness * factor * self.w[j]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _OfSeed:
    """A substitute for ``Noise`` with a fixed seed, so that trainings on different data have equal noise."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed, self.calls = source, seed, 0

    def call(self, purpose: str, *data: Tensor) -> Draws:
        """Return the random streams of the next call, as ``Noise.call`` does."""
        self.calls += 1
        return Draws(self.source, (purpose, self.seed, self.calls))


@dataclass(frozen=True, eq=False)
class Watched:
    """A recorded training of T steps on m canaries.

    sums: (T, m), the noisy sums divided by the clipping norm. sizes: (T,), numbers of examples in the batches.
    spent: the privacy ledger's entry for the training.
    """

    sums: np.ndarray
    sizes: np.ndarray
    spent: Release


def watch(loop: LocalSGD, there: np.ndarray, seed: int) -> Watched:
    """Train on m canaries and record the steps. there: (m,) factor of each canary's gradient; 0 excludes the canary."""
    assert loop.dp is not None
    work, data, clip = _work(loop, len(there)), _data(there), loop.dp.clip
    work.noise = _OfSeed(work.source, seed)  # pyright: ignore[reportAttributeAccessIssue]
    sums: list[np.ndarray] = []
    seen: list[int] = []

    def loss(batch: Batch, step: int) -> Tensor:
        seen.extend([step] * len(batch[0]))
        return work.module.training_step(batch, step)  # pyright: ignore[reportReturnType]

    def add_to_grad(params: Mapping[str, nn.Parameter]) -> None:
        grad = params["w"].grad
        assert grad is not None
        sums.append(grad.double().numpy() * (min(loop.batch_size, len(data)) / clip))

    spent = work.local(work.initial, data, seed, loss=loss, add_to_grad=add_to_grad).spent
    return Watched(np.stack(sums), np.bincount(seen, minlength=len(sums)), spent)


def _work(loop: LocalSGD, m: int) -> Work:
    assert loop.dp is not None
    return Work(Canaries(m, STEEP * loop.dp.clip), torch.device("cpu"), loop, source=of_audit(0))


def _data(factors: np.ndarray) -> ClientData:
    return ClientData(torch.arange(len(factors)), torch.from_numpy(factors).float())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of an audit.

    reported: the epsilon of the training's release; None if the release has no guarantee (is uncovered).
    bounds: lower bounds on epsilon, by kind of score. estimate: estimate of epsilon; None if there is no guarantee.
    sensitivity: measured change of a sum by one example, divided by the clipping norm C. stated: the sensitivity that
    the release states, divided by C. steps: number of steps that were run, and number that the release states.
    batches: p-value of the numbers of examples in batches, if batches are sampled at the stated rate q.
    """

    reported: float | None
    bounds: Mapping[str, LowerBound]
    estimate: Estimate | None
    sensitivity: float
    stated: float
    steps: tuple[int, int]
    batches: float

    @property
    def bound(self) -> float:
        """Return the largest of the lower bounds on epsilon from the different scores, with 95 % confidence."""
        return max(audited.bound for audited in self.bounds.values())

    @property
    def verdict(self) -> str:
        """Compare the bound with the reported epsilon: "above ...", "not above ..." or "cannot tell"."""
        return verdict(self.bound, max(audited.ceiling for audited in self.bounds.values()), self.reported)

    @property
    def faults(self) -> list[str]:
        """Return a message for each stated quantity that the audit refutes; empty if the release has no guarantee."""
        if self.reported is None or self.estimate is None:
            return []
        steps, counted = self.steps
        return [
            *([f"epsilon is above {', not '.join(apart(self.bound, self.reported))}"] * (self.bound > self.reported)),
            *self.estimate.faults,
            *([f"one example changes a sum by {self.sensitivity:.3g} C"] * (self.sensitivity > self.stated * 1.001)),
            *([f"there are {steps} steps, not {counted}"] * (steps != counted)),
            *(["batches are not independent draws with probability q"] * (self.batches < ALARM)),
        ]


def audit(loop: LocalSGD, seed: int, m: int = 1000, delta: float = 1e-5) -> Verdict:
    """Train with m canaries and guess that the m/4 canaries with the highest scores are included.

    There are three scores. Each score's lower bound has one third of the error probability of 5 %:

    sum          the sum of the canary's coordinate of the noisy sums over all steps
    difference   the score ``sum`` minus that of a second client without canaries, whose noise must be different
    spread       the standard deviation of the canary's coordinate over the steps, which detects noise that is reused
    """
    assert loop.dp is not None
    inside = coins(m, numpy_generator(seed, "coins"))
    client, control = (
        watch(loop, factors, seed_for(seed, "client", i)) for i, factors in enumerate((1.0 * inside, 0.0 * inside))
    )
    scores = {
        "sum": client.sums.sum(0),
        "difference": client.sums.sum(0) - control.sums.sum(0),
        "spread": client.sums.std(0),
    }
    level = 1 - (1 - CONFIDENCE) / len(scores)
    spent = client.spent
    return Verdict(
        reported=accountants.epsilon(spent.q, spent.sigma, spent.steps, delta) if spent.covered else None,
        bounds={kind: by_scores(score, inside, m // 4, delta, level) for kind, score in scores.items()},
        estimate=estimate(client.sums, inside, spent, delta) if spent.covered else None,
        sensitivity=_influence(loop, seed),
        stated=spent.sensitivity / loop.dp.clip,
        steps=(len(client.sums), spent.steps),
        batches=_sizes(np.concatenate([client.sizes, control.sizes]), m, spent.q),
    )


def _influence(loop: LocalSGD, seed: int, m: int = 20) -> float:
    """Return the largest change of a noisy sum by one example with a very large gradient, divided by the clipping norm.

    Two trainings with equal noise are compared step by step: one has the example, the other has a zero gradient
    instead. Each training has ten epochs, so that some batch contains the example.
    """
    loop = replace(loop, epochs=10)
    others = np.append(0.0, np.ones(m - 1))
    loud = others + np.append(LOUD, np.zeros(m - 1))
    with_it, without = (watch(loop, factors, seed).sums for factors in (loud, others))
    return float(np.linalg.norm(with_it - without, axis=1).max())


def _sizes(sizes: np.ndarray, n: int, q: float) -> float:
    """Return the two-sided p-value of the numbers of examples per batch (``sizes``), if each is Binomial(n, q)."""
    from scipy.stats import chi2  # imported here, because it takes half a second

    if q >= 1:
        return float((sizes == n).all())
    if q <= 0:
        return float(not sizes.any())
    square = float(np.sum((sizes - n * q) ** 2) / (n * q * (1 - q)))
    return 2 * min(float(chi2.cdf(square, len(sizes))), float(chi2.sf(square, len(sizes))))


def audit_method(algorithm: Algorithm, loop: LocalSGD, seed: int, m: int = 1000, delta: float = 1e-5) -> tuple[
    float | None, dict[str, LowerBound]
]:  # fmt: skip
    """Return the stated epsilon of a client's first reply, and a lower bound on epsilon from each protected tensor.

    Only tensors of m numbers are used, because each canary must have one number.

    Args:
        algorithm: method whose functions ``start``, ``down`` and ``client`` run once, with one client.
        loop: settings of the client's local training, with DP-SGD (``loop.dp`` is not None).
        seed: seed for the coins that include or exclude canaries, and for the method's random numbers.
        m: number of canaries, each with one weight of the model; m/4 of them are guessed to be included.
        delta: delta of the (epsilon, delta) guarantee, in (0, 1).

    Returns:
        The stated epsilon, and the lower bounds by score. The epsilon is None if no tensor of the reply has a privacy
        guarantee. Each protected tensor has two scores, because a canary may raise its number (key "+NAME") or lower
        its number ("-NAME"). With a confidence of 95 % all bounds are correct. ``bound.verdict(epsilon)`` is "cannot
        tell" if the bound from only correct guesses is at most epsilon.
    """
    inside, work = coins(m, numpy_generator(seed, "coins")), _work(loop, m)
    state = algorithm.start(work.snapshot(), Facts(1, [m], 1), seed)
    message = algorithm.down(state, 1, 0)
    reply = algorithm.client(work, message, {}, _data(1.0 * inside), 1, seed_for(seed, "client"))
    covered = [release for release in reply.releases if release.covered]
    tensors = {name: numbers(x).double().flatten().numpy() for name, x in {**reply.sums, **reply.each}.items()}
    names = dict.fromkeys(name for release in covered for name in release.what if len(tensors.get(name, ())) == m)
    level = 1 - (1 - CONFIDENCE) / max(1, 2 * len(names))
    bounds = {
        f"{sign}{name}": by_scores(factor * tensors[name], inside, m // 4, delta, level)
        for name in names
        for sign, factor in (("+", 1), ("-", -1))
    }
    spent = tuple((release.q, release.sigma, release.steps) for release in covered)
    return (accountants.composed(spent, delta) if covered else None), bounds
