"""docs/own_parts.md and docs/start.md: their files are written, and their commands run from a folder with them."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def write_files(folder: Path, page: str) -> None:
    """Write the files of a page, and what it takes from examples/."""
    (folder / "my_lab.py").write_text((ROOT / "examples" / "own_method.py").read_text(encoding="utf-8"), "utf-8")
    for text in re.findall(r"```python\n(.*?)```", TEXTS[page], re.S):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, text[:80]
        (folder / name[1]).write_text(text, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")


@pytest.mark.parametrize(
    ("page", "line"), [one for one in COMMANDS if "run.py" in one[1]], ids=lambda v: v.rpartition(" ")[2]
)
@pytest.mark.long
def test_a_run_of_a_page(page: str, line: str, tmp_path: Path, command: Command) -> None:
    write_files(tmp_path, page)
    python, script, *words = shlex.split(line)
    assert (python, script) == ("python", "sweeps/run.py")
    words += ["--tracking.wandb", "off"]
    done = command("run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if "--dry-run" in words:
        assert not (tmp_path / "runs").exists()
        return
    (folder,) = [path.parent for path in tmp_path.glob("runs/*/summary.json")]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert summary["rounds"] == 3
    assert bool(config.get("source")) == (folder.name != "first")
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    if folder.name == "photos":
        assert (summary["n_clients"], config["model"]["width"], rounds[-1]["test/top2"]) == (5, 8, 1.0)
    elif folder.name == "nights":  # clients of one of two zones are late, in turn
        late = [line["late"] for line in rounds[1:]]
        assert any(late)
        assert all(i % 2 == number % 2 for number, ids in enumerate(late, 1) for i in ids)
    elif folder.name == "watched":
        logged = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
        assert {line.split(",")[0] for line in logged[1:]} == {"0", "1", "2", "3"}
        assert [line["round"] for line in rounds if "measure/sharpness" in line] == [0, 2, 3]


@pytest.mark.parametrize(
    ("page", "line"),
    [one for one in COMMANDS if "tune.py" in one[1] or (one[0] == "start.md" and "table1.py" in one[1])],
    ids=lambda v: v.rpartition(" ")[2],
)
def test_a_sweep_of_a_page(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweeps: Callable[[str], ModuleType]
) -> None:
    write_files(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    _, script, *words = shlex.split(line)
    assert cells_of(sweeps(Path(script).stem), words)


def test_no_command_of_a_page_is_left_out() -> None:
    """A new kind of command must get a test here."""
    other = [line for _, line in COMMANDS if not re.match(r"python (sweeps/(run|tune|table1)|\w+)\.py", line)]
    assert other == ['make table1 ARGS="--preset smoke"']  # CI runs this command


@pytest.mark.parametrize("line", [line for _, line in COMMANDS if re.match(r"python \w+\.py$", line)])
@pytest.mark.long
def test_a_program_of_start(tmp_path: Path, line: str) -> None:
    write_files(tmp_path, "start.md")
    done = subprocess.run([sys.executable, *line.split()[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("keeps every promise" if "my_lab" in line else "scaffold") in done.stdout


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
