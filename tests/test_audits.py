"""The audit within a run: before the pool is released, with what it withholds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.artifacts import Store
from fedcommons.audits.distances import Look
from fedcommons.audits.pool import WHY, subjects
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import deciding
from fedcommons.core.release import SAMPLED_GAUSSIAN
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.generator import Receipt
from fedcommons.runs.build import Assembled, assemble, contributions, prepare
from fedcommons.runs.experiment import run
from fedcommons.runs.worker import noise_key
from fedcommons.sharing import synthetic_pool
from fedcommons.sharing.leaving import RAW
from fedcommons.sharing.stage import Contribution

QUICK = {
    "setting": "shuffled_synthetic", "tracking.wandb": "off", "federation.rounds": 1, "client.epochs": 1,
    "measure.every": 0, "data.limit": None,
}  # fmt: skip


def experiment(**fields: Any) -> Experiment:
    return presets.experiment("smoke", "digits", QUICK | {k.replace("__", "."): v for k, v in fields.items()})


def made_by(config: Experiment, make: Callable[[Examples], Tensor], receipt: Receipt | None = None) -> Assembled:
    """The run's parts where every client contributes this function of what its generator saw."""
    ready = prepare(config)
    each = [Contribution(Examples(make(n.examples), n.examples.y), receipt, len(n.examples)) for n in ready.needs]
    return assemble(ready, each)


def same(examples: Examples) -> Tensor:
    return examples.x


def noise(examples: Examples) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(256, size=examples.x.shape).astype(np.uint8))


def test_an_audit_changes_nothing_that_clients_train_on_and_its_default_no_name() -> None:
    plain, asked = experiment(), experiment(sharing__audit=True)
    assert not {"sharing.audit", "sharing.withhold"} & deciding(plain).keys()
    assert noise_key(plain) == noise_key(experiment(sharing__audit=False, sharing__withhold="none"))
    assert noise_key(plain) != noise_key(asked)
    audited, unaudited = made_by(asked, same), made_by(plain, same)
    assert unaudited.audited is None
    assert torch.equal(unaudited.shared.data.clients.rows.flat, audited.shared.data.clients.rows.flat)
    assert unaudited.shared.releases == audited.shared.releases
    assert audited.audited is not None
    assert audited.audited.facts["withheld"] == 0
    assert audited.audited.facts["pixels"]["identical"] == len(audited.shared.data.pool.rows.flat)  # pyright: ignore
    assert "more than chance explains" in audited.audited.told


