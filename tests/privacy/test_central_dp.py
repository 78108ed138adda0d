"""User-level central DP: sensitivity under hostile clients, noise, clipping norm, sampling, accountant, statement."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import Digits
from interrupted import require_resumed, small
from opacus.accountants import RDPAccountant

from fedcommons import Algorithm, ClientData, ClientError, LocalSGD, Message, Payload, Release, Reply, Work, generator
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import registry
from fedcommons.core.algorithm import BUFFERS
from fedcommons.core.compression import QSGD, Compression, TopK
from fedcommons.core.updates import Updates
from fedcommons.federation import checkpoint
from fedcommons.federation.central_dp import UNCLIPPED, CentralDP, Clip
from fedcommons.federation.client_sampling import accounted, most_rounds, participants, poisson_participants
from fedcommons.federation.rounds import Plan
from fedcommons.federation.stragglers import Independent
from fedcommons.flat_tensors import Flat, Layout, data
from fedcommons.privacy import gaussian
from fedcommons.privacy.accountants import composed
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.noise import SEED_ALONE, Noise, Source
from fedcommons.privacy.user_level import user_level
from fedcommons.runs import experiment
from fedcommons.runs.plans import with_central_target
from fedcommons.testing import Federation, LeastSquares
from fedcommons.testing.comparing import outcome
from fedcommons.testing.elsewhere import Apart

Change = Callable[[Reply], Reply]


def model_of(standing: Any) -> np.ndarray:
    return data(standing.state["model"]).double().numpy()


def private(federation: Federation, rounds: int, central: CentralDP, **plan: Any) -> Plan:
    return replace(federation.plan(rounds, **{"blocks": 2, **plan}), central=central)


@dataclass(frozen=True)
class Altered(FedAvg):
    """FedAvg whose client 0 changes its reply."""

    change: Change = lambda reply: reply

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        return self.change(reply) if len(data) == 9 else reply


def scaled(factor: float) -> Change:
    return lambda reply: replace(reply, sums={n: Flat(x.layout, x.buffer * factor) for n, x in reply.sums.items()})  # pyright: ignore


ATTACKS: Mapping[str, Change] = {
    "zero": scaled(0.0), "long": scaled(1e6), "longer": scaled(1e30), "other sign": scaled(-1e6), "nan": scaled(np.nan),
    "infinite": scaled(np.inf), "weight": lambda reply: replace(reply, weight=1e-20),
    "no weight": lambda reply: replace(reply, weight=0.0), "negative": lambda reply: replace(reply, weight=-1.0),
    "shape": lambda reply: replace(reply, sums={"delta": Flat(Layout(("a",), ((3,),)), torch.ones(3))}),
    "name": lambda reply: replace(reply, sums={"other": reply.sums["delta"]}),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("quantile", [None, 0.5])
def test_a_client_moves_the_model_by_at_most_clip_over_m(attack: str, quantile: float | None, digits: Digits) -> None:
    """Against the round without the client, the mean moves by clip/m, and the share of unclipped updates by 1/(2m)."""
    federation = digits((9, 16, 12), linear=True).training(LocalSGD(1, 5))
    # Errors of top-k must stay finite; QSGD makes a clipped update longer, so clipping must come last.
    compressed = Updates((Compression(TopK(0.5), has_feedback=True), Compression(QSGD(2), has_feedback=False)))
    plan = replace(private(federation, 1, CentralDP(0.01, 0.5, quantile)), updates=compressed)
    absent = replace(plan, straggler_rule=lambda joined, facts, round, seed: {0: 0.0})
    (first, _), (other, _) = (
        federation.run(Altered(ATTACKS[attack]), p)[-1] for p in (plan, absent)
    )  # equal seeds, so equal noise
    assert np.linalg.norm(model_of(first) - model_of(other)) <= 0.01 / 3 * (1 + 1e-5)
    assert len(first.rejected) == (attack in ("shape", "name"))
    assert all(data(x).isfinite().all() for memory in first.memory.values() for x in memory.values())
    if quantile is not None:
        assert abs(np.log(first.clip or 0) - np.log(other.clip or 0)) <= 0.2 * 0.5 / 3 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_no_rounding_makes_an_update_longer_than_the_clip(dtype: torch.dtype) -> None:
    draw = generator("test")
    for trial in range(60):
        parts = {n: torch.randn(1 + 97 * trial, generator=draw).mul(10.0 ** (trial % 5 - 2)).to(dtype) for n in "ab"}
        clip, weight = float(torch.rand((), generator=draw)), 1.0 + trial % 3
        reply, nbytes = Clip(clip, True)(Reply(parts, weight=weight), 8, {}, 0)
        sent = [data(reply.sums[name]).double() for name in parts]
        whole = torch.cat([x.to(dtype).div(weight) for x in parts.values()]).double()
        assert torch.cat(sent).norm() <= clip * (1 + 1e-14)
        assert float(data(reply.sums[UNCLIPPED])) == (0.5 if whole.norm() <= clip else -0.5)
        assert (reply.weight, nbytes) == (1.0, 12)
        if whole.norm() <= clip:
            assert torch.cat(sent).equal(whole)


@pytest.mark.parametrize(("expected", "quantile"), [(100.0, None), (100.0, 0.5), (4.0, 0.5)])
def test_noise_has_the_variance_that_the_accountant_assumes(expected: float, quantile: float | None) -> None:
    central, size, counts = CentralDP(3.0, 1.5, quantile), 4_000, []
    of_update, of_count = central.deviations(expected)
    if quantile is not None:  # theorem 1: both noises together are one mechanism with noise multiplier z
        assert of_update**-2 + (2 * of_count) ** -2 == pytest.approx(1.5**-2, rel=1e-12)
        assert of_count == max(expected / 20, 1.5)
    total: dict[str, Flat | torch.Tensor] = {"delta": torch.zeros(size, dtype=torch.float64)}
    total |= {UNCLIPPED: torch.zeros((), dtype=torch.float64)} if quantile else {}
    draws = []
    for number in range(200):
        noisy, replies, clip = central.noised(total, 3.0, expected, Noise(Source(1, b"s" * 32), number))
        draws.append(data(noisy["delta"]).numpy())
        counts.append(0.0 if quantile is None else expected * (np.log(3.0 / clip) / 0.2 + quantile - 0.5))
        assert noisy.keys() == {"delta"}
        assert sum(r.weight for r in replies.values()) == pytest.approx(expected, abs=1e-12)
    assert np.var(draws) == pytest.approx((of_update * 3.0) ** 2, rel=5 * sqrt(2 / (200 * size)))
    assert np.abs(np.corrcoef(draws[:20]) - np.eye(20)).max() < 6 / sqrt(size)
    assert np.var(counts) == pytest.approx(of_count**2, rel=5 * sqrt(2 / 200))


SETTINGS: list[dict[str, Any]] = [
    {}, {"participation": 0.5}, {"poisson": True, "participation": 0.3}, {"straggler_rule": Independent(0.7)},
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("central", [CentralDP(0.05, 0.7), CentralDP(0.5, 0.7, 0.6)], ids=["constant", "adaptive"])
@pytest.mark.parametrize("setting", SETTINGS, ids=["all", "half", "poisson", "stragglers"])
def test_rounds_are_those_of_the_papers_in_numpy(
    setting: dict[str, Any], central: CentralDP, least_squares: Callable[..., LeastSquares]
) -> None:
    """Also rounds without replies, in which the server adds noise to zero; other workers give the same bits."""
    problem, rate, n = least_squares(), 0.3, 4
    federation = problem.federation(rate).training(LocalSGD(1, 8))
    plan = replace(private(federation, 12, central), **setting)
    results = federation.run(FedAvg(), plan)
    m = n * plan.participation
    x, clip, empty = np.zeros(3), central.clip, 0
    for number, (now, metrics) in enumerate(results, 1):
        joined = participants(n, plan.participation, 0, number)
        if plan.poisson:
            joined = poisson_participants(n, plan.participation, 0, number, SEED_ALONE)
        late = plan.straggler_rule(joined, plan.facts, number, 0) if plan.straggler_rule else {}
        updates = [-rate * g for i, g in enumerate(problem.gradients(x)) if i in joined and i not in late]
        empty += not updates
        draws = Noise(SEED_ALONE, 0, number).call("central dp")
        total = sum((u * min(1, clip / np.linalg.norm(u)) for u in updates), np.zeros(3))
        of_update, of_count = central.deviations(m)
        x = x + (total + of_update * clip * draws.stream("delta").standard_normal(3)) / m
        if central.quantile is not None:
            assert metrics["privacy/clip"] == pytest.approx(clip, rel=1e-9)
            unclipped = sum(np.linalg.norm(u) <= clip for u in updates) - len(updates) / 2
            share = 0.5 + (unclipped + of_count * float(draws.stream(UNCLIPPED).standard_normal(()))) / m
            clip *= exp(-0.2 * (share - central.quantile))
            assert now.clip == pytest.approx(clip, rel=1e-9)
        assert model_of(now) == pytest.approx(x, abs=1e-9)
    assert bool(empty) == (setting.get("poisson", False) or "straggler_rule" in setting)
    assert outcome(federation.run(FedAvg(), plan, Apart(federation, FedAvg()))) == outcome(results)


METHODS = ["fedavg", "fedprox", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "moon", "ditto", "fedbn", "fedper",
           "fedvae"]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_average_leave_nothing_to_other_clients(name: str, digits: Digits) -> None:
    """Else the run states no epsilon."""
    algorithm: Algorithm = registry.make("algorithm", name, {})
    federation = digits((5, 6), method=algorithm).training(LocalSGD(1, 5))
    standing = federation.run(algorithm, private(federation, 2, CentralDP(1.0, 1.0, 0.5)))[-1][0]
    assert not standing.ledger.outlived
    assert standing.clip != 1.0


SEEN: dict[int, float] = {}


class Recalling(FedAvg):
    """FedAvg that keeps each client's mean pixel."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        SEEN.setdefault(len(data), float(data.x.float().mean()))
        return super().client(work, message, memory, data, round, seed)


