"""``--help`` and the refusal of a misspelt option import nothing that takes seconds."""

import inspect
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
import runpy, sys
sys.path.insert(0, {str(SWEEPS)!r})  # as Python does for a script
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    found = [name for name in {HEAVY} if name in sys.modules]
    print(ended.code, found, file=sys.stderr)
"""

PARTS = [(kind, name) for kind, k in KINDS.items() for name in k.known]


@pytest.mark.parametrize(("given", "code", "said"), [("--help", "0", ""), ("--seeed=1", "2", "unknown option")])
@pytest.mark.parametrize("name", NAMES)
def test_help_imports_nothing_heavy(name: str, given: str, code: str, said: str) -> None:
    play = PLAY.replace("sys.argv[0]", repr(str(SWEEPS / f"{name}.py")))
    done = subprocess.run([sys.executable, "-c", play, given], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"{code} []"
    assert said in done.stderr
    assert ("usage:" in done.stdout) == (given == "--help")


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_what_is_read_from_the_source_of_a_part_is_what_the_imported_part_has(kind: str, name: str) -> None:
    part = parts.find(kind, name)
    assert parts.constants(kind, name) == fields_of(part, KINDS[kind].handed)
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
