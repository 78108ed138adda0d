"""The trials of a sweep: which failures Tune tries again, and what is said of them."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override, to_dict
from fedcommons.sweeping import sweep as tuning
from fedcommons.sweeping import trials
from fedcommons.sweeping.display import Display

pytestmark = pytest.mark.ray

TRIAL = trials.trial


def counted(params: Mapping[str, Any]) -> None:
    """A trial that leaves a mark beside its folder each time it starts; one that is to die does so the first time."""
    import os
    import signal

    from fedcommons.sweeping import handed

    name = params["cell"]
    marks = Path(handed.value(name)["out"]) / f"{name}.starts"
    with open(marks, "a", encoding="utf-8") as file:
        file.write("x")
    if (marks.parent / "dies").read_text() == name and marks.read_text() == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    TRIAL(params)


@pytest.fixture
def smoke(tmp_path: Path) -> Experiment:
    values = {"data.limit": 100, "measure.every": 0, "federation.rounds": 1, "tracking.wandb": "off"}
    return presets.experiment("smoke", "digits", {**values, "artifacts": str(tmp_path / "artifacts")})


def test_a_trial_is_tried_again_where_its_process_died_and_not_where_its_request_cannot_be_met(
    ray_session: None, smoke: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the trials cannot import a test
    monkeypatch.setattr(trials, "trial", counted)
    killed = tuning.Trial("killed", smoke)
    refused = tuning.Trial("refused", override(smoke, {"seed": 1}))
    missing = tuning.Trial("missing", override(smoke, {"sharing.setting": "local_synthetic"}))
    out = tmp_path / "out"
    (out / "refused").mkdir(parents=True)  # in its folder lies a run of another seed, and what an old one had to say
    (out / "refused" / "config.yaml").write_text(yaml.safe_dump(to_dict(smoke)))
    (out / "refused" / "environment.json").write_text("{}")
    (out / "refused" / "error.txt").write_text("an old one\n")
    (out / "dies").write_text("killed")
    left = tuning.Todo(3, [killed, refused, missing], [])  # the last without its generators
    outcome = tuning.run_cells(left, out, Display())
    assert {path.stem: path.read_text() for path in out.glob("*.starts")} == {
        "killed": "xx",
        "refused": "x",
        "missing": "x",
    }
    assert (out / "killed" / "summary.json").exists()
    assert set(outcome.failures) == {"refused", "missing"}
    assert "holds a run with another seed" in outcome.failures["refused"]
    assert not outcome.failures["refused"].startswith("UserError")
    assert outcome.failures["missing"].endswith(f"(traceback: {out / 'missing' / 'error.txt'})")
