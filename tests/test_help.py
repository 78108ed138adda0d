"""``--help`` and the refusal of a misspelt option import nothing that takes seconds."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.config import cli, parts
from fedcommons.config.fields import fields_of
from fedcommons.config.parts import KINDS
from fedcommons.errors import UserError

SWEEPS = Path(__file__).parent.parent / "sweeps"
NAMES = sorted(path.stem for path in SWEEPS.glob("*.py"))
HEAVY = ("torch", "pytorch_lightning", "ray", "diffusers", "torchvision", "matplotlib", "opacus", "pandas", "sklearn",
         "scipy", "wandb")  # fmt: skip
PLAY = f"""
import contextlib, io, json, runpy, sys
played = []
sys.path.insert(0, {str(SWEEPS)!r})  # as Python does for a script
for name, word in {[(name, word) for name in NAMES for word in ("--help", "--seeed=1")]}:
    sys.argv, out, err = [name, word], io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(f"{SWEEPS}/{{name}}.py", run_name="__main__")
        code = None
    except SystemExit as ended:
        code = ended.code
    played.append([name, word, code, out.getvalue(), err.getvalue(), [m for m in {HEAVY} if m in sys.modules]])
print(json.dumps(played))
"""

PARTS = [(kind, name) for kind, k in KINDS.items() for name in k.known]


def test_help_imports_nothing_heavy() -> None:
    """Every script in one process, so what the first one imports that it should not stands beside all."""
    done = subprocess.run([sys.executable, "-c", PLAY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong, played = [], json.loads(done.stdout)
    for name, word, code, out, err, heavy in played:
        helped = word == "--help" and code == 0 and "usage:" in out
        refused = word != "--help" and code == 2 and "unknown option" in err and "usage:" not in out
        resumes = "resumes=False" not in (SWEEPS / f"{name}.py").read_text()  # what Ctrl-C then advises
        if helped and resumes != ("--resume" in out):
            wrong.append(f"{name} {'has no' if resumes else 'has'} --resume")
        if heavy or not (helped or refused):
            wrong.append(f"{name} {word}: exit code {code}, imports {heavy}, says {err}")
    assert not wrong
    assert len(played) == 2 * len(NAMES) >= 30


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_what_is_read_from_the_source_of_a_part_is_what_the_imported_part_has(kind: str, name: str) -> None:
    part = parts.find(kind, name)
    assert parts.constants(kind, name) == fields_of(part, KINDS[kind].handed, KINDS[kind].required)
    for method in ("needs", "check", "client", "nothing"):
        assert parts.defines(kind, name, method) == callable(getattr(part, method, None))


@pytest.mark.parametrize("name", ["run", "table1", "figure3", "tune", "convergence_parameters", "advise", "feddm"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_sweep_says_what_it_waits_for_before_it_loads_anything(
    sweeps: Callable[[str], ModuleType], name: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dataset=mnist", f"--data-dir={tmp_path}", *more, *(["--space=lr=0.1"] if name == "tune" else [])]
    with pytest.raises(UserError, match="data set mnist is not there"):
        getattr(sweeps(name), name)(options)
    assert capsys.readouterr().out.splitlines()[0] == "Loading torch and the data ..."


def test_there_is_something_to_compare() -> None:
    assert sum(bool(parts.constants(kind, name)) for kind, name in PARTS) >= 10


@pytest.mark.parametrize("kind", [kind for kind, k in KINDS.items() if k.known])
def test_the_help_of_a_field_that_names_a_part_lists_all_and_tells_of_what_is_chosen(kind: str) -> None:
    k = KINDS[kind]
    name = [*k.known][-1]
    argv = [f"--{k.field}={name}", *(["--sharing.setting=shuffled_synthetic"] if kind == "generator" else [])]
    told = cli.parser("", argv, {}).options[k.field].field.help
    assert f"{', '.join(k.known)}, or an import path; {name}: " in told
    assert (inspect.getdoc(parts.find(kind, name)) or "").startswith(told.rpartition(f"{name}: ")[2])
