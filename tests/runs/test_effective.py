"""``effective`` in summary.json: what a run used where a rule, not the config, decided a value."""

from pathlib import Path
from typing import Any

import pytest

from fedcommons import experiment, load_runs, run
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.privacy.accountants import epsilon
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.mechanisms import accountants, columns, mechanisms
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.runs.assemble import assemble
from fedcommons.runs.build import build
from fedcommons.runs.evaluate import summarise
from fedcommons.tracking.record_schema import flaw_of_summary

QUICK = {"data.limit": 120, "federation.rounds": 5, "model": "linear", "measure.every": 0, "wandb": "off"}


def _effective(values: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the effective values of an experiment before its first round, and its clients' sizes."""
    prepared = build(experiment("smoke", values={**QUICK, **values}))
    ready, line = assemble(prepared), {"round": 0, "comm/total_bytes": 0}
    return summarise(ready, [line], ready.start(ClientMemory()))["effective"], prepared.client_data.clients.sizes


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"partition.n_aux": 4, "client.epochs": 5, "partition.shift_size": None}),
        ({"partition.n_clients": 40, "partition.alpha": 100.0, "data.limit": 800}, {"partition.n_aux": 20}),
        ({"partition.shift": "rotation"}, {"partition.shift_size": 90.0}),
        ({"data": "procedural_sprites", "data.images": 240, "data.side": 8, "data.limit": None,
          "partition": "by_factor", "partition.factor": "quadrant_shape", "partition.n_clients": 12},
         {"partition.join": 12}),
        ({"straggler.rule": "deadline"}, {"straggler.partial": "drop"}),
        ({"algorithm": "feddpms", "model": "vae", "model.channels": (8,)}, {"feddpms.preliminary_rounds": 2}),
        ({"algorithm": "dense", "client.epochs": 3}, {"dense.client_epochs": 3}),
        ({"algorithm": "fedcvae"}, {"fedcvae.truncate": 3.0, "client.epochs": None}),
        ({"algorithm": "fedper", "model": "cnn", "evaluate.clients": True}, {"fedper.layers": "network.last"}),
        ({"algorithm": "fedpvr", "model": "cnn"}, {"fedpvr.layers": "network.hidden, network.last"}),
        ({"sharing": "merf", "sharing.target_epsilon": 1.0, "sharing.noise": "summed", "sharing.steps": 1},
         {"sharing.noise_multiplier": pytest.approx(3.731, abs=1e-3), "sharing.scale": 105 / 784 * 64,
          "sharing.second_scale": 105 / 784 * 64}),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_a_rule_decided_is_stated(values: dict[str, Any], expected: dict[str, Any]) -> None:
    """A value that the config states is not stated again (None)."""
    result, _ = _effective(values)
    assert {name: result.get(name) for name in expected} == expected


def test_values_that_differ_between_clients_are_stated_for_each() -> None:
    """Noise is solved for a target also before the first round: it is what clients would use."""
    effective, sizes = _effective({"client.batch_size": 30, "partition.name": "quantity"})
    assert effective["client.batch_size"] == [min(30, n) for n in sizes]
    private = {"dp.local": True, "dp.target_epsilon": 3.0, "client.epochs": 1, "partition.name": "quantity"}
    effective, sizes = _effective(private)
    for n, sigma in zip(sizes, effective["dp.noise_multiplier"], strict=True):
        assert 2.98 <= epsilon(min(1.0, 10 / n), sigma, 5 * -(-n // 10), 1e-5) <= 3.0


@pytest.mark.long
def test_generators_state_noise_epochs_and_counts_and_the_frame_has_their_ranges(tmp_path: Path) -> None:
    values = {**QUICK, "sharing": "local_synthetic", "generator": "private_ddpm", "generator.target_epsilon": 9.0,
              "generator.label_noise": 2.0, "generator.channels": (8, 8), "data.limit": 200, "federation.rounds": 1,
              "artifacts": str(tmp_path / "artifacts")}  # fmt: skip
    result = run(experiment("smoke", values=values), tmp_path / "run", say=lambda _: None)
    used, (images, counts) = result.summary["effective"], result.summary["privacy"]["mechanisms"]["commons"]
    assert (counts["what"], set(counts["sigma"]), set(counts["steps"])) == ("class counts", {2.0}, {1})
    assert set(images["sigma"]) == {used["generator.noise_multiplier"]}
    assert used["generator.target_epochs"] == result.experiment.flat["generator.epochs"]
    assert 0 < used["sharing.p"] < 1
    assert used["client.epochs"] < result.experiment.client.epochs  # the rule of equal work
    for q, sigma, steps in zip(images["q"], images["sigma"], images["steps"], strict=True):
        assert 8.98 <= epsilon(q, sigma, steps, 1e-5) <= 9.0
    row = load_runs(result.folder).iloc[0]
    assert (row["pool_sigma_min"], row["pool_sigma_max"]) == (min(images["sigma"]), max(images["sigma"]))


def _event(client: int, q: float, sigma: float, steps: int, what: str = "delta", **more: Any) -> Release:
    return Release(client, (what,), mechanism=SAMPLED_GAUSSIAN, q=q, sigma=sigma, sensitivity=2.0, steps=steps, **more)


def test_mechanisms_keep_the_commons_and_the_updates_apart() -> None:
    shared = [_event(0, 1.0, 3.0, 1, "images"), _event(1, 1.0, 4.0, 1, "images"), Release(1, ("raw examples",))]
    ledger = Ledger.before_rounds(shared).after([_event(0, 0.5, 1.0, 8), _event(1, 0.2, 0.7, 8)])
    ledger = ledger.after([_event(1, 0.2, 0.7, 8), _event(0, 1.0, 3.0, 2, "codes", commons=True)])
    result = mechanisms(ledger, shared, 1e-5, 5.0)
    (updates,), (images, codes) = result["updates"], result["commons"]
    assert [updates[name] for name in ("client", "q", "sigma", "steps")] == [[0, 1], [0.5, 0.2], [1.0, 0.7], [8, 16]]
    assert (updates["clip"], images["clip"], codes["clip"]) == (5.0, 2.0, None)
    assert [images[name] for name in ("what", "sigma", "accountant")] == ["images", [3.0, 4.0], 2 * ["exact Gaussian"]]
    assert [codes[name] for name in ("what", "client", "steps")] == ["codes", [0], [2]]
    assert columns(result)["sigma_min"] == 0.7
    assert columns(result)["pool_sigma_max"] == 4.0
    events = [_event(0, 1.0, 2.0, 4), _event(1, 0.5, 1.0, 4), _event(2, 1.0, 2.0, 4), _event(2, 0.5, 2.0, 4)]
    (table,) = mechanisms(Ledger().after(events), [], 1e-5, 5.0)["updates"]
    assert table["client"] == [0, 1, 2, 2]
    assert table["accountant"] == ["exact Gaussian", "rdp", "rdp", "rdp"]  # exact if all steps see all examples
    assert accountants(table) == "exact Gaussian or rdp"
    for wrong in ({"client": []}, {"sigma": None}, {"delta": None}, {"clip": "1"}):
        assert flaw_of_summary({"privacy": {"mechanisms": {"updates": [table]}}}) is None
        flaw = flaw_of_summary({"privacy": {"mechanisms": {"updates": [table | wrong]}}})
        assert "privacy.mechanisms" in (flaw or "")