class Writing(FedAvg):
    """FedAvg whose clients add their mean pixel to the message before they train."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = message.common["model"]
        assert isinstance(x, Flat)
        x.buffer.add_(data.x.float().mean())
        return super().client(work, message, memory, data, round, seed)


def test_clients_that_train_at_once_leave_nothing_unseen_to_other_clients(digits: Digits) -> None:
    """The method's ``client`` runs for all clients of a block before the first client trains."""
    federation = digits((5, 6), linear=True).training(LocalSGD(1, 5, batched=True))
    SEEN.clear()
    standing = federation.run(Recalling(), private(federation, 1, CentralDP(1.0, 1.0), blocks=1))[-1][0]
    assert any("SEEN" in name for name in standing.ledger.outlived)
    for batched in (True, False):
        trained = federation.training(LocalSGD(1, 5, batched=batched))
        ends = [trained.run(Writing(), private(federation, 1, CentralDP(1e4, 1e-12), blocks=b))[-1][0] for b in (1, 2)]
        assert model_of(ends[0]) == pytest.approx(model_of(ends[1]), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "name"),
    [(lambda reply: replace(reply, sums={**reply.sums, "steps": torch.tensor(3.0)}), "steps"),
     (lambda reply: replace(reply, sums={**reply.sums, "counts": torch.tensor([1, 2])}), "counts"),
     (lambda reply: replace(reply, sums={**reply.sums, BUFFERS: torch.ones(2)}), BUFFERS),
     (lambda reply: replace(reply, each={"means": torch.ones(2)}), "means")],
)  # fmt: skip
def test_a_reply_with_more_than_an_update_stops_the_run(change: Change, name: str, digits: Digits) -> None:
    federation = digits((9, 16), linear=True).training(LocalSGD(1, 5))
    with pytest.raises(ClientError, match=f"client 0, round 1.*also send {name}"):
        federation.run(Altered(change), private(federation, 1, CentralDP(1.0, 1.0)))


