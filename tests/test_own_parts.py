"""docs/own_parts.md and docs/start.md: their files are written, and their commands run from a folder with them."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from sweep_cells import cells_of

ROOT = Path(__file__).parent.parent
PAGES = ("own_parts.md", "start.md")
TEXTS = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES}
COMMANDS = [
    (page, line)
    for page, text in TEXTS.items()
    for block in re.findall(r"```bash\n(.*?)```", text, re.S)
    for line in block.strip().splitlines()
]
RUNS = [(page, line) for page, line in COMMANDS if "run.py" in line and "--dry-run" not in line]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def write_files(folder: Path, page: str) -> None:
    """Write the files of a page, and what it takes from examples/."""
    (folder / "my_lab.py").write_text((ROOT / "examples" / "own_method.py").read_text(encoding="utf-8"), "utf-8")
    for text in re.findall(r"```python\n(.*?)```", TEXTS[page], re.S):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, text[:80]
        (folder / name[1]).write_text(text, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")


def test_a_command_that_plans_or_sweeps_is_one_that_its_script_takes(
    sweeps: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for page, line in COMMANDS:
        if (page, line) in RUNS or not line.startswith("python sweeps"):
            continue
        (folder := tmp_path / str(len([*tmp_path.iterdir()]))).mkdir()
        write_files(folder, page)
        monkeypatch.chdir(folder)
        _, script, *words = shlex.split(line)
        sweep = sweeps(Path(script).stem)
        assert sweep.arguments(words) if "run.py" in line else cells_of(sweep, words)


@pytest.mark.parametrize(("page", "line"), RUNS, ids=lambda v: v.rpartition(" ")[2])
@pytest.mark.long
def test_a_run_of_a_page(page: str, line: str, tmp_path: Path, command: Command) -> None:
    write_files(tmp_path, page)
    words = [*shlex.split(line)[2:], "--tracking.wandb", "off"]
    done = command("run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (folder,) = [path.parent for path in tmp_path.glob("runs/*/summary.json")]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert summary["rounds"] == 3
    assert bool(config.get("source")) == (folder.name != "first")
    if folder.name in FACTS:
        assert FACTS[folder.name](summary, config, rounds)
    if folder.name == "photos":
        changed = tmp_path / "my_nets.py"
        changed.write_text(changed.read_text(encoding="utf-8") + "# another version\n", encoding="utf-8")
        done = command("run", *words, "--resume", cwd=tmp_path)
        assert (done.returncode, "another source.model" in done.stderr) == (2, True)


def late_in_turn(rounds: list[dict[str, Any]]) -> bool:
    """Return whether clients of one of two zones are late, in turn."""
    late = [line["late"] for line in rounds[1:]]
    return any(late) and all(i % 2 == number % 2 for number, ids in enumerate(late, 1) for i in ids)


FACTS: dict[str, Callable[[dict[str, Any], dict[str, Any], list[dict[str, Any]]], bool]] = {
    "photos": lambda s, c, r: (s["n_clients"], c["model"]["width"], r[-1]["test/top2"]) == (5, 8, 1.0),
    "nights": lambda s, c, r: late_in_turn(r),
    "rates": lambda s, c, r: (c["client"]["halved"], [*c["source"]]) == (2, ["schedule"]),
    "watched": lambda s, c, r: [line["round"] for line in r if "measure/sharpness" in line] == [0, 2, 3],
    "mixed": lambda s, c, r: (
        [line["round"] for line in r if "test/accuracy" in line] == [0, 2, 3]
        and r[-1]["personal/train_loss_mean"] < r[-1]["clients/train_loss_mean"]
    ),
    "neighbours": lambda s, c, r: s["p"] > 0 and s["privacy"]["epsilon_of_messages"] is None,
}
"""What holds for summary, config and rounds of a run, by the name of its folder."""


@pytest.mark.parametrize(("name", "printed"), [("ten_lines.py", "scaffold"), ("my_lab.py", "keeps every promise")])
@pytest.mark.long
def test_a_program_of_start(
    name: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ("start.md", f"python {name}") in COMMANDS
    write_files(tmp_path, "start.md")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(name, run_name="__main__")
    assert printed in capsys.readouterr().out


@pytest.mark.ray
def test_a_sweep_finds_user_defined_components(tmp_path: Path) -> None:
    write_files(tmp_path, "own_parts.md")
    (line,) = [line for page, line in COMMANDS if page == "own_parts.md" and "table1.py" in line]
    _, script, *words = shlex.split(line)
    clean = {k: v for k, v in os.environ.items() if k != "FEDCOMMONS_PARTS"}
    command = [sys.executable, str(ROOT / script), *words, "--tracking.wandb", "off"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    configs = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in tmp_path.glob("runs/*/*/config.yaml")]
    assert {config["algorithm"] for config in configs} == {"fedavg", "my_lab.py:FedAvgM"}
    assert [config["fedavgm"] for config in configs if "fedavgm" in config] == [{"beta": 0.5}]
