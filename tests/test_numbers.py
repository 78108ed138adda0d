"""One rule of numbers in options, config files, lists and search spaces; and the limits of the options of sweeps."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sweep_cells import cells_of

from fedcommons.config import cli, search_space
from fedcommons.config.fields import Field
from fedcommons.config.given import Given
from fedcommons.config.reading import value_of
from fedcommons.errors import UserError

FLOATS = {"12": 12.0, "٠.٥": 0.5, "1_0.5": 10.5, " 5 ": 5.0, "+5": 5.0, "1e3": 1000.0, ".5": 0.5, "5.": 5.0,
          "1e-400": 0.0, "007": 7.0}  # fmt: skip
INTS = {"12": 12, "１２": 12, "1_0": 10, " 5 ": 5, "-0": 0, "007": 7, "9" * 400: int("9" * 400)}
NO_FLOATS = ("0x10", "inf", "nan", "1__0", "1:30", "½", "", "1e", "-1e400", "9" * 400, "[1]", "true", "null", "--1")
NO_INTS = ("1e3", "1.0", "0x10", "inf", "1_", "²", "", "1:30", "true", "[1]")
TAKEN = [*((float, *one) for one in FLOATS.items()), *((int, *one) for one in INTS.items())]


def readers(kind: type, text: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what reads a number: an option, a key of a file, a member of a list, an option that lists, a space."""
    (folder / "c.yaml").write_text(f"x: '{text}'\n")
    parser = cli.Parser("a test")
    parser.add_argument("--x", type=kind, default=None)
    known = {"client.lr": Field(kind, None)}
    return {
        "option": lambda: cli.parse(parser, [f"--x={text}"]).x,
        "file": lambda: cli.parse(parser, ["--config", str(folder / "c.yaml")]).x,
        "member": lambda: value_of(Given("x", [text]), tuple[kind, ...])[0],
        "list": lambda: cli.split("--x", text, kind)[0],
        "space": lambda: search_space.parse([f"client.lr={text}"], known, {})["client.lr"][0],  # pyright: ignore
    }


@pytest.mark.parametrize(("kind", "text", "value"), TAKEN, ids=lambda v: str(v)[:9])
def test_a_number_means_the_same_everywhere(kind: type, text: str, value: Any, tmp_path: Path) -> None:
    values = {name: read() for name, read in readers(kind, text, tmp_path).items()}
    assert values == dict.fromkeys(values, value)
    assert {type(one) for one in values.values()} == {kind}


@pytest.mark.parametrize(
    ("kind", "text"), [*((float, t) for t in NO_FLOATS), *((int, t) for t in NO_INTS)], ids=lambda v: str(v)[:9]
)
def test_a_text_that_is_no_number_is_refused_everywhere(kind: type, text: str, tmp_path: Path) -> None:
    for name, read in readers(kind, text, tmp_path).items():
        with pytest.raises(UserError):
            pytest.fail(f"{name} read {text[:9]} as {read()}")


LIMITS = """
run --client.lr | 1e-9 1e38 | 0 1.1e38
run --seed | 0 4611686018427387904 | -1 4611686018427387905
run --target | 1 | 0 1.01
run --federation.participation | 0.1 1 | 0 1.01
run --dp.local --dp.clip | 1e-30 1e30 | 0 1.1e30 .inf
run --model.channels | [1,1000000] | [0,8] [8,1000001]
run --straggler.q | 0 0.99 | -0.1 1
table1 --seeds | 0 | -1 4611686018427387905
table1 --federations | 1:1 10:0.1 | 0:1 10:0 10:1.1
table1 --dry-run --on-cores | 1 1000000 | 0 1000001
tune --space=lr=0.1 --samples | 1 10000 | 0 10001
audit_pool --shadows | 2 10000 | 1 10001
private_sizes --clients | 1 1000 | 0 1001
private_sizes --epsilons | 1000 | 0 1001
private_fedssyn --checkpoints | 1 | 0 1.01
disclosure --round | 0 20 | -1 21
gradient_coding --pairs | 0:1 0.9:1000000000 | 1:2 0.5:0
quality --images | 10 1000000 | 9 1000001
"""
"""Options | smallest and largest allowed | smallest and largest refused."""
ROWS = [[cell.split() for cell in line.split("|")] for line in LIMITS.strip().splitlines()]


@pytest.mark.parametrize(("words", "allowed"), [row[:2] for row in ROWS], ids=lambda v: " ".join(v))
def test_a_limit_itself_is_allowed(sweeps: Callable[[str], ModuleType], words: list[str], allowed: list[str]) -> None:
    name, *argv, option = words
    module = sweeps(name)
    for value in allowed:
        given = [*argv, f"{option}={value}"]
        assert module.arguments(given) if name in ("run", "gradient_coding") else cells_of(module, given)


@pytest.mark.long
def test_values_out_of_range_are_refused_before_torch_is_imported_and_data_are_loaded(tmp_path: Path) -> None:
    sweeps = Path(__file__).parents[1] / "sweeps"
    lines = [(name, *argv, f"{option}={value}") for (name, *argv, option), _, refused in ROWS for value in refused]
    code = f"""
import runpy, sys
from fedcommons.config import cli
scripts, main = {{}}, cli.main
sys.modules |= {{"torch": None, "ray": None}}  # an import of these fails
cli.main = lambda function, **_: scripts.update({{function.__name__: function}})
sys.path.insert(0, {str(sweeps)!r})
for script, *argv in {lines!r}:
    if script not in scripts:
        runpy.run_path(f"{sweeps}/{{script}}.py", run_name="__main__")
    sys.argv = [script, *argv]
    try:
        main(scripts[script])
    except SystemExit as ended:
        if ended.code != 2:
            sys.exit(f"{{script}} {{argv}}: not refused, or late")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr[-500:]
    assert len(ended.stderr.splitlines()) == len(lines)
    for (_, *_, last), sentence in zip(lines, ended.stderr.splitlines(), strict=True):
        assert sentence.startswith("error: ")
        assert " lie" in sentence or last.partition("=")[0] in sentence, (last, sentence)
    assert not list(tmp_path.iterdir())
