"""Audits of a pool: within a run, with what they withhold, and by the sweep, also of stages with noisy sums."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import report_runs
import torch
from broken_noise import break_noise
from torch import Tensor

from fedcommons import Contribution, Examples, Experiment, Receipt, UserError
from fedcommons.audits.lower_bound import lower_bound
from fedcommons.audits.white_box_estimate import Estimate
from fedcommons.config import presets
from fedcommons.config.dotted import deciding
from fedcommons.privacy.release import SAMPLED_GAUSSIAN
from fedcommons.runs.assemble import Assembled, assemble
from fedcommons.runs.build import build, noise_key
from fedcommons.runs.experiment import run
from fedcommons.runs.pool_audit import WHY, subjects
from fedcommons.sharing.disclosure import RAW
from papers.fedssyn.audits import GRID
from papers.fedssyn.noisy_sums import audited

QUICK = {
    "setting": "shuffled_synthetic", "tracking.wandb": "off", "federation.rounds": 1, "client.epochs": 1,
    "measure.every": 0, "data.limit": None,
}  # fmt: skip


def experiment(**fields: Any) -> Experiment:
    return presets.experiment("smoke", "digits", QUICK | {k.replace("__", "."): v for k, v in fields.items()})


def made_by(config: Experiment, make: Callable[[Examples], Tensor], receipt: Receipt | None = None) -> Assembled:
    """The run's parts where every client contributes this function of what its generator saw."""
    ready = build(config)
    each = [Contribution(Examples(make(n.examples), n.examples.y), receipt, len(n.examples)) for n in ready.requests]
    return assemble(ready, each)


def same(examples: Examples) -> Tensor:
    return examples.x


def noise(examples: Examples) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(256, size=examples.x.shape).astype(np.uint8))


@pytest.mark.long
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
    assert "resemble seen images than chance explains" in audited.audited.text


