"""What the stages with noise of their own promise, FedMERF, NDPDC and DP-CDA: noise, salts, epsilons and refusals."""

from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons import ClientDatasets, Clients, Contributions, Examples, UserError, generator
from fedcommons.config.dotted import choose
from fedcommons.privacy.salts import name_of
from fedcommons.runs import build, experiment, run_salts
from fedcommons.sharing.dpcda import DPCDA
from fedcommons.sharing.exchange import share
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.ndpdc import NDPDC
from fedcommons.sharing.random_features import Fourier
from fedcommons.testing import check_stage

STAGES: dict[str, Any] = {
    "merf": MERF(noise_multiplier=1.0, features=200, per_class=2, steps=3),
    "ndpdc": NDPDC(noise_multiplier=1.0, iterations=3, per_class=2, batch=50, width=8),  # at q = 1
    "dpcda": DPCDA(noise_multiplier=1.0, per_class=2, mix=50.0),  # at q = 1
}
SERVER = "the server without it"


def clients(*cuts: int, seed: int = 0, is_secret: bool = False, n: int = 60, x: Any = None) -> ClientDatasets:
    """The same images, cut into clients at these places."""
    draws = generator("images of the test")
    images = torch.randint(256, (n, 1, 8, 8), generator=draws, dtype=torch.uint8)
    examples = Examples(images if x is None else x(images), torch.randint(10, (n,), generator=draws))
    return ClientDatasets(Clients(examples, np.split(np.arange(n), cuts)), 10, False, seed, is_secret)


def message(stage: Any, start: ClientDatasets, client: int = 0, step: int = 0) -> Tensor:
    """What a client sends: once, or in each step."""
    if isinstance(stage, MERF):
        return stage.message(start, client, stage.phi(start)).values
    if isinstance(stage, DPCDA):
        return stage.messages(start, stage.draws(start), step).values[client]
    return stage.sender(start, client).message(stage.networks(start).at(step), step).values


def noise(stage: Any, start: ClientDatasets, client: int = 0, step: int = 0) -> Tensor:
    return message(stage, start, client, step) - message(replace(stage, noise_multiplier=0.0), start, client, step)


@pytest.mark.parametrize(
    ("stage", "of_each"),
    [(replace(STAGES["merf"], noise_multiplier=2.0), 2.0),
     (replace(STAGES["merf"], noise_multiplier=2.0, noise="summed"), 2.0 / sqrt(5)),
     (replace(STAGES["merf"], noise_multiplier=2.0, noise="summed", may_miss=2), 2.0 / sqrt(3)),
     (replace(STAGES["ndpdc"], noise_multiplier=2.0), 2.0)],
    ids=["local", "summed", "summed, two may be missing", "ndpdc"],
)  # fmt: skip
def test_noise_has_the_variance_that_is_stated_and_is_new_for_every_client_and_step(stage: Any, of_each: float) -> None:
    """Of the sum over clients, too: to four standard errors."""
    start = clients(10, 20, 30, 40)
    noises = [noise(stage, start, client) for client in range(5)]
    n = noises[0].numel()
    for each in noises:
        assert each.std().item() == pytest.approx(of_each, rel=4 / sqrt(2 * n))
    assert torch.stack(noises).sum(0).std().item() == pytest.approx(sqrt(5) * of_each, rel=4 / sqrt(2 * n))
    if isinstance(stage, NDPDC):
        noises += [noise(stage, start, client, 1) for client in range(5)]
    together = torch.corrcoef(torch.stack([each.flatten() for each in noises])) - torch.eye(len(noises))
    assert together.abs().max() < 4.5 / sqrt(n)


OF_IMAGES: dict[str, dict[str, Any]] = {"merf": {"per_class": 9, "steps": 7, "fit": "generator"},
                                        "ndpdc": {"per_class": 9, "lr": 0.3}, "dpcda": {}}  # fmt: skip
OF_MESSAGES: dict[str, list[dict[str, Any]]] = {"merf": [{"scale": 3.0}],
                                                "ndpdc": [{"iterations": 4}, {"augment": "all"}],
                                                "dpcda": [{"clip": 0.3}, {"colluding": 0}]}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_only_an_equal_message_has_the_same_noise(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path))
    stage, start = STAGES[name], clients(20, 40)
    first = noise(stage, start)
    assert torch.equal(first, noise(replace(stage, **OF_IMAGES[name]), start))
    others = [noise(stage, start, 1), noise(stage, clients(20, 40, seed=1))]
    others += [noise(replace(stage, noise_multiplier=1.5), start) / 1.5]
    others += [message(stage, clients(20, 40, is_secret=True)) - (message(stage, start) - first)]
    others += [noise(replace(stage, **change), start) for change in OF_MESSAGES[name]]
    for other in others:
        assert (first - other).std() > 1.2  # sqrt(2), and 0 if they were the same


# Another version of the package: with the same constants its messages have another sigma, other features or a number


