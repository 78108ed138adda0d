"""An audit of private local training: does it keep what its release says?

Example j of m is a canary: its gradient is a multiple of the j-th unit vector, and zero where a coin left it out. The
training goes through the one local loop, as a client's does. Of what it does this is held against its ``Release``:

epsilon       against the ledger's: a lower bound by guessing the coins from all noisy gradients (``lower_bound``), and
              an estimate by how far canaries that are in lie from the others (``directions``), which sees more
noise         its deviation, by the canaries that are out
sensitivity   by how much one example changes a sum: noise is keyed, so the same key with and without it tells
batches       their sizes, against n independent draws with probability q
steps         their number

C: clipping norm;  T: steps;  m: canaries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.audits.lower_bound import LowerBound, apart, by_scores, coins, verdict
from fedcommons.audits.white_box_estimate import Estimate, estimate
from fedcommons.audits.white_box_runs import STEEP
from fedcommons.core.algorithm import Algorithm, Facts, Reply
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import Batch, LocalSGD
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import data as numbers
from fedcommons.privacy.accountants import composed
from fedcommons.privacy.noise import Draws, Source, of_audit
from fedcommons.privacy.release import Release
from fedcommons.seeding import numpy_generator, seed_for

LOUD = 1000.0
"""How much larger the gradient of the example is whose influence is measured: it decides where a whole batch points."""

CONFIDENCE = 0.95
"""Of all bounds together."""

ALARM = 1e-4
"""Probability with which the sizes of honest batches are called those of others."""


class Canaries(LightningModule):
    """Example (j, there) has the gradient  steepness there e_j,  wherever the weights are."""

    def __init__(self, m: int, steepness: float) -> None:
        super().__init__()
        self.w, self.steepness = nn.Parameter(torch.zeros(m)), steepness

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        j, there = batch
        return (self.steepness * there * self.w[j]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _OfSeed:
    """The noise of a seed, whatever the data are, so that two trainings differ by their data alone."""

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed, self.calls = source, seed, 0

    def call(self, purpose: str, *data: Tensor) -> Draws:
        """See ``Noise``."""
        self.calls += 1
        return Draws(self.source, (purpose, self.seed, self.calls))


@dataclass(frozen=True, eq=False)
class Watched:
    """A training: its sums (T, m) as they left the clipping and the noise, in units of C; batch sizes (T,); release."""

    sums: np.ndarray
    sizes: np.ndarray
    spent: Release


def watch(loop: LocalSGD, there: np.ndarray, seed: int) -> Watched:
    """Train on m canaries; there: (m,) factor of each one's gradient, 0 where it is left out."""
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


def _data(there: np.ndarray) -> ClientData:
    return ClientData(torch.arange(len(there)), torch.from_numpy(there).float())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found. reported: the release's epsilon, None where it is uncovered. bounds: by kind of score.

    estimate: by the canaries as directions, which the axes are; None where the release is uncovered.
    sensitivity: of one example, over C. steps: that were made. batches: how probable sizes as far off are at the q of
    the release.
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
        """The lower bound on epsilon, with 95 % confidence: the largest of all kinds."""
        return max(audited.bound for audited in self.bounds.values())

    @property
    def verdict(self) -> str:
        """What the bound says of the reported epsilon: above it, not above it, or that it cannot tell."""
        return verdict(self.bound, max(audited.ceiling for audited in self.bounds.values()), self.reported)

    @property
    def faults(self) -> list[str]:
        """What the release does not keep, in words; none where it is uncovered, as it promises nothing then."""
        if self.reported is None or self.estimate is None:
            return []
        steps, counted = self.steps
        return [
            *([f"epsilon is above {', not '.join(apart(self.bound, self.reported))}"] * (self.bound > self.reported)),
            *self.estimate.faults,
            *([f"one example changes a sum by {self.sensitivity:.3g} C"] * (self.sensitivity > self.stated * 1.001)),
            *([f"there are {steps} steps, not {counted}"] * (steps != counted)),
            *(["batches are no independent draws with probability q"] * (self.batches < ALARM)),
        ]


