"""Commands of pages are ones that the sweeps take; runs of docs/own_parts.md and docs/start.md are played."""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import yaml
from sweep_runs import sweep_output

from fedcommons.cli import parse

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
FOLLOWED = ("docs/own_parts.md", "docs/start.md")
"""Pages whose files are written and whose runs are run."""


def commands(page: str) -> list[str]:
    """Return each command of a sweep in a code span or a line of a block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    lines = [line for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.S | re.M) for line in block.splitlines()]
    matches = (re.match(r"(?:\$ )?(python sweeps/[a-z]\w*\.py.*?)(?:\s+#.*)?$", one) for one in (*spans, *lines))
    return list(dict.fromkeys(match[1] for match in matches if match))


def write_files(folder: Path, page: str) -> None:
    """Write the files of a page, and what it takes from examples/."""
    (folder / "my_lab.py").write_text((ROOT / "examples" / "own_method.py").read_text(encoding="utf-8"), "utf-8")
    for text in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, text[:80]
        (folder / name[1]).write_text(text, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")


def test_a_command_of_a_page_is_one_that_its_sweep_takes(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    write_files(tmp_path, FOLLOWED[0])
    examples = ("own_method", "own_tracker", "own_measure")
    (tmp_path / "my_lab.py").write_text("\n".join((ROOT / f"examples/{name}.py").read_text() for name in examples))
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("seed: 0\n")
    monkeypatch.chdir(tmp_path)
    load, claims = cache(sweeps), pd.read_csv(ROOT / "docs/claims.csv")["command"].dropna()
    found = [one for one in claims if "sweeps/" in one]  # the site's build checks those of pages.yaml
    folders = ("howto", "coming_from", "ideas", "methods", ".")
    guides = [str(path.relative_to(ROOT)) for name in folders for path in sorted((ROOT / "docs" / name).glob("*.md"))]
    for page in {"README.md", "docs/results/README.md", *guides} - {FOLLOWED[1]}:
        found += commands(page)
    for command in found:
        _, script, *words = shlex.split(command)
        if "--replay" in words:  # no other option goes with it
            assert parse.named(words) <= {"replay", "round", "client", "pdb"}
        elif "fedavgg" not in command:
            load(Path(script).stem).arguments(words)


RUNS = [(page, line) for page in FOLLOWED for line in commands(page) if "run.py" in line and "--dry-run" not in line]


@pytest.mark.parametrize(("page", "line"), RUNS, ids=lambda v: v.rpartition(" ")[2])
@pytest.mark.long
def test_a_run_of_a_page(page: str, line: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    write_files(tmp_path, page)
    done = command("run", *shlex.split(line)[2:], "--tracking.wandb", "off", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (folder,) = [path.parent for path in tmp_path.glob("runs/*/summary.json")]
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rounds"] == 3
    assert bool(config.get("source")) == (folder.name != "first")


@pytest.mark.long
def test_the_first_program_of_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, "docs/start.md")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("ten_lines.py", run_name="__main__")
    assert "scaffold" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_sweep_finds_user_defined_components(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, FOLLOWED[0])
    (line,) = [line for line in commands(FOLLOWED[0]) if "table1.py" in line]
    _, script, *words = shlex.split(line)
    monkeypatch.delenv("FEDCOMMONS_PARTS", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sweep_output(sweeps(Path(script).stem).table1, tmp_path, *words, "--tracking.wandb", "off")
    configs = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in tmp_path.glob("runs/*/*/config.yaml")]
    assert {config["algorithm"] for config in configs} == {"fedavg", "my_lab.py:FedAvgM"}


def test_numbers_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS))
    script = import_module("regenerate")
    other = (one := pd.DataFrame({"method": ["x", "y"], "accuracy": [0.5, 0.75]})).assign(accuracy=[0.5, 0.5])
    assert "accuracy is 0.25 off at y" in " ".join(script.differences(one, other, ["method"], {"accuracy": 0.125}))
    assert not script.differences(one, other, ["method"], {"accuracy": 0.25})


def test_a_page_with_a_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESULTS.parent / "_ext"))
    results, mine = import_module("results"), tmp_path / "mine.csv"
    mine.write_text("method,seed,share,rounds_to_target,rounds\nfedavg,0,0.5,3,9\nfedavg,1,0.7,,9\n")
    (tmp_path / "mine.md").write_text("![a picture](mine.png)")
    (tmp_path / "pictures.csv").write_text(f"picture,csv,crc\nmine.png,mine.csv,{results.crc(mine)}")
    columns = {"%": ["std", "100 * share", 1], "rounds": ["std", "rounds_to_target", 1]}
    table = {"csv": "mine.csv", "rows": {"by": "method"}, "columns": columns}
    page: dict[str, Any] = {"command": "sweeps/table1.py --seeds 0", "tables": {"main": table}}
    assert "| FedAvg | 60.0 ± 14.1 | >6 (missed by 1 of 2) |" in results.table(table, tmp_path)
    assert not [*results.faults("mine", page, tmp_path)]
    columns["%"][1], page["command"] = "shares", "sweeps/table1.py --sees 0"
    mine.write_text(mine.read_text() + "scaffold,0,0.5,3,9\n")
    for fault, word in zip(results.faults("mine", page, tmp_path), ("shares", "--sees", "older than"), strict=True):
        assert fault.startswith("mine: ")
        assert word in fault
