"""docs/own_parts.md, as a reader follows it: its files are written, its commands given, from a folder of one's own."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "own_parts.md"
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    for line in block.strip().splitlines()
]


def _blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder with the page's files, the method of examples/ in my_lab.py, and examples/ itself."""
    for text in _blocks(PAGE):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, text[:80]
        (tmp_path / name[1]).write_text(text, encoding="utf-8")
    (tmp_path / "my_lab.py").write_text(
        (ROOT / "examples" / "own_method.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def words_of(line: str) -> tuple[str, list[str]]:
    """The script of a command of the page, and its words."""
    python, script, *words = shlex.split(line)
    assert python == "python"
    return script, [*words, "--tracking.wandb", "off"]


def given(lab: Path, line: str) -> str:
    """What a command of the page prints, given in a process of its own."""
    script, words = words_of(line)
    where = {k: v for k, v in os.environ.items() if k != "FEDCOMMONS_PARTS"}
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *words],
        cwd=lab,
        env=where,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if "run.py" in c], ids=lambda c: c.rpartition("/")[2])
@pytest.mark.long
def test_a_run_with_ones_own_parts(
    lab: Path, line: str, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    script, words = words_of(line)
    assert script == "sweeps/run.py"
    done = command("run", *words, cwd=lab)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (folder,) = [path.parent for path in lab.glob("runs/*/summary.json")]
    summary, config = (
        json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
    )
    assert summary["rounds"] == 3
    assert config["source"]
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = {name for name in rounds[-1] if name.startswith("convergence/")}
    assert {"convergence/zeta_sq", "convergence/sigma_sq"} <= measured
    if folder.name == "photos":
        assert (summary["n_clients"], config["model"]["width"], config["model"]["smoothing"]) == (5, 8, 0.1)
        assert rounds[-1]["test/top2"] == 1.0  # of two classes
        assert rounds[-1]["train/largest_loss"] >= rounds[-1]["train/loss"]
        taken = "import fedcommons; print(fedcommons.load('runs/photos', may_run=['my_nets.py:ResNetGN']).model.last)"
        said = subprocess.run([sys.executable, "-c", taken], cwd=lab, capture_output=True, text=True, encoding="utf-8")
        assert said.stdout.startswith("Linear(in_features=8, out_features=2"), said.stderr[-2000:]
        changed = lab / "my_nets.py"
        changed.write_text(changed.read_text(encoding="utf-8") + "# another version\n", encoding="utf-8")
        done = command("run", *words, "--resume", cwd=lab)
        assert (done.returncode, "another source.model" in done.stderr) == (2, True)
    if folder.name == "descriptions":
        assert summary["config"]["model.dim"] == 4
    if folder.name == "nights":
        assert config["straggler"] == {"rule": "my_rules.py:Nights", "partial": "method", "q": 0.8, "zones": 2}
        late = [line["late"] for line in rounds[1:]]
        assert any(late)
        assert all(i % 2 == number % 2 for number, ids in enumerate(late, 1) for i in ids)
    if folder.name == "rates":
        assert config["client"]["lr_schedule"] == "my_rates.py:inverse"
        assert (config["client"]["halved"], config["source"].keys()) == (2, {"schedule"})
    if folder.name == "watched":
        told = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
        assert {line.split(",")[0] for line in told[1:]} == {"0", "1", "2", "3"}
        assert [line["round"] for line in rounds if "measure/sharpness" in line] == [0, 2, 3]
        assert config["source"].keys() == {"tracker", "measure"}
    if folder.name == "mixed":
        assert config["mixed"] == {"own": 0.7}
        assert [line["round"] for line in rounds if "test/accuracy" in line] == [0, 2, 3]
        for name in ("clients/train_accuracy_mean", "personal/train_accuracy_mean", "personal/train_loss_std"):
            assert summary[name] == rounds[-1][name]
        assert rounds[-1]["personal/train_loss_mean"] < rounds[-1]["clients/train_loss_mean"]
    if folder.name == "neighbours":
        assert summary["p"] > 0
        assert summary["privacy"]["epsilon_of_messages"] is None


@pytest.mark.ray
@pytest.mark.parametrize("command", [c for c in COMMANDS if "run.py" not in c], ids=lambda c: c[7:60])
def test_a_sweep_with_ones_own_parts(lab: Path, command: str) -> None:
    """Real trials on a real Ray, which find the parts by the same text."""
    given(lab, command)
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in lab.glob("runs/*/*/summary.json")]
    configs = [
        yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))
        for path in lab.glob("runs/*/*/summary.json")
    ]
    if "table1" in command:
        assert {s["algorithm"] for s in summaries} == {"fedavg", "my_lab.py:FedAvgM"}
        assert [c["fedavgm"] for c in configs if "fedavgm" in c] == [{"beta": 0.5}]
    elif "fedavgm" in command:
        assert sorted((c["fedavgm"]["beta"], c["seed"]) for c in configs) == [(0.5, 0), (0.5, 1), (0.9, 0), (0.9, 1)]
        assert len({s["last_accuracy"] for s in summaries}) > 1
    else:
        assert sorted(c["generator"]["spread"] for c in configs) == [0.5, 1.0]


@pytest.mark.ray
def test_actors_find_ones_own_parts_and_give_the_bits_of_one_process(lab: Path) -> None:
    command = next(c for c in COMMANDS if "ResNetGN" in c)
    given(lab, command)
    given(lab, f"{command.replace('runs/photos', 'runs/actors')} --federation.executor ray_actors")
    of = [(lab / "runs" / name / "rounds.jsonl").read_bytes() for name in ("photos", "actors")]
    assert of[0] == of[1]
