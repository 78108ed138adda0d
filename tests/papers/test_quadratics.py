"""FedAvg on quadratics: the batched grid equals a plain loop; constants and fits; the table of the sweep."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch

from papers.fedssyn import fitted_lines as lines
from papers.fedssyn import quadratics as q
from papers.fedssyn.quadratics import Quadratics

SMALL = (3, 7, 2)  # N, n, d
ROUNDS = 2 * (q.TOGETHER // len(q.STEP_SIZES)) + 3


@pytest.fixture(scope="module")
def small() -> list[Quadratics]:
    problem = q.draw(5, zeta_sq=10, sigma_sq=4, shape=SMALL)
    return [q.swap(problem, p, 5) for p in (0, 0.45, 1)]


def plain_loop(problem: Quadratics, eta: float, rounds: int, seed: int, models: str) -> np.ndarray:
    """FedAvg, one step after the other."""
    n_clients, n, d = problem.b.shape
    x, target, errors = np.ones(d), q.optimum(problem), []
    with np.errstate(all="ignore"):
        errors.append(np.square(x - target).sum())
        for r in range(1, rounds + 1):
            local = np.tile(x, (n_clients, 1))
            for i in range(n_clients):
                for j in q.order(seed, r, i, n):
                    a, b = problem.a[i, j], problem.b[i, j]
                    local[i] -= eta * a * (a * local[i] - b)
            x = local.mean(0)
            seen = x[None] if models == "server" else local
            errors.append(np.square(seen - target).sum(1).mean())
    return np.array(errors)


@pytest.mark.parametrize("models", ["server", "clients"])
def test_equals_a_plain_loop_on_every_step_size(small: list[Quadratics], models: str) -> None:
    steps = np.append(q.STEP_SIZES, 30.0)  # so few samples need a larger step to overflow
    result = q.run(small, steps, ROUNDS, 3, models)
    for problem, errors in zip(small, result, strict=True):
        slow = np.array([plain_loop(problem, eta, ROUNDS, 3, models) for eta in steps])
        finite = np.isfinite(slow)
        assert not finite.all()
        assert np.array_equal(np.isfinite(errors), finite)
        assert np.isinf(errors[~finite]).all()  # no nan
        assert np.allclose(errors[finite], slow[finite], rtol=1e-9, atol=1e-20)


def pairs(problem: Quadratics, client: int) -> Counter:
    return Counter((a, *b) for a, b in zip(problem.a[client], problem.b[client].tolist(), strict=True))


def test_a_swap_moves_whole_samples_and_equally_many_samples_of_each_client() -> None:
    problem = q.draw(0, 10, 5)
    before, unmoved = [pairs(problem, i) for i in range(10)], []
    for p in (0, 0.1, 0.29, 0.575, 1):
        after, m = q.swap(problem, p, 0), q.n_swapped(p, 100)
        assert sum((pairs(after, i) for i in range(10)), Counter()) == sum(before, Counter())
        in_place = (after.b == problem.b).all(2)
        assert (in_place.sum(1) >= 100 - m).all()
        assert m == 0 or (in_place.sum(1) < 100 - 0.7 * m).all()  # a tenth comes back
        unmoved.append(in_place)
    assert (~unmoved[1] & unmoved[2]).sum() < 5  # what p = 0.1 moves, 0.29 moves too, but for what comes back by chance
    assert (~unmoved[2][0] & ~unmoved[2][1]).sum() < 20  # of 29; every client's choice is its own
    assert [q.n_swapped(p, 100) for p in (0.025, 0.29, 0.575, 0.999, 1)] == [2, 29, 57, 99, 100]


def test_every_client_and_round_has_an_order_of_its_own() -> None:
    orders = [tuple(q.order(0, r, i, 50)) for r in (1, 2, 3) for i in range(4)]
    assert len(set(orders)) == 12
    assert all(sorted(result) == list(range(50)) for result in orders)
    assert orders[0] == tuple(q.order(0, 1, 0, 50)) != tuple(q.order(1, 1, 0, 50))


def test_the_samples_have_their_distribution() -> None:
    """||A_i b_ij||^2 has mean zeta^2 without noise and sigma^2 without heterogeneity, for every i (tolerance: 5 sd)."""
    samples = [q.draw(seed, 7, 0, (10, 2, 25)) for seed in range(400)]
    assert all(np.array_equal(s.b[:, 0], s.b[:, 1]) for s in samples)
    assert np.array_equal(samples[0].a, np.repeat(np.arange(1, 11)[:, None], 2, axis=1))
    lengths = np.mean([np.square(s.a[:, :1] * s.b[:, 0]).sum(1) for s in samples], axis=0)
    assert np.allclose(lengths, 7, rtol=5 * (2 / 25 / 400) ** 0.5)
    noise = q.draw(0, 0, 1000)
    assert np.allclose(np.square(noise.a[..., None] * noise.b).sum(2).mean(1), 1000, rtol=5 * (2 / 25 / 100) ** 0.5)


def test_constants_are_those_of_autograd(small: list[Quadratics]) -> None:
    x = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    for problem in small:
        a, b = (torch.from_numpy(array) for array in (problem.a, problem.b))

        def loss(i: int, at: torch.Tensor, a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
            return (a[i][:, None] * at - b[i]).square().sum() / 14

        of_clients = torch.stack([torch.autograd.grad(loss(i, x), x)[0] for i in range(3)])
        each = a[..., None] * (a[..., None] * x.detach() - b)
        assert np.allclose(q.gradients(problem, x.detach().numpy()), each.numpy())
        hessians = torch.stack(
            [torch.autograd.functional.hessian(lambda at, i=i: loss(i, at), x) for i in range(3)]  # pyright: ignore
        )
        result, zeta = q.constants(problem, x.detach().numpy()), of_clients - of_clients.mean(0)
        assert result.zeta_sq == pytest.approx(float(zeta.square().sum(1).mean()), rel=1e-12)
        noise = (each - of_clients[:, None]).square().sum(2).mean()
        assert result.sigma_sq == pytest.approx(float(noise), rel=1e-12)
        assert result.l_max == pytest.approx(max(float(torch.linalg.eigvalsh(h)[-1]) for h in hessians))
        whole = torch.linalg.eigvalsh(hessians.mean(0))
        assert (result.mu, result.l_avg) == pytest.approx((float(whole[0]), float(whole[-1])))
        assert np.allclose(q.gradients(problem, q.optimum(problem)).mean((0, 1)), 0, atol=1e-13)


def test_lemma_1_holds_with_equality_for_every_pool(small: list[Quadratics]) -> None:
    """And with as many samples in the pool as of each client, the mixture of p = 1/2 is their union."""
    near, far = small[1], q.draw(9, 3, 50, (4, 5, 2))
    for pool, x, p in product((near, far), (q.optimum(near), np.array([0.3, -2.0])), (0, 0.3, 1)):
        plain, shared, mixed = q.constants(near, x), q.constants(q.pooled(pool), x), q.constants(near, x, pool, p)
        delta_sq = q.delta_sq(near, pool, x)
        assert (delta_sq < 1e-20) == (pool is near)
        noise = (1 - p) * plain.sigma_sq + p * shared.sigma_sq + p * (1 - p) * (plain.zeta_sq + delta_sq)
        assert mixed.zeta_sq == pytest.approx((1 - p) ** 2 * plain.zeta_sq, rel=1e-12, abs=1e-25)
        assert mixed.sigma_sq == pytest.approx(noise, rel=1e-12)
        assert mixed.l_max == pytest.approx((1 - p) * plain.l_max + p * shared.l_avg)
        assert mixed.mu == mixed.l_avg == pytest.approx((1 - p) * plain.l_avg + p * shared.l_avg)
    pool, x = q.draw(9, 3, 50, (1, 7, 2)), np.array([0.3, -2.0])
    union = Quadratics(np.hstack([near.a, np.tile(pool.a, (3, 1))]), np.hstack([near.b, np.tile(pool.b, (3, 1, 1))]))
    result, wanted = (vars(q.constants(near, x, pool, 0.5)), vars(q.constants(union, x)))
    assert result == pytest.approx(wanted, rel=1e-12)


def test_fewest_rounds_and_the_line_by_hand() -> None:
    errors = np.array([[9, 5, 3, 2, 1], [9, 7, 0.5, 4, 4], [9, np.inf, np.inf, np.inf, np.inf]])
    assert lines.fewest_rounds(errors, 9) == (0, 0)
    assert lines.fewest_rounds(errors, 3) == (2, 1)  # two step sizes get there: the lower error
    assert lines.fewest_rounds(errors, 0.4) is None
    targets = np.array([1.0, 1 / 4, 1 / 9, 1e-9])
    steep = np.full((1, 20), 2.0)
    for rounds, eps in ((5, 1), (8, 1 / 4), (11, 1 / 9)):
        steep[0, rounds:] = eps
    to = lines.rounds_to(steep, targets)
    assert to[:3].tolist() == [5, 8, 11]
    assert np.isnan(to[3])
    assert lines.fit(to, targets) == pytest.approx((3, 2))  # 3/sqrt(eps) + 2; the last is not reached
    assert lines.fit(to[1:], targets[1:]) is None
    assert lines.r_squared(to, (3, 2), targets) == pytest.approx(1)
    mean = float(np.nanmean(to))
    assert lines.r_squared(to, (0, mean), targets) == pytest.approx(0)  # a constant explains nothing
    assert lines.r_squared(np.ones(3), (0, 1), targets[:3]) is None


X = lines.TARGETS**-0.5


def fitted(kind: str, shares: Sequence[float], rounds: Sequence[np.ndarray]) -> np.ndarray:
    """A and B of every share, (shares, 2)."""
    return np.array([line for line in lines.fit_all(kind, shares, rounds) if line])


def test_both_fits_recover_lines_and_the_constraints_of_the_authors_fit_bind() -> None:
    """A_p may not rise, and B_p falls by 1 at least for every p up to 0.5 and by 0.1 beyond."""
    shares, steep = (0.0, 0.25, 0.5, 0.75, 1.0), (0.15, 0.09, 0.05, 0.02, 0.01)
    true = [(0.15, -4.0), (0.1, -5.5), (0.1, -6.5), (0.04, -6.7), (0.0, -6.8)]
    for kind in lines.FITS:
        assert np.allclose(fitted(kind, shares, [a * X + b for a, b in true]), np.array(true), rtol=0, atol=1e-9)
    rounds = [a * X - 4 for a in steep]
    plain, result = (fitted(kind, shares, rounds) for kind in lines.FITS)
    assert np.allclose(result[:, 1], [-4, -5, -6, -6.1, -6.2])
    best = [X @ (r - b) / (X @ X) for r, b in zip(rounds, result[:, 1], strict=True)]  # least squares, given B
    assert np.allclose(result[:, 0], best, rtol=1e-9)
    assert (result[1:, 0] > plain[1:, 0] + 1e-3).all()  # what B loses A gains
