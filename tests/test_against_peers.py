"""``benchmarks/against_peers.py``: how a rival's process is found, timed and given up; no rival is needed."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
REPORTS = "import json\nfrom work import TIMES\nprint('PEERBENCH ' + json.dumps({'round_times': TIMES}))\n"


@pytest.fixture(scope="module")
def against() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("against_peers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of scripts, and of an environment with nothing but Python."""
    python = tmp_path / "venv-rival" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return tmp_path


def seconds(against: ModuleType, folder: Path, script: str, times: list[float]) -> float:
    """What ``run`` says of a script, with its rounds' seconds."""
    (folder / "rival.py").write_text(script)
    (folder / "work.py").write_text(f"TIMES = {json.dumps(times)}\n")
    return against.run(against.Rival("rival", "venv-rival", "rival.py {workload}"), "W1", folder, folder)


def test_a_rival_has_the_median_of_its_rounds_but_the_first(against: ModuleType, folder: Path) -> None:
    assert seconds(against, folder, REPORTS, [9.0, 1.0, 5.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    ("script", "times", "why"),
    [
        ("raise SystemExit('it is too old')", [], "exit code 1: it is too old"),
        (REPORTS, [1.0], "one round only"),
    ],
)
def test_why_a_rival_has_no_seconds_is_said(
    against: ModuleType, folder: Path, script: str, times: list[float], why: str
) -> None:
    with pytest.raises(against.RivalError, match=why):
        seconds(against, folder, script, times)


def test_a_script_of_ours_is_taken_first_and_imports_the_common_work(
    against: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder / "own"
    own.mkdir()
    (own / "rival.py").write_text(REPORTS)
    monkeypatch.setattr(against, "OWN", own)
    assert seconds(against, folder, "raise SystemExit('theirs')", [9.0, 1.0]) == 1.0


def test_what_pip_installs_is_said_of_every_rival(against: ModuleType) -> None:
    assert {rival.environment for rival in against.RIVALS} == set(against.ENVIRONMENTS)
