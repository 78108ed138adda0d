"""The one-run bound on what trains generators: sabotaged noise, clipping or batches are above the reported epsilon."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcommons.audits.lower_bound import by_scores, coins
from fedcommons.audits.membership import by_loss
from fedcommons.audits.one_run import bound
from fedcommons.config.sections import Data
from fedcommons.core import dp_vectorised
from fedcommons.core.accountants import composed
from fedcommons.core.dp_sgd import DPSGD, NoisySum
from fedcommons.core.noise import SEED_ALONE, Draws, Stream
from fedcommons.generators.private import PrivateDDPM
from fedcommons.runs import inputs
from fedcommons.seeds import numpy_generator

M, STEEP = 1000, 10.0


class Canaries(nn.Module):
    """Example (j, there) has the gradient  STEEP there e_j,  wherever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(M))

    def forward(self, j: Tensor, there: Tensor) -> Tensor:
        return STEEP * there * self.w.gather(0, j.view(1)).sum()


def audited(seed: int, batch_size: int = 100) -> tuple[float, float | None]:
    """The bound by the weights after an epoch of plain SGD, and the reported epsilon, None if nothing is covered."""
    module, inside = Canaries(), coins(M, numpy_generator(seed, "coins"))
    released = list(
        dp_vectorised.steps(
            module, torch.optim.SGD(module.parameters(), 1.0), lambda named, *row: functional_call(module, named, row),
            [torch.arange(M), torch.from_numpy(inside).float()], lambda *_: [], DPSGD(2.0, 1.5),
            batch_size=batch_size, epochs=1, physical_batch=250, noise=Draws(SEED_ALONE, (seed,)),
        )
    )  # fmt: skip
    spent = tuple((r.q, r.sigma, r.steps) for r in released)
    found = by_scores(-module.w.detach().double().numpy(), inside, M // 4, 1e-5).bound
    return found, composed(spent, 1e-5) if all(r.covered for r in released) else None


def no_noise(patch: pytest.MonkeyPatch) -> None:
    def blur(self: NoisySum, sigma: float, noise: Stream) -> None:
        self.sigma = sigma

    patch.setattr(NoisySum, "blur", blur)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    def unclipped(gradients: list[Tensor], clip: float) -> tuple[Tensor, float]:
        return torch.cat([g.flatten(1).sum(0) for g in gradients]), clip

    patch.setattr(dp_vectorised, "clipped_sum", unclipped)


def everybody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DPSGD, "sample", lambda self, n, b, draws: torch.arange(n))


@pytest.mark.parametrize("plant", [no_noise, no_clipping, everybody])
def test_the_bound_finds_faults_of_vectorised_steps(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found, reported = audited(seed=1)
    assert reported is not None  # the ledger takes it for private
    assert found > reported


@pytest.mark.parametrize("batch_size", [100, 1000])
def test_honest_vectorised_steps_stay_below_the_reported_epsilon(batch_size: int) -> None:
    for seed in (1, 2, 3):
        found, reported = audited(seed, batch_size)
        assert reported is not None
        assert found < reported


def test_a_sum_that_says_it_is_not_clipped_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on the norm comes from what clips, so where that is taken out, the ledger finds it."""

    def unclipped(gradients: list[Tensor], clip: float) -> tuple[Tensor, float]:
        return torch.cat([g.flatten(1).sum(0) for g in gradients]), float("inf")

    monkeypatch.setattr(dp_vectorised, "clipped_sum", unclipped)
    assert audited(seed=1)[1] is None


@pytest.mark.slow
def test_the_bound_finds_a_private_generator_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both report an epsilon of at most 0.2: without noise the bound is above it, with noise below."""
    digits = inputs.load(Data()).train
    some, canaries = digits[torch.arange(28)], digits[torch.arange(28, 228)]
    part = PrivateDDPM(
        epochs=300, batch_size=28, lr=2e-3, channels=(16, 32), schedule="squaredcos_cap_v2", target_epsilon=0.2,
    )  # fmt: skip
    honest = bound(replace(part, epochs=5), some, canaries, 10, 0, by_loss)
    assert honest.reported is not None
    assert honest.verdict == "not above the reported one"
    no_noise(monkeypatch)
    sabotaged = bound(part, some, canaries, 10, 0, by_loss)
    assert sabotaged.reported == pytest.approx(0.2, abs=0.01)
    assert sabotaged.verdict == "above the reported one"


def test_canaries_of_which_none_would_be_guessed_are_refused() -> None:
    digits = inputs.load(Data()).train
    with pytest.raises(ValueError, match="at least 4 canaries are needed, of which one is guessed, got 3"):
        bound(PrivateDDPM(noise_multiplier=1.0), digits[:9], digits[9:12], 10, 0, by_loss)
