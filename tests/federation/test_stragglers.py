"""Straggler rules, what of a late client's work is taken, and which bytes are lost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_forms import Digits

from fedcommons import Algorithm, ClientError, Facts, LocalSGD
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.config import presets
from fedcommons.federation.client_sampling import joining, participants
from fedcommons.federation.rounds import Plan, sample_clients
from fedcommons.federation.stragglers import Deadline, Fastest, Groups, Independent, PerClient, Rule, Slow, arrival
from fedcommons.flat_tensors import data
from fedcommons.runs import assemble, build, experiment, spec
from fedcommons.testing import Federation
from fedcommons.testing.comparing import bits

N = 20
RULES: Mapping[str, Rule] = {
    "independent": Independent(0.3), "per client": PerClient(tuple(i / N for i in range(N))), "groups": Groups(0.4, 3),
    "deadline": Deadline(1.3), "deadline, equally fast": Deadline(1.5, client_spread=0),
    "deadline, steady": Deadline(0.8, spread=0), "fastest": Fastest(5, client_spread=0), "slow": Slow(0.4),
}  # fmt: skip


def late_clients(rule: Rule, joined: Sequence[int], round: int, seed: int = 0) -> Mapping[int, float]:
    return rule(joined, Facts(N, [1] * N, 1), round, seed)


@pytest.mark.parametrize("name", RULES)
def test_replies_arrive_as_often_as_the_closed_form_says(name: str) -> None:
    """Within 4 standard errors for each client; a probability of 0 or 1 exactly."""
    rule, rounds, participation = RULES[name], 400, 0.6
    expected = arrival(rule, N, joining(N, participation), 3)
    assert expected is not None
    counts = np.zeros(N)
    for number in range(rounds):
        joined = participants(N, participation, 3, number)
        late = late_clients(rule, joined, number, 3)
        counts[[i for i in joined if i not in late]] += 1
    p = np.array(expected)
    assert np.all(abs(counts / rounds - p) <= 4 * np.sqrt(p * (1 - p) / rounds) + 1e-12)
    assert len({round(float(x), 6) for x in p}) == 1 or name in ("per client", "deadline", "deadline, steady")


@pytest.mark.parametrize("name", RULES)
def test_lateness_depends_on_round_and_seed_and_on_no_order_or_other_client(name: str) -> None:
    rule, joined = RULES[name], [2, 3, 5, 7, 11, 13, 17]
    for number in range(20):
        assert dict(late_clients(rule, joined, number)) == dict(late_clients(rule, joined[::-1], number))
        if name not in ("fastest", "slow"):
            alone = {i: share for j in range(N) for i, share in late_clients(rule, [j], number).items()}
            assert alone == late_clients(rule, range(N), number)
    assert len({tuple(late_clients(rule, joined, r)) for r in range(20)}) > 1 or name == "deadline, steady"
    assert len({tuple(late_clients(rule, joined, 1, seed)) for seed in range(20)}) > 1
    assert [sorted(late_clients(Independent(0.3), range(10), r)) for r in (1, 2)] == [[1, 3], [0, 3, 8]]  # for ever


def test_exactly_the_fastest_k_arrive() -> None:
    """They are those who would have done most of their work at a deadline that no client meets."""
    for number in range(50):
        done = late_clients(Deadline(1e-6), range(N), number)
        late = late_clients(Fastest(6), range(N), number)
        assert (len(done), len(late)) == (N, N - 6)
        assert set(range(N)) - late.keys() == set(sorted(done, key=lambda i: -done[i])[:6])
        assert set(late.values()) == {0.0}
    assert late_clients(Fastest(6), [1, 2, 3], 1) == {}
    assert Fastest(6).arrival(N, N, 0) is None  # some clients are always faster


def test_slow_clients_do_1_to_e_epochs_with_equal_probability() -> None:
    rule, local, rounds = Slow(0.5), LocalSGD(5, 1), 300
    shares = [share for number in range(rounds) for share in late_clients(rule, range(9), number).values()]
    assert len(shares) == rounds * 4  # floor(9/2)
    counts = np.bincount([local.epochs_for(10, None, share) for share in shares], minlength=6)
    assert counts[0] == 0
    assert abs(counts[1:] / len(shares) - 0.2).max() < 4 * np.sqrt(0.2 * 0.8 / len(shares))


def test_a_rule_that_names_others_or_no_share_is_refused(digits: Digits) -> None:
    for late in ({7: 0.0}, {1: 1.5}, {1: -0.1}, {1: float("nan")}):
        with pytest.raises(ClientError, match=r"stragglers must be some of \[0, 1, 2, 3, 4\]"):
            sample_clients(FedAvg(), digits().plan(1, late=lambda *_, late=late: late), {}, 1)


def late_plan(federation: Federation, shares: Mapping[int, float], **more: Any) -> Plan:
    """Return a plan of three rounds in which these clients are late."""
    plan = federation.plan(3, late=lambda joined, facts, round, seed: {i: s for i, s in shares.items() if i in joined})
    facts = replace(plan.facts, arrival=(1.0,) * plan.facts.n_clients)  # some methods must know it
    return replace(plan, facts=facts, **more)


def end(federation: Federation, algorithm: Algorithm, plan: Plan) -> dict[str, bytes]:
    return bits(federation.run(algorithm, plan)[-1][0])


@pytest.mark.long
def test_fedavg_drops_late_clients_and_fedprox_takes_them(digits: Digits) -> None:
    """FedProx with mu = 0 is FedAvg, but for what it takes."""
    federation, shares = digits().training(LocalSGD(3, 5)), {0: 0.2, 3: 0.9}
    dropped, lost, partial = (
        end(federation, FedAvg(), late_plan(federation, late, **more))
        for late, more in ((shares, {}), (dict.fromkeys(shares, 0.0), {}), (shares, {"take_partial": True}))
    )
    assert dropped == lost != partial
    assert end(federation, FedProx(mu=0), late_plan(federation, shares)) == partial
    assert end(federation, FedProx(mu=0), late_plan(federation, shares, take_partial=False)) == dropped


def test_lost_bytes_are_the_downloads_of_clients_without_a_reply(digits: Digits) -> None:
    """|S| - k late clients, each with the model and BatchNorm's statistics:  R (|S| - k) (Mc + Mb)  bytes."""
    federation = digits(batch_norm=True)
    plan = federation.plan(3, participation=0.8, late=Fastest(1))
    statistics = federation.work().initial_buffers
    start = replace(federation.start(FedAvg(), plan), buffers=statistics)
    each = data(federation.model).nbytes + data(statistics).nbytes
    for number, (now, facts) in enumerate(federation.run(FedAvg(), plan, start=start), 1):
        t = now.traffic
        assert (t.down, t.up, t.lost) == (number * 4 * each, number * each, number * 3 * each)
        assert t.total == t.down + t.up
        assert (facts["comm/lost_bytes"], facts["stragglers"], len(now.stragglers)) == (3 * each, 3, 3)


