"""``--help`` and refusals import nothing that takes seconds; help lists every option with its default."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

SWEEPS = Path(__file__).parent.parent / "sweeps"
NAMES = sorted(path.stem for path in SWEEPS.glob("*.py"))
HEAVY = ("torch", "pytorch_lightning", "ray", "diffusers", "torchvision", "matplotlib", "opacus", "pandas", "sklearn",
         "scipy", "wandb")  # fmt: skip
PLAY = f"""
import contextlib, io, json, runpy, sys
ends = []
sys.path.insert(0, {str(SWEEPS)!r})  # as Python does for a script
for name, word in {[(name, word) for name in NAMES for word in ("--help", "--seeed=1")]}:
    sys.argv, out, err = [name, word], io.StringIO(), io.StringIO()
    code = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(f"{SWEEPS}/{{name}}.py", run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    ends.append([name, word, code, out.getvalue(), err.getvalue(), [m for m in {HEAVY} if m in sys.modules]])
print(json.dumps(ends))
"""


@pytest.mark.long
def test_help_and_refusals_import_nothing_heavy() -> None:
    """Every script in one process: a heavy module stays listed from the first script that imports it."""
    done = subprocess.run([sys.executable, "-c", PLAY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = []
    for name, word, code, out, err, heavy in json.loads(done.stdout):
        helped = word == "--help" and code == 0 and "usage:" in out
        refused = word != "--help" and code == 2 and "unknown option" in err and "usage:" not in out
        resumes = "resumes=False" not in (SWEEPS / f"{name}.py").read_text()  # what Ctrl-C then advises
        if heavy or not (helped or refused) or (helped and resumes != ("--resume" in out)):
            wrong.append(f"{name} {word}: exit code {code}, imports {heavy}, prints {err}")
    assert not wrong


def test_help_lists_every_option_with_its_default(
    sweeps: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sweeps("table1").arguments(["--help"])
    entries = {}
    for entry in re.split(r"^ {0,4}(?=-)", capsys.readouterr().out.partition("\noptions:\n")[2], flags=re.M):
        entries[entry.partition(" ")[0]] = " ".join(entry.split())
    with pytest.raises(SystemExit):
        sweeps("table1").arguments(["--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    names = {f"{section}.{name}" for section, of in printed.items() if isinstance(of, dict) for name in of}
    assert len(names) > 60
    assert {f"--{name}" for name in names} <= entries.keys()
    for option, default in (("--client.lr", "0.04"), ("--alphas", "0.01,0.1"), ("--data.name", "digits")):
        assert re.search(rf"default: {re.escape(default)}\)", entries[option]), entries[option]