def test_copies_are_withheld_and_so_is_every_epsilon() -> None:
    """Also where a receipt covers the images: what is left out depends on the real ones."""
    receipt = Receipt(SAMPLED_GAUSSIAN, 0.5, 1.0, 1.0, 10)
    half = experiment(sharing__withhold="near_copies")

    def mixed(examples: Examples) -> Tensor:
        x = noise(examples)
        x[::2] = examples.x[::2]
        return x

    found = made_by(half, mixed, receipt)
    assert found.audited is not None
    kept = found.shared.data.pool
    assert kept is not None
    store = kept.store
    copies = {x.numpy().tobytes() for x in store.x[: len(found.prepared.dealt.own.store)]}
    assert not any(store.x[row].numpy().tobytes() in copies for row in kept.rows.flat.tolist())
    sizes = [len(n.examples) for n in found.prepared.needs]
    assert found.audited.withheld == {i: -(-n // 2) for i, n in enumerate(sizes)}
    assert found.audited.facts["withheld"] == sum(-(-n // 2) for n in sizes)
    assert len(kept.rows.flat) == sum(n // 2 for n in sizes)
    assert not any(event.covered for event in found.shared.releases)
    assert {event.why for event in found.shared.releases} == {WHY}
    assert all(event.covered for event in made_by(experiment(), noise, receipt).shared.releases)
    whole = made_by(experiment(), mixed, receipt).shared  # whatever the receipt says, copies are raw
    assert whole.disclosed > 0
    assert {RAW} == {name for event in whole.releases if not event.covered for name in event.what}


@pytest.mark.parametrize("look", [Look(), Look(-1, 1, True)])
@pytest.mark.long
def test_exact_and_moved_copies_are_all_withheld(look: Look) -> None:
    found = made_by(experiment(sharing__withhold="near_copies"), lambda examples: look.of(examples.x))
    assert found.audited is not None
    pixels = found.audited.facts["pixels"]
    assert pixels["memorised"]
    assert pixels["identical"] == pixels["near_copies"] == pixels["images"] == found.audited.facts["withheld"]
    assert (found.shared.p, found.shared.data.pool) == (0, None)  # clients train on their own examples
    assert found.shared.data.clients.sizes == found.shared.data.own.sizes


@pytest.mark.long
def test_held_out_images_are_what_generators_did_not_see() -> None:
    """Of the client itself, and the validation set; test images take no part."""
    found = made_by(experiment(sharing__audit=True), same)
    assert found.audited is not None
    data, prepared = found.prepared.dataset, found.prepared
    for one, need in zip(subjects(prepared.dealt, prepared.needs, data.validation), prepared.needs, strict=True):
        seen = {x.numpy().tobytes() for x in need.examples.x}
        own = {x.numpy().tobytes() for x in data.train.x[prepared.dealt.own.rows[need.client]]}
        allowed = own - seen | {x.numpy().tobytes() for x in data.validation.x}
        held = {x.numpy().tobytes() for x in one.held_out.x}
        assert held <= allowed
        assert held & own
        assert held - own


def test_an_audit_without_held_out_images_is_refused_before_any_work() -> None:
    fields = {"data__validation": 0.0, "generator__rho": 1.0, "sharing__audit": True}
    with pytest.raises(UserError, match=r"sharing.audit needs held-out images of client 0"):
        prepare(experiment(**fields))
    prepare(experiment(**{**fields, "sharing__audit": False}))
    prepare(experiment(**{**fields, "data__validation": 0.1}))
    prepare(experiment(**{**fields, "generator__rho": 0.5}))
    with pytest.raises(UserError, match=r"sharing\.withhold"):
        prepare(experiment(sharing__withhold="near_copys"))


@pytest.mark.long
def test_a_run_of_generators_writes_its_audit_also_when_it_is_resumed(tmp_path: Path) -> None:
    said: list[str] = []
    fields = {"sharing__audit": True, "artifacts": str(tmp_path / "artifacts")}
    config = experiment(generator__name="user_parts:Parrot", **fields)
    summary = run(config, tmp_path / "run", say=said.append)
    assert sum(line.startswith("audit:") for line in said) == 1
    written = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert written["spaces"]["pixels"]["all"] == summary["audit"]["pixels"]
    assert summary["audit"]["pixels"]["identical"] == summary["audit"]["pixels"]["images"]
    assert set(written["spaces"]) == {"pixels", "features"}
    assert set(written["withheld"]) == {"0", "1", "2", "3"}
    (tmp_path / "run" / "summary.json").unlink()
    assert run(config, tmp_path / "run", resume=True, say=said.append) == summary
    bare = run(experiment(setting="real", sharing__audit=True), tmp_path / "real", say=said.append)
    assert any("no generator makes images" in line for line in said)
    assert "audit" not in bare
    assert not (tmp_path / "real" / "audit.json").exists()


@pytest.mark.long
def test_the_images_of_the_pool_are_those_that_are_audited(tmp_path: Path) -> None:
    """What the store holds, cut to the contribution, is what the audit counts."""
    config = experiment(sharing__audit=True, sharing__p=0.25, artifacts=str(tmp_path), data__limit=120)
    ready, store = prepare(config), Store(tmp_path)
    for job in synthetic_pool.missing(store, ready.needs):
        synthetic_pool.keep(store, job, synthetic_pool.make(job))
    found = assemble(ready, contributions(ready, store))
    assert found.audited is not None
    assert found.audited.facts["pixels"]["images"] == sum(need.n for need in ready.needs)
    assert not found.audited.facts["pixels"]["identical"]
    for space in ("pixels", "features"):
        verdict = found.audited.facts[space]
        assert not verdict["memorised"]
        assert verdict["finds"] == verdict["finds_images"] / verdict["images"]
        assert f"would have found {verdict['finds_images']} copies" in found.audited.told