class LouderMERF(MERF):
    def sigma_of_each(self, n_clients: int) -> float:
        return 1.003 * super().sigma_of_each(n_clients)


class LouderNDPDC(NDPDC):
    def sigma(self, n: int, classes: int) -> float:
        return 1.003 * super().sigma(n, classes)


class LouderDPCDA(DPCDA):
    def tau(self, client_data: ClientDatasets) -> float:
        return 1.003 * super().tau(client_data)


class OtherFeatures(MERF):
    def phi(self, client_data: ClientDatasets) -> Fourier:
        return Fourier(super().phi(client_data).w * 1.01)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("version", [LouderMERF, LouderNDPDC, LouderDPCDA, OtherFeatures])
def test_another_version_has_other_secret_noise_and_salts_and_resumes_no_run(
    version: type[MERF | NDPDC | DPCDA], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))
    stage: Any = next(each for each in STAGES.values() if issubclass(version, type(each)))
    other, start = version(**vars(stage)), clients(20, is_secret=True)
    first, names = noise(stage, start), [*map(name_of, stage.salts(start))]
    (run := tmp_path / "run").mkdir()
    run_salts.begin_salt(run, names)
    assert run_salts.read_salt(run, [*map(name_of, stage.salts(start))])
    if version is not OtherFeatures:  # seeded noise hides nothing, so it need not change, and results stay
        seeded = clients(20)
        assert torch.allclose(1.003 * noise(stage, seeded), noise(other, seeded), rtol=0, atol=1e-4)
    assert (first - noise(other, start)).std() > 1.2  # sqrt(2), and 0 if they were the same
    others_names = [*map(name_of, other.salts(start))]
    assert not set(names) & set(others_names)
    with pytest.raises(UserError, match="would release the same data twice"):
        run_salts.read_salt(run, others_names)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_all_clients_get_all_images_and_pay_for_their_messages_and_them(stage: Any) -> None:
    start = clients(20, 30)
    shared = share(stage, start)
    for rows, client in zip(start.clients.rows, shared.data.clients, strict=True):
        assert (len(client), client.n_own) == (len(rows) + 20, len(rows))
    sent = 3 * stage.per_class if isinstance(stage, DPCDA) else getattr(stage, "iterations", 1)
    up = 4 * message(stage, start).numel() * sent
    assert shared.traffic.once == 3 * (up + 20 * (prod(start.shape) + 1))
    assert shared.data.pool is not None
    assert len(shared.data.pool.rows.flat) == 20
    silent = share(replace(stage, noise_multiplier=0.0), clients(20, 40))
    assert [(event.covered, event.n_disclosed) for event in silent.releases] == [(False, 20)] * 3
    assert silent.views == {}


FEW: dict[str, Any] = {"features": 40, "per_class": 2, "steps": 3, "noise_multiplier": 3.0}
STEPS: dict[str, Any] = {"iterations": 3, "per_class": 2, "batch": 2, "width": 8, "noise_multiplier": 3.0}


def test_what_leaves_moves_no_more_than_is_stated() -> None:
    """A message with summed noise is hidden by less than is stated of the sum."""
    check_stage(NDPDC(**STEPS | {"batch": 50}, augment="translation"))
    with pytest.raises(AssertionError, match="MERF"):
        check_stage(MERF(**FEW, noise="summed"))


@pytest.mark.parametrize(
    ("stage", "before", "n", "factor"),
    [(MERF(noise_multiplier=0.3, features=2000, noise="summed"), "class is ", 3000, sqrt(2) / 300),
     (replace(STAGES["ndpdc"], noise_multiplier=3.0), "class is ", 60, 1 / 6)],
    ids=["merf", "ndpdc"],
)  # fmt: skip
def test_what_can_be_hoped_for_is_the_noise_in_a_class(stage: Any, before: str, n: int, factor: float) -> None:
    start = clients(20, 40, n=n)
    total = torch.stack([noise(stage, start, client) for client in range(3)]).sum(0)
    of_features = total[:, :-1] if isinstance(stage, MERF) else total
    (sentence,) = stage.beforehand(start)
    ratio = float(sentence.partition(before)[2].partition(" times")[0])
    assert ratio == pytest.approx(of_features.norm(dim=1).mean().item() * factor, rel=0.1)
    assert replace(stage, noise_multiplier=0.0).beforehand(start) == []


RUN = {"sharing.target_epsilon": 2.0, "federation.rounds": 1, "client.epochs": 1, "model.name": "linear",
       "tracking.wandb": "off"}  # fmt: skip
OF_RUN: dict[str, dict[str, Any]] = {"merf": {"sharing.noise": "summed", "sharing.steps": 3},
                                     "ndpdc": {"sharing.iterations": 3, "sharing.width": 8},
                                     "dpcda": {"sharing.per_class": 3}}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", STAGES)
