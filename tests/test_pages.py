"""Pages: their commands are ones that the sweeps take, and docs/results/regenerate.py compares numbers."""

import re
import shlex
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import yaml

from fedcommons.config import cli

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def commands() -> list[str]:
    """Return each command of a sweep in a code span or a line of a block, and those that make pages' numbers."""
    found = []
    for page in ("README.md", "docs/howto.md", "docs/claims.md", "docs/results/README.md"):
        text = (ROOT / page).read_text()
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
        lines = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in block.splitlines()]
        matches = (re.match(r"(?:\$ )?(python sweeps/[a-z]\w*\.py.*?)(?:\s+#.*)?$", one) for one in (*spans, *lines))
        found += [match[1] for match in matches if match]
    for facts in yaml.safe_load((RESULTS / "pages.yaml").read_text()).values():
        found.append(f"python {facts['command'].replace('DIR', 'runs')} --out runs/out")
    return list(dict.fromkeys(found))


def test_a_command_of_a_page_is_one_that_its_sweep_takes(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    examples = ("own_method", "own_tracker", "own_measure")
    (tmp_path / "my_lab.py").write_text("\n".join((ROOT / f"examples/{name}.py").read_text() for name in examples))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("seed: 0\n")
    monkeypatch.chdir(tmp_path)
    load = cache(sweeps)
    for command in commands():
        _, script, *words = shlex.split(command)
        if "--replay" in words:  # no other option goes with it
            assert cli.named(words) <= {"replay", "round", "client", "pdb"}
        elif "fedavgg" not in command:
            load(Path(script).stem).arguments(words)


def test_the_cheapest_pages_are_taken_and_numbers_that_differ_are_reported() -> None:
    spec = spec_from_file_location("regenerate", RESULTS / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(script := module_from_spec(spec))
    minutes = {"a": 5.0, "b": 1.0, "c": 4.0, "d": 30.0}
    assert [script.within(limit, minutes) for limit in (0.5, 9.9, 10)] == [[], ["b", "c"], ["b", "c", "a"]]
    one = pd.DataFrame({"method": ["x", "y"], "seed": [0, 0], "accuracy": [0.5, 0.75], "rounds": [None, 3.0]})
    other = one.iloc[::-1]

    def differences(changed: pd.DataFrame) -> str:
        return " ".join(script.differences(one, changed, ["method", "seed"], {"accuracy": 0.125, "rounds": 0}))

    assert differences(other) == ""
    assert differences(other.assign(accuracy=[0.625, 0.5])) == ""
    assert "accuracy is 0.25 off at y, 0" in differences(other.assign(accuracy=[0.5, 0.5]))
    assert differences(other.assign(rounds=[3.0, 8.0])).startswith("rounds is inf off at x, 0")
    assert differences(one.head(1)) == "other rows: 2 committed, 1 made"