@pytest.mark.long
def test_copies_are_withheld_and_so_is_every_epsilon() -> None:
    """Also where a receipt covers the images: what is left out depends on the real ones."""
    receipt = Receipt(SAMPLED_GAUSSIAN, 0.5, 1.0, 1.0, 10)
    half = experiment(sharing__withhold="near_copies")

    def mixed(examples: Examples) -> Tensor:
        x = noise(examples)
        x[::2] = examples.x[::2]
        return x

    result = made_by(half, mixed, receipt)
    assert result.audited is not None
    pool = result.shared.data.pool
    assert pool is not None
    store = pool.store
    copies = {x.numpy().tobytes() for x in store.x[: len(result.spec.client_data.clients.store)]}
    assert not any(store.x[row].numpy().tobytes() in copies for row in pool.rows.flat.tolist())
    sizes = [len(n.examples) for n in result.spec.requests]
    assert result.audited.withheld == {i: -(-n // 2) for i, n in enumerate(sizes)}
    assert len(pool.rows.flat) == sum(n // 2 for n in sizes)
    assert not any(event.covered for event in result.shared.releases)
    assert {event.reason for event in result.shared.releases} == {WHY}
    assert all(event.covered for event in made_by(experiment(), noise, receipt).shared.releases)
    whole = made_by(experiment(), mixed, receipt).shared  # whatever the receipt says, copies are raw
    assert whole.disclosed > 0
    assert {RAW} == {name for event in whole.releases if not event.covered for name in event.what}


@pytest.mark.long
def test_held_out_images_are_what_generators_did_not_see() -> None:
    result = made_by(experiment(sharing__audit=True), same)
    assert result.audited is not None
    data, prepared = result.spec.dataset, result.spec
    for subject, need in zip(
        subjects(prepared.client_data, prepared.requests, data.validation), prepared.requests, strict=True
    ):
        seen = {x.numpy().tobytes() for x in need.examples.x}
        client_images = {x.numpy().tobytes() for x in data.train.x[prepared.client_data.clients.rows[need.client]]}
        allowed = client_images - seen | {x.numpy().tobytes() for x in data.validation.x}
        held_out = {x.numpy().tobytes() for x in subject.held_out.x}
        assert held_out <= allowed
        assert held_out & client_images
        assert held_out - client_images


def test_an_audit_without_held_out_images_is_refused_before_any_work() -> None:
    fields = {"data__validation": 0.0, "generator__rho": 1.0, "sharing__audit": True}
    with pytest.raises(UserError, match=r"sharing.audit needs held-out images of client 0"):
        build(experiment(**fields))
    build(experiment(**{**fields, "data__validation": 0.1}))
    build(experiment(**{**fields, "generator__rho": 0.5}))


@pytest.mark.long
def test_a_run_of_generators_writes_its_audit_also_when_it_is_resumed(tmp_path: Path) -> None:
    messages: list[str] = []
    fields = {"sharing__audit": True, "artifacts": str(tmp_path / "artifacts")}
    config = experiment(generator__name="user_parts:Parrot", sharing__p=0.25, **fields)
    summary = run(config, tmp_path / "run", say=messages.append)
    assert sum(line.startswith("audit:") for line in messages) == 1
    written = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert written["spaces"]["pixels"]["all"] == summary["audit"]["pixels"]
    of_contributions = sum(need.n for need in build(config).requests)  # the images in the pool, not all that were made
    assert summary["audit"]["pixels"]["identical"] == summary["audit"]["pixels"]["images"] == of_contributions
    (tmp_path / "run" / "summary.json").unlink()
    assert run(config, tmp_path / "run", resume=True, say=messages.append) == summary
    bare = run(experiment(setting="real", sharing__audit=True), tmp_path / "real", say=messages.append)
    assert any("no generator makes images" in line for line in messages)
    assert "audit" not in bare


# The sweep


PARROT = ["--preset", "smoke", "--generator", "user_parts:Parrot"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_a_pool_of_copies_is_called_memorised(here: Path, sweeps: Callable[[str], ModuleType]) -> None:
    argv = [*PARROT, "--shadows", "12", "--canaries", "40", "--out", "out"]
    sweep = sweeps("audit_pool")
    assert sweep.audit_pool([*argv, "--dry-run"]) == 0
    assert not (here / "out").exists()
    assert sweep.audit_pool(argv) == 0
    record = json.loads((here / "out" / "seed_0.json").read_text())["audit"]
    for space in ("pixels", "features"):
        verdict = record["spaces"][space]["all"]
        assert (verdict["memorised"], verdict["near_copies"], verdict["images"]) == (True, 200, 200)
    assert record["spaces"]["pixels"]["all"]["identical"] == 200
    assert record["attacks"]["pool"]["auc"] > 0.8
    assert record["attacks"]["pool"]["worst"]["images"] >= 1
    e = record["epsilon"]
    assert (e["canaries"], e["guesses"]) == (40, 10)
    assert e["right"] >= 8
    assert e["at_least"] == lower_bound(40, 10, e["right"], 1e-5) > 0
    assert e["ceiling"] == lower_bound(40, 10, 10, 1e-5) >= e["at_least"]
    assert (e["reported"], e["verdict"]) == (None, "no epsilon is reported")
    table = (here / "out" / "audit_pool.md").read_text()
    assert "**memorised**" in table
    assert "Most exposed images" in table
    assert f"| {e['at_least']:.3g} ({e['ceiling']:.3g}) " in table
    for name in ("roc", "pairs"):
        assert (here / "out" / f"audit_pool_{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_seeds_are_audited_once_and_have_their_mean_and_range(here: Path, sweeps: Callable[[str], ModuleType]) -> None:
    argv = [*PARROT, "--shadows", "2", "--canaries", "8"]
    sweep = sweeps("audit_pool")
    assert sweep.audit_pool([*argv, "--seed", "1", "--out", "one"]) == 0
    assert sweep.audit_pool([*argv, "--seeds", "0,1", "--out", "two"]) == 0
    one_seed, two_seeds = here / "one", here / "two"
    assert (one_seed / "seed_1.json").read_bytes() == (two_seeds / "seed_1.json").read_bytes()
    pools = [json.loads((two_seeds / f"seed_{n}.json").read_text())["audit"]["attacks"]["pool"] for n in (0, 1)]
    areas = [pool["auc"] for pool in pools]
    text = (two_seeds / "audit_pool.md").read_text()
    assert "exposed images" not in text  # two generators are too few
    (line,) = (line for line in text.splitlines() if "pool: AUC" in line)
    assert line.split("|")[-2].strip() == f"{sum(areas) / 2:.3f} [{min(areas):.3f}, {max(areas):.3f}]"
    for pool in pools:
        assert float(np.trapezoid(pool["roc"], GRID)) == pytest.approx(pool["auc"], abs=0.02)
    with (two_seeds / "audit_pool.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["images"] for row in rows if row["group"] == "all"] == ["200"] * 4  # two seeds, two spaces
    with pytest.raises(UserError, match="holds audits already"):
        sweep.audit_pool([*argv, "--seeds", "0,1", "--out", "two"])
    before = {path: path.stat().st_mtime_ns for path in two_seeds.glob("seed_*.json")}
    assert sweep.audit_pool([*argv, "--seeds", "0,1", "--out", "two", "--resume"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in two_seeds.glob("seed_*.json")}
    with pytest.raises(UserError, match="shadows = 2, and now it is 3"):
        sweep.audit_pool([*argv[:-3], "3", *argv[-2:], "--seeds", "0,1", "--out", "two", "--resume"])


STAGES = {
    "merf": ["--sharing.features", "20", "--partition.n_clients", "2"],
    "ndpdc": ["--sharing.iterations", "30", "--sharing.batch", "5", "--partition.n_clients", "2"],
}


sweep = report_runs.script("audit_pool")


def estimate(sweep: ModuleType, setting: str, canaries: int, *more: str) -> Estimate:
    argv = ["--preset", "smoke", "--sharing", setting, "--sharing.target_epsilon", "10", *STAGES[setting], *more]
    return audited(build(sweep.arguments(argv).config), None, canaries)[1]


@pytest.mark.long
@pytest.mark.parametrize("setting", STAGES)
def test_right_sums_say_most_of_what_is_reported_and_no_more(sweep: ModuleType, setting: str) -> None:
    """merf: with one step and q = 1 mu says all; ndpdc: mu says less than who weighs each step by itself."""
    result = estimate(sweep, setting, 20 if setting == "merf" else 100)
    assert result.faults == []
    assert 0.75 * result.ceiling < result.epsilon < result.reported == pytest.approx(10, abs=0.01)
    assert result.ceiling == pytest.approx(result.reported, rel=1e-3 if setting == "merf" else 0.5)
    assert result.verdict == "not above the reported one"
    if setting == "merf":
        summed = estimate(sweep, "merf", 40, "--sharing.noise", "summed")
        assert summed.faults == []
        assert summed.noise[0] == pytest.approx(summed.sigma, rel=0.1)


@pytest.mark.parametrize(("setting", "name"), [("merf", "half"), ("ndpdc", "the same in each step")])
@pytest.mark.long
def test_broken_secret_noise_fails(sweep: ModuleType, setting: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_noise(monkeypatch, name)
    result = estimate(sweep, setting, 20)
    assert any("the noise multiplier is about" in fault for fault in result.faults)
    assert result.epsilon > result.reported
    assert result.verdict == "above the reported one"


def test_the_audit_sweep_writes_one_table_row_for_each_seed(sweep: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset", "smoke", "--sharing", "merf", "--sharing.target_epsilon", "5", *STAGES["merf"]]
    argv += ["--seeds", "0,1", "--out", str(tmp_path / "out")]
    assert sweep.audit_pool(argv) == 0
    text = (tmp_path / "out" / "audit_pool.md").read_text()
    rows = re.findall(r"^\| ([01]) +\| [01] +\| 1 +\| 0\.89\d* +\| 1 ", text, re.M)
    assert rows == ["0", "1"]
    with pytest.raises(UserError, match="without noise"):
        sweep.audit_pool([*argv[:4], "--sharing.noise_multiplier", "0", f"--out={tmp_path / 'none'}"])
    with pytest.raises(UserError, match="holds an audit already"):
        sweep.audit_pool([*argv, "--sharing.features", "30"])