SHORT = {"federation.rounds": 4, "federation.checkpoint_every": 2, "measure.every": 0, "tracking.wandb": "off",
         "data.limit": 80, "client.epochs": 2}  # fmt: skip


@pytest.mark.long
def test_the_record_names_late_clients(tmp_path: Path) -> None:
    values = {**SHORT, "straggler.rule": "deadline", "straggler.deadline": 1.0, "straggler.partial": "take"}
    config = presets.experiment("smoke", "digits", values)
    whole = experiment.run(config, tmp_path / "whole", say=lambda _: None)
    untrained, *lines = [json.loads(line) for line in (tmp_path / "whole/rounds.jsonl").read_text().splitlines()]
    assert not {"late", "partial", "stragglers"} & untrained.keys()
    ready = assemble.assemble(build.build(config))
    for line in lines:
        joined, late = sample_clients(ready.algorithm, ready.plan, {}, line["round"])
        assert line["late"] == sorted(late) == sorted(Deadline(1.0)(joined, ready.plan.facts, line["round"], 0))
        assert line["partial"] == line["late"]
        assert line["stragglers"] == len(late)
    assert any(line["late"] for line in lines)
    assert whole["bytes_lost"] == sum(line["comm/lost_bytes"] for line in lines) == 0


def prepared(values: Mapping[str, Any]) -> spec.RunSpec:
    return build.build(presets.experiment("smoke", "digits", {**SHORT, **values}))


def test_methods_know_how_likely_each_reply_is() -> None:
    for fields, participation, expected in (
        ({}, 0.8, (0.75,) * 4),
        ({"q": 0.5}, 0.5, (0.25,) * 4),
        ({"rule": "per_client", "qs": (0.0, 0.25, 0.5, 0.75)}, 1.0, (1.0, 0.75, 0.5, 0.25)),
        ({"rule": "slow", "share": 0.5}, 1.0, (0.5,) * 4),
        ({"rule": "slow", "share": 0.5, "partial": "take"}, 1.0, (1.0,) * 4),
        ({"rule": "fastest", "k": 3}, 1.0, None),
    ):
        values = {f"straggler.{name}": value for name, value in fields.items()}
        ready = assemble.assemble(prepared({**values, "federation.participation": participation}))
        assert ready.plan.facts.arrival == expected
