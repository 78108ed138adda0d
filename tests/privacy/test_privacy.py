"""The ledger: what each client is charged, what no epsilon covers, and no epsilon where something is uncovered."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closed_forms import Digits
from interrupted import PowerCut, cut_at

from fedcommons import Algorithm, ClientData, LocalSGD, Message, Payload, Reply, State, UserError, Work
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddm import FedDM
from fedcommons.algorithms.ifca import IFCA
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import presets, registry
from fedcommons.config.dotted import override
from fedcommons.config.registry import KINDS
from fedcommons.privacy.accountants import composed, epsilon
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.ledger import Ledger, read
from fedcommons.privacy.noise import Stream
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.privacy.statement import in_short, statement
from fedcommons.runs.build import build
from fedcommons.runs.experiment import run
from fedcommons.testing import Federation
from fedcommons.tracking.run_folder import read_rounds


def _trained(client: int, steps: int = 8, q: float = 0.25, what: str = "delta") -> Release:
    return Release(client, (what,), mechanism=SAMPLED_GAUSSIAN, q=q, sigma=1.0, sensitivity=5.0, steps=steps)


def test_a_client_is_charged_for_what_it_released_and_no_other() -> None:
    ledger = Ledger().after([_trained(1), _trained(2)]).after([_trained(2, 3), _trained(4, 5, 0.5)])
    spent = [ledger.updates.epsilon(i, 1e-5) for i in range(5)]
    assert spent == [0, epsilon(0.25, 1.0, 8, 1e-5), epsilon(0.25, 1.0, 11, 1e-5), 0, epsilon(0.5, 1.0, 5, 1e-5)]
    assert ledger.updates.largest_epsilon(1e-5) == max(spent)
    assert Ledger().updates.largest_epsilon(1e-5) == 0
    report = statement(ledger, 5, 1e-5, rejected=0, local=True, secret=True)
    assert report["epsilon_local_training"] == {"largest": max(spent), "of_each_client": spent}
    assert report["epsilon_of_messages"] == max(spent)
    assert ledger.uncovered == {}


def test_what_was_shared_before_counts_in_the_whole_and_not_in_training() -> None:
    ledger = Ledger.before_rounds([_trained(0, 4, what="images"), _trained(1, 4, what="images")])
    ledger = ledger.after([_trained(0), replace(_trained(0, 4, 0.5), sigma=2.0)])
    assert ledger.updates.covered == {0: {(0.25, 1.0): 8, (0.5, 2.0): 4}}
    trained, whole = (composed(((0.25, 1.0, n), (0.5, 2.0, 4)), 1e-5) for n in (8, 12))
    assert (ledger.updates.epsilon(0, 1e-5), ledger.epsilon_of_all(0, 1e-5)) == (trained, whole)
    report = statement(ledger, 2, 1e-5, rejected=0, local=True, secret=True)
    assert report["epsilon_local_training"]["of_each_client"] == [trained, 0]
    assert report["epsilon_of_messages"] == whole


@pytest.mark.parametrize("bare", [Release(3, ("images",)), Release(3)], ids=["nothing", "no name"])
@pytest.mark.parametrize("before", [True, False], ids=["before the federation", "in a round"])
def test_one_event_of_one_client_that_is_not_covered_leaves_no_epsilon_of_all(bare: Release, before: bool) -> None:
    ledger = (Ledger.before_rounds([bare]) if before else Ledger().after([bare])).after([_trained(0), _trained(1)])
    assert sum(ledger.uncovered.values()) == 1
    report = statement(ledger, 5, 1e-5, rejected=0, local=True, secret=True)
    assert report["epsilon_of_messages"] is None
    assert report["epsilon_local_training"]["largest"] == epsilon(0.25, 1.0, 8, 1e-5)
    assert "released 1 time " in report["uncovered"][-1]


def test_what_was_given_away_is_the_most_of_one_event_and_nothing_that_noise_covers() -> None:
    """Two releases may disclose the same examples, so that their sum would count the examples twice."""
    ledger = Ledger.before_rounds([Release(1, ("images",), n_disclosed=5), replace(_trained(2), n_disclosed=9)])
    ledger = ledger.after([Release(1, ("more",), n_disclosed=3), Release(4, ("means",), n_disclosed=2)]).after(
        [_trained(1)]
    )
    assert ledger.n_disclosed == {1: 5, 4: 2}
    assert ledger.after([Release(1, ("all",), n_disclosed=8), Release(4, ("delta",))]).n_disclosed == {1: 8, 4: 2}
    assert read(json.loads(json.dumps(ledger.record()))) == ledger
    assert read(Ledger().record()) == Ledger()


PRIVATE = LocalSGD(2, 5, dp=DPSGD(1.0, 1.0))
SMALL: dict[str, Any] = {
    "dp.local": True, "tracking.wandb": "off", "measure.every": 0, "data.limit": 60, "client.epochs": 1,
}  # fmt: skip


def _ledger(algorithm: Algorithm, federation: Federation, local: LocalSGD = PRIVATE, **options: Any) -> Ledger:
    federation = federation.training(local, "samples")  # weights by the number of examples are public
    plan = federation.plan(2)
    start = replace(federation.start(algorithm, plan), **options)
    return federation.run(algorithm, plan, start=start)[-1][0].ledger


OTHERS = ("fedmix", "feddm", "fedlap", "feddpms", "fedproto", "fedgen", "one_shot", "fedcvae", "ifca", "fedbuff",
          "qfedavg")  # fmt: skip
"""Methods that share more without noise, or have other steps or none."""


@pytest.mark.parametrize("name", [n for n in KINDS["algorithm"].components if n not in OTHERS])
@pytest.mark.long
def test_methods_under_dp_sgd_are_charged_their_steps_and_nothing_is_uncovered(name: str, digits: Digits) -> None:
    """Two rounds of two epochs of ceil(n/B) steps at q = B/n; Ditto and FedRep train twice, one-shot methods once."""
    algorithm = registry.make("algorithm", name, {})
    ledger = _ledger(algorithm, digits(method=algorithm))
    assert ledger.uncovered == {}
    each = {"ditto": 8, "fedrep": 24, "dense": 2, "coboosting": 2}.get(name, 4)
    assert ledger.updates.covered == {i: {(5 / n, 1.0): each * -(-n // 5)} for i, n in enumerate((9, 16, 12, 20, 7))}


@dataclass(frozen=True)
class Changed(FedAvg):
    change: Callable[[Reply, ClientData], Reply] = lambda reply, data: reply

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return self.change(super().client(work, message, memory, data, round, seed), data)


class DrawsElsewhere(FedAvg):
    """Its noise follows from the seed of the run, which everybody knows."""

    def client(self, *args: Any) -> Reply:
        delta = {"delta": torch.randn(4, generator=torch.Generator().manual_seed(args[-1]))}
        release = Release(what=("delta",), mechanism=SAMPLED_GAUSSIAN, sigma=1.0, sensitivity=1.0, steps=1)
        return Reply(each=delta, releases=[release])

    def merge(self, executor: Any, state: State, *args: Any) -> State:
        return state


SECRET = {"secret": torch.ones(2)}


@pytest.mark.parametrize(
    ("algorithm", "uncovered"),
    [
        (Changed(lambda reply, data: replace(reply, sums={**reply.sums, **SECRET})), {"secret": 10}),
        (Changed(lambda reply, data: replace(reply, each=SECRET)), {"secret": 10}),
        (Changed(lambda reply, data: replace(reply, releases=())), {"delta": 10}),
        (Changed(lambda reply, data: replace(reply, releases=[*reply.releases, Release(what=("delta",))])),
         {"delta": 10}),
        (Changed(lambda reply, data: replace(reply, weight=float(data.y.sum() + 1))), {"weight": 10}),
        (DrawsElsewhere(), {"delta (no noise was drawn for it)": 10}),
        (SCAFFOLD(option=1), {"delta": 10, "control": 10}),  # its local steps go by gradients without noise
        (IFCA(), {f"{name} (the cluster is chosen by losses without noise)": 10 for name in ("delta", "cluster")}),
    ],
    ids=["in the sum", "for each", "nothing", "delta twice", "weight", "noise of its own", "option 1 of SCAFFOLD",
         "IFCA's cluster"],
)  # fmt: skip
def test_what_no_release_names_is_uncovered(algorithm: Algorithm, uncovered: dict[str, int], digits: Digits) -> None:
    assert _ledger(algorithm, digits()).uncovered == uncovered


@pytest.mark.long
def test_batch_norms_statistics_are_uncovered_whatever_a_method_says(digits: Digits) -> None:
    federation = digits(batch_norm=True)
    as_if_by_dp_sgd = Changed(lambda reply, data: replace(reply, releases=[
        event.with_names("delta", "buffers") for event in reply.releases]))  # fmt: skip
    for algorithm in (FedAvg(), as_if_by_dp_sgd):
        ledger = _ledger(algorithm, federation, buffers=federation.work().initial_buffers)
        assert ledger.uncovered == {"buffers": 10}


CALLS = [0]
"""How many batches were drawn; outside of the method and its loop, whose changes uncover all."""


def alternating(*sigmas: float) -> DPSGD:
    """Return DP-SGD whose batches have by turns these noise multipliers."""

    class Alternates(DPSGD):
        def sample(self, n: int, batch_size: int, draws: Stream) -> torch.Tensor:
            CALLS[0] += 1
            return super().sample(n, batch_size, draws)

        @property
        def noise_multiplier(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
            return sigmas[max(0, CALLS[0] - 1) % len(sigmas)]

        @noise_multiplier.setter
        def noise_multiplier(self, value: float) -> None:
            pass

    return Alternates(1.0, 1.0)


@pytest.mark.parametrize(
    ("dp", "uncovered"),
    [(DPSGD(0.0, 1.0), {"delta": 10}), (DPSGD(1.0, 1.0), {}),
     (alternating(1.0, 1.0, 0.0, *[1.0] * 1000), {"delta": 1}), (alternating(1.0, 2.0), {"delta": 10})],
    ids=["no noise", "noise", "one step without", "steps of two kinds"],
)  # fmt: skip
def test_only_steps_of_one_noise_level_are_covered(dp: DPSGD, uncovered: dict[str, int], digits: Digits) -> None:
    CALLS[0] = 0
    assert _ledger(FedAvg(), digits(), LocalSGD(2, 5, dp=dp)).uncovered == uncovered


@pytest.mark.parametrize("bare_steps", [0, 1])
def test_a_step_on_the_pixels_without_noise_among_others_uncovers_the_images(bare_steps: int, digits: Digits) -> None:
    """The first step has no noise: a ledger that reads only the last step would miss it."""
    CALLS[0] = 0
    method = FedDM(init="noise", iterations=3, match_batch=4, least=5)
    federation = digits(sizes=(40,))
    n_classes = int((torch.bincount(federation.data.clients[0].y) >= 5).sum())  # of each class a batch in a step
    dp = alternating(*[0.0] * bare_steps * n_classes, *[2.0] * 1000)
    ledger = _ledger(method, federation, LocalSGD(1, 5, dp=dp))
    assert ledger.commons.uncovered.get("images", 0) == bare_steps  # of two rounds


def test_a_delta_at_which_an_example_could_be_published_is_refused() -> None:
    config = presets.experiment("smoke", "digits", {"dp.local": True, "partition.name": "dirichlet_niid"})
    largest = max(range(4), key=lambda i: len(build(config).partition.rows[i]))
    n = len(build(config).partition.rows[largest])
    for values in ({"dp.delta": 1 / n}, {"dp.delta": 1 / n, "dp.local": False}):  # a delta that is set must be used
        with pytest.raises(UserError, match=rf"dp.delta must be below 1/n_i .* client {largest} has {n}"):
            build(override(config, values))
    build(override(config, {"dp.delta": 0.999 / n}))
    build(override(config, {"dp.local": False}))


@pytest.mark.long
def test_a_run_logs_what_it_has_spent_also_after_a_resumption(tmp_path: Path) -> None:
    config = presets.experiment("smoke", "digits", {**SMALL, "federation.participation": 0.5})

    whole = run(config, tmp_path / "whole", say=lambda text: None)
    with pytest.raises(PowerCut):
        run(config, tmp_path / "broken", on_round=cut_at(2), say=lambda text: None)
    assert run(config, tmp_path / "broken", resume=True, say=lambda text: None) == whole
    spent = [line["privacy/epsilon_local_training_if_secret"] for line in read_rounds(tmp_path / "broken")]
    assert spent == [line["privacy/epsilon_local_training_if_secret"] for line in read_rounds(tmp_path / "whole")]
    assert spent[0] == 0 < spent[1] <= spent[2] <= spent[3]
    assert spent[3] == whole["privacy"]["epsilon_local_training_if_secret"]["largest"]


@pytest.mark.long
def test_a_run_with_a_rejected_reply_has_no_epsilon_of_all_messages(tmp_path: Path) -> None:
    summaries = []
    for algorithm in ("fedavg", "user_parts:Broken"):
        config = presets.experiment("smoke", "digits", {**SMALL, "algorithm": algorithm})
        summaries.append(run(config, tmp_path / f"{len(summaries)}", say=lambda text: None))
    quiet, broken = (summary["privacy"] for summary in summaries)
    assert summaries[1]["rejected"]
    assert quiet["epsilon_of_messages_if_secret"] == quiet["epsilon_local_training_if_secret"]["largest"] > 0
    assert broken["epsilon_of_messages_if_secret"] is None
    assert any("replies were rejected" in line for line in broken["uncovered"])
    assert broken["epsilon_local_training_if_secret"] == quiet["epsilon_local_training_if_secret"]


def test_seeded_noise_earns_nothing_and_the_names_say_so() -> None:
    """The numbers are those of secret noise, under names that cannot be taken for a guarantee."""
    ledger = Ledger.before_rounds([_trained(0, 4, what="images")]).after([_trained(0)])
    earned, seeded = (statement(ledger, 1, 1e-5, rejected=0, local=True, secret=secret) for secret in (True, False))
    assert (earned["noise"], seeded["noise"]) == ("secret", "seeded")
    names = [name for name in earned if "epsilon" in name]
    assert len(names) == 4
    assert not any(name.endswith("_if_secret") for name in names)
    for name in names:
        assert seeded[name] is None
        assert seeded[f"{name}_if_secret"] == earned[name] != 0
    assert (earned["overall"], seeded["overall"]) == (earned["epsilon_of_messages"], "none")
    assert all("if the noise were secret" in line and "none" in line for line in seeded["in_words"])
    short, named = in_short(seeded), {name: seeded[name] for name in seeded if name.endswith("max_if_secret")}
    assert short.items() >= {"overall": "none", "trusted": "", **named}.items()


def test_parts_that_are_not_ours_are_named_as_trusted() -> None:
    user_code = {"algorithm": "my.py:Mine", "generator": "my.py:Draws", "tracker": "my.py:Tells"}
    lines = statement(Ledger(), 1, 1e-5, rejected=0, local=True, secret=True, user_code=user_code)["trusted"]
    assert [line.partition(":")[0] for line in lines] == ["algorithm my.py", "generator my.py"]
    assert statement(Ledger(), 1, 1e-5, rejected=0, local=True, secret=True)["trusted"] == []
