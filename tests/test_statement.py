"""The privacy statement: what was earned, what would be, and what is taken at a component's word."""

from pathlib import Path
from typing import Any

import pytest

from fedcommons.accounting.privacy import Ledger
from fedcommons.accounting.statement import in_short, statement
from fedcommons.config import presets
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.runs.experiment import run


def _trained(client: int, steps: int = 8, what: str = "delta") -> Release:
    return Release(client, (what,), mechanism=SAMPLED_GAUSSIAN, q=0.25, sigma=1.0, sensitivity=5.0, steps=steps)


def test_seeded_noise_earns_nothing_and_the_names_say_so() -> None:
    """The numbers are those of secret noise, under names that cannot be taken for a guarantee."""
    ledger = Ledger.of([_trained(0, 4, "images")]).after([_trained(0)])
    earned, seeded = (statement(ledger, 1, 1e-5, rejected=0, local=True, secret=secret) for secret in (True, False))
    assert (earned["noise"], seeded["noise"]) == ("secret", "seeded")
    names = [name for name in earned if "epsilon" in name]
    assert len(names) == 4
    assert not any(name.endswith("_if_secret") for name in names)
    for name in names:
        assert seeded[name] is None
        assert seeded[f"{name}_if_secret"] == earned[name] != 0
    assert (earned["overall"], seeded["overall"]) == (earned["epsilon_of_messages"], "none")
    shared, whole = earned["pool_epsilon_max"], earned["overall"]
    assert all(f"{shared:.4g} at delta = 1e-05" in told["in_words"][0] for told in (earned, seeded))
    assert all(f"{whole:.4g} at delta = 1e-05" in told["in_words"][1] for told in (earned, seeded))
    assert "would be" not in earned["in_words"][1]
    assert all("if the noise were secret" in line and "none" in line for line in seeded["in_words"])
    short = in_short(seeded)
    assert short.pop("in_words") == " ".join(seeded["in_words"])
    assert short.pop("uncovered") == "; ".join(seeded["uncovered"])
    assert short == {
        "pool_epsilon_max_if_secret": shared, "epsilon_of_messages_if_secret": whole, "overall": "none", "trusted": ""
    }  # fmt: skip


def test_parts_that_are_not_ours_are_named_as_trusted() -> None:
    own = {"algorithm": "my.py:Mine", "generator": "my.py:Draws", "tracker": "my.py:Tells"}
    said = statement(Ledger(), 1, 1e-5, rejected=0, local=True, secret=True, own=own)["trusted"]
    assert [line.partition(":")[0] for line in said] == ["algorithm my.py", "generator my.py"]
    assert statement(Ledger(), 1, 1e-5, rejected=0, local=True, secret=True)["trusted"] == []


def test_a_rejection_shows() -> None:
    ledger = Ledger().after([_trained(0)])
    quiet, rejected = (statement(ledger, 5, 1e-5, rejected=n, local=True, secret=True) for n in (0, 2))
    assert rejected["epsilon_of_messages"] is None
    assert quiet["epsilon_of_messages"] > 0
    assert len(rejected["uncovered"]) == len(quiet["uncovered"]) + 1
    assert "2 replies were rejected" in rejected["uncovered"][-1]


@pytest.mark.parametrize(
    "values",
    [
        {"sharing.setting": "local_synthetic", "generator.epochs": 1, "generator.channels": (8, 8),
         "generator.sampling_steps": 2},  # a real image has a part in all synthetic ones
        {"sharing.setting": "shuffled_real", "sharing.p": 0.5},
        {"algorithm": "fedmix"},
    ],
    ids=["local_synthetic", "shuffled_real", "fedmix"],
)  # fmt: skip
@pytest.mark.long
def test_a_run_that_shares_something_has_no_epsilon_of_all_messages(values: dict[str, Any], tmp_path: Path) -> None:
    plain = {"dp.local": True, "tracking.wandb": "off", "measure.every": 0, "data.limit": 60, "client.epochs": 1}
    config = presets.experiment("smoke", "digits", plain | values | {"artifacts": str(tmp_path / "store")})
    said = run(config, tmp_path / "run", say=lambda text: None)["privacy"]
    assert said["epsilon_of_messages_if_secret"] is None
    assert said["epsilon_local_training_if_secret"]["largest"] > 0
