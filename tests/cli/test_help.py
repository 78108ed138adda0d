"""``--help`` and refusals import nothing that takes seconds; help lists every option; hints name the right one."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fedcommons.cli.argv import typed
from fedcommons.cli.main import COMMANDS
from fedcommons.cli.parser import FIRST
from fedcommons.config.registry import KINDS
from fedcommons.errors import nearest

SWEEPS = Path(__file__).parents[2] / "sweeps"
NAMES = sorted([*(path.stem for path in SWEEPS.glob("*.py")), *COMMANDS])
HEAVY = ("torch", "pytorch_lightning", "ray", "diffusers", "torchvision", "matplotlib", "opacus", "pandas", "sklearn",
         "scipy", "wandb")  # fmt: skip
PLAY = f"""
import contextlib, io, json, sys
from fedcommons.cli.main import main
ends = []
for name, word in {[(name, word) for name in NAMES for word in ("--help", "--seeed=1")]}:
    sys.argv, out, err = ["fedcommons", name, word], io.StringIO(), io.StringIO()
    code = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
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
    wrong, unknown = [], {typed(name) for name in FIRST}
    for name, word, code, out, err, heavy in json.loads(done.stdout):
        helped = word == "--help" and code == 0 and re.search(r"\n  (python sweeps/|fedcommons )", out)
        refused = word != "--help" and code == 2 and "unknown option" in err and "examples:" not in out
        if heavy or not (helped or refused):
            wrong.append(f"{name} {word}: exit code {code}, imports {heavy}, prints {err}")
        unknown -= {*out.replace(",", " ").split()}
    assert (wrong, unknown) == ([], set())


def test_help_of_table1_lists_options(sweeps: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    table1, texts = sweeps("table1"), []
    for word in ("--help", "--print_config", "--version"):
        with pytest.raises(SystemExit):
            table1.arguments([word])
        texts.append(capsys.readouterr().out)
    assert texts[2] == f"fedcommons {version('fedcommons')}\n"
    words = ("  python sweeps/", "  --algorithms", "  --lr LR, --client.lr LR", "  --federations", "  --wandb")
    places = [texts[0].index(f"\n{word}") for word in words]
    assert places == sorted(places)
    listed = " ".join(texts[0].split())
    sections = yaml.safe_load(texts[1]).items()
    names = {f"{section}.{name}" for section, fields in sections if isinstance(fields, dict) for name in fields}
    assert len(names) > 60
    assert not [name for name in names if f"--{name} " not in listed]
    for option, default in (("--client.lr", "0.04"), ("--alphas", "0.01,0.1"), ("--data.name", "digits")):
        assert re.search(rf"{option} (?:(?! --\w).)*default: {re.escape(default)}\)", listed), option


def test_nearest_names() -> None:
    """A dotted name is compared by its last word first; at most five names that begin so are listed."""
    names = [name for kind in KINDS.values() for name in kind.components]
    assert (nearest("fashion-mnist", names), nearest("zzz", names)) == ("; did you mean 'fmnist'?", ".")
    assert nearest("dirichlet", names).count("'dirichlet_") == 5
    assert "'--partition.alpha'" in nearest("--alpha", ["--data.alphabet", "--partition.alpha", "--alps"])
    assert nearest("ab", [f"abc{i}" for i in range(6)]).count("'") == 2


SCRIPT = """
import time
from fedcommons.cli import parse
loaded = time.time()
def script(argv):
    print(*[parse.parse(parse.Parser(""), words).started < loaded for words in (argv, [*argv])])
parse.main(script)
"""


def test_the_time_of_a_command_counts_from_the_start_of_a_process_that_runs_only_this_command(tmp_path: Path) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT, encoding="utf-8")
    in_notebook = "import runpy, sys; sys.argv = ['my_script.py']; runpy.run_path('my_script.py')"
    for words, printed in (["my_script.py"], "True False\n"), (["-c", in_notebook], "False False\n"):
        command = [sys.executable, *words]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == printed
