"""What the site's pages ask of the code, without building it: each part has its place, and Start does what it says."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcommons
from fedcommons.config.parts import KINDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
START = DOCS / "start.md"
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", START.read_text(), re.S) for line in block.strip().splitlines()
]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def of_page(path: Path, kind: str) -> list[str]:
    """The parts of a kind whose docstrings a page asks for."""
    return re.findall(rf"<!-- docstring {kind} (\w+) -->", path.read_text(encoding="utf-8"))


def test_every_part_has_its_place() -> None:
    methods = {path.stem: path for path in (DOCS / "methods").glob("*.md") if path.stem != "index"}
    assert methods.keys() == KINDS["algorithm"].known.keys()
    for name, path in methods.items():
        assert of_page(path, "algorithm") == [name]
        for what in ("$$\n", "**When to use it.**", "**What it costs.**", "**What we found.**"):
            assert what in path.read_text(), (name, what)
        assert f"({name}.md)" in (DOCS / "methods" / "index.md").read_text()
    pages = {"sharing": "sharing.md", "generator": "generators.md", "partition": "ideas/partitions.md"}
    for kind, page in pages.items():
        assert sorted(of_page(DOCS / page, kind)) == sorted(KINDS[kind].known), kind


def test_every_sweep_and_every_letter_has_its_place() -> None:
    sweeps = re.findall(r"<!-- sweep (\w+) -->", (DOCS / "sweeps.md").read_text())
    assert sorted(sweeps) == sorted(path.stem for path in (ROOT / "sweeps").glob("*.py"))
    ideas = "".join(path.read_text() for path in (DOCS / "ideas").glob("*.md"))
    for picture in ("alpha", "n", "c", "e", "b", "p", "rho", "zeta"):
        assert f"({picture}.png)" in ideas
        assert (DOCS / "ideas" / f"{picture}.png").is_file()
    assert all(f"(partition_{name}.png)" in ideas for name in KINDS["partition"].known)


def test_the_public_names_stand_in_the_groups_of_the_docstring() -> None:
    """From which the reference is made."""
    named = re.findall(r"\w+", re.sub(r"^\w+ ?\w*  +", "", fedcommons.__doc__ or "", flags=re.M))
    assert set(fedcommons.__all__) <= set(named)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder with the files of Start."""
    for text in re.findall(r"```python\n(.*?)```", START.read_text(), re.S):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, text[:80]
        (tmp_path / name[1]).write_text(text)
    return tmp_path


def shape(text: str) -> list[str]:
    """Lines whose numbers, which depend on the machine, are all alike."""
    return [
        re.sub(r"[\d.]*\d( (min|s|MB|GB|kB))?|(?<=round) \d+", "#", line).strip() for line in text.strip().splitlines()
    ]


@pytest.mark.parametrize("line", [c for c in COMMANDS if "run.py" in c], ids=lambda c: c[-30:])
@pytest.mark.long
def test_a_run_of_start(lab: Path, line: str, command: Command) -> None:
    words = line.split()[2:]
    done = command("run", *words, *([] if "--dry-run" in words else ["--wandb", "off"]), cwd=lab)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = [shape(block) for block in re.findall(r"```text\n(.*?)```", START.read_text(), re.S)]
    said = shape(done.stdout)
    if "runs/first" in words:
        assert said == shown[1]
    elif "--dry-run" in words:
        assert said[-2:] == shown[2]
        assert not (lab / "runs").exists()
    else:
        assert (lab / "runs/heavy/summary.json").is_file()


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("python ") and "sweeps/" not in c])
@pytest.mark.long
def test_a_program_of_start(lab: Path, line: str) -> None:
    done = subprocess.run([sys.executable, *line.split()[1:]], cwd=lab, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("keeps every promise" if "my_lab" in line else "scaffold") in done.stdout


@pytest.mark.ray
@pytest.mark.parametrize("line", [c for c in COMMANDS if "table1" in c], ids=lambda c: c[:20])
def test_a_sweep_of_start(lab: Path, line: str) -> None:
    """``make table1`` gives its ARGS to the sweep; that it makes the environment too, CI sees."""
    words = line.replace('make table1 ARGS="', "python sweeps/table1.py --resume ").replace('"', "").split()[2:]
    done = subprocess.run(
        [sys.executable, str(ROOT / "sweeps" / "table1.py"), *words, "--wandb", "off"], cwd=lab,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list(lab.glob("runs/*/table1.md"))
