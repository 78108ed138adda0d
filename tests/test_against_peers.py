"""``benchmarks/against_peers.py``: how the process of another framework is timed and given up; none is needed."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPORTS = "import json\nfrom work import TIMES\nprint('PEERBENCH ' + json.dumps({'round_times': TIMES}))\n"


@pytest.fixture
def seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a framework's script, whose rounds take these times, with nothing but Python in its environment."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    against = importlib.import_module("against_peers")
    python = tmp_path / "venv-rival" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    def run(script: str, times: list[float], own: str = "") -> float:
        (tmp_path / "rival.py").write_text(script, encoding="utf-8")
        (tmp_path / "work.py").write_text(f"TIMES = {json.dumps(times)}\n", encoding="utf-8")
        if own:
            (tmp_path / "own").mkdir()
            (tmp_path / "own" / "rival.py").write_text(own, encoding="utf-8")
            monkeypatch.setattr(against, "OWN", tmp_path / "own")
        return against.run(against.Rival("rival", "venv-rival", "rival.py {workload}"), "W1", tmp_path, tmp_path)

    return run


def test_our_script_is_preferred_and_has_the_median_of_its_rounds_but_the_first(seconds: Callable[..., float]) -> None:
    assert seconds("raise SystemExit('theirs')", [9.0, 1.0, 5.0, 2.0], REPORTS) == 2.0


@pytest.mark.parametrize(
    ("script", "times", "why"),
    [("raise SystemExit('too old')", [], "exit code 1: too old"), (REPORTS, [1.0], "one round")],
)
def test_a_failure_is_reported(seconds: Callable[..., float], script: str, times: list[float], why: str) -> None:
    with pytest.raises(Exception, match=why) as error:
        seconds(script, times)
    assert type(error.value).__name__ == "RivalError"
