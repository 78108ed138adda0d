"""The trials of a sweep: their order, which Tune tries again, and the results that are kept between sweeps."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.tune.search import Searcher

from fedcommons.config import presets
from fedcommons.config.flat import override, to_dict
from fedcommons.errors import UserError
from fedcommons.sweeping import kept, trials
from fedcommons.sweeping import sweep as tuning
from fedcommons.sweeping.display import Display
from fedcommons.sweeping.order import InOrder, Lacking


def in_order(cells: dict[str, int], cores: int, monkeypatch: pytest.MonkeyPatch) -> InOrder:
    """Return the order of cells, each with this number of generators of its own, on a machine with these cores."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(cores)})
    lacking = [Lacking(3, [f"{name} {i}"], [name], [name]) for name, n in cells.items() for i in range(n)]
    return InOrder(dict.fromkeys(cells, 1), lacking)


def starts(order: InOrder, cores: int, fails: str = "") -> list[str]:
    """Return what starts when, if trials take equally long, as Tune asks: twice as many wait as there are cores."""
    running: list[tuple[str, dict]] = []
    started = []
    for number in range(100):
        while len(running) < 2 * cores:
            found = order.suggest(str((number, len(running))))
            if not isinstance(found, dict):
                break
            running.append((str((number, len(running))), found))
            started.append(found["cell"] if "cell" in found else f"makes {found['generator']['images'][0]}")
        if not running:
            assert found == Searcher.FINISHED
            return started
        trial, given = running.pop(0)
        is_failed = fails in given.get("generator", {}).get("images", [])
        order.on_trial_complete(trial, {"failed": "no memory", "trace": "line 7"} if is_failed else {"trained": True})
    raise AssertionError("it never ends")


def test_a_cell_waits_for_its_generators_and_fails_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"pool": 3, "real": 0, "next pool": 1, "next real": 0}
    assert starts(in_order(cells, 1, monkeypatch), 1) == [
        "makes pool 0", "makes pool 1", "makes pool 2", "pool", "real", "makes next pool 0", "next pool", "next real",
    ]  # fmt: skip
    order = in_order({"pool": 2, "real": 0}, 1, monkeypatch)
    assert starts(order, 1, fails="pool 0") == ["makes pool 0", "makes pool 1", "real"]
    assert order.failed == {"pool": "the generator of client 3 failed: no memory"}
    assert (order.traces, order.trained) == (["line 7"], 1)


FACTS = {"seed": 3, "channels": (8, 16), "rate": 0.1}


def test_a_kept_result_is_read_again_if_all_facts_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert kept.read(file, FACTS, "audit") is None
    kept.write(file, FACTS, "audit", {"auc": 0.75})
    assert kept.read(file, FACTS, "audit") == {"auc": 0.75}
    for facts, words in (
        ({**FACTS, "seed": 4}, "seed = 3, and now it is 4"),
        ({"seed": 3, "rate": 0.1}, "channels = [8, 16], and now it is its default"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            kept.read(file, facts, "audit")
    for content in ("", '{"facts": {}}', '{"facts": 1, "audit": {}}', "NaN"):
        file.write_text(content)
        with pytest.raises(UserError, match="remove it"):
            kept.read(file, {}, "audit")


TRIAL = trials.trial


def counted(params: Mapping[str, Any]) -> None:
    """Leave a mark beside the trial's folder at each start; kill the process at the first start of one of them."""
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


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_trial_is_tried_again_only_if_its_process_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import cloudpickle

    values = {"data.limit": 100, "measure.every": 0, "federation.rounds": 1, "tracking.wandb": "off"}
    smoke = presets.experiment("smoke", "digits", {**values, "artifacts": str(tmp_path / "artifacts")})
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the trials cannot import a test
    monkeypatch.setattr(trials, "trial", counted)
    killed = tuning.Trial("killed", smoke)
    refused = tuning.Trial("refused", override(smoke, {"seed": 1}))
    missing = tuning.Trial("missing", override(smoke, {"sharing.setting": "local_synthetic"}))
    out = tmp_path / "out"
    (out / "refused").mkdir(parents=True)  # it holds a run of another seed, and an older error
    (out / "refused" / "config.yaml").write_text(yaml.safe_dump(to_dict(smoke)))
    (out / "refused" / "environment.json").write_text("{}")
    (out / "refused" / "error.txt").write_text("an old one\n")
    (out / "dies").write_text("killed")
    outcome = tuning.run_cells(tuning.Todo(3, [killed, refused, missing], []), out, Display())  # without generators
    starts = {path.stem: path.read_text() for path in out.glob("*.starts")}
    assert starts == {"killed": "xx", "refused": "x", "missing": "x"}
    assert (out / "killed" / "summary.json").exists()
    assert set(outcome.failures) == {"refused", "missing"}
    assert "holds a run with another seed" in outcome.failures["refused"]
    assert outcome.failures["missing"].endswith(f"(traceback: {out / 'missing' / 'error.txt'})")
