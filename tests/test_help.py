"""``--help`` and refusals import nothing that takes seconds; help lists every option with its default."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

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


@pytest.mark.parametrize("kind", KINDS)
def test_constants_read_from_the_source_are_those_of_the_imported_component(kind: str) -> None:
    for name in KINDS[kind].known:
        part = parts.find(kind, name)
        assert parts.constants(kind, name) == fields_of(part, KINDS[kind].handed, KINDS[kind].required)
        for method in ("needs", "check", "client", "nothing"):
            assert parts.defines(kind, name, method) == callable(getattr(part, method, None))


@pytest.mark.parametrize("name", ["run", "feddm"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_sweep_prints_that_it_loads_torch_before_it_looks_for_data(
    sweeps: Callable[[str], ModuleType], name: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dataset=mnist", f"--data-dir={tmp_path}", *more]
    with pytest.raises(UserError, match="data set mnist is not there"):
        getattr(sweeps(name), name)(options)
    assert capsys.readouterr().out.splitlines()[0].startswith("Loading torch")


@pytest.mark.parametrize("kind", [kind for kind, k in KINDS.items() if k.known])
def test_help_lists_the_components_and_the_summary_of_the_chosen_one(kind: str) -> None:
    k = KINDS[kind]
    name = [*k.known][-1]
    argv = [f"--{k.field}={name}", *(["--sharing.setting=shuffled_synthetic"] if kind == "generator" else [])]
    text = cli.parser("", argv, {}).options[k.field].field.help
    assert f"{', '.join(k.known)}, or an import path; {name}: " in text
    assert (inspect.getdoc(parts.find(kind, name)) or "").startswith(text.rpartition(f"{name}: ")[2])


@pytest.mark.parametrize("name", ["run", "table1"])
def test_help_lists_every_option_with_its_default(
    name: str, sweeps: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    module = sweeps(name)
    with pytest.raises(SystemExit):
        module.arguments(["--help"])
    shown = defaults(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        module.arguments(["--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    flat = {k: v for k, v in printed.items() if not isinstance(v, dict)}
    flat |= {f"{section}.{k}": v for section, of in printed.items() if isinstance(of, dict) for k, v in of.items()}
    assert len(flat) > 80
    for option, value in flat.items():
        text = shown[f"--{option if '.' in option else option.replace('_', '-')}"]
        read = {float: float, str: str}.get(type(value), yaml.safe_load)
        assert read(text) == value or option == "tracking.preset", option


def defaults(text: str) -> dict[str, str]:
    """Return each option of a help text with the last default of its entry, however the lines are wrapped.

    An entry begins at a line that is hardly indented and whose first word is an option.
    """
    _, _, listed = text.partition("\noptions:\n")
    of: dict[str, str] = {}
    for entry in re.split(r"^ {0,4}(?=-)", re.split(r"\n\n(?=\S)", listed)[0], flags=re.M)[1:]:
        joined = re.sub(r"(?<=[a-z\d],)\s+", "", " ".join(entry.split()))
        if name := re.search(r"--[\w.-]+", joined):
            of[name[0]] = joined.rpartition("default: ")[2].removesuffix(")") if "default: " in joined else ""
    return of