def test_poisson_sampling_is_independent_and_secret_if_the_noise_is() -> None:
    rounds, n, q = 2000, 30, 0.2
    for source in (SEED_ALONE, Source(0, b"k" * 32)):
        joined = np.zeros((rounds, n))
        for number in range(rounds):
            joined[number, poisson_participants(n, q, 0, number, source)] = 1
        assert np.abs(joined.mean(0) - q).max() < 5 * sqrt(q * (1 - q) / rounds)
        assert joined.sum(1).var() == pytest.approx(n * q * (1 - q), rel=5 * sqrt(2 / rounds))
        assert np.abs(np.corrcoef(joined.T) - np.eye(n)).max() < 6 / sqrt(rounds)
    others = [poisson_participants(1000, q, 0, 1, s) for s in (SEED_ALONE, Source(0, b"k" * 32), Source(0, b"l" * 32))]
    assert len(set(map(tuple, others))) == 3
    assert others[0] == poisson_participants(1000, q, 0, 1, Source(77))  # seeds pair runs with other fields
    counts = np.bincount([i for r in range(1, 41) for i in participants(20, 0.3, 5, r)], minlength=20)
    assert most_rounds(20, 0.3, 5, 40) == counts.max() > 12
    assert most_rounds(20, 1.0, 5, 40) == 40