def audit(loop: LocalSGD, seed: int, m: int = 1000, delta: float = 1e-5) -> Verdict:
    """Train with canaries; m/4 of them are guessed to be in. Scores of a canary, of which each gets a third of 5 %:

    sum          of its coordinate over all steps
    difference   the same minus the coordinate of another client, whose noise may not be the same
    spread       of its coordinate over the steps, which is only noise where noise is new in each step
    """
    assert loop.dp is not None
    inside = coins(m, numpy_generator(seed, "coins"))
    one, other = (
        watch(loop, there, seed_for(seed, "client", i)) for i, there in enumerate((1.0 * inside, 0.0 * inside))
    )
    scores = {
        "sum": one.sums.sum(0),
        "difference": one.sums.sum(0) - other.sums.sum(0),
        "spread": one.sums.std(0),
    }
    level = 1 - (1 - CONFIDENCE) / len(scores)
    spent = one.spent
    return Verdict(
        reported=composed(((spent.q, spent.sigma, spent.steps),), delta) if spent.covered else None,
        bounds={kind: by_scores(score, inside, m // 4, delta, level) for kind, score in scores.items()},
        estimate=estimate(one.sums, inside, spent, delta) if spent.covered else None,
        sensitivity=_influence(loop, seed),
        stated=spent.sensitivity / loop.dp.clip,
        steps=(len(one.sums), spent.steps),
        batches=_sizes(np.concatenate([one.sizes, other.sizes]), m, spent.q),
    )


def _influence(loop: LocalSGD, seed: int, m: int = 20) -> float:
    """The largest change of a sum, in units of C, by an example whose gradient is far larger than those of all others.

    Over ten epochs, as it may not be in each batch; weights decide no gradient here, so each step stands for itself.
    """
    loop = replace(loop, epochs=10)
    others = np.append(0.0, np.ones(m - 1))
    loud = others + np.append(LOUD, np.zeros(m - 1))
    with_it, without = (watch(loop, there, seed).sums for there in (loud, others))
    return float(np.linalg.norm(with_it - without, axis=1).max())


def _sizes(sizes: np.ndarray, n: int, q: float) -> float:
    """The probability of sizes that vary as far from  n q (1 - q)  around n q, on either side, were they binomial."""
    from scipy.stats import chi2  # half a second to import

    if q >= 1:
        return float((sizes == n).all())
    if q <= 0:
        return float(not sizes.any())
    square = float(np.sum((sizes - n * q) ** 2) / (n * q * (1 - q)))
    return 2 * min(float(chi2.cdf(square, len(sizes))), float(chi2.sf(square, len(sizes))))


def audit_method(algorithm: Algorithm, loop: LocalSGD, seed: int, m: int = 1000, delta: float = 1e-5) -> tuple[
    float | None, dict[str, LowerBound]
]:  # fmt: skip
    """The epsilon of a client's first reply, None if nothing of it is covered, and bounds by each covered tensor.

    ``bound.verdict(epsilon)`` is "cannot tell" where a bound could not have been above that epsilon.
    Only tensors of m numbers are looked at, for canaries that raise them and for some that lower them.
    """
    inside, work = coins(m, numpy_generator(seed, "coins")), _work(loop, m)
    state = algorithm.start(work.snapshot(), Facts(1, [m], 1), seed)
    message = algorithm.down(state, 1, 0)
    reply = algorithm.client(work, message, {}, _data(1.0 * inside), 1, seed_for(seed, "client"))
    covered = [release for release in reply.releases if release.covered]
    vectors = {name: vector for release in covered for name in release.what if len(vector := _vector(reply, name)) == m}
    level = 1 - (1 - CONFIDENCE) / max(1, 2 * len(vectors))
    bounds = {
        f"{sign}{name}": by_scores(vector if sign == "+" else -vector, inside, m // 4, delta, level)
        for name, vector in vectors.items()
        for sign in "+-"
    }
    spent = tuple((release.q, release.sigma, release.steps) for release in covered)
    return (composed(spent, delta) if covered else None), bounds


def _vector(reply: Reply, name: str) -> np.ndarray:
    """A tensor of a reply as one row of numbers; none where the reply has no such tensor."""
    tensor = {**reply.sums, **reply.each}.get(name)
    return np.zeros(0) if tensor is None else numbers(tensor).double().flatten().numpy()