def test_a_run_states_the_epsilon_of_the_data_it_shares(name: str, tmp_path: Any) -> None:
    config = choose({**RUN, **OF_RUN[name], "sharing.setting": name})
    result = experiment.run(config, tmp_path / "run", say=lambda _: None)["privacy"]
    assert result["pool_epsilon_max_if_secret"] == pytest.approx(2.0, abs=0.011)
    if name == "merf":
        assert result["pool_epsilon_of_each_view_if_secret"][SERVER] == pytest.approx(7.539, abs=1e-3)
        assert result["pool_epsilon_of_each_view"] is None
        assert any("the server without it (epsilon 7.539)" in line for line in result["uncovered"])
    if name == "dpcda":
        assert any("all other clients together (epsilon " in line for line in result["uncovered"])


@pytest.mark.long
def test_a_secret_run_has_its_epsilon_and_resumes_by_its_salts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_STATE", str(tmp_path / "state"))
    config = choose({**RUN, "sharing.setting": "merf", "sharing.steps": 3, "dp.noise": "secret",
                     "artifacts": str(tmp_path / "artifacts")})  # fmt: skip
    result = experiment.run(config, tmp_path / "run", say=lambda _: None)["privacy"]
    assert result["pool_epsilon_max"] == pytest.approx(2.0, rel=1e-6)
    assert result["pool_epsilon_of_each_view"][SERVER] == pytest.approx(2.0, rel=1e-6)
    assert not any("larger epsilons" in line for line in result["uncovered"])
    assert run_salts.read_salt(tmp_path / "run", build.build(config).salts)
    for salt in (tmp_path / "state" / "salts").glob("artifact-*"):
        salt.unlink()
    with pytest.raises(UserError, match=r"salts .* lost"):
        run_salts.read_salt(tmp_path / "run", build.build(config).salts)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [("merf", {"target_epsilon": None}, "not neither"), ("ndpdc", {"delta": 1e-3}, r"sharing\.delta .*dp\.delta"),
     ("merf", {"target_epsilon": None, "noise_multiplier": 1e-9}, r"noise_multiplier .* 0.0001, got 1e-09"),
     ("merf", {"may_miss": 1}, r"sharing\.may_miss .*summed"),
     ("merf", {"noise": "summed", "may_miss": 10}, r"sharing\.may_miss .*below .*10"),
     ("ndpdc", {"target_epsilon": 0.1, "iterations": 10_000}, "target_epsilon 0.1 .*above 100"),
     ("dpcda", {"target_epsilon": 0.1, "per_class": 10_000}, "target_epsilon 0.1 .*above 100"),
     ("dpcda", {"target_epsilon": None, "noise_multiplier": 1e-4, "per_class": 10**6}, r"at least 0\.00215 "),
     ("dpcda", {"colluding": 10}, r"sharing\.colluding .*below .*10, got 10")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(name: str, values: dict[str, Any], words: str) -> None:
    asked = {"target_epsilon": 1.0, **values}
    with pytest.raises(UserError, match=words):
        build.build(choose({"sharing.setting": name, **{f"sharing.{n}": v for n, v in asked.items()}}))


@pytest.mark.parametrize("name", STAGES)
def test_the_limits_are_allowed_and_noise_below_them_covers_nothing(name: str) -> None:
    limits: dict[str, dict[str, Any]] = {
        "merf": {"noise": "summed", "may_miss": 9}, "ndpdc": {"iterations": 3, "width": 8}, "dpcda": {"colluding": 9},
    }  # fmt: skip
    values = {f"sharing.{n}": v for n, v in {**limits[name], "target_epsilon": 1.0, "delta": 1e-6}.items()}
    build.build(choose({"sharing.setting": name, **values, "dp.delta": 1e-6}))
    prepared = build.build(choose({"sharing.setting": name, "sharing.noise_multiplier": 1e-4}))
    for sigma, covered in ((0.0, False), (9e-5, False), (1e-4, True)):
        stage: Any = replace(prepared.stage, noise_multiplier=sigma)  # type: ignore[type-var]
        _, events = stage.release(prepared.client_data, Contributions.none(prepared.client_data))
        sizes = prepared.client_data.clients.sizes
        assert [(event.covered, event.n_disclosed) for event in events] == [
            (covered, 0 if covered else n) for n in sizes
        ]


@pytest.mark.parametrize(
    ("stage", "start", "words"),
    [*((STAGES[name], clients(x=lambda x: x.float()), "uint8") for name in ("merf", "dpcda")),
     *((stage, replace(clients(), n_classes=None), "not classes") for stage in STAGES.values()),
     (replace(STAGES["merf"], fit="generator"), clients(x=lambda x: x.flatten(1)), r"sharing.fit .*\(64,\)"),
     (STAGES["ndpdc"], clients(x=lambda x: x[..., :1]), "2x2")],
)  # fmt: skip
def test_other_examples_are_refused(stage: Any, start: ClientDatasets, words: str) -> None:
    STAGES["ndpdc"].check_data(clients(x=lambda x: x[..., :2, :2].contiguous()))
    with pytest.raises(UserError, match=words):
        stage.check_data(start)