FACTS: dict[str, Any] = {"noise": 2.0, "clip": 1.0, "last_clip": None, "rounds": 40, "delta": 1e-5}


def test_epsilon_is_that_of_the_gaussian_mechanism_and_of_opacus() -> None:
    exact = user_level(Ledger(), {}, **FACTS, q=1.0, steps=12, secret=True)
    assert gaussian.delta(exact["epsilon"], sqrt(12) / 2.0) == pytest.approx(1e-5, rel=1e-6)
    theirs = RDPAccountant()
    theirs.history = [(2.0, 0.1, 40)]
    sampled = user_level(Ledger(), {}, **FACTS, q=0.1, steps=40, secret=True)
    assert sampled["epsilon"] == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)
    seeded = user_level(Ledger(), {}, **FACTS, q=0.1, steps=40, secret=False)
    assert (seeded["epsilon"], seeded["epsilon_if_secret"]) == (None, sampled["epsilon"])


@pytest.mark.parametrize("target", [0.5, 3.0, 40.0])
@pytest.mark.parametrize(("share", "poisson"), [(1.0, False), (0.5, False), (0.1, True)])
def test_the_statement_meets_a_target_epsilon(share: float, poisson: bool, target: float, digits: Digits) -> None:
    plan = replace(private(digits((5,) * 10), 30, CentralDP(1.0, 1.0), participation=share), poisson=poisson)
    central = with_central_target(plan, target, 1e-5).central
    assert central
    q, steps = accounted(10, share, plan.seed, 30, poisson=poisson)
    course: dict[str, Any] = {**FACTS, "noise": central.noise, "q": q, "steps": steps}
    assert 0.99 * target <= user_level(Ledger(), {}, **course, secret=True)["epsilon"] <= target


@pytest.mark.parametrize("secret", [True, False])
def test_there_is_no_epsilon_if_data_reach_others_beside_the_models(secret: bool) -> None:
    shared = Ledger.before_rounds([Release(1, ("class counts",), commons=True)])
    outlived = Ledger().after([], ["Model.cache"])
    for ledger, leaks in ((shared, {}), (outlived, {}), (Ledger(), {"number of rounds": "it follows train/loss"})):
        stated = user_level(ledger, leaks, **FACTS, q=1.0, steps=12, secret=secret)
        assert stated["epsilon"] is stated.get("epsilon_if_secret") is None
        assert "none" in stated["in_words"]


FIELDS = {"algorithm": "fedavgm", "dp.central": True, "dp.central_quantile": 0.5, "federation.sampling": "poisson",
          "federation.participation": 0.5, "dp.noise": "secret", "dp.central_epsilon": 6.0}  # fmt: skip


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_run_and_states_its_epsilon(tmp_path: Path) -> None:
    """The noise and the participants are secret, and the clipping norm comes from the checkpoint of round 4."""
    config, whole, cut = small(tmp_path, FIELDS), tmp_path / "whole", tmp_path / "cut"
    stated = experiment.run(config, whole)["privacy"]
    shutil.copytree(whole, cut)
    for path in [cut / "summary.json", *cut.glob("checkpoints/round-000006*")]:
        path.unlink()
    saved = checkpoint.load_latest(cut / "checkpoints")
    assert saved
    assert saved.clip not in (None, 1.0)
    require_resumed(config, cut, whole, 5)
    noise = stated["user_level"]["noise_multiplier"]
    assert stated["user_level"]["epsilon"] == pytest.approx(composed(((0.5, noise, 6),), 1e-5))
    assert 0.99 * 6 <= stated["user_level"]["epsilon"] <= 6
    assert "central_noise" not in (whole / "config.yaml").read_text(encoding="utf-8")
    assert (stated["noise"], stated["overall"]) == ("secret", "none")
